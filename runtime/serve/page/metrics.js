// What a poll of /metrics says about each model.

const RUNNING = "num_requests_running";
const NUMBERS = {
  [RUNNING]: "running",
  num_requests_waiting: "waiting",
  kv_cache_usage_perc: "cache",
  prompt_tokens_total: "prompt",
  generation_tokens_total: "generated",
};
const HISTOGRAMS = {
  time_to_first_token_seconds_bucket: "first",
  inter_token_latency_seconds_bucket: "between",
};

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/** The samples of Prometheus' text format: name, labels and value of each. */
export function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (found === null) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c));
    samples.push({ name: found[1], labels, value: number(found[3]) });
  }
  return samples;
}

function number(text) {
  return Number(text.replace(/^([+-]?)Inf$/, "$1Infinity"));
}

/** By model, summed over replicas: running, waiting, cache, prompt, generated, and as maps from bounds to counts: first, between. */
export function figures(samples) {
  const models = new Map();
  const known = samples.find(({ name }) => name.endsWith(RUNNING));
  if (known === undefined) return models;
  const prefix = known.name.slice(0, -RUNNING.length);
  for (const { name, labels, value } of samples) {
    if (!name.startsWith(prefix)) continue;
    const short = name.slice(prefix.length);
    const model = labels.model_name ?? "";
    if (!models.has(model)) models.set(model, { first: new Map(), between: new Map() });
    const found = models.get(model);
    if (Object.hasOwn(NUMBERS, short)) found[NUMBERS[short]] = (found[NUMBERS[short]] ?? 0) + value;
    if (Object.hasOwn(HISTOGRAMS, short)) {
      const counts = found[HISTOGRAMS[short]];
      counts.set(number(labels.le), (counts.get(number(labels.le)) ?? 0) + value);
    }
    if (NUMBERS[short] === "cache") found.replicas = (found.replicas ?? 0) + 1;
  }
  // A share is the mean of the replicas'.
  for (const found of models.values()) if (found.replicas > 1) found.cache /= found.replicas;
  return models;
}

/**
 * A quantile of what a histogram has counted between two polls, as Prometheus estimates it: in a bucket, values are
 * spread evenly; in the last, which has no upper bound, they are its lower bound. null if nothing was counted.
 */
export function quantile(share, before, after) {
  const bounds = [...after.keys()].sort((a, b) => a - b);
  const counts = bounds.map((bound) => after.get(bound) - (before.get(bound) ?? 0));
  const wanted = share * counts.at(-1);
  if (!(counts.at(-1) > 0)) return null;
  const place = counts.findIndex((count) => count >= wanted);
  const [low, below] = place === 0 ? [0, 0] : [bounds[place - 1], counts[place - 1]];
  if (bounds[place] === Infinity) return low;
  return low + ((bounds[place] - low) * (wanted - below)) / (counts[place] - below);
}
