/* The live chart of GPU memory: rows come in as float64, a canvas is drawn, nothing leaves the page.

   Pure parts first (numbers in, numbers or drawing calls out; tested without a browser), the page's elements last. A row is
   [time, a size for each layer, allocated, reserved, device_used, peak]: seconds since the epoch, bytes, NaN where unavailable. */

export const STALE_PERIODS = 3;
const STALE_AT_LEAST = 2500; // ms: a busy interpreter is late now and then
const PATIENCE = 1500; // ms that a button waits for the kernel before it says why nothing happens
const MIB = 2 ** 20;
const GIB = 2 ** 30;

// ---- words

/** Bytes with the unit that keeps three or four digits, as the Python side writes them. */
export function human(size) {
  const fixed = (x) => x.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  if (size < 1024) return `${size} B`;
  if (size < MIB) return `${fixed(size / 1024)} KiB`;
  if (size < 100 * MIB) return `${fixed(size / MIB)} MiB`;
  if (size < 10 * GIB) return `${Math.round(size / MIB).toLocaleString("en")} MiB`;
  return `${fixed(size / GIB)} GiB`;
}

/** 4.2 s, 3 min 05 s, 2 h 07 min. */
export function duration(seconds) {
  if (seconds < 60) return `${Math.max(seconds, 0).toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (n) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

/** At most six [bytes, word] from 0 to top, at powers of two. */
export function ticks(top) {
  let step = 1024;
  while (top / step > 5) step *= 2;
  const [unit, name] = step >= GIB ? [GIB, "GiB"] : step >= MIB ? [MIB, "MiB"] : [1024, "KiB"];
  const found = [];
  for (let size = 0; size <= top; size += step) {
    found.push([size, size ? `${(size / unit).toLocaleString("en")} ${name}` : "0"]);
  }
  return found;
}

/** Round steps of a time axis: [seconds, word], at most eight. */
export function timeTicks(length) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200];
  const step = steps.find((s) => length / s <= 7) ?? 86400;
  const word = (s) => (s < 60 ? `${s} s` : s % 3600 === 0 ? `${s / 3600} h` : s < 3600 && s % 60 === 0 ? `${s / 60} min` : duration(s));
  const found = [];
  for (let s = 0; s <= length; s += step) found.push([s, word(s)]);
  return found;
}

/** Where the vertical axis ends: the capacity where that leaves the chart readable, else a little room. */
export function scaleTop(highest, capacity) {
  if (capacity > 0 && highest > 0.35 * capacity) return Math.max(highest, capacity) * 1.04;
  return Math.max(highest * 1.15, MIB);
}

// ---- what is kept

/** Rows that never outgrow their room: when it is full, two neighbours become one, and the one with more memory stays. */
export class Ring {
  constructor(capacity, key) {
    this.capacity = capacity;
    this.key = key;
    this.rows = [];
    this.perRow = 1;
    this.taken = 0;
    this.shared = 0;
    this.latest = null;
  }

  push(row) {
    this.latest = row;
    this.taken += 1;
    const last = this.rows.length - 1;
    if (this.shared === 0) {
      if (this.rows.length >= this.capacity) this.halve();
      this.rows.push(row);
    } else if (row[this.key] >= this.rows[last][this.key]) {
      this.rows[last] = row;
    }
    this.shared = (this.shared + 1) % this.perRow;
  }

  halve() {
    const kept = [];
    for (let i = 0; i + 1 < this.rows.length; i += 2) {
      const [a, b] = [this.rows[i], this.rows[i + 1]];
      kept.push(b[this.key] >= a[this.key] ? b : a);
    }
    this.rows = kept;
    this.perRow *= 2;
  }

  /** Other categories for a row that is here. */
  replace(row) {
    let [low, high] = [0, this.rows.length - 1];
    while (low <= high) {
      const middle = (low + high) >> 1;
      const time = this.rows[middle][0];
      if (time === row[0]) {
        this.rows[middle] = row;
        break;
      }
      if (time < row[0]) low = middle + 1;
      else high = middle - 1;
    }
    if (this.latest && this.latest[0] === row[0]) this.latest = row;
  }
}

/** Everything that the page knows about one watch, shared by its views. */
export class Store {
  constructor({ columns, capacity, period, started }) {
    this.width = columns.length;
    this.allocated = columns.indexOf("allocated");
    this.deviceUsed = columns.indexOf("device_used");
    this.peak = columns.indexOf("peak");
    this.reserved = columns.indexOf("reserved");
    this.layers = this.allocated - 1;
    this.capacity = capacity;
    this.period = period;
    this.started = started;
    this.rings = [];
    this.marks = [];
    this.number = 0;
    this.heard = null; // ms, the page's clock
    this.late = 0; // messages that never came
    this.frozenAt = null; // the time of the last row that a paused view shows
  }

  ring(number) {
    while (this.rings.length <= number) this.rings.push(new Ring(this.capacity, this.allocated));
    return this.rings[number];
  }

  /** One message from the kernel; buffer is a DataView or nothing. Messages of other kinds are not ours. */
  receive(message, buffer, now) {
    if (!["rows", "history", "relabelled", "alive"].includes(message.k)) return false;
    this.heard = now;
    const rows = buffer ? this.decode(buffer) : [];
    const series = message.s ?? [];
    if (message.k === "relabelled") {
      rows.forEach((row, i) => this.ring(series[i]).replace(row));
      return true;
    }
    if (message.k === "history") {
      this.rings = [];
      this.marks = [];
    } else if (message.k === "rows") {
      if (this.number && message.n > this.number + 1) this.late += message.n - this.number - 1;
    }
    this.number = Math.max(this.number, message.n ?? 0);
    rows.forEach((row, i) => {
      const ring = this.ring(series[i]);
      // What a history brought along may come once more.
      if (!ring.latest || row[0] > ring.latest[0]) ring.push(row);
    });
    for (const mark of message.m ?? []) {
      const last = this.marks[this.marks.length - 1];
      if (!last || mark.time > last.time || message.k === "history" || mark.label !== last.label) this.marks.push(mark);
    }
    if (this.marks.length > 800) {
      const own = this.marks.filter((mark) => mark.kind === "mark").slice(-400);
      const others = this.marks.filter((mark) => mark.kind !== "mark").filter((_, i) => i % 2);
      this.marks = [...own, ...others].sort((a, b) => a.time - b.time);
    }
    return true;
  }

  decode(buffer) {
    const bytes = buffer.buffer.slice(buffer.byteOffset, buffer.byteOffset + buffer.byteLength);
    const numbers = new Float64Array(bytes);
    const rows = [];
    for (let i = 0; i + this.width <= numbers.length; i += this.width) rows.push(numbers.slice(i, i + this.width));
    return rows;
  }

  /** No message for a while: the kernel is held by one long call, was restarted, or is gone. */
  isStale(now) {
    return this.heard !== null && now - this.heard > Math.max(STALE_PERIODS * this.period * 1000, STALE_AT_LEAST);
  }

  /** running | paused | stale | stopped, from what the kernel says and what it does not say. */
  state(told, now) {
    if (told === "stopped") return "stopped";
    if (this.isStale(now)) return "stale";
    return this.frozenAt !== null ? "paused" : told;
  }

  freeze() {
    const times = this.rings.map((ring) => ring.latest?.[0] ?? 0);
    this.frozenAt = Math.max(this.started, ...times);
  }

  thaw() {
    this.frozenAt = null;
  }

  /** The rows of a series that a view shows. */
  shown(number) {
    const rows = this.ring(number).rows;
    return this.frozenAt === null ? rows : rows.filter((row) => row[0] <= this.frozenAt);
  }

  /** The newest row that a view shows. */
  now(number) {
    const rows = this.shown(number);
    return this.frozenAt === null ? this.ring(number).latest : rows[rows.length - 1] ?? null;
  }

  /** The last moment on the time axis; at least a second after the first. */
  end() {
    const times = this.rings.map((ring) => ring.latest?.[0] ?? 0);
    return Math.max(this.started + 1, this.frozenAt ?? Math.max(0, ...times));
  }

  /** The layers' numbers that any row has bytes in. */
  present() {
    const found = new Set();
    for (const ring of this.rings) {
      for (const row of ring.rows) for (let i = 0; i < this.layers; i++) if (row[i + 1] > 0) found.add(i);
    }
    return [...found].sort((a, b) => a - b);
  }

  height(row) {
    let sum = 0;
    for (let i = 1; i <= this.layers; i++) if (row[i] > 0) sum += row[i];
    return sum;
  }
}

/** One row for each of `columns` stretches of time, the highest, and the last row: no peak is lost. */
export function thin(rows, columns, key) {
  if (rows.length <= columns) return rows;
  const start = rows[0][0];
  const width = (rows[rows.length - 1][0] - start) / columns || 1;
  const kept = [];
  let column = -1;
  for (const row of rows.slice(0, -1)) {
    const at = Math.floor((row[0] - start) / width);
    if (at !== column) {
      kept.push(row);
      column = at;
    } else if (row[key] > kept[kept.length - 1][key]) kept[kept.length - 1] = row;
  }
  return [...kept, rows[rows.length - 1]];
}

/** Rows without a gap of more than `longest` seconds: a pause is not drawn over. */
export function stretches(rows, longest) {
  const found = [];
  let last = -Infinity;
  for (const row of rows) {
    if (row[0] - last > longest) found.push([]);
    found[found.length - 1].push(row);
    last = row[0];
  }
  return found;
}

/** The place of the row nearest to a time; -1 without rows. */
export function nearest(rows, time) {
  let best = -1;
  for (let i = 0; i < rows.length; i++) {
    if (best < 0 || Math.abs(rows[i][0] - time) <= Math.abs(rows[best][0] - time)) best = i;
  }
  return best;
}

// ---- drawing

/** Where things are on a canvas of this size, in CSS pixels. */
export function geometry(width, height) {
  const narrow = width < 420;
  const bar = narrow ? 24 : 36;
  const left = narrow ? 58 : 70;
  const right = bar + (narrow ? 20 : 30);
  return { width, height, left, top: 16, plotWidth: Math.max(width - left - right, 10), plotHeight: height - 40, bar, barX: width - bar - 8 };
}

/** Draws one device. `view`: rows, bar (the row that the bar shows), barWord, capacity, peak, marks, start, end, cursor (a time or
    null), period, perRow, fills, ink, quiet, grid, alarm, paper. Returns {top}: bytes at the upper end of the scale. */
export function drawPanel(ctx, store, view, where) {
  const { left, top: upper, plotWidth, plotHeight, bar, barX, width, height } = where;
  const floor = upper + plotHeight;
  ctx.clearRect(0, 0, width, height);
  const rows = thin(view.rows, Math.max(Math.floor(plotWidth), 2), store.allocated);
  let highest = view.bar ? store.height(view.bar) : 0;
  for (const row of rows) highest = Math.max(highest, store.height(row));
  const top = scaleTop(highest, view.capacity);
  const x = (time) => left + ((time - view.start) / (view.end - view.start)) * plotWidth;
  const y = (size) => floor - (size / top) * plotHeight;
  const line = (x1, y1, x2, y2, colour, dash = [], thick = 1) => {
    ctx.beginPath();
    ctx.setLineDash(dash);
    ctx.strokeStyle = colour;
    ctx.lineWidth = thick;
    ctx.moveTo(x1, y1);
    ctx.lineTo(x2, y2);
    ctx.stroke();
    ctx.setLineDash([]);
  };
  // What crosses the areas has an edge of the ground's colour: areas are light and dark, in both themes.
  const edged = (x1, y1, x2, y2, colour, dash, thick) => {
    line(x1, y1, x2, y2, view.paper, [], thick + 1.6);
    line(x1, y1, x2, y2, colour, dash, thick);
  };
  const text = (words, at, height_, colour, align = "left") => {
    ctx.fillStyle = colour;
    ctx.textAlign = align;
    ctx.fillText(words, at, height_);
  };
  ctx.font = '11px system-ui, "Segoe UI", Roboto, Arial, sans-serif';
  for (const [size, word] of ticks(top)) {
    line(left, y(size), left + plotWidth, y(size), view.grid);
    text(word, left - 6, y(size) + 4, view.quiet, "right");
  }
  for (const [seconds, word] of timeTicks(view.end - view.start)) {
    const at = x(view.start + seconds);
    const half = ctx.measureText(word).width / 2;
    if (at + half <= left + plotWidth + 8) text(word, at, floor + 16, view.quiet, "center");
  }
  const thinned = rows.length ? (rows[rows.length - 1][0] - rows[0][0]) / rows.length : 0;
  const gap = Math.max(1, 5 * view.period, 4 * view.period * view.perRow, 3 * thinned);
  for (const stretch of stretches(rows, gap)) {
    const last = stretch[stretch.length - 1];
    const until = last === rows[rows.length - 1] ? Math.min(view.end, last[0] + gap) : last[0] + view.period;
    drawAreas(ctx, store, stretch, until, x, y, view.fills);
  }
  drawMarks(ctx, view, x, floor, upper, left + plotWidth, line, edged, text);
  if (view.peak > 0) {
    edged(left, y(view.peak), left + plotWidth, y(view.peak), view.ink, [], 0.8);
    tag(ctx, `peak allocated ${human(view.peak)}`, left + plotWidth - 3, Math.max(y(view.peak) - 4, 11), view, "right");
  }
  if (view.capacity > 0 && view.capacity <= top) {
    edged(left, y(view.capacity), width - 4, y(view.capacity), view.alarm, [6, 4], 1);
    tag(ctx, `capacity ${human(view.capacity)}`, left + 4, Math.max(y(view.capacity) - 4, 11), { ...view, ink: view.alarm }, "left");
  }
  if (view.bar) {
    let base = 0;
    for (let i = 0; i < store.layers; i++) {
      const size = view.bar[i + 1];
      if (!(size > 0)) continue;
      ctx.fillStyle = view.fills[i];
      ctx.fillRect(barX, y(base + size), bar, y(base) - y(base + size));
      base += size;
    }
    text(view.barWord, barX + bar / 2, floor + 16, view.quiet, "center");
  }
  line(left, floor + 0.5, left + plotWidth, floor + 0.5, view.quiet);
  if (view.cursor !== null) edged(x(view.cursor), upper, x(view.cursor), floor, view.ink, [2, 2], 1);
  return { top };
}

/** Each sample stands until the next; the last one until a time. */
function drawAreas(ctx, store, rows, until, x, y, fills) {
  const n = rows.length;
  const xs = rows.map((row) => x(row[0]));
  xs.push(Math.max(x(until), xs[n - 1] + 1));
  const base = new Float64Array(n);
  for (let i = 0; i < store.layers; i++) {
    if (!rows.some((row) => row[i + 1] > 0)) continue;
    ctx.beginPath();
    for (let j = 0; j < n; j++) {
      ctx.lineTo(xs[j], y(base[j]));
      ctx.lineTo(xs[j + 1], y(base[j]));
    }
    for (let j = n - 1; j >= 0; j--) {
      const size = rows[j][i + 1];
      if (size > 0) base[j] += size;
      ctx.lineTo(xs[j + 1], y(base[j]));
      ctx.lineTo(xs[j], y(base[j]));
    }
    ctx.closePath();
    ctx.fillStyle = fills[i];
    ctx.fill();
  }
}

function drawMarks(ctx, view, x, floor, upper, right, line, edged, text) {
  const visible = view.marks.filter((mark) => mark.time >= view.start && x(mark.time) <= right + 1);
  for (const mark of visible) {
    const at = x(mark.time);
    if (mark.kind === "checkpoint") line(at, floor, at, floor + 4, view.quiet);
    else if (mark.kind === "cell") line(at, upper, at, floor, view.quiet, [1, 3]);
    else edged(at, upper, at, floor, view.ink, [], 1);
  }
  // Names where there is room for them; a reader's own come first.
  const named = (kind) => visible.filter((mark) => mark.kind === kind);
  const taken = [];
  for (const mark of [...named("mark"), ...named("cell")]) {
    const words = mark.label.slice(0, 24);
    const width = ctx.measureText(words).width;
    const from = Math.min(x(mark.time) + 3, right + 8 - width);
    if (taken.some(([low, high]) => from < high + 6 && from + width + 6 > low)) continue;
    taken.push([from, from + width]);
    text(words, from, upper - 5, mark.kind === "mark" ? view.ink : view.quiet);
  }
}

/** Words over the areas, on a ground of their own. */
function tag(ctx, words, at, height, view, align) {
  const width = ctx.measureText(words).width;
  ctx.globalAlpha = 0.8;
  ctx.fillStyle = view.paper;
  ctx.fillRect(align === "right" ? at - width - 2 : at - 2, height - 10, width + 4, 13);
  ctx.globalAlpha = 1;
  ctx.fillStyle = view.ink;
  ctx.textAlign = align;
  ctx.fillText(words, at, height);
}

// ---- the page

/** A row in words, for a screen reader and the line above a chart. */
export function describe(store, row) {
  const words = [`allocated ${human(row[store.allocated])}`, `reserved ${human(row[store.reserved])}`];
  const used = row[store.deviceUsed];
  if (used === used) words.push(`nvidia-smi ${human(used)}`);
  return words.join(", ");
}

/** The words of the line that says how things stand. */
export function statusWords(state, asked, patient) {
  if (state === "stale") return "stale: nothing heard from the kernel (held by one long call, restarted or gone)";
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
      this.paintTable(series);
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
    const made = { line, canvas, ctx: canvas.getContext("2d"), where: null };
    canvas.addEventListener("pointermove", (event) => this.point(made, number, event));
    canvas.addEventListener("pointerleave", () => this.move(null));
    canvas.addEventListener("keydown", (event) => this.key(number, event));
    this.body.append(element("section", { class: "gpumem-device" }, line, canvas));
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
    const height = width < 420 ? 170 : 220;
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

  paintTable(series) {
    const { store } = this;
    const rows = series.map((_, number) => this.row(number));
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
      for (const { title } of series) head.append(element("th", { scope: "col" }, title));
      this.table.append(element("thead", {}, head));
    }
    this.table.append(body);
  }
}

/** The checkpoint or mark that a moment belongs to: the last one up to a sample later. */
export function markAt(marks, time, period) {
  let found = null;
  for (const mark of marks) if (mark.time <= time + period / 2) found = mark;
  return found && time - found.time < Math.max(2 * period, 0.5) ? found : null;
}

/* anywidget gives initialize() and render() different model objects: what views share hangs on this closure, one for each model. */
export default function make() {
  let store = null;
  const storeOf = (model) => {
    const facts = ["columns", "capacity", "period", "started"].map((name) => [name, model.get(name)]);
    return (store ??= new Store(Object.fromEntries(facts)));
  };
  return {
    initialize({ model }) {
      const received = (message, buffers) => storeOf(model).receive(message, buffers?.[0], Date.now());
      model.on("msg:custom", received);
      storeOf(model);
      // A page that was loaded anew asks for what it has missed.
      model.send({ k: "hello" });
      return () => model.off("msg:custom", received);
    },
    render({ model, el }) {
      const view = new View(model, storeOf(model), el);
      return () => view.remove();
    },
  };
}
