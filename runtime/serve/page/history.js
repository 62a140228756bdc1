// The last minutes of the engine's figures.

import { quantile } from "./metrics.js";

/** How far back the charts go, in seconds. */
export const SPAN = 300;
// Over how long rates and quantiles are taken; polls are not exactly a second apart.
const RATE = 2.5;
const LATENCY = 30.5;

export class History {
  /** For each poll its time and, by model, the values that are drawn. */
  points = [];
  #polls = [];

  add(at, models) {
    if (this.#hasRestarted(models)) this.#polls = [];
    const [recent, earlier] = [RATE, LATENCY].map((window) => this.#polls.find((poll) => poll.at >= at - window));
    const values = new Map();
    for (const [name, now] of models) {
      const rates = (key) => rate(key, recent?.models.get(name), now, at - (recent?.at ?? at));
      const then = earlier?.models.get(name);
      const quantiles = (key, share) => (then === undefined ? null : quantile(share, then[key], now[key]));
      values.set(name, {
        running: now.running ?? null,
        waiting: now.waiting ?? null,
        cache: now.cache ?? null,
        prompt: rates("prompt"),
        generated: rates("generated"),
        first50: quantiles("first", 0.5),
        first99: quantiles("first", 0.99),
        between50: quantiles("between", 0.5),
        between99: quantiles("between", 0.99),
      });
    }
    this.points.push({ at, models: values });
    this.#polls.push({ at, models });
    while (this.points[0].at < at - SPAN) this.points.shift();
    while (this.#polls[0].at < at - LATENCY) this.#polls.shift();
  }

  #hasRestarted(models) {
    const last = this.#polls.at(-1)?.models;
    return [...models].some(([name, now]) => now.prompt < last?.get(name)?.prompt);
  }
}

function rate(key, then, now, seconds) {
  const grown = now[key] - then?.[key];
  return seconds > 0 && grown >= 0 ? grown / seconds : null;
}
