// The view of the server: live requests, queue, memory, prefix cache, throughput, the model and its load check.

import { call, getJson, View } from "./api.js";
import { byId, el, formatBytes, formatCount, formatRate, formatSeconds, makeCells, setText, showFacts, Table } from "./dom.js";
import { Plot } from "./plots.js";

const POLL_SECONDS = 2;

const plots = [
  new Plot("Generated", "tokens a second", ({ rates }) => rates?.generated, formatRate),
  new Plot("Prefilled", "tokens a second", ({ rates }) => rates?.prefilled, formatRate),
  new Plot("Running", "rows", ({ status }) => status.queue.running + status.queue.background.running, formatCount),
  new Plot("Memory", "in use", ({ status }) => status.memory?.active, formatBytes),
];
const REQUEST = "Request,API,Phase,Age,First token,Tokens a second,Prompt,Cached,Output,Cancel".split(",");
const MODEL = ["Model", "State", "Requests", "Limit", "Action"];
const requests = new Table(byId("request-table"), REQUEST, makeRequestRow, updateRequestRow);
const models = new Table(byId("model-table"), MODEL, ({ model }) => el("tr", {}, el("th", { scope: "row" }, model), ...makeCells(4)), updateModelRow);
let view = null;
let last = null; // the status before, and when it came

export function setUpServer() {
  byId("plots").append(...plots.map((plot) => plot.card));
  byId("clear-cache").addEventListener("click", ({ target }) => {
    if (confirm("Clear the prefix cache? Prompts are computed again then.")) view.act(() => call("POST", "v1/cache/clear"), target);
  });
  view = new View("server", POLL_SECONDS, showServer);
}

async function showServer() {
  const before = last;
  last = null;
  const status = joinWorkers(await getJson("v1/status", { background: true }));
  last = before;
  showStatus(status);
  return status.model ? "" : "The model is being loaded.";
}

/** With --ray the status has one of each worker. Numbers are added up; the rest is the first worker's. */
function joinWorkers(status) {
  const found = (status.workers ?? status.models ?? []).map((worker) => worker.status).filter(Boolean);
  if (!found.length) return { ...EMPTY, ...status };
  return { ...found.reduce(addUp), ...status, requests: found.flatMap((each) => each.requests), load_check: found[0].load_check };
}

const NONE = { running: 0, waiting: 0 };
const EMPTY = { requests: [], queue: { ...NONE, background: NONE }, limits: {}, cache: {}, batches: { waiting: 0 } };

function addUp(one, other) {
  if (typeof one === "number" && typeof other === "number") return one + other;
  if (one === null || typeof one !== "object" || Array.isArray(one) || !other) return one ?? other;
  return Object.fromEntries(Object.keys(one).map((name) => [name, addUp(one[name], other[name])]));
}

function showStatus(status) {
  const now = performance.now();
  const seconds = last ? (now - last.now) / 1000 : 0;
  const isSame = seconds > 0 && status.tokens && last.status.tokens && status.uptime >= last.status.uptime;
  const measure = (name) => Math.max(0, status.tokens[name] - last.status.tokens[name]) / seconds;
  const rates = isSame ? { generated: measure("generated"), prefilled: measure("prefilled") } : null;
  last = { now, status };
  for (const plot of plots) plot.add({ status, rates });
  setText(byId("server-lead"), `mlxrun ${status.version}, up for ${formatSeconds(status.uptime)}: ${status.status}`);
  requests.show(status.requests);
  showQueue(status);
  showMemory(status.memory);
  showCache(status.cache);
  showModel(status);
  models.show((status.models ?? []).map((each) => ({ ...each, id: each.model })));
  showLoadCheck(status.load_check);
}

function makeRequestRow(request) {
  const progress = el("progress", { max: 1, "aria-label": "Progress of the prompt" });
  const phase = el("td", {}, el("span"), progress);
  const name = el("th", { scope: "row" }, request.id, ...(request.key ? [el("span", { className: "soft" }, ` ${request.key}`)] : []));
  const button = view.makeButton("Cancel", request.id, () => call("POST", `v1/requests/${encodeURIComponent(request.id)}/cancel`));
  return el("tr", {}, name, el("td", {}, request.surface), phase, ...makeCells(6), el("td", {}, button));
}

function updateRequestRow(row, request) {
  const [, , phase, ...cells] = row.cells;
  const [text, progress] = phase.children;
  setText(text, request.phase);
  progress.hidden = request.phase !== "prefill";
  progress.value = request.progress;
  const { age, ttft, tokens_per_second: rate, prompt_tokens: prompt, cached_tokens: cached, output_tokens: output } = request;
  const texts = [formatSeconds(age), formatSeconds(ttft), formatRate(rate), ...[prompt, cached, output].map(formatCount)];
  texts.forEach((each, at) => setText(cells[at], each));
}

function updateModelRow(row, { model, state, error, running, waiting, memory, pinned }) {
  const [, ...cells] = row.cells;
  const counts = `${formatCount(running)} running, ${formatCount(waiting)} waiting`;
  [error ?? state, counts, formatBytes(memory)].forEach((text, at) => setText(cells[at], text));
  if (row.dataset.state === state) return; // so that a focused button stays
  row.dataset.state = state;
  const label = pinned ? null : { unloaded: "Load", ready: "Unload" }[state];
  const post = () => call("POST", `v1/models/${label.toLowerCase()}`, { json: { model } });
  cells[3].replaceChildren(...(label ? [view.makeButton(label, model, post)] : []));
}

function showQueue({ queue, limits, batches }) {
  const { running, waiting, background } = queue;
  const job = batches.running;
  showFacts(byId("queue"), {
    Running: `${formatCount(running)} of ${formatCount(limits.max_running)}`,
    Waiting: `${formatCount(waiting)} of ${formatCount(limits.max_queue)}`,
    "Lines of batches": `${formatCount(background.running)} running, ${formatCount(background.waiting)} waiting`,
    Batch: job ? `${formatCount(job.done + job.failed)} of ${formatCount(job.total)} lines` : null,
    "Batches that wait": batches.waiting || null,
  });
}

function showMemory(memory) {
  showFacts(byId("memory"), {
    "In use": formatBytes(memory?.active),
    Peak: formatBytes(memory?.peak),
    "Kept for later": formatBytes(memory?.cache),
    Limit: formatBytes(memory?.limit),
  });
}

function showCache(cache) {
  const hits = ["exact", "prefix", "supersequence", "lcp"].reduce((sum, name) => sum + (cache[name] ?? 0), 0);
  const prompts = hits + (cache.miss ?? 0);
  byId("clear-cache").hidden = cache.backend === "none";
  showFacts(byId("cache"), {
    Backend: cache.backend,
    "Prompts with a hit": `${formatCount(hits)} of ${formatCount(prompts)}`,
    "Tokens found": formatCount(cache.tokens),
    Entries: formatCount(cache.entries),
    "In memory": formatBytes(cache.memory_bytes ?? 0),
    Pinned: cache.pinned_bytes ? formatBytes(cache.pinned_bytes) : null,
    "On disk": cache.backend === "disk" ? formatBytes(cache.disk_bytes) : null,
  });
}

function showModel({ model, device, versions, speculation }) {
  showFacts(byId("model-facts"), {
    Name: model?.name,
    Context: model && `${formatCount(model.context_length)} tokens`,
    Takes: model?.input_modalities?.join(", "),
    Tasks: model?.tasks?.join(", "),
    Device: device && [device.name, device.backend].filter(Boolean).join(", "),
    Speculation: speculation?.method,
    MLX: versions?.mlx,
  });
}

function showLoadCheck(report) {
  const found = report?.checks ?? [];
  const wrong = found.filter((check) => !check.passed).map(({ name, error }) => `${name}: ${error ?? "differs"}`);
  const notes = [...wrong, report?.long_rows, report?.images, report?.videos].filter(Boolean);
  const lead = `${found.length - wrong.length} of ${found.length} comparisons with the library passed`;
  setText(byId("check-lead"), found.length ? [lead, ...notes].join("; ") : "Nothing was compared.");
}
