// Functions without a page: showing unsafe text, filtering and sorting rows. Tested with Node.

// Characters that change how others are shown, or that cannot be seen. Joiners stay: emoji and scripts need them.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;

/** Parts of a text in order: [text, isMark]. A mark stands for a character that would not be seen. */
function splitInvisible(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INVISIBLE)) {
    if (found.index > end) parts.push([text.slice(end, found.index), false]);
    parts.push(["U+" + found[0].charCodeAt(0).toString(16).toUpperCase().padStart(4, "0"), true]);
    end = found.index + found[0].length;
  }
  if (end < text.length) parts.push([text.slice(end), false]);
  return parts;
}

/** A value of a record as text: strings as they are, others as JSON. */
function showValue(value) {
  if (value === undefined || value === null) return "";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** All texts of a row of a chunk, in lower case, for searching. Numbers that stand for shared texts are replaced. */
function joinTexts(row, texts) {
  const found = [];
  const add = (messages) => {
    for (const [role, text, , more] of messages ?? []) {
      found.push(role, showValue(readText(text, texts)), showValue(more?.reasoning));
      for (const call of more?.calls ?? []) found.push(...call.map(showValue));
    }
  };
  add(row.prompt);
  for (const answer of row.runs) {
    if (!answer) continue;
    add(answer.transcript);
    for (const key of ["answer", "reasoning", "note", "error"]) found.push(readText(answer[key] ?? "", texts));
    found.push(showValue(answer.expected), showValue(answer.extracted));
    for (const choice of answer.choices ?? []) found.push(readText(choice, texts));
  }
  return found.join("\n").toLowerCase();
}

/** A text of a chunk, which is a number if several rows have it. */
function readText(text, texts) {
  return typeof text === "number" ? texts[text] : text;
}

// What each filter selects, of the marks and flags of one row. Marks: c right, p partly, w wrong, f failed,
// u answered without a score, m measured in a unit, - not there. Flags, a hexadecimal digit for each run: 1 cut, 2 empty, 4 scored
// differently by another run.
const STATES = {
  all: () => true,
  wrong: (marks) => /[wp]/.test(marks),
  failed: (marks) => marks.includes("f"),
  unscored: (marks) => marks.includes("u"),
  cut: (marks, flags) => /[1357]/.test(flags),
  empty: (marks, flags) => /[2367]/.test(flags),
  flip: (marks, flags) => /[4-7]/.test(flags),
};

/** The positions of the rows that a filter selects: {state, group, task, run}; -1 stands for any. */
function selectRows(columns, filter) {
  const test = STATES[filter.state] ?? STATES.all;
  const found = [];
  for (let at = 0; at < columns.ids.length; at++) {
    if (filter.group >= 0 && columns.groups[at] !== filter.group) continue;
    if (filter.task >= 0 && columns.tasks[at] !== filter.task) continue;
    let marks = columns.marks[at];
    let flags = columns.flags[at];
    if (filter.run >= 0) {
      if (marks[filter.run] === "-") continue;
      marks = marks[filter.run];
      flags = flags[filter.run];
    }
    if (test(marks, flags)) found.push(at);
  }
  return found;
}

/** Sort positions by a column, in place; ties stay in the order of the job. `descending`: largest first. */
function sortRows(positions, values, descending) {
  const sign = descending ? -1 : 1;
  return positions.sort((a, b) => {
    const [left, right] = [values[a], values[b]];
    if (left === right) return a - b;
    if (left === null) return 1;
    if (right === null) return -1;
    return (left < right ? -1 : 1) * sign;
  });
}

const MOST_COMPARED = 4e6; // pairs of words

/** Parts of two texts in order: [text, isOwn]. Words that the other text has not at this place are own. Of texts
 * that differ over very many words, all between the first and the last difference is own. */
function compareTexts(left, right) {
  const [a, b] = [left, right].map((text) => text.match(/\s+|[\p{L}\p{N}_]+|[^]/gu) ?? []);
  const least = Math.min(a.length, b.length);
  let start = 0;
  while (start < least && a[start] === b[start]) start++;
  let end = 0;
  while (end < least - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const [x, y] = [a, b].map((words) => words.slice(start, words.length - end));
  const common = x.length * y.length <= MOST_COMPARED ? findCommon(x, y) : [];
  return [[a, 0], [b, 1]].map(([words, side]) => {
    const kept = new Set(common.map((pair) => start + pair[side]));
    const isOwn = (at) => at >= start && at < words.length - end && !kept.has(at);
    const parts = [];
    words.forEach((word, at) => {
      if (parts.length && parts.at(-1)[1] === isOwn(at)) parts.at(-1)[0] += word;
      else parts.push([word, isOwn(at)]);
    });
    return parts;
  });
}

/** The longest common subsequence of two lists of words, as pairs of places. */
function findCommon(x, y) {
  const width = y.length + 1;
  const longest = new Uint16Array((x.length + 1) * width); // of what follows two places
  for (let i = x.length - 1; i >= 0; i--) {
    for (let j = y.length - 1; j >= 0; j--) {
      const at = i * width + j;
      longest[at] = x[i] === y[j] ? longest[at + width + 1] + 1 : Math.max(longest[at + width], longest[at + 1]);
    }
  }
  const found = [];
  for (let i = 0, j = 0; i < x.length && j < y.length;) {
    if (x[i] === y[j]) found.push([i++, j++]);
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return found;
}

/** 1234567 as 1,234,567. */
function formatNumber(value) {
  return String(value).replace(/\B(?=(\d{3})+$)/g, ",");
}

/** Seconds as 0.42 s, 12 s or 3 min 20 s. */
function formatSeconds(value) {
  if (value === null || value === undefined) return "";
  if (value < 10) return value.toFixed(2) + " s";
  if (value < 120) return Math.round(value) + " s";
  return Math.floor(value / 60) + " min " + Math.round(value % 60) + " s";
}

if (typeof module === "object") {
  module.exports = { splitInvisible, showValue, joinTexts, readText, selectRows, sortRows, compareTexts,
    formatNumber, formatSeconds };
}
