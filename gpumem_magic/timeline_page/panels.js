/* What stands beneath the picture: the selected allocation, the events around the moment, what is allocated then by stack and by call
   path, and the segment. Every text that comes from the recording becomes the text of an element, never markup. */

import { counted, human } from "../units.js";
import { count, isPale } from "./draw.js";
import { eventsAround, extentEvents, flameOf, groupsOf, categoryOf, pathsOf, sameIn } from "./lists.js";
import { NEVER } from "./model.js";

const GROUPS = 10; // that are listed at first, and more with each press
const EVENTS = 13;
const SIZES = 3; // of a group
const KINDS = ["", "other", "other"]; // a stack's own frames, the libraries', the native ones
const NARROWEST = 1.5; // pixels of a part of the flame graph
const FLAME_ROW = 22;
const NO_STACK = "no stack";

export const moment = (position) => (position ? `after event ${count(position - 1)}` : "at the start");

/** A frame's words without the folders of its file. */
const short = (text) => text.replace("torch::autograd::generated::", "").replace(/^.*[\\/](?=[^\\/]*:\d+ )/, "");

/** The same with the two folders that it is in. */
const nearby = (text) => text.replace(/^.*[\\/](?=[^\\/]*[\\/][^\\/]*[\\/][^\\/]*:\d+ )/, "…/");

/** What is said of an allocation of the device that is looked at. */
export class Words {
  constructor(data, machine) {
    Object.assign(this, { data, machine });
  }

  label = (category) => this.data.categories[category].label;
  frame = (code) => this.machine.device.strings[Math.floor(code / 3)];

  /** The name of what held it, where a measured cell knew it. */
  holder(one) {
    const { device } = this.machine;
    return device.holder[one] < 0 ? "" : device.strings[device.holder[one]];
  }

  named(one) {
    const { device } = this.machine;
    return `${this.label(device.category[one])}, ${human(device.requested[one])}${this.holder(one) && `, ${this.holder(one)}`}`;
  }

  /** The line of the program that is innermost in a stack, or what else tells the most. */
  head(stack) {
    const { device } = this.machine;
    return stack < 0 || device.heads[stack] < 0 ? NO_STACK : device.strings[device.heads[stack]];
  }

  /** The same of an event: a stack, or else the statement that ran then. */
  placeAt(event, stack) {
    const head = this.head(stack);
    return head === NO_STACK ? this.machine.device.statementAt(event) || head : head;
  }

  origin = (one) => this.head(this.machine.device.stack[one]);
  inShort = (one) => `${this.named(one)} · ${short(this.origin(one))}`;

  /** All words about an allocation: what it is, what held it, and its stack. */
  all(one) {
    const { device } = this.machine;
    const frames = device.stacks[device.stack[one]].map((code) => this.frame(code));
    return [this.label(device.category[one]), this.holder(one), ...frames].join("\n");
  }

  /** Its call path for a reader, outermost first: the program's own frames and the one that tells the most. */
  path(one) {
    const { device } = this.machine;
    const own = device.stacks[device.stack[one]].filter((code) => code % 3 === 0).map((code) => this.frame(code)).reverse();
    const head = this.origin(one);
    return head === own[own.length - 1] ? own : [...own, head];
  }
}

export class Panels {
  /** act: does what an action of the machine asks for, and tells those who listen. */
  constructor(document, data, machine, words, act) {
    Object.assign(this, { document, data, machine, words, act });
    [this.theme, this.most, this.allFrames, this.segment, this.focus, this.extents] = ["light", GROUPS, false, null, null, new Map()];
    this.find("search").addEventListener("input", () => {
      this.most = GROUPS;
      this.drawFound();
    });
    this.find("more").addEventListener("click", () => {
      this.most += 5 * GROUPS;
      this.drawFound();
    });
    this.find("flame").addEventListener("keydown", (event) => this.walk(event));
  }

  find = (id) => this.document.getElementById(id);
  make = (tag, text = "", options = {}) => Object.assign(this.document.createElement(tag), { textContent: text }, options);

  /** The segment that is looked at, by its address; null is the selected allocation's. */
  choose(address) {
    this.segment = address;
  }

  draw(theme) {
    this.theme = theme;
    this.drawSelected();
    this.drawEvents();
    this.drawFound();
  }

  swatch(category) {
    const swatch = this.make("span", "", { className: "swatch" });
    swatch.style.background = this.data.categories[category][this.theme];
    return swatch;
  }

  /** A list of names and what they are. */
  facts(pairs) {
    const list = this.make("dl");
    for (const [name, text] of pairs) if (text) list.append(this.make("dt", name), this.make("dd", text));
    return list;
  }

  /** A stack as a list: the program's own frames, or all. */
  frames(stack) {
    const codes = stack < 0 ? [] : this.machine.device.stacks[stack];
    const own = codes.filter((code) => code % 3 === 0);
    const shown = this.allFrames ? codes : own.length ? own : codes.slice(0, 6);
    const list = this.make("ol", "", { className: "stack" });
    for (const code of shown) list.append(this.make("li", nearby(this.words.frame(code)), { className: KINDS[code % 3], title: this.words.frame(code) }));
    if (!codes.length) list.append(this.make("li", "No stack was recorded.", { className: "other" }));
    return [list, codes.length - shown.length];
  }

  drawSelected() {
    const { device, selected } = this.machine;
    const panel = this.find("selected");
    if (selected < 0) {
      panel.replaceChildren(this.make("p", "Nothing is selected: click an allocation, or choose one from the lists.", { className: "quiet" }));
      return;
    }
    const [born, freed, why] = [device.born[selected], device.freed[selected], device.reason[selected]];
    const facts = this.facts([
      ["category", this.words.label(device.category[selected])],
      ["known by", this.data.evidence[device.evidence[selected]] + (why < 0 ? "" : `: it ${device.reasons[why]}`)],
      ["held by", this.words.holder(selected)],
      ["size", `${human(device.requested[selected])} asked for, ${human(device.size[selected])} with rounding`],
      ["lives", `${born < 0 ? "from before the recording" : `from event ${count(born)}`} `
        + (freed === NEVER ? "to its end" : `to event ${count(freed)}`)],
      ["place", `0x${device.address[selected].toString(16)}, stream ${device.stream[selected]}`],
    ]);
    const [list, hidden] = this.frames(device.stack[selected]);
    panel.replaceChildren(facts, this.make("h3", "Asked for by"), list);
    let more = hidden;
    if (device.freedBy[selected] >= 0) {
      const [ending, others] = this.frames(device.freedBy[selected]);
      panel.append(this.make("h3", "Let go by"), ending);
      more += others;
    }
    if (!more && !this.allFrames) return;
    const toggle = this.make("button", this.allFrames ? "Only the program's own frames" : `Show ${counted(more, "more frame")}`, { type: "button" });
    toggle.addEventListener("click", () => {
      this.allFrames = !this.allFrames;
      this.drawSelected();
      panel.querySelector("button")?.focus();
    });
    panel.append(toggle);
  }

  /** Replaces the elements of a list of buttons, and gives the one that had the focus it back. */
  refill(list, elements) {
    const before = [...list.querySelectorAll("button")].indexOf(this.document.activeElement);
    list.replaceChildren(...elements);
    if (before >= 0) list.querySelectorAll("button")[before]?.focus();
  }

  drawEvents() {
    const { device, position, selected } = this.machine;
    if (!this.extents.has(device)) this.extents.set(device, extentEvents(device));
    const events = eventsAround(device, this.extents.get(device), position, EVENTS);
    const rows = events.map(({ event, action, one, size }) => {
      const button = this.make("button", "", { type: "button" });
      const place = one < 0 ? "" : this.words.placeAt(event, (action.startsWith("free") ? device.freedBy : device.stack)[one]);
      const what = one < 0 ? "" : `${this.words.label(device.category[one])} · ${short(place)}`;
      button.append(this.make("span", count(event), { className: "number" }), this.make("span", action),
        this.make("span", size ? human(size) : "", { className: "size" }), this.make("span", what, { className: "what", title: place }));
      button.setAttribute("aria-current", event === position - 1 ? "step" : String(one >= 0 && one === selected));
      button.addEventListener("click", () => {
        const moved = this.machine.goTo(event + 1);
        if (one >= 0) this.machine.select(one);
        this.act(moved);
      });
      const row = this.make("li");
      row.append(button);
      return row;
    });
    this.refill(this.find("events"), rows.length ? rows : [this.make("li", "The recording has no events.", { className: "quiet" })]);
  }

  /** What is allocated at the moment and has the words that are sought: by stack, and by call path. */
  drawFound() {
    const { device, position } = this.machine;
    const sought = this.find("search").value.trim();
    const live = device.matching(position, sought, (one) => this.words.all(one));
    const size = live.reduce((sum, one) => sum + device.requested[one], 0);
    this.find("found").textContent = sought ? `${counted(live.length, "allocation")}, ${human(size)}` : "";
    this.drawGroups(live, sought);
    const root = pathsOf(device, live, (one) => this.words.path(one));
    this.focus = this.focus ? sameIn(root, this.focus) : root;
    this.drawFlame();
  }

  drawGroups(live, sought) {
    const { device, selected } = this.machine;
    const groups = groupsOf(device, live, (one) => this.words.holder(one).split(/[.[]/)[0]);
    const rows = groups.slice(0, this.most).map((group) => {
      const first = group.members[0];
      const at = group.members.indexOf(selected);
      const row = this.make("tr");
      const button = this.make("button", human(group.size), { type: "button" });
      button.prepend(this.swatch(device.category[first]));
      const sizes = group.sizes.slice(0, SIZES).map(([asked, times]) => `${count(times)} × ${human(asked)}`).join(", ");
      const others = group.sizes.length - SIZES;
      const many = group.count === 1 ? "1" : sizes + (others > 0 ? ` and ${counted(others, "other size")}` : "");
      const holder = group.count > 1 ? this.words.holder(first).split(/[.[]/)[0] : this.words.holder(first);
      const stack = this.words.origin(first);
      const ends = new Set(group.members.map((one) => device.freedBy[one]).filter((end) => end >= 0).map((end) => this.words.head(end)));
      const end = ends.size ? short([...ends][0]) + (ends.size > 1 ? ` and ${counted(ends.size - 1, "other place")}` : "") : "";
      const head = this.make("td");
      head.append(button);
      const why = device.reason[first] < 0 ? this.data.evidence[device.evidence[first]] : device.reasons[device.reason[first]];
      row.append(head, this.make("td", many), this.make("td", [this.words.label(device.category[first]), holder].filter(Boolean).join(", "), { title: why }),
        this.make("td", stack === NO_STACK && holder ? "" : short(stack), { title: stack }), this.make("td", end));
      row.setAttribute("aria-current", String(at >= 0));
      // Pressed again, it goes on to the next of the group.
      row.addEventListener("click", () => this.act(this.machine.select(group.members[(at + 1) % group.count])));
      return row;
    });
    const none = () => {
      const row = this.make("tr");
      row.append(this.make("td", sought ? "Nothing that is allocated here has these words." : "Nothing is allocated here.", { className: "quiet", colSpan: 5 }));
      return row;
    };
    this.refill(this.find("groups").tBodies[0], rows.length ? rows : [none()]);
    const left = groups.length - rows.length;
    const rest = groups.slice(this.most).reduce((sum, group) => sum + group.size, 0);
    this.find("more").hidden = left <= 0;
    this.find("more").textContent = `${counted(left, "more stack")}, ${human(rest)}`;
  }

  drawFlame() {
    const panel = this.find("flame");
    const focused = panel.contains(this.document.activeElement);
    const placed = flameOf(this.focus, NARROWEST / Math.max(panel.clientWidth, 300)).filter(({ node }) => node.word || node.size);
    this.parts = placed.map(({ node, row, from, share }) => {
      const category = categoryOf(node);
      const colour = category === null ? "" : this.data.categories[category][this.theme];
      const button = this.make("button", node.word ? short(node.word) : "all", { type: "button", tabIndex: -1 });
      Object.assign(button.style, { left: `${100 * from}%`, width: `${100 * share}%`, top: `${row * FLAME_ROW}px`, background: colour });
      if (colour) button.className = isPale(colour) ? "pale" : "deep";
      const told = `${node.word || "all"}: ${human(node.size)}, ${counted(node.count, "allocation")}`;
      button.title = told;
      button.setAttribute("aria-label", told);
      button.addEventListener("click", () => this.narrow(node));
      button.addEventListener("focus", () => (this.find("path").textContent = told));
      button.addEventListener("pointerenter", () => (this.find("path").textContent = told));
      return { node, button };
    });
    panel.style.height = `${FLAME_ROW * placed.reduce((most, { row }) => Math.max(most, row + 1), 0)}px`;
    panel.replaceChildren(...this.parts.map(({ button }) => button));
    const at = this.parts.find(({ node }) => node === this.focus)?.button;
    if (!at) return;
    at.tabIndex = 0;
    at.setAttribute("aria-current", "true");
    if (focused) at.focus();
  }

  narrow(node) {
    this.focus = node;
    this.drawFlame();
    this.parts.find((one) => one.node === node)?.button.focus();
  }

  /** Arrow keys in the flame graph: outwards, inwards, and to the parts beside. */
  walk(event) {
    const here = this.parts.findIndex(({ button }) => button === this.document.activeElement);
    if (here < 0) return;
    const { node } = this.parts[here];
    const beside = this.parts.filter((one) => one.node.above === node.above);
    const place = beside.findIndex((one) => one.node === node);
    const next = { ArrowUp: this.parts.find((one) => one.node === node.above), ArrowDown: this.parts.find((one) => one.node.above === node),
      ArrowLeft: beside[place - 1], ArrowRight: beside[place + 1] };
    if (event.key === "Escape" && this.focus.above) this.narrow(this.focus.above);
    else if (event.key in next) next[event.key]?.button.focus();
    else return;
    event.preventDefault();
  }

  /** The segment that was chosen, or that of the selected allocation, with what asked for it. */
  drawSegment(segments) {
    const { device, selected, position } = this.machine;
    const address = this.segment ?? (selected >= 0 && device.isLive(selected, position) ? device.address[selected] : null);
    const one = address === null ? null : segments.find((segment) => segment.address <= address && address < segment.address + segment.size);
    const panel = this.find("segment");
    if (!one) {
      panel.replaceChildren(this.make("p", "Click a segment, or select an allocation, to see what asked for its segment.", { className: "quiet" }));
      return;
    }
    const facts = this.facts([
      ["segment", `${human(one.size)}, ${one.size > one.used ? human(one.size - one.used) : "none"} of it free`],
      ["pool", `${one.pool}, stream ${one.stream}${one.expandable ? ", expandable" : ""}`],
      ["place", `0x${one.address.toString(16)}`],
    ]);
    panel.replaceChildren(facts, this.make("h3", "Asked for by"), this.frames(one.stack)[0]);
  }
}
