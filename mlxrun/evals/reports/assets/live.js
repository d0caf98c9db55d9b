// Pages that a server sends: they ask it for a newer version of themselves, and the index of runs.

const [LIVE_MS, QUIET_MS] = [2000, 15000]; // between two questions while a run goes on, and else
const MOST_WORK = 5; // an update takes at most a part of the time like this

/** Calls `update(page)` with each newer version of this page, as a document in which no script runs. */
class LivePage {
  constructor(update) {
    this.update = update;
    document.addEventListener("visibilitychange", () => this.refresh());
    this.plan(0);
  }

  plan(took) {
    const isLive = document.body.dataset.live === "1";
    byId("live").textContent = isLive ? "● live" : "";
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refresh(), Math.max(isLive ? LIVE_MS : QUIET_MS, MOST_WORK * took));
  }

  async refresh() {
    if (document.hidden) return this.plan(0);
    const start = performance.now();
    const { digest } = document.body.dataset;
    try {
      const address = location.origin + location.pathname + location.search;
      const response = await fetch(address, { cache: "no-store", headers: { "If-None-Match": `"${digest}"` } });
      if (response.ok) {
        const page = new DOMParser().parseFromString(await response.text(), "text/html");
        if (page.body.dataset.digest) {
          Object.assign(document.body.dataset, page.body.dataset);
          this.update(page);
        }
      } else if (response.status !== 304) {
        throw new Error(`status ${response.status}`);
      }
      this.plan(performance.now() - start);
    } catch (error) {
      this.plan(0);
      byId("live").textContent = `no answer (${error.message})`;
    }
  }
}

/** Take the element with an id over from another version of this page. */
function takeOver(page, id) {
  const [old, fresh] = [byId(id), page.getElementById(id)];
  const open = [...old.querySelectorAll("details")].map((each) => each.open);
  const element = document.importNode(fresh, true);
  [...element.querySelectorAll("details")].forEach((each, at) => { each.open = open[at] ?? each.open; });
  old.replaceWith(element);
}

/** The index: filter, keyboard, and which runs are chosen. */
class RunsView {
  constructor() {
    byId("find-run").addEventListener("input", () => this.filter());
    document.addEventListener("change", () => this.countChosen());
    document.addEventListener("keydown", (event) => this.handleKey(event));
    this.countChosen();
    new LivePage((page) => this.takeOver(page));
  }

  list(selector) {
    return [...byId("runs").querySelectorAll(selector)];
  }

  takeOver(page) {
    const chosen = new Set(this.list(":checked").map((each) => each.value));
    const focused = document.activeElement?.getAttribute("href");
    takeOver(page, "runs");
    for (const each of this.list("input")) each.checked = chosen.has(each.value);
    if (focused) this.list("a").find((each) => each.getAttribute("href") === focused)?.focus();
    this.filter();
    this.countChosen();
  }

  filter() {
    const wanted = byId("find-run").value.trim().toLowerCase();
    for (const row of this.list("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  }

  countChosen() {
    byId("compare").disabled = this.list(":checked").length < 1;
  }

  handleKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const field = byId("find-run");
    if (event.target === field) {
      if (event.key !== "Escape" && event.key !== "Enter") return;
      event.preventDefault();
      if (event.key === "Escape") field.value = "";
      this.filter();
      this.move(0);
    } else if (event.key === "/") {
      event.preventDefault();
      field.focus();
    } else if (event.key === "j" || event.key === "k") {
      this.move(event.key === "j" ? 1 : -1);
    } else if (event.key === "x") {
      document.activeElement.closest("tr")?.querySelector("input").click();
    }
  }

  /** Go to the link so many rows further; from elsewhere, to the first one. */
  move(steps) {
    const links = this.list("tr:not([hidden]) a");
    const at = links.indexOf(document.activeElement);
    links[at < 0 ? 0 : Math.max(0, Math.min(links.length - 1, at + steps))]?.focus();
  }
}
