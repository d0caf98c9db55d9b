// The table of lines: only the rows that can be seen are in the page.

const ROW = 34; // pixels, as in report.css
const SPARE = 8; // rows that are kept above and below what can be seen
const MOST = 15e6; // pixels; browsers limit the height of an element

const MARKS = {
  c: ["✓", "right"],
  p: ["◐", "partly right"],
  w: ["✗", "wrong"],
  f: ["!", "failed"],
  u: ["·", "not scored"],
  m: ["◇", "measured"],
  "-": [" ", "not in this run"],
};

/** An element with a class and contents: strings become text, never HTML. */
function make(tag, name, ...contents) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...contents);
  return element;
}

/** Append a text in which characters that would not be seen are marked. */
function appendText(element, text) {
  for (const [part, isMark] of splitInvisible(text)) {
    element.append(isMark ? make("span", "unseen", part) : part);
  }
  return element;
}

/** The runs of each task: those that have any line of it. */
function listRunsOfTasks({ columns, runs, tasks }) {
  const found = tasks.map(() => new Set());
  columns.marks.forEach((marks, row) => {
    for (let run = 0; run < runs.length; run++) if (marks[run] !== "-") found[columns.tasks[row]].add(run);
  });
  return found.map((each) => [...each].sort((a, b) => a - b));
}

/** Shows the selected rows in a box that scrolls; `onOpen(row)` is called for the one that is chosen. */
class LineTable {
  constructor(box, onOpen) {
    this.box = box;
    this.onOpen = onOpen;
    this.rows = [];
    this.current = -1; // position in `rows`
    this.inner = box.querySelector(".rows");
    this.shown = new Map();
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.draw()).observe(box);
    this.inner.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(Number(row.dataset.at), true);
    });
  }

  setData(data) {
    this.data = data;
    this.runsOf = listRunsOfTasks(data);
    const most = Math.max(...this.runsOf.map((runs) => runs.length));
    this.box.style.setProperty("--marks", `${Math.max(1.3, 1.15 * most)}rem`);
  }

  /** Show these rows, given by their positions in the data. The row `wanted` is current if it is there, and by
   * default that which is; with it, the table is not scrolled. */
  show(rows, wanted) {
    const row = wanted ?? this.rows[this.current];
    this.rows = rows;
    this.current = row === undefined ? -1 : rows.indexOf(row);
    const height = Math.min(rows.length * ROW, MOST);
    this.inner.style.height = height + "px";
    this.box.setAttribute("aria-rowcount", rows.length + 1);
    this.redraw();
    if (wanted !== undefined) return;
    if (this.current >= 0) this.reveal();
    else this.box.scrollTop = 0;
  }

  /** Make the row at a position current; `open`: show its details too. */
  choose(at, open) {
    if (!this.rows.length) return;
    this.current = Math.max(0, Math.min(at, this.rows.length - 1));
    this.reveal();
    this.redraw();
    if (open) this.onOpen(this.rows[this.current]);
  }

  /** Make a row current, if it is selected; returns whether it is. */
  find(row) {
    const at = this.rows.indexOf(row);
    if (at >= 0) this.choose(at, true);
    return at >= 0;
  }

  get fits() {
    return Math.max(1, Math.floor(this.box.clientHeight / ROW) - 1);
  }

  // With very many rows the box is less high than all of them, and a pixel of scrolling is more than one.
  get scale() {
    const [all, high] = [this.rows.length * ROW, this.box.clientHeight];
    return all <= MOST ? 1 : (all - high) / (MOST - high);
  }

  reveal() {
    const [top, high] = [this.current * ROW, this.box.clientHeight - ROW];
    const seen = this.box.scrollTop * this.scale;
    if (top < seen) this.box.scrollTop = top / this.scale;
    else if (top + ROW > seen + high) this.box.scrollTop = (top + ROW - high) / this.scale;
  }

  redraw() {
    this.inner.replaceChildren();
    this.shown.clear();
    this.draw();
  }

  draw() {
    const seen = this.box.scrollTop * this.scale;
    const first = Math.max(0, Math.floor(seen / ROW) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((seen + this.box.clientHeight) / ROW) + SPARE);
    for (const [at, element] of this.shown) {
      if (at < first || at >= last) {
        element.remove();
        this.shown.delete(at);
      }
    }
    const shift = this.box.scrollTop - seen;
    for (let at = first; at < last; at++) {
      if (!this.shown.has(at)) this.shown.set(at, this.inner.appendChild(this.makeRow(at)));
      this.shown.get(at).style.transform = `translateY(${at * ROW + shift}px)`;
    }
    if (this.shown.has(this.current)) this.box.setAttribute("aria-activedescendant", "row-" + this.current);
    else this.box.removeAttribute("aria-activedescendant");
  }

  makeRow(at) {
    const { columns, groups } = this.data;
    const row = this.rows[at];
    const element = make("div", "row");
    element.id = "row-" + at;
    element.dataset.at = at;
    element.setAttribute("role", "row");
    element.setAttribute("aria-rowindex", at + 2);
    element.setAttribute("aria-selected", String(at === this.current));
    const cells = [
      ["marks", this.makeMarks(row)],
      ["id", columns.ids[row]],
      ["group", groups[columns.groups[row]] ?? ""],
      ["answer", columns.answers[row]],
      ["expected", columns.expected[row]],
      ["number", columns.output[row] === null ? "" : formatNumber(columns.output[row])],
      ["number", formatSeconds(columns.took[row])],
    ];
    for (const [name, content] of cells) {
      const cell = make("span", "cell " + name);
      cell.setAttribute("role", "gridcell");
      if (typeof content === "string") appendText(cell, content);
      else cell.append(content);
      element.append(cell);
    }
    return element;
  }

  makeMarks(row) {
    const { columns, runs } = this.data;
    const found = make("span", "");
    for (const run of this.runsOf[columns.tasks[row]]) {
      const mark = columns.marks[row][run];
      const [sign, word] = MARKS[mark];
      const flags = Number("0x" + columns.flags[row][run]);
      const cut = flags & 1 ? ", cut" : "";
      const sized = make("span", `mark mark-${mark}${cut ? " is-cut" : ""}`, sign);
      sized.setAttribute("role", "img");
      sized.setAttribute("aria-label", runs.length > 1 ? `${runs[run].label}: ${word}${cut}` : word + cut);
      sized.title = sized.getAttribute("aria-label");
      found.append(sized);
    }
    return found;
  }
}
