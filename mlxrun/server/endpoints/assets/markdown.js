// Renders Markdown by DOM calls. Texts of models become text nodes: no HTML is parsed, no image is loaded, and
// only links to the web and to mail addresses are links. Repeats in the patterns are bounded, so that no text
// takes long.

import { copyText, el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ *\|?( *:?-+:? *\|)+( *:?-+:?)? *$/;
const MOST_NESTED = 12;
const WEB = new Set(["http:", "https:", "mailto:"]);
const INLINE = new RegExp(
  [
    /(?<ticks>`+)(?<code>[^]{1,4000}?)(?<!`)\k<ticks>(?!`)/,
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /(?<image>!?)\[(?<label>[^\]]{0,1000})\]\(<?(?<target>[^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?(?: +"[^"\n]{0,500}")?\)/,
    /<(?<auto>(?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/,
    /(?<bare>https?:\/\/[^\s<>"'`*|]{1,2000})/,
    /(?<stars>\*{1,3})(?=[^\s*])(?<starred>[^]{0,4000}?[^\s*])\k<stars>(?!\*)/,
    /(?<!\w)(?<lines>_{1,3})(?=[^\s_])(?<lined>[^]{0,4000}?[^\s_])\k<lines>(?!\w)/,
    /~~(?=\S)(?<struck>[^]{0,4000}?\S)~~/,
    /(?<lineend> *\n)/,
  ].map((each) => each.source).join("|"),
  "g",
);

const shown = new WeakMap(); // the source of each rendered block

/** Renders a text into an element. Blocks whose source is the same stay, so a growing text costs little. */
export function renderMarkdown(target, text) {
  const blocks = parseBlocks(text.replaceAll("\t", "    ").split(/\r\n?|\n/));
  blocks.forEach((block, at) => {
    const source = `${block.kind} ${block.lines.join("\n")}`;
    const old = target.children[at];
    if (old && shown.get(old) === source) return;
    const made = renderBlock(block, 0);
    shown.set(made, source);
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > blocks.length) target.lastElementChild.remove();
}

/** Splits lines into blocks: their kind and their lines. */
function parseBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const start = at++;
    const kind = findKind(lines, start);
    if (kind === "blank") continue;
    if (kind === "code") at = findFenceEnd(lines, at, FENCE.exec(lines[start])[1]);
    else if (kind === "quote") while (at < lines.length && QUOTE.test(lines[at])) at++;
    else if (kind === "list") at = findListEnd(lines, at, ITEM.exec(lines[start]));
    else if (kind === "table") while (at < lines.length && lines[at].includes("|")) at++;
    else if (kind === "paragraph") while (at < lines.length && findKind(lines, at) === "paragraph") at++;
    blocks.push({ kind, lines: lines.slice(start, at) });
  }
  return blocks;
}

/** The kind of block that begins with a line. */
function findKind(lines, at) {
  const line = lines[at];
  if (!line.trim()) return "blank";
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  return line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") ? "table" : "paragraph";
}

function findFenceEnd(lines, at, fence) {
  while (at < lines.length) {
    const line = lines[at++].trim();
    if (line.length >= fence.length && line === fence[0].repeat(line.length)) break;
  }
  return at;
}

const isOrdered = (item) => /\d/.test(item[2]);

/** The end of a list: items of the same kind, and lines that are indented. */
function findListEnd(lines, at, first) {
  for (let blank = false; at < lines.length; at++) {
    const item = RULE.test(lines[at]) ? null : ITEM.exec(lines[at]);
    const isOwn = item !== null && (item[1].length > first[1].length + 1 || isOrdered(item) === isOrdered(first));
    const isInner = /^ {2}/.test(lines[at]);
    const kind = findKind(lines, at);
    if (kind !== "blank" && !isOwn && !isInner && (blank || kind !== "paragraph")) return at;
    blank = kind === "blank";
  }
  return at;
}

function renderBlock({ kind, lines }, depth) {
  if (kind === "code") return renderCode(lines);
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return el(`h${Math.min(6, marks.length + 1)}`, {}, ...renderInline(text.replace(/ #+$/, "").trim()));
  }
  if (kind === "rule") return el("hr");
  if (kind === "table") return renderTable(lines);
  if (depth < MOST_NESTED) {
    if (kind === "quote") {
      const inner = parseBlocks(lines.map((line) => line.replace(QUOTE, "")));
      return el("blockquote", {}, ...inner.map((block) => renderBlock(block, depth + 1)));
    }
    if (kind === "list") return renderList(lines, depth);
  }
  return el("p", {}, ...renderInline(lines.join("\n").trim()));
}

function renderCode(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const last = lines.at(-1).trim();
  const isClosed = lines.length > 1 && last.length >= fence.length && last === fence[0].repeat(last.length);
  const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
  const button = el("button", { type: "button", "aria-label": "Copy this code" }, "Copy");
  button.addEventListener("click", () => copyText(text, button));
  const head = el("div", { className: "code-head" }, el("span", {}, language.trim().slice(0, 40)), button);
  return el("div", { className: "code" }, head, el("pre", { tabIndex: 0 }, el("code", {}, text)));
}

function renderList(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const list = el(isOrdered(first) ? "ol" : "ul");
  if (isOrdered(first)) list.start = parseInt(first[2], 10);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && (!items.length || item[1].length <= first[1].length + 1)) {
      width = item[0].length;
      items.push([line.slice(width)]);
    } else {
      const indent = line.length - line.trimStart().length;
      items.at(-1).push(line.slice(Math.min(width, indent)));
    }
  }
  for (const inner of items.map(parseBlocks)) list.append(renderItem(inner, depth));
  return list;
}

/** An item whose first block is a paragraph begins without a <p>. */
function renderItem(blocks, depth) {
  const isPlain = blocks[0]?.kind === "paragraph";
  const text = isPlain ? renderInline(blocks[0].lines.join("\n").trim()) : [];
  const others = blocks.slice(isPlain ? 1 : 0).map((block) => renderBlock(block, depth + 1));
  return el("li", {}, ...text, ...others);
}

function renderTable(lines) {
  const [head, rule, ...rows] = lines.map(splitCells);
  const makeRow = (tag, cells) =>
    el("tr", {}, ...head.map((_, at) => {
      const mark = (rule[at] ?? "").trim();
      const align = mark.endsWith(":") ? (mark.startsWith(":") ? "centre" : "right") : "left";
      return el(tag, { className: align }, ...renderInline((cells[at] ?? "").trim()));
    }));
  const table = el("table", {}, el("thead", {}, makeRow("th", head)), el("tbody", {}, ...rows.map((row) => makeRow("td", row))));
  return el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Table" }, table);
}

const splitCells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);

/** Renders the text of a block as nodes. */
export function renderInline(text, depth = 0) {
  const nodes = [];
  const pattern = new RegExp(INLINE, "g");
  let from = 0;
  for (let found; depth < MOST_NESTED && (found = pattern.exec(text)); from = pattern.lastIndex) {
    if (found.index > from) nodes.push(text.slice(from, found.index));
    nodes.push(...renderMatch(found, pattern, depth));
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

function renderMatch(found, pattern, depth) {
  const parts = found.groups;
  if (parts.code !== undefined) return [el("code", {}, parts.code.replace(/^ (.*) $/s, "$1"))];
  if (parts.escaped !== undefined) return [parts.escaped];
  if (parts.target !== undefined) {
    const label = parts.image ? [`image: ${parts.label || parts.target}`] : renderInline(parts.label, depth + 1);
    return makeLink(parts.target, label, found[0]);
  }
  if (parts.auto !== undefined) return makeLink(parts.auto, [parts.auto], found[0]);
  if (parts.bare !== undefined) {
    const url = parts.bare.replace(/[.,:;!?)\]]+$/, ""); // the end of a sentence
    pattern.lastIndex -= parts.bare.length - url.length;
    return makeLink(url, [url], url);
  }
  if (parts.struck !== undefined) return [el("del", {}, ...renderInline(parts.struck, depth + 1))];
  if (parts.lineend !== undefined) return [el("br")];
  const inner = renderInline(parts.starred ?? parts.lined, depth + 1);
  const marks = (parts.stars ?? parts.lines).length;
  if (marks === 1) return [el("em", {}, ...inner)];
  const strong = el("strong", {}, ...inner);
  return [marks === 2 ? strong : el("em", {}, strong)];
}

/** A link, or its source as text if it leads anywhere but to the web. */
function makeLink(url, label, source) {
  let parsed;
  try {
    parsed = new URL(url);
  } catch {
    return [source];
  }
  if (!WEB.has(parsed.protocol)) return [source];
  return [el("a", { href: parsed.href, title: parsed.href, target: "_blank", rel: "noopener noreferrer" }, ...label)];
}
