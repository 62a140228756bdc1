// Polls the engine's figures, and draws them.

import { Chart } from "./chart.js";
import { History } from "./history.js";
import { figures, parse } from "./metrics.js";
import { count, percent, rate, seconds } from "./numbers.js";

const EVERY = 1000;
const LATENCY = "over the last 30 s";
const CHARTS = [
  { title: "Tokens per second", note: "over the last 2 s", kinds: [{ key: "generated", name: "generated" }, { key: "prompt", name: "prompt" }], show: rate, least: 1 },
  { title: "Requests", note: "at that moment", kinds: [{ key: "running", name: "running" }, { key: "waiting", name: "waiting" }], show: count, least: 1, isWhole: true },
  { title: "KV cache use", note: "share of its blocks", kinds: [{ key: "cache", name: "used" }], show: percent, least: 0.001 },
  { title: "Time to the first token", note: LATENCY, kinds: [{ key: "first50", name: "p50" }, { key: "first99", name: "p99" }], show: seconds, least: 0.001 },
  { title: "Time between tokens", note: LATENCY, kinds: [{ key: "between50", name: "p50" }, { key: "between99", name: "p99" }], show: seconds, least: 0.001 },
];

/** host: where the charts are put; problem: what is wrong is written there. */
export function watchEngine(host, problem) {
  const charts = CHARTS.map((options) => new Chart(options));
  const history = new History();
  const models = [];
  host.append(...charts.map(({ figure }) => figure));

  async function poll() {
    const began = performance.now();
    if (!document.hidden) {
      try {
        const response = await fetch("metrics", { signal: AbortSignal.timeout(5 * EVERY) });
        if (!response.ok) throw new Error(String(response.status));
        const found = figures(parse(await response.text()));
        models.push(...[...found.keys()].filter((name) => !models.includes(name)));
        history.add(performance.now() / 1000, found);
        for (const chart of charts) chart.update(history.points, models);
        say(found.size > 0 ? "" : "/metrics has no figures of an engine.");
      } catch {
        say("/metrics cannot be read; see whether the server still runs.");
      }
    }
    setTimeout(poll, Math.max(0, began + EVERY - performance.now()));
  }

  function say(text) {
    // Said once, not each second.
    if (problem.textContent !== text) problem.textContent = text;
  }

  poll();
}
