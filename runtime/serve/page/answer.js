// One model's answer to one message, as it comes.

import { ApiProblem, call } from "./api.js";
import { events } from "./events.js";

// Models without a chat template, once the server has said so.
const plain = new Set();
// A page gets what has come at once when it is free to: in milliseconds, well above how late it may be.
const LEAST_TIME = 250;

export class Answer {
  text = "";
  reasoning = "";
  /** The texts of the answer's tokens, where the server sends them. */
  tokens = [];
  count = 0;
  problem = "";
  finish = "";
  ended = false;
  isPlain = false;
  #asked = 0;
  #first = 0;
  #last = 0;
  #countAtFirst = 0;

  constructor(model) {
    this.model = model;
  }

  /** Whether it is as long as the model wanted it. */
  get isWhole() {
    return this.finish === "stop";
  }

  /** From the request to the first token, in seconds. */
  get firstToken() {
    return this.#first ? (this.#first - this.#asked) / 1000 : null;
  }

  /** Tokens per second after the first; null if they took too short a time to say. */
  get rate() {
    const time = this.#last - this.#first;
    return time < LEAST_TIME ? null : (1000 * (this.count - this.#countAtFirst)) / time;
  }

  /**
   * Ask for it.
   * messages: the conversation; settings: temperature and max_tokens; withTokens: whether the tokens' texts are needed;
   * changed: called whenever there is more.
   */
  async stream(messages, settings, withTokens, signal, changed) {
    try {
      if (!plain.has(this.model)) {
        try {
          await this.#read("v1/chat/completions", { messages, ...settings, logprobs: withTokens || undefined }, signal, changed);
          return;
        } catch (problem) {
          if (!(problem instanceof ApiProblem && problem.status === 400 && problem.message.includes("has no chat template"))) throw problem;
          plain.add(this.model);
        }
      }
      this.isPlain = true;
      await this.#read("v1/completions", { prompt: asText(messages), ...settings, logprobs: withTokens ? 0 : undefined }, signal, changed);
    } catch (problem) {
      if (signal.aborted) this.finish = "stopped";
      else this.problem = problem instanceof ApiProblem ? problem.message : "The answer broke off; see whether the server still runs.";
    } finally {
      this.ended = true;
      changed();
    }
  }

  async #read(path, body, signal, changed) {
    this.#asked = performance.now();
    const stream_options = { include_usage: true, continuous_usage_stats: true };
    const response = await call(path, { model: this.model, ...body, stream: true, stream_options }, signal);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      this.#add(JSON.parse(data));
      changed();
    }
    throw new Error("no end");
  }

  #add(chunk) {
    if (chunk.error) throw new ApiProblem(chunk.error.message, 500);
    const [choice] = chunk.choices;
    if (choice) {
      this.text += choice.text ?? choice.delta?.content ?? "";
      this.reasoning += choice.delta?.reasoning_content ?? "";
      this.tokens.push(...(choice.logprobs?.tokens ?? choice.logprobs?.content?.map((entry) => entry.token) ?? []));
      this.finish = choice.finish_reason ?? this.finish;
    }
    const count = chunk.usage?.completion_tokens ?? 0;
    if (count > this.count) {
      this.#last = performance.now();
      if (this.count === 0) [this.#first, this.#countAtFirst] = [this.#last, count];
      this.count = count;
    }
  }
}

/** A conversation for a model that only continues text: each answer continues its message. */
function asText(messages) {
  return messages.map(({ role, content }) => (role === "assistant" ? `${content}\n` : role === "system" ? `${content}\n` : content)).join("");
}
