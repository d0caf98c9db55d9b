// Calls the server. Paths are relative to the page, so a proxy may serve all of it below a path of its own.

import { byId, el, showNotice } from "./dom.js";

const STORE = "mlxrun-key";
let asking = null; // the promise of the open dialog
let declined = false; // the user has closed it without a key

/** An answer that is an error, with its status and the text of the server. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Calls a path and returns the response, if it is no error. `background`: do not ask again for a key that
    the user has declined to give. */
export async function call(method, path, { json, form, signal, headers = {}, background = false } = {}) {
  const body = form ?? (json && JSON.stringify(json));
  for (;;) {
    const key = sessionStorage.getItem(STORE);
    const sent = { ...headers };
    if (json) sent["Content-Type"] = "application/json";
    if (key) sent.Authorization = `Bearer ${key}`;
    const response = await send(path, { method, body, signal, headers: sent });
    if (response.ok) return response;
    const error = new ApiError(await readError(response), response.status);
    if (response.status !== 401 || (background && declined)) throw error;
    byId("change-key").hidden = false;
    if (key === sessionStorage.getItem(STORE) && !(await askKey(key ? error.message : "This server needs a key."))) throw error;
  }
}

export const getJson = async (path, options) => (await call("GET", path, options)).json();

async function send(path, options) {
  try {
    return await fetch(path, { ...options, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
}

async function readError(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`.trim();
  }
}

/** Asks for a key, and returns whether one was given. */
export function askKey(reason) {
  asking ??= new Promise((done) => {
    const dialog = byId("key-dialog");
    byId("key-reason").textContent = reason;
    byId("key").value = "";
    dialog.returnValue = "";
    dialog.onclose = () => {
      asking = null;
      declined = dialog.returnValue !== "given";
      done(!declined);
      if (!declined) dispatchEvent(new Event("keychange"));
    };
    dialog.showModal();
  });
  return asking;
}

export function setUpKeys() {
  const dialog = byId("key-dialog");
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(STORE, byId("key").value.trim());
    byId("key").value = "";
    dialog.close("given");
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("change-key").hidden = !sessionStorage.getItem(STORE);
  byId("change-key").addEventListener("click", () => askKey("The key for this server."));
}

/** Reads the events of a stream as JSON. An event with an error, or a stream without an end, raises. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiError("The answer ended early: the connection was closed.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      if (!data.length) continue; // a comment, which keeps the connection open
      if (data[0] === "[DONE]") return;
      const chunk = JSON.parse(data.join("\n"));
      if (chunk.error) throw new ApiError(chunk.error.message);
      yield chunk;
    }
  }
}

/** A view that shows the server again, `seconds` after the last time, while it and the tab are shown. `show`
    returns what there is to say besides. */
export class View {
  constructor(name, seconds, show) {
    Object.assign(this, { seconds, show, busy: false, problem: "" });
    [this.view, this.content, this.notice] = ["view", "content", "notice"].map((part) => byId(`${name}-${part}`));
    document.addEventListener("visibilitychange", () => this.refresh());
    addEventListener("hashchange", () => setTimeout(() => this.refresh()));
    this.refresh();
  }

  async refresh() {
    clearTimeout(this.timer);
    if (this.busy || this.view.hidden || document.hidden) return;
    this.busy = true;
    try {
      const text = await this.show();
      this.content.hidden = false;
      showNotice(this.notice, this.problem || text || "");
    } catch (error) {
      showNotice(this.notice, error.message);
    } finally {
      this.busy = false;
      this.timer = setTimeout(() => this.refresh(), this.seconds * 1000);
    }
  }

  /** Runs what a button does, and shows what is wrong until the next one. What has ended meanwhile is not. */
  async act(action, button = {}) {
    this.problem = "";
    button.disabled = true;
    try {
      await action();
    } catch (error) {
      if (error.status !== 404) this.problem = error.message;
    }
    button.disabled = false;
    showNotice(this.notice, this.problem);
    await this.refresh();
  }

  makeButton(label, name, action) {
    const button = el("button", { type: "button", "aria-label": `${label} ${name}`, onclick: () => this.act(action, button) }, label);
    return button;
  }
}
