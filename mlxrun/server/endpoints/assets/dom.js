// Makes elements, and texts for numbers. Texts become text nodes; nothing here parses HTML.

export const byId = (id) => document.getElementById(id);

/** Makes an element. Names that begin with `on` are listeners, those with `-` attributes, others properties. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.includes("-")) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/** Makes an element of an SVG picture. */
export function makeSvg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Sets a text if it differs, so that a screen reader and a selection notice only changes. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function showNotice(node, text) {
  setText(node, text);
  node.hidden = !text;
}

/** Shows names and values in a <dl>; values that are null are left out. */
export function showFacts(list, facts) {
  const shown = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined);
  while (list.children.length > shown.length) list.lastElementChild.remove();
  while (list.children.length < shown.length) list.append(el("div", {}, el("dt"), el("dd")));
  shown.forEach(([name, value], at) => {
    const [term, text] = list.children[at].children;
    setText(term, name);
    setText(text, String(value));
  });
}

/** A table in a region that scrolls. While it is empty, the text after it is shown in its place. */
export class Table {
  /** `make(item)` returns a row; `update(row, item)` shows the newest values in it. */
  constructor(region, columns, make, update) {
    Object.assign(this, { region, make, update, body: el("tbody") });
    const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)));
    region.append(el("table", {}, el("thead", {}, head), this.body));
  }

  /** Shows items by their ids. A row that stays keeps its elements, and so the focus. */
  show(items) {
    const rows = new Map([...this.body.rows].map((row) => [row.dataset.id, row]));
    items.forEach((item, at) => {
      const row = rows.get(item.id) ?? this.make(item);
      row.dataset.id = item.id;
      rows.delete(item.id);
      if (this.body.rows[at] !== row) this.body.insertBefore(row, this.body.rows[at] ?? null);
      this.update(row, item);
    });
    for (const row of rows.values()) row.remove();
    this.region.hidden = !items.length;
    if (this.region.nextElementSibling) this.region.nextElementSibling.hidden = items.length > 0;
  }
}

export const makeCells = (count, className = "") => Array.from({ length: count }, () => el("td", { className }));

export const formatCount = (number) => (number ?? 0).toLocaleString("en");

export function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return "unknown";
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, bytes < 1 ? 0 : Math.floor(Math.log10(bytes) / 3));
  const value = bytes / 1000 ** power;
  return `${value.toFixed(power && value < 100 ? 1 : 0)} ${units[power]}`;
}

export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  return hours ? `${hours} h ${minutes % 60} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

export const formatRate = (rate) => (rate === null || rate === undefined ? "" : rate.toFixed(rate < 100 ? 1 : 0));
export const formatTime = (unix) => new Date(unix * 1000).toLocaleString();

/** Copies a text. `navigator.clipboard` exists only in secure contexts, such as https and localhost. */
export async function copyText(text, button) {
  const label = button.textContent;
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const area = el("textarea", { value: text, className: "unseen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1500);
}
