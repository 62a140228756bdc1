// How an answer is shown. What a model has written is only ever the data of text nodes.

import { count, rate, seconds } from "./numbers.js";

const ENDS = { stop: "ended by itself", length: "ended at max tokens", stopped: "stopped" };

function element(name, className, ...inside) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...inside);
  return made;
}

export class AnswerView {
  #same = document.createTextNode("");
  #other = document.createTextNode("");
  #reasoning = document.createTextNode("");

  constructor(model) {
    this.notice = element("p", "note");
    this.details = element("details", "reasoning", element("summary", "", "Reasoning"), element("p", "text", this.#reasoning));
    this.mark = element("ins", "", this.#other);
    this.text = element("p", "text", this.#same, this.mark);
    this.problem = element("p", "worse");
    this.figures = element("p", "figures");
    this.text.dir = "auto";
    this.article = element("article", "answer", element("h3", "", element("bdi", "", model)), this.notice, this.details, this.text, this.problem, this.figures);
  }

  /** cut: from where on its text differs from the other's; null if it does not. */
  show(answer, cut) {
    const place = cut ?? answer.text.length;
    put(this.#same, answer.text.slice(0, place));
    put(this.#other, answer.text.slice(place));
    put(this.#reasoning, answer.reasoning);
    this.details.hidden = answer.reasoning === "";
    this.mark.hidden = cut === null;
    this.mark.classList.toggle("ends", cut === answer.text.length);
    this.notice.hidden = !answer.isPlain;
    this.notice.textContent = answer.isPlain ? `${answer.model} has no chat template: it continues the text, through /v1/completions.` : "";
    this.problem.hidden = answer.problem === "";
    this.problem.textContent = answer.problem;
    // Those who listen hear the answer once it is whole.
    this.article.setAttribute("aria-busy", String(!answer.ended));
    this.article.classList.toggle("growing", !answer.ended);
    this.figures.textContent = figures(answer);
  }
}

function figures(answer) {
  if (answer.firstToken === null) return "";
  const said = [`first token after ${seconds(answer.firstToken)}`];
  if (answer.rate !== null) said.push(`${rate(answer.rate)} tokens/s`);
  said.push(answer.count === 1 ? "1 token" : `${count(answer.count)} tokens`);
  if (answer.ended && answer.finish) said.push(ENDS[answer.finish] ?? answer.finish);
  // Lines break between these only.
  return said.map((each) => each.replaceAll(" ", "\u00a0")).join(" · ");
}

function put(node, text) {
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}
