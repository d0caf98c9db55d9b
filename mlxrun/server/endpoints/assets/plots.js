// Small plots of the last minutes, as SVG.

import { el, makeSvg, setText } from "./dom.js";

const POINTS = 150;
const WIDTH = 300;
const HEIGHT = 60;

/** A value over time: its newest number, its largest one, and a line. */
export class Plot {
  constructor(title, unit, read, format) {
    this.read = read;
    this.format = format;
    this.title = `${title}, ${unit}`;
    this.values = [];
    this.number = el("strong", {}, "–");
    this.most = el("span", { className: "soft" });
    this.area = makeSvg("path", { class: "area" });
    this.line = makeSvg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    const view = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this.picture = makeSvg("svg", { ...view, "aria-label": this.title }, this.area, this.line);
    const head = el("p", {}, el("span", { className: "soft" }, this.title), this.number);
    this.card = el("div", { className: "card" }, head, this.picture, this.most);
  }

  /** Adds the value of now; one that is not known leaves a gap. */
  add(state) {
    this.values.push(this.read(state) ?? null);
    if (this.values.length > POINTS) this.values.shift();
    const known = this.values.filter((value) => value !== null);
    const most = Math.max(0, ...known);
    const now = this.values.at(-1);
    setText(this.number, now === null ? "–" : this.format(now));
    setText(this.most, known.length ? `at most ${this.format(most)}` : "");
    this.picture.setAttribute("aria-label", `${this.title}: ${this.number.textContent} now, ${this.most.textContent}`);
    this.draw(most || 1);
  }

  draw(most) {
    let line = "";
    let area = "";
    let start = null;
    const first = POINTS - this.values.length;
    this.values.forEach((value, at) => {
      const x = (((first + at) / (POINTS - 1)) * WIDTH).toFixed(1);
      if (value !== null) {
        const y = (HEIGHT - 2 - (value / most) * (HEIGHT - 4)).toFixed(1);
        line += `${start === null ? "M" : "L"}${x} ${y}`;
        area += start === null ? `M${x} ${HEIGHT}L${x} ${y}` : `L${x} ${y}`;
        start ??= x;
      }
      const isLast = value !== null && (this.values[at + 1] ?? null) === null;
      if (isLast) area += `L${x} ${HEIGHT}Z`;
      if (value === null || isLast) start = null;
    });
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}
