// Joins the parts of the page: theme, filters, search, keyboard, and the address of a line.

const byId = (id) => document.getElementById(id);
// The table is shown before the browser has read all chunks; what needs them waits.
function whenLoaded(call) {
  if (document.readyState !== "loading") call();
  else document.addEventListener("DOMContentLoaded", call, { once: true });
}

const CHOICES = ["group", "task", "run"]; // the lists of filters
const SEARCH_MS = 12; // spent on searching before the page may draw again

function setUpTheme() {
  const themes = ["auto", "light", "dark"];
  const button = byId("theme");
  let theme = "auto";
  const set = (next) => {
    theme = next;
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
    try {
      localStorage.setItem("mlxrun-report-theme", theme);
    } catch {
      // Pages of files may have no storage; the choice then lasts as long as the page.
    }
  };
  button.addEventListener("click", () => set(themes[(themes.indexOf(theme) + 1) % themes.length]));
  try {
    const stored = localStorage.getItem("mlxrun-report-theme");
    if (themes.includes(stored)) set(stored);
  } catch {
    // As above.
  }
}

/** Searches the texts of rows in steps, so that typing stays fluent; `done(rows)` gets those that have it. */
class Search {
  constructor(data, reader) {
    this.data = data;
    this.reader = reader;
    this.texts = new Array(data.count);
    this.turn = 0;
  }

  run(rows, query, progress, done) {
    const turn = ++this.turn;
    const wanted = query.toLowerCase();
    const found = [];
    let at = 0;
    const step = () => {
      if (turn !== this.turn) return; // another search has begun
      const end = performance.now() + SEARCH_MS;
      while (at < rows.length && performance.now() < end) {
        for (const last = Math.min(at + 50, rows.length); at < last; at++) {
          if (this.readTexts(rows[at]).includes(wanted)) found.push(rows[at]);
        }
      }
      if (at < rows.length) {
        progress(at / rows.length);
        setTimeout(step);
      } else {
        done(found);
      }
    };
    whenLoaded(step);
  }

  stop() {
    this.turn++;
  }

  /** Read all texts while the page is idle, so that the first search is as quick as the others. */
  prepare(row = 0) {
    requestIdleCallback((deadline) => {
      let at = row;
      while (at < this.data.count && deadline.timeRemaining() > 1) this.readTexts(at++);
      if (at < this.data.count) this.prepare(at);
    });
  }

  readTexts(row) {
    this.texts[row] ??= this.data.columns.ids[row].toLowerCase() + "\n" + joinTexts(...this.reader.readRow(row));
    return this.texts[row];
  }
}

class LinesView {
  constructor(data) {
    this.detail = new DetailPane(byId("detail"));
    this.table = new LineTable(byId("table"), (row) => this.open(row));
    this.takeData(data);
    this.filter = { state: "all", group: -1, task: -1, run: -1 };
    this.sorting = { key: "order", descending: false };
    this.setUpControls();
    this.update();
    this.followAddress();
    if (document.body.dataset.digest) new LivePage((page) => this.takeOver(page));
    addEventListener("hashchange", () => this.followAddress());
    document.addEventListener("keydown", (event) => this.handleKey(event));
  }

  takeData(data) {
    this.data = this.detail.data = data;
    this.detail.reader = new ChunkReader(data.chunk);
    this.table.setData(data);
    this.search?.stop();
    this.search = new Search(data, this.detail.reader);
    if ("requestIdleCallback" in window) whenLoaded(() => this.search.prepare());
  }

  /** Show a newer version of this page, with the same filters and at the same line. */
  takeOver(page) {
    const chosen = CHOICES.map((name) => byId("filter-" + name)?.selectedOptions[0].textContent);
    const key = (data, row) => `${data.columns.tasks[row]} ${data.columns.ids[row]}`;
    const [old, row] = [this.data, this.table.rows[this.table.current]];
    const shown = row === undefined ? "" : JSON.stringify(this.detail.reader.readRow(row)[0]);
    for (const each of document.querySelectorAll("script[id]")) each.remove();
    for (const each of page.querySelectorAll("script[id]")) document.body.append(document.importNode(each, true));
    for (const id of ["summary", "main", "states", "choices"]) takeOver(page, id);
    this.takeData(JSON.parse(byId("head").textContent));
    CHOICES.forEach((name, at) => {
      const options = [...(byId("filter-" + name)?.options ?? [])];
      const option = options.find((each) => each.textContent === chosen[at]) ?? options[0];
      if (option) option.selected = true;
      this.filter[name] = Number(option?.value ?? -1);
    });
    this.table.rows = [];
    this.table.current = -1;
    const same = row === undefined ? -1 : this.data.columns.ids.findIndex((_, at) => key(this.data, at) === key(old, row));
    this.setState(this.filter.state, same);
    if (same >= 0 && this.detail.isOpen && JSON.stringify(this.detail.reader.readRow(same)[0]) !== shown) {
      this.detail.show(same);
    }
  }

  setUpControls() {
    byId("choices").parentElement.addEventListener("change", ({ target }) => {
      if (target.id === "search") return;
      if (target.name === "state") return this.setState(target.value);
      this.filter[target.id.replace("filter-", "")] = Number(target.value);
      this.update();
    });
    byId("search").addEventListener("input", () => this.update());
    byId("close").addEventListener("click", () => this.close());
    byId("differences")?.addEventListener("click", () => this.detail.toggleDifferences());
    byId("previous").addEventListener("click", () => this.table.choose(this.table.current - 1, true));
    byId("next").addEventListener("click", () => this.table.choose(this.table.current + 1, true));
    for (const button of document.querySelectorAll("button[data-sort]")) {
      button.addEventListener("click", () => this.sortBy(button.dataset.sort));
    }
    document.addEventListener("click", ({ target }) => {
      const link = target.closest("a[data-state]");
      if (link) this.showSelection(link.dataset);
    });
  }

  /** A link elsewhere on the page that selects lines: by state, and by group if it names one. */
  showSelection({ state, group }) {
    if (group !== undefined && byId("filter-group")) {
      this.filter.group = this.data.groups.indexOf(group);
      byId("filter-group").value = String(this.filter.group);
    }
    this.setState(state);
  }

  /** `row`: the one that stays current if it is selected. */
  setState(state, row) {
    this.filter.state = state;
    const radio = document.querySelector(`#states input[value="${state}"]`);
    if (radio) radio.checked = true;
    this.update(row);
  }

  /** Take back all filters and the search. */
  showAll() {
    for (const name of CHOICES) {
      this.filter[name] = -1;
      if (byId("filter-" + name)) byId("filter-" + name).value = "-1";
    }
    byId("search").value = "";
    this.setState("all");
  }

  sortBy(key) {
    const { sorting } = this;
    if (sorting.key === key && sorting.descending) this.sorting = { key: "order", descending: false };
    else this.sorting = { key, descending: sorting.key === key };
    for (const button of document.querySelectorAll("button[data-sort]")) {
      const active = button.dataset.sort === this.sorting.key;
      const order = this.sorting.descending ? "descending" : "ascending";
      button.parentElement.setAttribute("aria-sort", active ? order : "none");
    }
    this.update();
  }

  update(row) {
    const rows = selectRows(this.data.columns, this.filter);
    const values = this.data.columns[this.sorting.key];
    if (values) sortRows(rows, values, this.sorting.descending);
    const query = byId("search").value.trim();
    this.search.stop();
    if (!query) return this.show(rows, row);
    const progress = (share) => { byId("count").textContent = `searching, ${Math.round(100 * share)} %`; };
    this.search.run(rows, query, progress, (found) => this.show(found, row));
  }

  show(rows, row) {
    this.table.show(rows, row);
    const all = formatNumber(this.data.count);
    const some = formatNumber(rows.length);
    byId("count").textContent = rows.length === this.data.count ? `${all} lines` : `${some} of ${all} lines`;
    byId("no-lines").hidden = rows.length > 0;
  }

  open(row) {
    whenLoaded(() => this.detail.show(row));
    const name = "#line/" + encodeURIComponent(this.data.columns.ids[row]);
    history.replaceState(null, "", name + (this.data.tasks.length > 1 ? "/" + this.data.columns.tasks[row] : ""));
  }

  close() {
    this.detail.hide();
    byId("table").focus();
  }

  /** Open the line that the address names: #line/ID, or #line/ID/TASK of a suite. */
  followAddress() {
    const found = /^#line\/([^/]+)(?:\/(\d+))?$/.exec(location.hash);
    if (!found) return;
    let id;
    try {
      id = decodeURIComponent(found[1]);
    } catch {
      return;
    }
    const { ids, tasks } = this.data.columns;
    const row = ids.findIndex((each, at) => each === id && (!found[2] || tasks[at] === Number(found[2])));
    if (row < 0) return;
    if (!this.table.rows.includes(row)) this.showAll();
    if (this.table.find(row)) byId("lines").scrollIntoView({ behavior: "instant" });
  }

  handleKey(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return this.handleEscape(typing, event);
    if (event.key === "Enter" && event.target === byId("search")) return byId("table").focus();
    if (typing) return;
    if (event.key === "/") {
      event.preventDefault();
      byId("search").focus();
      byId("search").select();
      return;
    }
    this.moveByKey(event);
  }

  handleEscape(typing, event) {
    if (typing) {
      if (event.target === byId("search")) byId("search").value = "";
      this.update();
      byId("table").focus();
    } else if (this.detail.isOpen) {
      this.close();
    }
  }

  moveByKey(event) {
    const { table } = this;
    const inTable = event.target === byId("table");
    if (event.key === "o" && this.detail.isOpen) return this.detail.toggleFolds();
    if (event.key === "d" && byId("differences")) return this.detail.toggleDifferences();
    const steps = { j: 1, k: -1 };
    if (inTable) Object.assign(steps, { ArrowDown: 1, ArrowUp: -1, PageDown: table.fits, PageUp: -table.fits });
    const ends = inTable ? { Home: 0, End: table.rows.length - 1 } : {};
    if (event.key in steps) table.choose(table.current + steps[event.key], this.detail.isOpen);
    else if (event.key in ends) table.choose(ends[event.key], this.detail.isOpen);
    else if (event.key === "Enter" && inTable) table.choose(table.current, true);
    else return;
    event.preventDefault();
  }
}

setUpTheme();
if (byId("head")) new LinesView(JSON.parse(byId("head").textContent));
else if (byId("runs")) new RunsView();
performance.mark("lines");
