/* The live chart of GPU memory in the page: rows come in as float64, a canvas is drawn, nothing leaves the page.

   The store (`watch_store.js`) and the drawing (`watch_chart.js`) are plain modules; the kernel sends them as one. */

import { human } from "../units.js";
import { inPlaces } from "../place.js";
import { Store, duration, nearest } from "./watch_store.js";
import { drawPanel, geometry } from "./watch_chart.js";

const PATIENCE = 1500; // ms that a button waits for the kernel before it says why nothing happens

/** A row in words, for a screen reader and the line above a chart. */
export function describe(store, row) {
  const words = [`allocated ${human(row[store.allocated])}`, `reserved ${human(row[store.reserved])}`];
  const used = row[store.deviceUsed];
  if (used === used) words.push(`nvidia-smi ${human(used)}`);
  return words.join(", ");
}

/** The words of the line that says how things stand. */
export function statusWords(state, asked, patient) {
  if (state === "stale") return "stale: no word from the kernel (busy with one long call, restarted or gone)";
  if (asked === "stop" && state !== "stopped") return patient ? "stopping" : "will stop when this cell is over";
  if (asked === "pause" && state === "paused") return patient ? "paused" : "paused here; the kernel follows after this cell";
  return state;
}

const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

function hatched(layer) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ctx = tile.getContext("2d");
  ctx.fillStyle = layer.colour;
  ctx.fillRect(0, 0, 6, 6);
  ctx.strokeStyle = layer.hatch;
  ctx.lineWidth = 1.6;
  for (const shift of [-6, 0, 6]) {
    ctx.beginPath();
    ctx.moveTo(shift - 1, 7);
    ctx.lineTo(shift + 7, -1);
    ctx.stroke();
  }
  return ctx.createPattern(tile, "repeat");
}

class View {
  constructor(model, store, el) {
    this.model = model;
    this.store = store;
    this.layers = model.get("layers");
    this.cursor = null; // a time, or null for now
    this.asked = null;
    this.askedAt = 0;
    this.marked = 0;
    this.panels = [];
    this.pending = false;
    this.tableAt = 0;
    this.tableNow = "";
    this.root = element("div", { class: "gpumem-watch", role: "group", "aria-label": "GPU memory, live" });
    // JupyterLab's shortcuts (arrows, Enter) are for its cells, not for what has the focus in here.
    this.root.setAttribute("data-lm-suppress-shortcuts", "true");
    this.root.setAttribute("data-jp-suppress-context-menu", "true");
    this.status = element("span", { class: "gpumem-status", role: "status" });
    this.pauseButton = this.button("Pause", "gpumem-pause", () => this.pause());
    this.markButton = this.button("Mark", "gpumem-mark", () => this.mark());
    this.stopButton = this.button("Stop", "gpumem-stop", () => this.ask("stop"));
    this.root.append(
      element("div", { class: "gpumem-head" }, element("strong", {}, "GPU memory"), this.status,
        element("span", { class: "gpumem-buttons" }, this.pauseButton, this.markButton, this.stopButton)),
    );
    this.empty = element("p", { class: "gpumem-empty" }, "No GPU is in use yet. The chart begins with the first use.");
    this.body = element("div", { class: "gpumem-body" });
    this.table = element("table", { class: "gpumem-table" });
    this.root.append(this.empty, this.body, this.table);
    el.append(this.root);
    this.root.addEventListener("keydown", (event) => event.stopPropagation());
    this.fills = this.layers.map((layer) => (layer.hatch ? hatched(layer) : layer.colour));
    this.request = () => this.schedule();
    model.on("msg:custom", this.request);
    model.on("change:state", this.request);
    model.on("change:series", this.request);
    this.timer = setInterval(this.request, 500);
    if (typeof ResizeObserver !== "undefined") {
      this.observer = new ResizeObserver(this.request);
      this.observer.observe(this.root);
    }
    this.schedule();
  }

  remove() {
    clearInterval(this.timer);
    this.observer?.disconnect();
    this.model.off("msg:custom", this.request);
    this.model.off("change:state", this.request);
    this.model.off("change:series", this.request);
  }

  button(words, name, act) {
    const made = element("button", { type: "button", class: name }, words);
    made.addEventListener("click", act);
    return made;
  }

  // What is asked of the kernel. It may be busy, or gone: the page never waits for it.

  ask(kind, more = {}) {
    this.asked = kind;
    this.askedAt = Date.now();
    try {
      this.model.send({ k: kind, ...more });
    } catch (error) {
      this.store.heard = -Infinity;
    }
    this.schedule();
  }

  pause() {
    const paused = this.store.frozenAt !== null || this.model.get("state") === "paused";
    if (paused) this.store.thaw();
    else this.store.freeze();
    this.ask(paused ? "resume" : "pause");
  }

  mark() {
    this.marked += 1;
    // The time of what is on the screen, by the kernel's clock.
    this.ask("mark", { text: `mark ${this.marked}`, time: this.store.end() });
  }

  // Drawing, at most once a frame.

  schedule() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      if (this.root.isConnected) this.paint();
    });
  }

  paint() {
    const { store } = this;
    const now = Date.now();
    const series = this.model.get("series");
    const state = store.state(this.model.get("state"), now);
    this.paintHead(state, now);
    this.empty.hidden = series.length > 0;
    while (this.panels.length < series.length) this.panels.push(this.panel(series[this.panels.length], this.panels.length));
    const order = inOrder(series);
    order.forEach((number, at) => {
      const { section } = this.panels[number];
      if (this.body.children[at] !== section) this.body.insertBefore(section, this.body.children[at] ?? null);
    });
    const style = getComputedStyle(this.root);
    const look = {
      ink: style.color,
      quiet: style.getPropertyValue("--gpumem-quiet").trim() || style.color,
      grid: style.getPropertyValue("--gpumem-grid").trim() || style.color,
      alarm: style.getPropertyValue("--gpumem-alarm").trim() || style.color,
      paper: style.getPropertyValue("--gpumem-paper").trim() || "#FFFFFF",
    };
    this.panels.forEach((panel, number) => this.paintPanel(panel, number, series[number], look));
    if (now - this.tableAt > 180 || this.cursor !== null) {
      this.tableAt = now;
      this.paintTable(series, order);
    }
    this.root.dataset.state = state;
    this.root.dataset.samples = String(Math.max(0, ...store.rings.map((ring) => ring.taken)));
    this.root.dataset.marks = String(store.marks.length);
  }

  paintHead(state, now) {
    if (state === "stopped" || this.asked === this.answered(state)) this.asked = null;
    const words = statusWords(state, this.asked, now - this.askedAt < PATIENCE);
    if (this.status.textContent !== words) this.status.textContent = words;
    const dead = state === "stopped";
    const label = state === "paused" ? "Resume" : "Pause";
    if (this.pauseButton.textContent !== label) this.pauseButton.textContent = label;
    this.pauseButton.disabled = this.markButton.disabled = dead;
    this.stopButton.disabled = dead || this.asked === "stop";
  }

  /** The request that this state of the kernel answers. */
  answered(state) {
    const told = this.model.get("state");
    if (told === "paused" && this.asked === "pause") return "pause";
    if (state === "running" && this.asked === "resume") return "resume";
    return this.asked === "mark" ? "mark" : undefined;
  }

  panel(facts, number) {
    const line = element("div", { class: "gpumem-line" });
    const canvas = element("canvas", { tabindex: "0", role: "slider", class: "gpumem-canvas" });
    canvas.setAttribute("aria-label", `Memory of ${facts.title} ${facts.name} over time; arrow keys move through the samples`);
    const section = element("section", { class: "gpumem-device" }, line, canvas);
    const made = { section, line, canvas, ctx: canvas.getContext("2d"), where: null };
    canvas.addEventListener("pointermove", (event) => this.point(made, number, event));
    canvas.addEventListener("pointerleave", () => this.move(null));
    canvas.addEventListener("keydown", (event) => this.key(number, event));
    this.body.append(section);
    return made;
  }

  point(panel, number, event) {
    const { left, plotWidth } = panel.where;
    const at = event.clientX - panel.canvas.getBoundingClientRect().left;
    const rows = this.store.shown(number);
    if (at < left || at > left + plotWidth + 4 || !rows.length) return this.move(null);
    const time = this.store.started + ((at - left) / plotWidth) * (this.store.end() - this.store.started);
    return this.move(rows[nearest(rows, time)][0]);
  }

  key(number, event) {
    const rows = this.store.shown(number);
    if (!rows.length) return;
    const at = this.cursor === null ? rows.length - 1 : nearest(rows, this.cursor);
    const far = Math.max(1, Math.round(rows.length / 10));
    const moves = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
      PageDown: at - far, PageUp: at + far, Home: 0, End: rows.length - 1,
    };
    if (event.key === "Escape") this.move(null);
    else if (event.key in moves) this.move(rows[Math.min(Math.max(moves[event.key], 0), rows.length - 1)][0]);
    else return;
    event.preventDefault();
  }

  move(time) {
    this.cursor = time;
    this.tableAt = 0;
    this.schedule();
  }

  /** The row of a series at the cursor, or now. */
  row(number) {
    const rows = this.store.shown(number);
    return this.cursor === null ? this.store.now(number) : rows[nearest(rows, this.cursor)] ?? null;
  }

  paintPanel(panel, number, facts, look) {
    const { store } = this;
    const width = Math.max(Math.floor(this.body.clientWidth), 160);
    const height = width < 420 ? 184 : 234;
    const ratio = window.devicePixelRatio || 1;
    if (panel.canvas.width !== Math.round(width * ratio) || panel.canvas.height !== Math.round(height * ratio)) {
      panel.canvas.width = Math.round(width * ratio);
      panel.canvas.height = Math.round(height * ratio);
      panel.canvas.style.width = `${width}px`;
      panel.canvas.style.height = `${height}px`;
    }
    panel.where = geometry(width, height);
    panel.ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    const rows = store.shown(number);
    const bar = this.row(number);
    const { top } = drawPanel(panel.ctx, store, {
      rows, bar, barWord: this.cursor === null ? "now" : "then", capacity: facts.capacity, peak: bar ? store.now(number)[store.peak] : 0,
      marks: store.marks, start: store.started, end: store.end(), cursor: this.cursor, period: store.period,
      perRow: store.ring(number).perRow, fills: this.fills, ...look,
    }, panel.where);
    const words = bar ? `${describe(store, bar)} of ${human(facts.capacity)}` : "no sample yet";
    const line = `${facts.title}  ${facts.name}  ·  ${words}`;
    if (panel.line.textContent !== line) panel.line.textContent = line;
    const at = this.cursor === null ? rows.length - 1 : nearest(rows, this.cursor);
    const spoken = bar ? `${duration(bar[0] - store.started)}: ${describe(store, bar)}` : "no sample yet";
    const { canvas } = panel;
    canvas.setAttribute("aria-valuemin", "0");
    canvas.setAttribute("aria-valuemax", String(Math.max(rows.length - 1, 0)));
    canvas.setAttribute("aria-valuenow", String(Math.max(at, 0)));
    canvas.setAttribute("aria-valuetext", spoken);
    // For who reads the picture by its pixels.
    const { barX, bar: barWidth, top: upper, plotHeight } = panel.where;
    Object.assign(canvas.dataset, { top: String(top), barX: String(barX + barWidth / 2), upper: String(upper), plot: String(plotHeight) });
  }

  paintTable(series, order) {
    const { store } = this;
    const rows = order.map((number) => this.row(number));
    if (!rows.some(Boolean)) return;
    const first = rows.find(Boolean);
    const mark = this.cursor === null ? null : markAt(store.marks, first[0], store.period);
    const when = this.cursor === null ? "now" : `at ${duration(first[0] - store.started)}`;
    const caption = mark ? `${when} · ${mark.line ? `line ${mark.line}: ` : ""}${mark.label}` : when;
    const cells = store.present().map((layer) => [layer, rows.map((row) => (row ? row[layer + 1] : NaN))]);
    const key = JSON.stringify([caption, cells]);
    if (key === this.tableNow) return;
    this.tableNow = key;
    const body = element("tbody");
    for (const [layer, sizes] of cells.reverse()) {
      const { name, label, colour, hatch } = this.layers[layer];
      const swatch = element("span", { class: "gpumem-swatch", "aria-hidden": "true" });
      swatch.style.background = hatch
        ? `repeating-linear-gradient(135deg, ${colour} 0 2px, ${hatch} 2px 4px)` : colour;
      const row = element("tr", { "data-layer": name }, element("th", { scope: "row" }, swatch, label));
      for (const size of sizes) row.append(element("td", { "data-bytes": String(size) }, size === size ? human(size) : "–"));
      if (!sizes.some((size) => size > 0)) row.classList.add("gpumem-none");
      body.append(row);
    }
    body.style.setProperty("--gpumem-rows", String(Math.ceil(cells.length / 3)));
    this.table.replaceChildren(element("caption", {}, caption));
    if (series.length > 1) {
      const head = element("tr", {}, element("td"));
      for (const number of order) head.append(element("th", { scope: "col" }, series[number].title));
      this.table.append(element("thead", {}, head));
    }
    this.table.append(body);
  }
}

/** The numbers of the series as a reader expects them, whichever came first. */
function inOrder(series) {
  const before = ([engine, index], [other, another]) => engine - other || index - another;
  return series.map((_, number) => number).sort((one, two) => before(series[one].place, series[two].place));
}

/** The checkpoint or mark that a moment belongs to: the last one up to a sample later. */
export function markAt(marks, time, period) {
  let found = null;
  for (const mark of marks) if (mark.time <= time + period / 2) found = mark;
  return found && time - found.time < Math.max(2 * period, 0.5) ? found : null;
}

const shown = (model, store, el) => {
  const view = new View(model, store, el);
  return () => view.remove();
};

/* anywidget gives initialize() and render() different model objects: what views share hangs on this closure, one for each model. */
export default function make() {
  let store = null;
  const storeOf = (model) => {
    const facts = ["columns", "capacity", "period", "started"].map((name) => [name, model.get(name)]);
    return (store ??= new Store(Object.fromEntries(facts)));
  };
  return {
    initialize({ model }) {
      const store = storeOf(model);
      const leave = inPlaces(model.get("place"), (el) => shown(model, store, el));
      const received = (message, buffers) => {
        store.receive(message, buffers?.[0], Date.now());
        // The picture that stays, also for a page in which nobody else would put it.
        if (message.k === "left") leave(message.html);
      };
      model.on("msg:custom", received);
      // A page that was loaded anew asks for what it has missed.
      model.send({ k: "hello" });
      return () => {
        model.off("msg:custom", received);
        leave();
      };
    },
    render({ model, el }) {
      return shown(model, storeOf(model), el);
    },
  };
}
