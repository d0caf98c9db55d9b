// The view of the server: live requests, queue, memory, prefix cache, throughput, the model and its load check.

import { call, getJson, poll } from "./api.js";
import { byId, el, formatBytes, formatCount, formatRate, formatSeconds, makeCells, setText, showFacts, showNotice, Table } from "./dom.js";
import { Plot } from "./plots.js";

const POLL_SECONDS = 2;

const plots = [
  new Plot("Generated", "tokens a second", ({ rates }) => rates?.generated, formatRate),
  new Plot("Prefilled", "tokens a second", ({ rates }) => rates?.prefilled, formatRate),
  new Plot("Running", "rows", ({ status }) => status.queue.running + status.queue.background.running, formatCount),
  new Plot("Memory", "in use", ({ status }) => status.memory?.active, formatBytes),
];
const REQUEST = "Request,API,Phase,Age,First token,Tokens a second,Prompt,Cached,Output,Cancel".split(",");
const CHECK = ["Comparison", "Result", "Difference", "Limit", "Instead"];
const requests = new Table(byId("request-table"), REQUEST, makeRequestRow, updateRequestRow);
const checks = new Table(byId("check-table"), CHECK, () => el("tr", {}, el("th", { scope: "row" }), ...makeCells(4)), updateCheckRow);
let last = null; // the status before, and when it came

export function setUpServer() {
  byId("plots").append(...plots.map((plot) => plot.card));
  byId("clear-cache").addEventListener("click", clearCache);
  refresh = poll(byId("server-view"), POLL_SECONDS, showServer);
}

let refresh = () => {};

async function showServer() {
  try {
    const status = joinWorkers(await getJson("v1/status", { background: true }));
    showNotice(byId("server-notice"), status.model ? "" : "The model is being loaded.");
    byId("server-content").hidden = false;
    showStatus(status);
  } catch (error) {
    last = null;
    showNotice(byId("server-notice"), error.message);
  }
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
  showLoadCheck(status.load_check);
}

function makeRequestRow(request) {
  const progress = el("progress", { max: 1, "aria-label": "Progress of the prompt" });
  const phase = el("td", {}, el("span"), progress);
  const name = el("th", { scope: "row" }, request.id, ...(request.key ? [el("span", { className: "soft" }, ` ${request.key}`)] : []));
  const button = el("button", { type: "button", "aria-label": `Cancel ${request.id}` }, "Cancel");
  button.addEventListener("click", () => cancelRequest(request.id, button));
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

async function cancelRequest(id, button) {
  button.disabled = true;
  try {
    await call("POST", `v1/requests/${encodeURIComponent(id)}/cancel`);
  } catch (error) {
    if (error.status !== 404) showNotice(byId("server-notice"), error.message);
    button.disabled = false;
  }
  refresh();
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

async function clearCache() {
  if (!confirm("Clear the prefix cache? Prompts are computed again then.")) return;
  try {
    await call("POST", "v1/cache/clear");
  } catch (error) {
    showNotice(byId("server-notice"), error.message);
  }
  refresh();
}

function showModel({ model, models = [], device, versions, speculation }) {
  const takes = model?.vision ? "text and images" : "text";
  showFacts(byId("model-facts"), {
    Name: model?.name,
    Context: model && `${formatCount(model.context_length)} tokens`,
    Takes: model && takes,
    Tasks: model?.tasks?.join(", "),
    Device: device && [device.name, device.backend].filter(Boolean).join(", "),
    Speculation: speculation?.method,
    MLX: versions?.mlx,
    ...Object.fromEntries(models.map((each) => [each.model, each.error ?? each.state])),
  });
}

function showLoadCheck(report) {
  const found = report?.checks ?? [];
  const passed = found.filter((check) => check.passed).length;
  const notes = [report?.long_rows, report?.images, report?.videos].filter(Boolean);
  const lead = `${passed} of ${found.length} comparisons with the library passed`;
  setText(byId("check-lead"), found.length ? [lead, ...notes].join("; ") : "Nothing was compared.");
  checks.show(found.map((check) => ({ ...check, id: check.name })));
}

function updateCheckRow(row, check) {
  const format = (value) => (value === null ? "" : value.toPrecision(2));
  const result = check.passed ? "passed" : check.error ?? "differs";
  const texts = [check.name, result, format(check.difference), format(check.limit), check.instead];
  texts.forEach((text, at) => setText(row.cells[at], text));
  row.className = check.passed ? "" : "failed";
}
