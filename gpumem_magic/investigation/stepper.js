/* The stepper: one checkpoint of a cell after another. Everything that it says was worked out in Python; this draws it.

   Pure parts first (facts in, numbers and words out; tested without a browser), the page's elements last. `facts` is the
   dictionary that `gpumem_magic.investigation.steps.facts` makes. Sizes are bytes. */

import { counted, mib } from "../units.js";
import { inPlaces } from "../place.js";

const SVG = "http" + "://www.w3.org/2000/svg"; // the name of the drawing elements; nothing is loaded from there
export const PACE = 1400; // ms for each step while it plays
const STRIP_HEIGHT = 46;
const NEAR = 0.6; // of the card: where a step fills that much of it, the card's end is in the picture

// ---- words and numbers

/** The step that a key leads to, or null for a key that means nothing here. Arrows pass over steps that are quiet. */
export function stepForKey(key, step, steps) {
  const count = steps.length;
  const far = Math.max(1, Math.round(count / 10));
  const next = beside(steps, step, 1), previous = beside(steps, step, -1);
  const targets = {
    ArrowRight: next, ArrowDown: next, ArrowLeft: previous, ArrowUp: previous,
    PageDown: step + far, PageUp: step - far, Home: 0, End: count - 1,
  };
  return key in targets ? clamp(targets[key], count) : null;
}

/** The nearest step in a direction (1 or -1) in which something moved; the end where there is none. */
export function beside(steps, step, way) {
  let to = step + way;
  while (to > 0 && to < steps.length - 1 && steps[to].quiet) to += way;
  return clamp(to, steps.length);
}

export const clamp = (step, count) => Math.min(Math.max(Number.isFinite(step) ? Math.round(step) : 0, 0), count - 1);

/** What the picture's width stands for, in bytes, at every step: the most that any has in use, or the card where that comes near its end
    or a request failed. */
export function scaleOf(facts) {
  const most = Math.max(1, ...facts.steps.flatMap(({ used, published, peak, reserved }) => [used, published ?? 0, peak, reserved]));
  return facts.wanted || most > NEAR * facts.capacity ? Math.max(facts.capacity, most) : most;
}

/** The parts of the bar: [{name, label, colour, start, size}], bottom (left) first, as shares of the width. */
export function barOf(facts, step) {
  const scale = scaleOf(facts);
  const parts = [];
  let start = 0;
  for (const kind of facts.kinds) {
    const size = facts.steps[step].categories[kind.name] ?? 0;
    if (size <= 0) continue;
    parts.push({ ...kind, bytes: size, start: start / scale, size: size / scale });
    start += size;
  }
  return parts;
}

/** Where the segments of a step are drawn: [{x, width, pool, pieces: [{x, width, kind, bytes, name}]}], and the x of the end.

    One scale for all steps, so that a segment keeps its width. gap: pixels between two segments. */
export function stripOf(facts, step, width, gap = 1.5) {
  const strip = facts.steps[step].strip;
  if (!strip) return null;
  const most = Math.max(...facts.steps.map((one) => one.strip?.length ?? 0));
  // With many segments the gaps would eat the picture.
  const between = Math.min(gap, (0.25 * width) / Math.max(most, 1));
  const perByte = (width - between * most) / scaleOf(facts);
  const segments = [];
  let x = 0;
  for (const number of strip) {
    const { size, pool, pieces } = facts.segments[number];
    let inside = x;
    const drawn = pieces.map(([bytes, kind, name]) => {
      const piece = { x: inside, width: bytes * perByte, kind: facts.kinds[kind], bytes, name: name ?? null };
      inside += piece.width;
      return piece;
    });
    segments.push({ x, width: size * perByte, size, pool, pieces: drawn });
    x += size * perByte + between;
  }
  return { segments, end: x, perByte };
}

/** The largest free piece of a drawn strip, or null. */
export function largestHole(strip) {
  let found = null;
  for (const segment of strip?.segments ?? []) {
    for (const piece of segment.pieces) {
      if (piece.kind.name === "free" && (found === null || piece.bytes > found.bytes)) found = piece;
    }
  }
  return found;
}

/** [term, figure] beside the bar. */
export function figuresOf(facts, step) {
  const { smi, published, change, allocated, reserved, peak } = facts.steps[step];
  const card = scaleOf(facts) < facts.capacity ? ` of ${mib(facts.capacity)}` : "";
  const rows = [["nvidia-smi", smi === null ? "n/a" : `${mib(smi)}${card} MiB`]];
  if (facts.steps.some((one) => one.published !== null)) {
    const off = published === null || smi === null ? "" : ` (ours is ${mib(smi - published, true)})`;
    rows.push(["published", published === null ? "–" : `${mib(published)} MiB${off}`]);
  }
  rows.push(["change", change ? `${mib(change, true)} MiB` : "none"]);
  rows.push(["reserved", `${mib(reserved)} MiB`], ["allocated", `${mib(allocated)} MiB`]);
  if (peak > allocated) rows.push(["peak within", `${mib(peak)} MiB`]);
  return rows;
}

/** What the slider says to a reader who does not see it. */
export function positionWords(facts, step) {
  const one = facts.steps[step];
  return `step ${step + 1} of ${facts.steps.length}: ${one.line ? `line ${one.line}, ` : ""}${one.title}`;
}

/** A strip in words. */
export function stripWords(facts, step) {
  const one = facts.steps[step];
  if (!one.strip) return "";
  const hole = largestHole(stripOf(facts, step, 1000));
  const free = hole ? `the largest free piece is ${mib(hole.bytes)} MiB` : "no piece is free";
  const wanted = one.kind === "error" && facts.wanted ? `; ${mib(facts.wanted)} MiB are wanted in one piece` : "";
  return `${counted(one.strip.length, "segment")}, ${mib(one.reserved)} MiB: ${free}${wanted}`;
}

/** The kinds that any step has, for the legend: those of the bars, and those of the strips only. */
export function legendOf(facts) {
  const drawn = new Set(facts.present);
  for (const { pieces } of facts.segments) for (const [, kind] of pieces) drawn.add(facts.kinds[kind].name);
  // A free piece of a strip is a cached byte of the bar.
  if (drawn.has("cached")) drawn.delete("free");
  return facts.kinds.filter(({ name }) => drawn.has(name));
}

// ---- the page

const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const shape = (name, attributes = {}, ...children) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

let numbers = 0;

export class View {
  constructor(model, el) {
    this.model = model;
    this.timer = null;
    this.width = 0;
    this.number = ++numbers;
    this.build(el);
    this.onFacts = () => { this.facts = model.get("facts"); this.fill(); this.draw(); };
    this.onStep = () => this.draw();
    model.on("change:facts", this.onFacts);
    model.on("change:step", this.onStep);
    this.onFacts();
    this.sized = new ResizeObserver(() => this.measured());
    this.sized.observe(this.root);
  }

  remove() {
    this.pause();
    this.sized.disconnect();
    this.model.off("change:facts", this.onFacts);
    this.model.off("change:step", this.onStep);
  }

  get step() { return clamp(this.model.get("step"), this.facts.steps.length); }

  go(step) {
    const to = clamp(step, this.facts.steps.length);
    if (to === this.model.get("step")) return;
    this.model.set("step", to);
    this.model.save_changes();
  }

  play() {
    if (this.step === this.facts.steps.length - 1) this.go(0);
    this.timer = setInterval(() => {
      this.go(beside(this.facts.steps, this.step, 1));
      if (this.step === this.facts.steps.length - 1) this.pause();
    }, PACE);
    this.playing();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.playing();
  }

  playing() {
    const on = this.timer !== null;
    this.root.dataset.playing = String(on);
    this.playButton.textContent = on ? "pause" : "play";
    this.playButton.setAttribute("aria-pressed", String(on));
    // While it plays, a screen reader would be told more than it can say.
    this.words.setAttribute("aria-live", on ? "off" : "polite");
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (event.key === " " && event.target.tagName !== "BUTTON") {
      event.preventDefault();
      if (this.timer === null) this.play(); else this.pause();
      return;
    }
    const to = stepForKey(event.key, this.step, this.facts.steps);
    if (to === null) return;
    event.preventDefault();
    this.pause();
    this.go(to);
  }

  build(el) {
    const button = (text, label, act) => {
      const made = element("button", { type: "button", "aria-label": label, title: label }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.title = element("strong");
    this.device = element("span", { class: "gpumem-quiet" });
    this.slider = element("input", { type: "range", min: "0", step: "1", "aria-label": "checkpoint" });
    this.slider.addEventListener("input", () => { this.pause(); this.go(Number(this.slider.value)); });
    this.playButton = button("play", "play or pause (space)", () => (this.timer === null ? this.play() : this.pause()));
    this.bar = shape("svg", { role: "img", class: "gpumem-bar" });
    this.strip = shape("svg", { role: "img", class: "gpumem-strip" });
    this.stripHead = element("p", { class: "gpumem-quiet" });
    this.legend = element("ul", { class: "gpumem-legend", "aria-label": "colours" });
    this.figures = element("dl", { class: "gpumem-figures" });
    this.words = element("p", { class: "gpumem-words", "aria-live": "polite" });
    this.listing = element("ol", { class: "gpumem-listing", tabindex: "0", "aria-label": "source of the cell" });
    this.root = element("section", { class: "gpumem-stepper", "aria-label": "GPU memory, checkpoint by checkpoint", tabindex: "-1" },
      element("div", { class: "gpumem-head" }, this.title, this.device),
      element("div", { class: "gpumem-controls" },
        button("◀", "previous checkpoint (left arrow)", () => { this.pause(); this.go(beside(this.facts.steps, this.step, -1)); }),
        this.playButton,
        button("▶", "next checkpoint (right arrow)", () => { this.pause(); this.go(beside(this.facts.steps, this.step, 1)); }),
        this.slider),
      element("div", { class: "gpumem-columns" },
        this.listing,
        element("div", { class: "gpumem-state" }, this.words, this.figures)),
      this.bar, this.stripHead, this.strip, this.legend);
    // The notebook's own shortcuts stay out: an arrow key here is a step, not another cell.
    this.root.setAttribute("data-lm-suppress-shortcuts", "true");
    this.root.addEventListener("keydown", (event) => { this.key(event); event.stopPropagation(); });
    el.append(this.root);
  }

  /** What is the same for all steps. */
  fill() {
    const { facts } = this;
    this.slider.max = String(facts.steps.length - 1);
    this.device.textContent = facts.device;
    this.lines = new Map();
    this.listing.replaceChildren(...facts.listing.map(([number, text]) => {
      const line = element("li", { value: String(number), "data-line": String(number) }, element("code", {}, text || " "));
      this.lines.set(number, line);
      return line;
    }));
    this.legend.replaceChildren(...legendOf(facts).map(({ name, label, colour }) => {
      const swatch = element("span", { class: "gpumem-swatch", "aria-hidden": "true" });
      swatch.style.background = colour;
      return element("li", { "data-kind": name }, swatch, label);
    }));
  }

  measured() {
    const width = Math.floor(this.root.clientWidth);
    if (width > 0 && Math.abs(width - this.width) > 1) this.draw();
  }

  draw() {
    const { facts, step } = this;
    const one = facts.steps[step];
    this.width = Math.max(Math.floor(this.root.clientWidth) - 8, 240);
    this.root.dataset.step = String(step);
    this.root.dataset.kind = one.kind;
    this.slider.value = String(step);
    this.slider.setAttribute("aria-valuetext", positionWords(facts, step));
    this.title.textContent = `${step + 1} of ${facts.steps.length}: ${one.title}`;
    // Between backticks stands code.
    this.words.replaceChildren(...one.words.join(" ").split("`").map((text, at) => (at % 2 ? element("code", {}, text) : text)));
    this.figures.replaceChildren(...figuresOf(facts, step).flatMap(([term, figure]) => {
      const key = term.replace(" ", "-");
      return [element("dt", { "data-term": key }, term), element("dd", { "data-figure": key }, figure)];
    }));
    this.mark(one);
    this.drawBar(step);
    this.drawStrip(step, one);
  }

  /** The current statement in the source, brought into sight without moving the page. */
  mark(one) {
    for (const [number, line] of this.lines) {
      const on = one.line > 0 && number >= one.line && number <= one.last;
      line.classList.toggle("gpumem-current", on);
      if (on && number === one.line) line.setAttribute("aria-current", "step"); else line.removeAttribute("aria-current");
    }
    const line = this.lines.get(one.line);
    if (!line) return;
    const middle = line.offsetTop - (this.listing.clientHeight - line.offsetHeight) / 2;
    this.listing.scrollTop = Math.max(0, middle);
  }

  drawBar(step) {
    const { facts, width } = this;
    const one = facts.steps[step];
    const scale = scaleOf(facts);
    const at = (bytes) => (width * bytes) / scale;
    this.bar.setAttribute("viewBox", `0 0 ${width} 44`);
    this.bar.setAttribute("width", String(width));
    this.bar.setAttribute("height", "44");
    const parts = barOf(facts, step);
    this.bar.setAttribute("aria-label", parts.map(({ label, bytes }) => `${label} ${mib(bytes)} MiB`).join(", ") || "nothing is in use");
    const drawn = parts.map((part) => shape("rect", {
      x: part.start * width, y: 8, width: Math.max(part.size * width - 0.6, 0.4), height: 26, fill: part.colour, "data-kind": part.name,
    }, shape("title", {}, `${part.label}: ${mib(part.bytes)} MiB`)));
    const lines = this.card(one, at(facts.capacity));
    if (one.published !== null) {
      lines.push(shape("path", { d: `M${at(one.published)} 34 l-5 9 h10 z`, class: "gpumem-published" },
        shape("title", {}, `published: ${mib(one.published)} MiB`)));
    }
    if (one.peak > one.allocated) {
      const [from, to] = [at(one.allocated), at(Math.min(one.peak, scale))];
      lines.push(shape("path", { d: `M${from} 5 H${to} M${to} 2 V8`, class: "gpumem-peak" },
        shape("title", {}, `allocated at once inside this statement: ${mib(one.peak)} MiB`)));
    }
    this.bar.replaceChildren(...drawn, ...lines);
  }

  /** The card's end where the picture reaches it, else how much of the card is in use, as a thin line beneath. */
  card(one, end) {
    const { facts, width } = this;
    if (end <= width) return [shape("line", { x1: end - 0.5, x2: end - 0.5, y1: 2, y2: 40, class: "gpumem-capacity" })];
    const share = (width * one.used) / facts.capacity;
    return [
      shape("rect", { x: 0, y: 39, width, height: 4, class: "gpumem-card" },
        shape("title", {}, `${mib(one.used)} of ${mib(facts.capacity)} MiB of the card are in use`)),
      shape("rect", { x: 0, y: 39, width: share, height: 4, class: "gpumem-card-used" }),
    ];
  }

  drawStrip(step, one) {
    const { facts, width } = this;
    const strip = stripOf(facts, step, width);
    const shown = strip !== null && facts.segments.length > 0;
    this.strip.style.display = this.stripHead.style.display = shown ? "" : "none";
    if (!shown) return;
    const wanted = one.kind === "error" && facts.wanted;
    const height = STRIP_HEIGHT + (wanted ? 24 : 4);
    this.strip.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.strip.setAttribute("width", String(width));
    this.strip.setAttribute("height", String(height));
    const words = stripWords(facts, step);
    this.strip.setAttribute("aria-label", words);
    this.stripHead.textContent = `PyTorch's segments, by address: ${words}`;
    const drawn = strip.segments.flatMap((segment) => {
      const pieces = segment.pieces.map((piece) => this.piece(piece));
      const frame = shape("rect", { x: segment.x, y: 2, width: Math.max(segment.width, 0.7), height: STRIP_HEIGHT - 4, class: "gpumem-segment" },
        shape("title", {}, `a segment of ${mib(segment.size)} MiB (${segment.pool} pool)`));
      return [frame, ...pieces.flat()];
    });
    if (wanted) drawn.push(...this.wanted(strip, facts.wanted * strip.perByte, width));
    this.strip.replaceChildren(...drawn);
  }

  piece({ x, width, kind, bytes, name }) {
    const label = `${kind.label}${name ? ` (${name})` : ""}: ${mib(bytes)} MiB`;
    const drawn = [shape("rect", {
      x, y: 4, width: Math.max(width - 0.4, 0.3), height: STRIP_HEIGHT - 8, fill: kind.name === "free" ? "transparent" : kind.colour,
      "data-kind": kind.name, "data-bytes": String(bytes), class: kind.name === "free" ? "gpumem-free" : "",
    }, shape("title", {}, label))];
    const text = kind.name === "free" ? `${mib(bytes)} free` : name ?? "";
    if (text && width > 7 * text.length + 6) {
      const dark = ["parameters", "optimizer_state", "temporaries", "unknown"].includes(kind.name);
      const style = kind.name === "free" ? "gpumem-on-paper" : dark ? "gpumem-on-dark" : "gpumem-on-light";
      drawn.push(shape("text", { x: x + width / 2, y: STRIP_HEIGHT / 2 + 4, "text-anchor": "middle", class: style }, text));
    }
    return drawn;
  }

  /** The request that failed, to scale, beneath the largest hole. */
  wanted(strip, size, width) {
    const hole = largestHole(strip);
    const x = Math.max(0, Math.min(hole ? hole.x : strip.end, width - size));
    const y = STRIP_HEIGHT + 2;
    const text = `${mib(this.facts.wanted)} MiB wanted`;
    return [
      shape("rect", { x, y, width: Math.max(size, 1), height: 18, class: "gpumem-wanted", "data-wanted": String(this.facts.wanted) }),
      shape("text", { x: x + 5, y: y + 13, class: "gpumem-wanted-text" }, text),
    ];
  }
}

const shown = (model, el) => {
  const view = new View(model, el);
  return () => view.remove();
};

export default {
  initialize: ({ model }) => inPlaces(model.get("place"), (el) => shown(model, el)),
  render: ({ model, el }) => shown(model, el),
};
