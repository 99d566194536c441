/* The page's elements: what the reader does goes to the machine, and what the machine says is drawn. Every text that comes from
   the recording becomes the text of an element, never markup. */

import { amount, human } from "../units.js";
import { count, drawOver, drawSegments, fragmentation, layout, pixelColours, runsOf, segmentAt, since } from "./draw.js";
import { Machine } from "./machine.js";
import { CACHED, Device, paint } from "./model.js";
import { moment, Panels, Words } from "./panels.js";

const LEFT = 74;
const TOP = 20;
const BOTTOM = 24;
const MOST_SEGMENTS = 4000;
const SEEN = 6; // pixels of an outline that is found without a pointer at it
const QUIET_AFTER = 140; // ms without a move, after which the picture is drawn with all pixels

export function start(document, data) {
  const window = document.defaultView;
  const find = (id) => document.getElementById(id);
  const make = (tag, text = "", options = {}) => Object.assign(document.createElement(tag), { textContent: text }, options);
  const devices = data.devices.map((one) => new Device(one));
  const machine = new Machine(devices, data.categories.length);
  const words = new Words(data, machine);
  const [stack, over, tip] = [find("stack"), find("over"), find("tip")];
  let [theme, colours, placed, pick, pixels, image] = ["light", null, null, null, null, null];
  let box = { x: LEFT, y: TOP, width: 10, height: 10 };
  let [ratio, coarse, scheduled, settled] = [1, false, "", 0];
  let said = ""; // what the words on the page are about

  // ---- what is drawn, when

  /** Asks for "all" or "marks" in the next frame; several wishes become one. */
  function redraw(what) {
    if (!what) return;
    if (!scheduled) window.requestAnimationFrame(frame);
    if (scheduled !== "all") scheduled = what;
  }

  function frame() {
    const what = scheduled;
    scheduled = "";
    if (what === "all") drawStack();
    drawTop();
    const about = [machine.number, machine.position, machine.selected, [...machine.device.hidden], theme, panels.segment, over.parentElement.clientWidth].join("|");
    if (about !== said) drawWords();
    said = about;
  }

  function moving() {
    coarse = true;
    window.clearTimeout(settled);
    settled = window.setTimeout(() => {
      coarse = false;
      redraw("all");
    }, QUIET_AFTER);
  }

  /** Gives a canvas its size, or an empty one back where it has that. */
  function size(canvas, width, height, scale) {
    const [wide, tall] = [width, height].map((length) => Math.max(Math.round(length * scale), 1));
    if (canvas.width === wide && canvas.height === tall) {
      const context = canvas.getContext("2d");
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.clearRect(0, 0, wide, tall);
      return;
    }
    [canvas.width, canvas.height] = [wide, tall];
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }

  function drawStack() {
    const whole = over.parentElement;
    box = { x: LEFT, y: TOP, width: Math.max(whole.clientWidth - LEFT - 2, 40), height: whole.clientHeight - TOP - BOTTOM };
    ratio = coarse ? 1 : Math.min(window.devicePixelRatio || 1, 2);
    size(stack, box.width, box.height, ratio);
    stack.style.left = `${LEFT}px`;
    stack.style.top = `${TOP}px`;
    const context = stack.getContext("2d");
    if (!image || image.width !== stack.width || image.height !== stack.height) {
      image = context.createImageData(stack.width, stack.height);
      pixels = new Uint32Array(image.data.buffer);
      pick = new Int32Array(pixels.length);
    }
    paint(machine.device, machine.view, stack.width, stack.height, colours, pixels, pick);
    context.putImageData(image, 0, 0);
    drawOverview();
  }

  function variables() {
    const style = window.getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    return { ink: read("ink"), quiet: read("quiet"), grid: read("grid"), alarm: read("alarm"), paper: read("paper"), focus: read("focus") };
  }

  function drawTop() {
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    size(over, over.parentElement.clientWidth, over.parentElement.clientHeight, scale);
    const context = over.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    const runs = machine.selected < 0 ? [] : runsOf(pick, stack.width, stack.height, machine.selected);
    drawOver(context, box, machine, { ...variables(), runs, thin: isSeen(runs) ? null : thinPlace(), ratio, font: "12px system-ui, sans-serif" });
  }

  /** Whether an outline is large enough to be found. */
  const isSeen = (runs) => runs.reduce((sum, [, , width]) => sum + width, 0) >= SEEN * ratio && runs.some(([, , , height]) => height > ratio);

  /** Where the selected allocation is, if it has no pixel of its own; null where it is hidden or out of sight. */
  function thinPlace() {
    const { device, selected, view, position } = machine;
    if (selected < 0 || device.hidden.has(device.category[selected])) return null;
    const [from, to] = [device.born[selected] + 1, Math.min(device.freed[selected], device.events) + 1];
    if (to <= view.x0 || from >= view.x1) return null;
    const at = device.isLive(selected, position) ? position : Math.min(Math.max(from, Math.ceil(view.x0)), to - 1);
    const [beneath, size] = device.placeOf(selected, at);
    const bytes = beneath + size / 2;
    return bytes < view.y0 || bytes > view.y1 ? null : { from, to, bytes };
  }

  /** The whole recording in little, with what is in sight. */
  function drawOverview() {
    const canvas = find("overview");
    const [width, height] = [canvas.parentElement.clientWidth, 34];
    const { device, view, whole } = machine;
    size(canvas, width, height, 1);
    const context = canvas.getContext("2d");
    const { quiet, focus } = variables();
    const wide = width - LEFT - 2;
    context.fillStyle = quiet;
    context.globalAlpha = 0.55;
    for (let x = 0; x < wide; x++) {
      const first = Math.min(Math.floor((x / wide) * whole.x1), device.events);
      const last = Math.min(Math.max(Math.ceil(((x + 1) / wide) * whole.x1) - 1, first), device.events);
      const tall = (device.height[device.highest(first, last)] / whole.y1) * height;
      context.fillRect(LEFT + x, height - tall, 1, tall);
    }
    context.globalAlpha = 1;
    context.strokeStyle = focus;
    context.lineWidth = 2;
    const [a, b] = [view.x0, view.x1].map((at) => LEFT + (at / whole.x1) * wide);
    context.strokeRect(a + 1, 1, Math.max(b - a - 2, 2), height - 2);
  }

  // ---- words

  function drawWords() {
    const { device, position } = machine;
    const now = device.sums(position, data.categories.length);
    // Code is between backticks.
    find("answer").replaceChildren(...device.answer.split("`").map((part, place) => (place % 2 ? make("code", part) : part)));
    find("answer").hidden = !device.answer;
    const when = `${position === device.peak ? "Peak, " : ""}${moment(position)}${position ? ` of ${count(device.events)}` : ""}`;
    find("moment").textContent = `${device.events ? when : "The state in the file"}: `
      + `${amount(now.allocated)} allocated, ${amount(now.reserved)} reserved`
      + (device.times && position ? `, ${since(device.times[position - 1])} after the first event.` : ".");
    data.categories.forEach((_, category) => {
      const button = find(`category-${category}`);
      button.parentElement.hidden = !device.present.has(category);
      button.lastChild.textContent = `${words.label(category)} ${human(now.sizes[category])}`;
      button.setAttribute("aria-pressed", String(!device.hidden.has(category)));
    });
    find("rounding").textContent = `rounding ${human(now.rounding)}`;
    find("cached").lastChild.textContent = `cached, free ${human(now.reserved - now.allocated)}`;
    panels.draw(theme);
    drawSegmentsNow();
  }

  function drawSegmentsNow() {
    const canvas = find("segments");
    const segments = machine.device.segmentsAt(machine.position);
    const told = fragmentation(segments);
    panels.drawSegment(segments);
    if (find("order").value === "free") segments.sort((a, b) => b.size - b.used - (a.size - a.used) || a.address - b.address);
    const left = segments.length - MOST_SEGMENTS;
    find("fragmentation").textContent = left > 0 ? `${told} The first ${count(MOST_SEGMENTS)} are drawn.` : told;
    const width = canvas.parentElement.clientWidth;
    placed = layout(segments.slice(0, MOST_SEGMENTS), width);
    canvas.parentElement.style.height = `${placed.height}px`;
    const scale = Math.min(window.devicePixelRatio || 1, 2);
    size(canvas, width, placed.height, scale);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    drawSegments(context, placed, machine.device, {
      fills: data.categories.map((one) => one[theme]), free: data.cached[theme], outline: variables().focus, selected: machine.selected,
    });
    canvas.setAttribute("aria-label", `Segments ${moment(machine.position)}: ${told}`);
  }

  function say() {
    const { device, position, selected } = machine;
    const what = selected < 0 ? "" : ` Selected: ${words.named(selected)}, ${words.origin(selected)}.`;
    find("live").textContent = `${moment(position)}, ${human(device.height[position])} allocated.${what}`;
  }

  const panels = new Panels(document, data, machine, words, (what) => act(what, true));

  /** Draws what an action asks for, and tells those who listen. */
  function act(what, aloud = false) {
    if (what === "all") moving();
    redraw(what);
    if (aloud) say();
    return what;
  }

  // ---- what the reader does

  function place(event) {
    const bounds = over.getBoundingClientRect();
    const [x, y] = [event.clientX - bounds.left - box.x, event.clientY - bounds.top - box.y];
    const inside = x >= 0 && y >= 0 && x < box.width && y < box.height;
    const at = inside ? pick[Math.min(Math.floor(y * ratio), stack.height - 1) * stack.width + Math.min(Math.floor(x * ratio), stack.width - 1)] : -1;
    const { view } = machine;
    return { x, y, inside, at, share: x / box.width, position: Math.floor(view.x0 + (x / box.width) * (view.x1 - view.x0)) };
  }

  function showTip(parent, x, y, text) {
    tip.style.display = text ? "block" : "none";
    if (!text) return;
    if (tip.parentElement !== parent) parent.append(tip);
    tip.textContent = text;
    tip.style.left = `${Math.max(Math.min(x + 14, parent.clientWidth - tip.offsetWidth - 4), 0)}px`;
    tip.style.top = `${y + 16 + tip.offsetHeight > parent.clientHeight && y > tip.offsetHeight ? y - tip.offsetHeight - 8 : y + 16}px`;
  }

  let drag = null;
  over.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, far: false };
    over.setPointerCapture(event.pointerId);
  });
  over.addEventListener("pointermove", (event) => {
    if (drag && (drag.far || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4)) {
      act(machine.pan((drag.x - event.clientX) / box.width, (event.clientY - drag.y) / box.height));
      drag = { x: event.clientX, y: event.clientY, far: true };
      showTip(over.parentElement, 0, 0, "");
      return;
    }
    const found = place(event);
    const text = !found.inside ? "" : found.at >= 0 ? words.inShort(found.at) : found.at === CACHED ? "cached, free" : "";
    showTip(over.parentElement, found.x + box.x, found.y + box.y, text);
  });
  over.addEventListener("pointerup", (event) => {
    const clicked = drag && !drag.far;
    drag = null;
    if (!clicked) return;
    const found = place(event);
    if (!found.inside) return;
    const moved = machine.goTo(found.position);
    machine.select(found.at >= 0 ? found.at : -1);
    act(moved === "all" ? "all" : "marks", true);
  });
  over.addEventListener("pointercancel", () => (drag = null));
  over.addEventListener("pointerleave", () => showTip(over.parentElement, 0, 0, ""));
  over.addEventListener("dblclick", (event) => act(machine.zoom(1 / 3, place(event).share)));
  over.addEventListener("wheel", (event) => {
    // Within a notebook the wheel scrolls the notebook, until the picture has the focus.
    if (document.activeElement !== over && !event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const factor = Math.exp(Math.max(Math.min(event.deltaY || event.deltaX, 200), -200) / 300);
    const found = place(event);
    act(event.shiftKey ? machine.zoom(factor, 1 - found.y / box.height, "y") : machine.zoom(factor, Math.min(Math.max(found.share, 0), 1)));
  }, { passive: false });
  over.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const what = machine.key(event.key, event.shiftKey);
    if (what === null) return;
    event.preventDefault();
    act(what, true);
  });

  const strip = find("overview").parentElement;
  const slide = (event) => {
    const share = (event.clientX - strip.getBoundingClientRect().left - LEFT) / Math.max(strip.clientWidth - LEFT - 2, 1);
    const { view, whole } = machine;
    act(machine.pan((share * whole.x1 - (view.x0 + view.x1) / 2) / (view.x1 - view.x0)));
  };
  strip.addEventListener("pointerdown", (event) => (strip.setPointerCapture(event.pointerId), slide(event)));
  strip.addEventListener("pointermove", (event) => event.buttons && slide(event));

  const cells = find("segments").parentElement;
  const cellAt = (event) => {
    const bounds = cells.getBoundingClientRect();
    return { x: event.clientX - bounds.left, y: event.clientY - bounds.top };
  };
  cells.addEventListener("pointermove", (event) => {
    const { x, y } = cellAt(event);
    const found = segmentAt(placed, x, y);
    if (!found) return showTip(cells, 0, 0, "");
    const { segment, block } = found;
    const what = block ? `${words.inShort(block.one)}${block.waiting ? ", waits for a stream" : ""} · ` : "free · ";
    const rest = segment.size > segment.used ? human(segment.size - segment.used) : "none";
    return showTip(cells, x, y, `${what}segment of ${human(segment.size)}, ${rest} of it free`);
  });
  cells.addEventListener("pointerleave", () => showTip(cells, 0, 0, ""));
  cells.addEventListener("click", (event) => {
    const { x, y } = cellAt(event);
    const found = segmentAt(placed, x, y);
    panels.choose(found?.segment.address ?? null);
    act(machine.select(found?.block ? found.block.one : -1), true);
  });

  for (const [id, key] of Object.entries({ "zoom-in": "+", "zoom-out": "-", taller: "}", flatter: "{", whole: "0", peak: "p" })) {
    find(id).addEventListener("click", () => act(machine.key(key), true));
  }
  find("order").addEventListener("change", drawSegmentsNow);
  const chooser = find("device");
  chooser.addEventListener("change", () => {
    panels.choose(null);
    act(machine.choose(Number(chooser.value)), true);
    drawNotes();
  });

  // ---- the page itself

  function paintTheme(name) {
    theme = name;
    document.documentElement.dataset.theme = name;
    const { paper, ink } = variables();
    colours = pixelColours(data, name, paper, ink);
    data.categories.forEach((one, category) => (find(`category-${category}`).firstChild.style.background = one[name]));
    find("cached").firstChild.style.background = data.cached[name];
    find("theme").textContent = name === "dark" ? "Light" : "Dark";
    redraw("all");
  }

  function drawNotes() {
    find("notes").replaceChildren(...machine.device.notes.map((note) => make("li", note)));
    find("notes").parentElement.hidden = !machine.device.notes.length;
  }

  /** The peaks of several devices side by side. */
  function drawRanks() {
    find("ranks").hidden = devices.length < 2;
    chooser.parentElement.hidden = devices.length < 2;
    if (devices.length < 2) return;
    const peaks = devices.map((device) => device.sums(device.peak, data.categories.length));
    const table = find("ranks").querySelector("table");
    const row = (head, cells) => {
      const line = make("tr");
      line.append(make("th", head, { scope: "row" }), ...cells.map((cell) => make("td", cell)));
      return line;
    };
    const heads = make("tr");
    heads.append(make("td"), ...devices.map((device) => make("th", device.name, { scope: "col" })));
    table.append(heads, row("allocated", peaks.map((peak) => human(peak.allocated))), row("reserved", peaks.map((peak) => human(peak.reserved))));
    data.categories.forEach((_, category) => {
      if (peaks.some((peak) => peak.sizes[category])) table.append(row(words.label(category), peaks.map((peak) => human(peak.sizes[category]))));
    });
  }

  find("title").textContent = data.title;
  devices.forEach((device, number) => chooser.append(make("option", device.name, { value: String(number) })));
  data.categories.forEach((_, category) => {
    const button = make("button", "", { id: `category-${category}`, type: "button" });
    button.append(make("span", "", { className: "swatch" }), make("span"));
    button.addEventListener("click", () => act(machine.toggle(category), true));
    const item = make("li");
    item.append(button);
    find("legend").insertBefore(item, find("extra"));
  });
  const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
  paintTheme(prefersDark.matches ? "dark" : "light");
  let told = null; // a notebook says what its own theme is, whatever the system prefers: again at every change of its page
  prefersDark.addEventListener("change", (event) => told || paintTheme(event.matches ? "dark" : "light"));
  window.addEventListener("message", ({ source, data: said }) => {
    if (source !== window.parent || !["light", "dark"].includes(said?.theme) || said.theme === told) return;
    told = said.theme;
    paintTheme(told);
  });
  find("theme").addEventListener("click", () => paintTheme(theme === "dark" ? "light" : "dark"));
  new window.ResizeObserver(() => redraw("all")).observe(over.parentElement);
  drawNotes();
  drawRanks();
  return machine;
}
