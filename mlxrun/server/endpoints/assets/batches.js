// The view of batches and files.

import { call, getJson, View } from "./api.js";
import { byId, el, formatBytes, formatCount, formatTime, makeCells, setText, Table } from "./dom.js";

const POLL_SECONDS = 5;
const PAGE = 20;
const MOST = 100; // that the server lists at once
const HEAD_BYTES = 1 << 20; // of a file, in which its first line is looked for
const ENDED = new Set(["completed", "failed", "expired", "cancelled"]);

const BATCH = ["Batch", "Endpoint", "Status", "Lines", "Created", "Files", "Action"];
const FILE = ["File", "Purpose", "Size", "Created", "Action"];
const batchTable = new Table(byId("batch-table"), BATCH, makeBatchRow, updateBatchRow);
const fileTable = new Table(byId("file-table"), FILE, makeFileRow, () => {});

let wanted = PAGE;
let view = null;

export function setUpBatches() {
  byId("new-batch").addEventListener("submit", (event) => {
    event.preventDefault();
    view.act(startBatch);
  });
  byId("more-batches").addEventListener("click", () => {
    wanted = Math.min(MOST, wanted + PAGE);
    view.refresh();
  });
  view = new View("batches", POLL_SECONDS, showAll);
}

async function showAll() {
  const paths = [`v1/batches?limit=${wanted}`, "v1/files"];
  const [batches, files] = await Promise.all(paths.map((path) => getJson(path, { background: true })));
  batchTable.show(batches.data);
  byId("more-batches").hidden = !batches.has_more || wanted === MOST;
  fileTable.show(files.data);
}

async function startBatch() {
  const [file] = byId("batch-file").files;
  const endpoint = await findEndpoint(file);
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  const { id } = await (await call("POST", "v1/files", { form })).json();
  await call("POST", "v1/batches", { json: { input_file_id: id, endpoint, completion_window: "24h" } });
  byId("new-batch").reset();
}

/** The endpoint of a job's lines: the `url` of the first one, as all lines of a batch have the same. */
async function findEndpoint(file) {
  const head = await file.slice(0, HEAD_BYTES).text();
  try {
    const { url } = JSON.parse(head.trimStart().split("\n", 1)[0]);
    if (typeof url === "string") return url;
  } catch {
    // As below.
  }
  throw new Error(`${file.name}: the first line is no JSON object with a "url", such as "/v1/chat/completions".`);
}

function makeBatchRow(batch) {
  const created = el("td", {}, formatTime(batch.created_at));
  const head = [el("th", { scope: "row" }, batch.id), el("td", {}, batch.endpoint)];
  return el("tr", {}, ...head, ...makeCells(2), created, ...makeCells(2));
}

function updateBatchRow(row, batch) {
  const [, , status, lines, , files, action] = row.cells;
  const { total, completed, failed } = batch.request_counts;
  const problems = (batch.errors?.data ?? []).slice(0, 3).map(({ line, message }) => (line ? `line ${line}: ` : "") + message);
  setText(status, [batch.status, ...problems].join("; "));
  setText(lines, `${formatCount(completed)} of ${formatCount(total)}${failed ? `, ${formatCount(failed)} failed` : ""}`);
  const state = `${batch.status} ${batch.output_file_id} ${batch.error_file_id}`;
  if (row.dataset.state === state) return; // so that a focused button stays
  row.dataset.state = state;
  const named = [["Input", batch.input_file_id], ["Output", batch.output_file_id], ["Errors", batch.error_file_id]];
  files.replaceChildren(...named.filter(([, id]) => id).map(([label, id]) => view.makeButton(label, `of ${batch.id}`, () => download(id))));
  const path = `v1/batches/${batch.id}`;
  const button = ENDED.has(batch.status)
    ? view.makeButton("Delete", batch.id, () => call("DELETE", path))
    : view.makeButton("Cancel", batch.id, () => call("POST", `${path}/cancel`));
  action.replaceChildren(button);
}

function makeFileRow(file) {
  const buttons = [
    view.makeButton("Download", file.filename, () => download(file.id)),
    view.makeButton("Delete", file.filename, () => call("DELETE", `v1/files/${file.id}`)),
  ];
  const cells = [file.purpose, formatBytes(file.bytes), formatTime(file.created_at)].map((text) => el("td", {}, text));
  return el("tr", {}, el("th", { scope: "row", title: file.id }, file.filename), ...cells, el("td", {}, ...buttons));
}

/** Saves a file. It is fetched first, as a link cannot send the API key. */
async function download(id) {
  const { filename } = await getJson(`v1/files/${id}`);
  const content = await (await call("GET", `v1/files/${id}/content`)).blob();
  const url = URL.createObjectURL(content);
  el("a", { href: url, download: filename }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
