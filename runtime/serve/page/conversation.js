// A conversation with one or two models.

import { Answer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { parting } from "./difference.js";

export class Conversation {
  #turns = [];
  #stop = null;

  /** host: where the turns are put. */
  constructor(host) {
    this.host = host;
  }

  /**
   * Send a message and wait for the answers.
   * models: one or two; settings: system, temperature, max_tokens, inTurn: whether one model waits for the other.
   * Whether there is any answer.
   */
  async send(message, models, { system, inTurn, ...settings }) {
    const turn = new Turn(message, models);
    const histories = models.map((_, side) => [...this.#history(system, side), { role: "user", content: message }]);
    const stop = (this.#stop = new AbortController());
    this.#turns.push(turn);
    this.host.append(turn.element);
    this.host.scrollTop = this.host.scrollHeight;
    const ask = (side) => turn.answers[side].stream(histories[side], settings, models.length > 1, stop.signal, () => this.#changed(turn));
    if (inTurn) for (const side of models.keys()) await ask(side);
    else await Promise.all(models.map((_, side) => ask(side)));
    turn.show();
    return turn.answers.some(({ text, reasoning }) => text || reasoning);
  }

  stop() {
    this.#stop?.abort();
  }

  clear() {
    this.stop();
    this.#turns = [];
    this.host.replaceChildren();
  }

  #changed(turn) {
    if (turn.isWaiting) return;
    turn.isWaiting = true;
    requestAnimationFrame(() => {
      const { scrollTop, scrollHeight, clientHeight } = this.host;
      turn.show();
      // Who has scrolled up to read stays there.
      if (scrollTop + clientHeight > scrollHeight - 40) this.host.scrollTop = this.host.scrollHeight;
    });
  }

  /** What one side's model is sent: its own answers, or the only one where there was one. Turns without an answer are left out. */
  #history(system, side) {
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { message, answers } of this.#turns) {
      const text = (answers[side] ?? answers[0]).text;
      if (text) messages.push({ role: "user", content: message }, { role: "assistant", content: text });
    }
    return messages;
  }
}

class Turn {
  isWaiting = false;

  constructor(message, models) {
    this.message = message;
    this.answers = models.map((model) => new Answer(model));
    this.views = models.map((model) => new AnswerView(model));
    const asked = document.createElement("p");
    asked.className = "asked";
    asked.dir = "auto";
    asked.textContent = message;
    const row = document.createElement("div");
    row.className = "answers";
    row.append(...this.views.map(({ article }) => article));
    this.note = document.createElement("p");
    this.note.className = "note";
    this.element = document.createElement("div");
    this.element.className = "turn";
    this.element.append(asked, row, this.note);
    this.show();
  }

  show() {
    this.isWaiting = false;
    const [first, second] = this.answers;
    const areGood = second !== undefined && this.answers.every(({ problem }) => !problem);
    const cuts = areGood ? parting(first, second) : null;
    this.views.forEach((view, side) => view.show(this.answers[side], cuts?.[side] ?? null));
    this.note.textContent = areGood && first.ended && second.ended ? compared(first.text, second.text, cuts) : "";
  }
}

function compared(first, second, cuts) {
  if (cuts) return cuts[0] === 0 ? "The texts differ from the beginning." : `The texts part after ${cuts[0]} characters.`;
  return first === second ? "Both texts are the same." : "The texts are the same as far as both go.";
}
