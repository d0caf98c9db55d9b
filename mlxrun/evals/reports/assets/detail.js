// The details of one line: its prompt, and what each run answered.

/** Reads the chunks of lines that the page contains, each when it is needed first. */
class ChunkReader {
  constructor(size) {
    this.size = size;
    this.chunks = new Map();
  }

  /** The chunk with a row: {texts, rows}. */
  readChunk(number) {
    if (!this.chunks.has(number)) {
      const element = document.getElementById("chunk-" + number);
      this.chunks.set(number, JSON.parse(element.textContent));
    }
    return this.chunks.get(number);
  }

  /** A row and the texts that it shares with others. */
  readRow(row) {
    const chunk = this.readChunk(Math.floor(row / this.size));
    return [chunk.rows[row % this.size], chunk.texts];
  }
}

/** Fills the pane beside the table. */
class DetailPane {
  constructor(pane) {
    this.pane = pane;
    this.body = pane.querySelector(".detail-body");
    this.title = pane.querySelector(".detail-title");
    this.marksDifferences = true;
  }

  show(row) {
    this.row = row;
    const { columns, groups, tasks } = this.data;
    const [found, texts] = this.reader.readRow(row);
    this.texts = texts;
    const where = [tasks[columns.tasks[row]], groups[columns.groups[row]]].filter(Boolean).join(" · ");
    this.title.replaceChildren(appendText(make("span", "detail-id"), columns.ids[row]));
    if (where) this.title.append(appendText(make("span", "detail-where"), where));
    const answers = make("div", "answers");
    const shown = found.runs.map((answer) => readText(answer?.answer, texts));
    const given = [...shown.keys()].filter((run) => typeof shown[run] === "string");
    found.runs.forEach((answer, run) => {
      // Each is compared with the first; the first only if there are two.
      const other = run !== given[0] ? given[0] : given.length === 2 ? given[1] : undefined;
      if (answer) answers.append(this.makeAnswer(answer, run, columns.marks[row][run], shown[other]));
    });
    this.body.replaceChildren(this.makePrompt(found.prompt), answers);
    this.body.scrollTop = 0;
    document.body.classList.add("has-detail");
  }

  hide() {
    document.body.classList.remove("has-detail");
  }

  get isOpen() {
    return document.body.classList.contains("has-detail");
  }

  makePrompt(prompt) {
    const section = make("section", "prompt");
    if (!prompt) {
      section.append(make("p", "absent", "The prompt is not known: the line is not in the job file any more."));
      return section;
    }
    for (const message of prompt) section.append(this.makeMessage(...message));
    return section;
  }

  /** `more`: of a message of a transcript: its reasoning, its calls of tools, and the tool whose result it is. */
  makeMessage(role, text, media, more = {}) {
    const message = make("div", "message");
    message.append(appendText(make("div", "role"), role));
    if (more.reasoning) message.append(this.makeFold("Reasoning", more.reasoning, "reasoning"));
    for (const [source, name] of media) message.append(this.makeMedium(readText(source, this.texts), name));
    if (role === "tool" || role === "tools") {
      message.append(this.makeFold(more.tool ? `Result of ${more.tool}` : "Content", text, "tool"));
    } else if (text !== "") message.append(this.makeText(text));
    for (const [name, given] of more.calls ?? []) message.append(this.makeFold(`Call ${name}`, given, "tool"));
    return message;
  }

  /** A text that is shown when its title is clicked; the title has its beginning. */
  makeFold(title, text, name) {
    const start = showValue([readText(text, this.texts)].flat()[0]).slice(0, 120);
    const head = appendText(make("summary", ""), title + " ");
    head.append(appendText(make("span", "fold-start"), start));
    return make("details", "fold", head, this.makeText(text, name));
  }

  makeMedium(source, name) {
    const kind = /^data:(image|audio)\//.exec(source)?.[1];
    if (!kind) return appendText(make("p", "absent"), `Not shown: ${name}`);
    const medium = make(kind === "image" ? "img" : kind, "");
    medium.src = source;
    medium.title = name;
    if (kind === "image") medium.alt = name;
    else medium.controls = true;
    return medium;
  }

  /** A block of text. What was left out in its middle is shown as such: [before, characters, after]. What differs
   * from the text `other` is marked. */
  makeText(text, name = "", other) {
    const block = make("pre", "text " + name);
    block.dir = "auto";
    block.tabIndex = 0; // long ones scroll
    const found = readText(text, this.texts);
    if (typeof found === "string" && other !== undefined && this.marksDifferences) {
      for (const [part, isOwn] of compareTexts(found, other)[0]) {
        if (isOwn) block.append(appendText(make("mark", ""), part));
        else appendText(block, part);
      }
      return block;
    }
    if (typeof found === "string") return appendText(block, found);
    const [before, left, after] = found;
    appendText(block, before);
    block.append(make("span", "left-out", `${formatNumber(left)} characters left out; mlxrun report --full has them`));
    return appendText(block, after);
  }

  /** Fold all that can be folded, or unfold it if nothing is. */
  toggleFolds() {
    const folds = [...this.body.querySelectorAll("details")];
    const isOpen = folds.some((each) => each.open);
    for (const each of folds) each.open = !isOpen;
  }

  toggleDifferences() {
    this.marksDifferences = !this.marksDifferences;
    document.getElementById("differences").setAttribute("aria-pressed", this.marksDifferences);
    const top = this.body.scrollTop;
    if (this.isOpen) this.show(this.row);
    this.body.scrollTop = top;
  }

  makeTranscript(turns) {
    const calls = turns.reduce((sum, [, , , more]) => sum + (more?.calls?.length ?? 0), 0);
    const words = `Transcript: ${turns.length} messages, ${calls} tool call${calls === 1 ? "" : "s"}`;
    const block = make("div", "block transcript", make("div", "role", words));
    for (const turn of turns) block.append(this.makeMessage(...turn));
    return block;
  }

  makeAnswer(answer, run, mark, other) {
    const section = make("section", "answer-of");
    section.append(this.makeHead(answer, run, mark));
    if (answer.prompt) {
      const own = make("details", "", make("summary", "", "This run's prompt differs"));
      for (const message of answer.prompt) own.append(this.makeMessage(...message));
      section.append(own);
    }
    if (answer.error !== undefined) section.append(this.makeBlock("Error", answer.error, "error"));
    if (answer.transcript) section.append(this.makeTranscript(answer.transcript));
    if (answer.reasoning !== undefined) section.append(this.makeFold("Reasoning", answer.reasoning, "reasoning"));
    if (answer.error === undefined) section.append(this.makeBlock("Answer", answer.answer, "answer-text", other));
    (answer.choices ?? []).forEach((choice, at) => {
      section.append(this.makeBlock(`Choice ${at + 2}`, choice, "answer-text"));
    });
    section.append(this.makeFacts(answer));
    return section;
  }

  makeHead(answer, run, mark) {
    const [sign, word] = MARKS[mark];
    const verdict = answer.score === undefined ? word : `${word}, ${Number(answer.score.toFixed(4))}`;
    const head = make("h3", "", make("span", "mark mark-" + mark, sign), " ");
    if (this.data.runs.length > 1) head.append(appendText(make("span", "run-label"), this.data.runs[run].label), " ");
    head.append(make("span", "verdict", verdict));
    if (answer.cut) head.append(make("span", "chip chip-cut", "cut at the maximum number of tokens"));
    if (answer.empty) head.append(make("span", "chip", "empty"));
    return head;
  }

  makeBlock(title, text, name, other) {
    const block = make("div", "block", make("div", "role", title));
    block.append(text === "" ? make("p", "absent", "empty") : this.makeText(text, name, other));
    return block;
  }

  makeFacts(answer) {
    const list = make("dl", "facts");
    const add = (name, value) => {
      if (value === "" || value === undefined) return;
      list.append(make("dt", "", name), appendText(make("dd", ""), value));
    };
    add("expected", showValue(answer.expected));
    if (answer.match) add("extracted", answer.extracted === null ? "nothing" : showValue(answer.extracted));
    add("match", answer.match);
    add("note", readText(answer.note, this.texts));
    for (const [name, value] of Object.entries(answer.scores ?? {})) add(name, showValue(value));
    for (const [name, value] of Object.entries(answer.agent ?? {})) add(name, showValue(value));
    add("choices", answer.choice_scores?.join(", "));
    add("finish", answer.finish);
    if (answer.tokens) add("tokens", `${formatNumber(answer.tokens[0])} in, ${formatNumber(answer.tokens[1])} out`);
    if (answer.times) {
      const [waited, first, took, reused] = answer.times;
      const wait = waited === null ? "" : `waited ${formatSeconds(waited)}, `;
      const token = first === null ? "" : `first token after ${formatSeconds(first)}, `;
      add("time", `${wait}${token}finished after ${formatSeconds(took)}`);
      if (reused) add("from cache", `${formatNumber(reused)} prompt tokens`);
    }
    return list;
  }
}
