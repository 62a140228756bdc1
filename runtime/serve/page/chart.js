// A running chart: lines over the last minutes, and a table of the values at one time.

import { ticks } from "./axis.js";
import { SPAN } from "./history.js";

const HEIGHT = 168;
const [TOP, RIGHT, BOTTOM, LEFT] = [8, 10, 24, 58];
const COLOURS = 8;
// A line does not cross a longer time without a poll.
const GAP = 5;

function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function swatch(kind, colour) {
  const made = drawn("svg", { viewBox: "0 0 26 10", class: "swatch", "aria-hidden": "true" });
  made.append(drawn("line", { x1: 0, y1: 5, x2: 26, y2: 5, class: `line kind${kind} ${colour}` }));
  return made;
}

export class Chart {
  #points = [];
  #models = [];
  #at = null;

  /**
   * title, note: above it; kinds: key and name of each of a model's lines; show: writes a value; least: the lowest
   * top of the axis; isWhole: whether values are.
   */
  constructor({ title, note, kinds, show, least, isWhole = false }) {
    Object.assign(this, { title, kinds, show, least, isWhole });
    this.plot = drawn("svg", {
      class: "plot", height: HEIGHT, tabindex: 0, role: "slider", "aria-label": `${title}: values over time`,
      "aria-orientation": "horizontal", "aria-valuemin": -SPAN, "aria-valuemax": 0, "aria-valuenow": 0,
    });
    this.table = element("table", { "aria-label": title });
    this.figure = element("figure", { class: "chart" }, element("figcaption", {}, title, element("small", {}, note)), this.plot, this.table);
    this.plot.addEventListener("pointermove", (event) => this.#pointAt(event));
    this.plot.addEventListener("pointerdown", (event) => this.#pointAt(event));
    this.plot.addEventListener("pointerleave", () => this.#choose(null));
    this.plot.addEventListener("blur", () => this.#choose(null));
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.plot);
  }

  /** points: of a History; models: names in the order of their colours. */
  update(points, models) {
    if (models.length !== this.#models.length) this.#fillTable(models);
    [this.#points, this.#models] = [points, models];
    this.#draw();
  }

  get #now() {
    return this.#points.at(-1)?.at ?? 0;
  }

  get #chosen() {
    return this.#points.find((point) => point.at === this.#at) ?? this.#points.at(-1);
  }

  #choose(point) {
    this.#at = point?.at ?? null;
    this.#draw();
  }

  #pointAt(event) {
    const box = this.plot.getBoundingClientRect();
    const time = this.#now - SPAN * (1 - (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT));
    const far = (point) => Math.abs(point.at - time);
    if (this.#points.length > 0) this.#choose(this.#points.reduce((best, point) => (far(point) < far(best) ? point : best)));
  }

  #key(event) {
    const last = this.#points.length - 1;
    const place = this.#points.indexOf(this.#chosen);
    const to = {
      ArrowLeft: place - 1, ArrowDown: place - 1, ArrowRight: place + 1, ArrowUp: place + 1,
      PageUp: place + 10, PageDown: place - 10, Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") this.#choose(null);
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.#choose(this.#points[Math.max(0, Math.min(last, to))]);
  }

  #draw() {
    const width = this.plot.clientWidth;
    if (width === 0) return;
    const values = this.#points.flatMap(({ models }) => [...models.values()].flatMap((each) => this.kinds.map(({ key }) => each[key] ?? 0)));
    const marks = ticks(Math.max(this.least, ...values), this.isWhole);
    const x = (at) => width - RIGHT - ((this.#now - at) / SPAN) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / marks.at(-1)) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const mark of marks) {
      parts.push(drawn("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }));
      parts.push(drawn("text", { x: LEFT - 8, y: y(mark) + 4, "text-anchor": "end" }, mark === 0 ? "0" : this.show(mark)));
    }
    for (let minutes = 0; minutes <= SPAN / 60; minutes += 1) {
      const at = x(this.#now - 60 * minutes);
      parts.push(drawn("line", { class: "grid", x1: at, x2: at, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 }));
      parts.push(drawn("text", { x: minutes ? at : width - RIGHT, y: HEIGHT - 6, "text-anchor": minutes ? "middle" : "end" }, minutes ? `−${minutes} min` : "now"));
    }
    this.#models.forEach((name, number) => {
      this.kinds.forEach(({ key }, kind) => {
        const look = `line kind${kind} colour${number % COLOURS}`;
        for (const piece of this.#pieces(name, key)) {
          const path = piece.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
          // A line of one point would not be seen.
          if (path.length === 1) path.push(path[0]);
          parts.push(drawn("polyline", { class: look, points: path.join(" ") }));
        }
      });
    });
    if (this.#at !== null) {
      const at = x(this.#chosen.at);
      parts.push(drawn("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.plot.replaceChildren(...parts);
    this.#say();
  }

  /** A line's parts between gaps. */
  #pieces(name, key) {
    const pieces = [];
    let last = null;
    for (const { at, models } of this.#points) {
      const value = models.get(name)?.[key] ?? null;
      if (value === null) last = null;
      else {
        if (last === null || at - last > GAP) pieces.push([]);
        pieces.at(-1).push([at, value]);
        last = at;
      }
    }
    return pieces;
  }

  #fillTable(models) {
    const heads = this.kinds.map(({ name }, kind) => element("th", { scope: "col" }, swatch(kind, "plain"), name));
    const rows = models.map((name, number) => {
      const head = element("th", { scope: "row" }, swatch(0, `colour${number % COLOURS}`), element("bdi", {}, name));
      return element("tr", {}, head, ...this.kinds.map(() => element("td")));
    });
    this.table.replaceChildren(element("thead", {}, element("tr", {}, element("th", { scope: "col" }), ...heads)), element("tbody", {}, ...rows));
  }

  #say() {
    const chosen = this.#chosen;
    if (chosen === undefined) return;
    const ago = Math.round(this.#now - chosen.at);
    const when = ago === 0 ? "now" : `${ago} s ago`;
    const said = [];
    this.table.tHead.rows[0].cells[0].textContent = when;
    this.#models.forEach((name, row) => {
      this.kinds.forEach(({ key, name: kind }, column) => {
        const text = this.show(chosen.models.get(name)?.[key] ?? null);
        this.table.tBodies[0].rows[row].cells[column + 1].textContent = text;
        said.push(`${name} ${kind} ${text}`);
      });
    });
    this.plot.setAttribute("aria-valuenow", String(-ago));
    this.plot.setAttribute("aria-valuetext", `${when}: ${said.join(", ")}`);
  }
}
