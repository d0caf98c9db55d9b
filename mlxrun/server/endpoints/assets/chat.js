// The chat: a conversation with any model of /v1/models, whose answers are streamed.

import { ApiError, call, getJson, readEvents } from "./api.js";
import { byId, copyText, el, formatCount, formatRate, formatSeconds, setText, showNotice } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const DRAW_MS = 60; // between two drawings of a growing answer
const ASK_MS = 1000; // between two questions how far the prompt is
const RETRY_MS = 2000; // until the models are asked for again, while one is loaded
const FOLLOW_PIXELS = 60; // from the end, within which a growing answer is followed

let turns = []; // of the conversation: a question with its files, and the answer to it
let attached = []; // files of the next question: name and data URL
let running = null; // the AbortController of the answer that is streamed

export function setUpChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendQuestion();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    sendQuestion();
  });
  byId("chat-view").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("new-chat").addEventListener("click", startAgain);
  addEventListener("keychange", loadModels);
  setUpFiles();
  loadModels();
}

// Models

async function loadModels() {
  const select = byId("model");
  try {
    const { data } = await getJson("v1/models");
    const models = data.filter((model) => !model.tasks || model.tasks.includes("generate"));
    select.replaceChildren(...models.map((model) => el("option", { value: model.id }, model.id)));
    select.disabled = !models.length;
    showNotice(byId("chat-notice"), models.length ? "" : "No model here answers questions: it gives vectors or scores.");
  } catch (error) {
    showNotice(byId("chat-notice"), error.message);
    if (error.status === 503 || !error.status) setTimeout(loadModels, RETRY_MS);
  }
}

// Files

function setUpFiles() {
  const view = byId("chat-view");
  byId("attach").addEventListener("change", (event) => {
    attachFiles(event.target.files);
    event.target.value = "";
  });
  byId("prompt").addEventListener("paste", (event) => attachFiles(event.clipboardData.files));
  view.addEventListener("dragover", (event) => {
    event.preventDefault();
    view.classList.add("dropping");
  });
  view.addEventListener("dragleave", (event) => {
    if (!view.contains(event.relatedTarget)) view.classList.remove("dropping");
  });
  view.addEventListener("drop", (event) => {
    event.preventDefault();
    view.classList.remove("dropping");
    attachFiles(event.dataTransfer.files);
  });
}

async function attachFiles(files) {
  for (const file of files) {
    if (!/^(image|video|audio)\/|^application\/pdf$/.test(file.type)) {
      showNotice(byId("chat-notice"), `${file.name} is no image, PDF, video or sound.`);
      continue;
    }
    showNotice(byId("chat-notice"), "");
    attached.push({ name: file.name || "image", url: await readDataUrl(file) });
    showAttached();
  }
}

function readDataUrl(file) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(file);
  });
}

function showAttached() {
  const remove = (file) => {
    attached = attached.filter((other) => other !== file);
    showAttached();
    byId("prompt").focus();
  };
  byId("files").hidden = !attached.length;
  byId("files").replaceChildren(
    ...attached.map((file) => {
      const button = el("button", { type: "button", "aria-label": `Remove ${file.name}`, onclick: () => remove(file) }, "×");
      return el("li", {}, showFile(file), button);
    }),
  );
}

const isImage = (file) => file.url.startsWith("data:image/");
const showFile = (file) => (isImage(file) ? el("img", { src: file.url, alt: file.name }) : el("span", {}, file.name));

// A conversation

function startAgain() {
  running?.abort();
  turns = [];
  byId("messages").replaceChildren();
  setText(byId("spoken"), "");
  byId("prompt").focus();
}

async function sendQuestion() {
  const text = byId("prompt").value.trim();
  if (running || byId("model").disabled || (!text && !attached.length)) return;
  const turn = { text, files: attached, answer: "" };
  byId("prompt").value = "";
  attached = [];
  showAttached();
  turns.push(turn);
  byId("messages").append(renderQuestion(turn));
  await answer(turn);
}

function renderQuestion(turn) {
  const files = el("div", { className: "shown-files" }, ...turn.files.map(showFile));
  return el("article", { className: "question", "aria-label": "You" }, files, el("p", {}, turn.text));
}

/** Streams the answer to the last question. */
async function answer(turn) {
  const shown = new ShownAnswer(byId("model").value);
  const again = () => {
    if (running || turns.at(-1) !== turn) return;
    shown.article.remove();
    answer(turn);
  };
  Object.assign(turn, { answer: "", reasoning: "" });
  for (const button of document.querySelectorAll(".regenerate")) button.remove();
  byId("messages").append(shown.article);
  shown.article.scrollIntoView({ block: "end" });
  const controller = (running = new AbortController());
  showRunning(true);
  try {
    await streamAnswer(turn, shown, controller.signal);
  } catch (error) {
    if (error.name === "AbortError") shown.end = "stopped";
    else shown.showError(error instanceof ApiError ? error.message : String(error));
  } finally {
    if (running === controller) {
      running = null;
      showRunning(false);
    }
  }
  shown.finish(again);
  setText(byId("spoken"), turn.answer || shown.end);
}

function showRunning(isRunning) {
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
  if (isRunning) setText(byId("spoken"), "Waiting for the answer");
  if (isRunning && document.activeElement === document.body) byId("stop").focus();
  if (!isRunning && [document.body, byId("stop")].includes(document.activeElement)) byId("prompt").focus();
}

async function streamAnswer(turn, shown, signal) {
  const id = `ui-${Array.from(crypto.getRandomValues(new Uint32Array(3)), (n) => n.toString(16)).join("")}`;
  const waiting = setInterval(() => showProgress(id), ASK_MS);
  try {
    const options = { json: buildBody(turn), signal, headers: { "x-request-id": id } };
    const response = await call("POST", "v1/chat/completions", options);
    for await (const chunk of readEvents(response)) {
      const [choice] = chunk.choices;
      const { content, reasoning_content: reasoning } = choice?.delta ?? {};
      if (content || reasoning) clearInterval(waiting);
      turn.answer += content ?? "";
      turn.reasoning += reasoning ?? "";
      shown.add(turn, chunk.usage, choice?.finish_reason);
      if (content || reasoning) setText(byId("progress"), "");
    }
  } finally {
    clearInterval(waiting);
    setText(byId("progress"), "");
  }
}

/** Says how far the prompt is. A key that may not read the status, or a server without it, says nothing. */
async function showProgress(id) {
  const status = await getJson("v1/status", { background: true }).catch(() => ({}));
  const all = [status, ...(status.workers ?? status.models ?? []).map((worker) => worker.status)];
  const live = all.flatMap((each) => each?.requests ?? []).find((request) => request.id === id);
  if (!running || live?.ttft) return;
  if (live?.phase === "queued") setText(byId("progress"), "Waiting in the queue");
  if (live?.phase === "prefill") {
    const counts = `${formatCount(live.computed_tokens)} of ${formatCount(live.prompt_tokens)}`;
    setText(byId("progress"), `Reading the prompt: ${counts} tokens`);
  }
}

/** The body of a request. Earlier questions without an answer are left out. */
function buildBody(turn) {
  const messages = byId("system").value.trim() ? [{ role: "system", content: byId("system").value }] : [];
  for (const each of turns) {
    if (each !== turn && !each.answer) continue;
    messages.push({ role: "user", content: buildContent(each) });
    if (each !== turn) messages.push({ role: "assistant", content: each.answer });
  }
  const body = { model: byId("model").value, messages, stream: true, stream_options: { include_usage: true } };
  if (byId("temperature").value) body.temperature = Number(byId("temperature").value);
  if (byId("max-tokens").value) body.max_tokens = Number(byId("max-tokens").value);
  return body;
}

function buildContent({ text, files }) {
  if (!files.length) return text;
  const parts = files.map(({ name, url }) => {
    const part = /^data:(image|video|audio)\//.exec(url)?.[1].concat("_url");
    return part ? { type: part, [part]: { url } } : { type: "file", file: { file_data: url, filename: name } };
  });
  return text ? [...parts, { type: "text", text }] : parts;
}

/** An answer on the page. It is drawn again at most every DRAW_MS. */
class ShownAnswer {
  constructor(model) {
    this.end = "";
    this.model = model;
    this.started = performance.now();
    this.firstToken = null;
    this.timer = null;
    this.reasoning = el("div", { className: "markdown" });
    this.fold = el("details", { className: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), this.reasoning);
    this.content = el("div", { className: "markdown" });
    this.foot = el("div", { className: "foot soft" });
    const parts = [this.fold, this.content, this.foot];
    this.article = el("article", { className: "answer", "aria-label": "Answer", "aria-busy": "true" }, ...parts);
  }

  add(turn, usage, finish) {
    this.turn = turn;
    this.usage = usage ?? this.usage;
    this.finishReason = finish ?? this.finishReason;
    if (turn.answer || turn.reasoning) {
      this.lastToken = usage ? this.lastToken : performance.now();
      this.firstToken ??= this.lastToken;
    }
    this.timer ??= setTimeout(() => this.draw(), DRAW_MS);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    if (!this.turn) return;
    const log = byId("messages");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < FOLLOW_PIXELS;
    this.fold.hidden = !this.turn.reasoning;
    renderMarkdown(this.reasoning, this.turn.reasoning);
    renderMarkdown(this.content, this.turn.answer);
    if (follows) log.scrollTop = log.scrollHeight;
  }

  showError(message) {
    this.end = "failed";
    this.content.after(el("p", { className: "notice" }, message));
  }

  /** Shows what the answer took, and its buttons. */
  finish(again) {
    this.draw();
    this.article.setAttribute("aria-busy", "false");
    const copy = el("button", { type: "button", onclick: () => copyText(this.turn?.answer ?? "", copy) }, "Copy");
    const regenerate = el("button", { type: "button", className: "regenerate", onclick: again }, "Regenerate");
    this.foot.append(...(this.turn?.answer ? [copy] : []), regenerate, el("span", {}, this.describe()));
    const log = byId("messages");
    log.scrollTop = log.scrollHeight;
  }

  describe() {
    const parts = [this.model, this.end, this.finishReason === "length" ? "ended at the limit of tokens" : ""];
    const tokens = this.usage?.completion_tokens;
    if (this.firstToken) parts.push(`first token after ${formatSeconds((this.firstToken - this.started) / 1000)}`);
    if (tokens) parts.push(tokens === 1 ? "1 token" : `${formatCount(tokens)} tokens`);
    const seconds = (this.lastToken - this.firstToken) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${formatRate((tokens - 1) / seconds)} tokens a second`);
    return parts.filter(Boolean).join(" · ");
  }
}
