// The live chart without a browser: node --test tests/js
import assert from "node:assert/strict";
import { test } from "node:test";

import { inPlaces } from "../../gpumem_magic/place.js";
import make, { describe, markAt, statusWords } from "../../gpumem_magic/widgets/watch.js";
import { drawPanel, geometry } from "../../gpumem_magic/widgets/watch_chart.js";
import { Ring, Store, duration, nearest, scaleTop, withoutGaps, thin, ticks, timeTicks } from "../../gpumem_magic/widgets/watch_store.js";

const MIB = 2 ** 20;
const COLUMNS = ["time", "parameters", "activations", "cached", "allocated", "reserved", "device_used", "peak"];
const store = (more = {}) => new Store({ columns: COLUMNS, capacity: 8, period: 0.1, started: 100, ...more });
const row = (time, parameters, activations = 0, cached = 0) =>
  [time, parameters, activations, cached, parameters + activations, parameters + activations + cached, NaN, parameters + activations];
const view = (rows) => new DataView(new Float64Array(rows.flat()).buffer);

/** A canvas context that remembers what was drawn: [method, arguments, fill or stroke]. */
function recorder() {
  const calls = [];
  const target = { fillStyle: "", strokeStyle: "", measureText: (words) => ({ width: 6 * words.length }) };
  return new Proxy(target, {
    get: (self, name) => {
      if (name === "calls") return calls;
      if (name in self) return self[name];
      return (...args) => calls.push([name, args, name.startsWith("fill") ? self.fillStyle : self.strokeStyle]);
    },
    set: (self, name, value) => ((self[name] = value), true),
  });
}

const panel = (s, more = {}) => ({
  rows: s.ring(0).rows, bar: s.ring(0).latest, barWord: "now", capacity: 1000 * MIB, peak: 0, marks: [], start: 100, end: s.end(), cursor: null,
  period: 0.1, perRow: 1, fills: ["blue", "yellow", "grey"], ink: "ink", quiet: "quiet", grid: "grid", alarm: "red", paper: "white", ...more,
});

test("times in words, as the Python side has them", () => {
  assert.deepEqual([4.2, 185, 7620].map(duration), ["4.2 s", "3 min 05 s", "2 h 07 min"]);
});

test("axes have few, round words", () => {
  for (const top of [1, 1500, 3 * MIB, 777 * MIB, 81 * 2 ** 30]) {
    const found = ticks(top);
    assert.ok(found.length >= 1 && found.length <= 6, `${found.length} ticks for ${top}`);
    assert.ok(found.every(([size]) => size <= top));
  }
  for (const length of [1, 59, 61, 4000, 86400, 1e6]) assert.ok(timeTicks(length).length <= 13);
  assert.equal(scaleTop(0, 1000), MIB);
  assert.ok(scaleTop(900 * MIB, 1000 * MIB) > 1000 * MIB, "the capacity is in the chart where it is near");
  assert.ok(scaleTop(100 * MIB, 1000 * MIB) < 200 * MIB, "and not where it would flatten it");
});

test("a ring halves its resolution and keeps the highest", () => {
  const ring = new Ring(8, 4);
  for (let i = 0; i < 1000; i++) ring.push(row(100 + i, i === 637 ? 5000 : i % 7));
  assert.ok(ring.rows.length <= 8);
  assert.equal(ring.taken, 1000);
  assert.equal(ring.latest[0], 1099);
  assert.ok(ring.rows.some((kept) => kept[0] === 737 && kept[4] === 5000));
  assert.deepEqual(ring.rows.map((kept) => kept[0]), ring.rows.map((kept) => kept[0]).sort((a, b) => a - b));
});

test("a day of samples stays small", () => {
  const ring = new Ring(4096, 4);
  for (let i = 0; i < 864_000; i++) ring.push([i / 10, 1, 1, 1, i % 1000, 1, 1, 1]);
  assert.ok(ring.rows.length <= 4096);
  assert.ok(ring.rows.length * 22 * 8 < 20 * MIB);
});

test("messages become rows; what comes twice or late is not kept twice", () => {
  const s = store();
  assert.equal(s.receive({ k: "something else" }, null, 0), false);
  s.receive({ k: "rows", n: 1, s: [0, 1] }, view([row(101, 10), row(101, 20)]), 5);
  s.receive({ k: "rows", n: 2, s: [0, 1] }, view([row(102, 11), row(102, 21)]), 6);
  s.receive({ k: "rows", n: 2, s: [0, 1] }, view([row(102, 11), row(102, 21)]), 6);
  s.receive({ k: "rows", n: 5, s: [0, 1] }, view([row(103, 12), row(103, 22)]), 7);
  assert.deepEqual(s.rings.map((ring) => ring.rows.map((kept) => kept[1])), [[10, 11, 12], [20, 21, 22]]);
  assert.equal(s.late, 2);
  assert.equal(s.end(), 103);
  assert.deepEqual(s.present(), [0]);
});

test("a row in the middle of a buffer is read where it lies", () => {
  const s = store();
  const numbers = new Float64Array([0, ...row(101, 77)]);
  s.receive({ k: "rows", n: 1, s: [0] }, new DataView(numbers.buffer, 8), 0);
  assert.equal(s.now(0)[1], 77);
});

test("a page that comes late gets the history, once", () => {
  const s = store();
  s.receive({ k: "rows", n: 7, s: [0] }, view([row(107, 70)]), 0);
  s.receive({ k: "history", n: 7, s: [0, 0], m: [{ time: 100.5, kind: "mark", label: "a" }] }, view([row(106, 60), row(107, 70)]), 0);
  s.receive({ k: "rows", n: 8, s: [0] }, view([row(108, 80)]), 0);
  assert.deepEqual(s.ring(0).rows.map((kept) => kept[0]), [106, 107, 108]);
  assert.equal(s.marks.length, 1);
});

test("categories that become known replace those of before", () => {
  const s = store();
  s.receive({ k: "rows", n: 1, s: [0] }, view([row(101, 10, 0)]), 0);
  s.receive({ k: "rows", n: 2, s: [0] }, view([row(102, 10, 0)]), 0);
  s.receive({ k: "relabelled", n: 2, s: [0, 0] }, view([row(102, 4, 6), row(55, 1, 1)]), 0);
  assert.deepEqual(s.ring(0).rows.map((kept) => kept[2]), [0, 6]);
  assert.equal(s.now(0)[2], 6);
  assert.equal(s.ring(0).taken, 2);
});

test("marks stay bounded, and a user's own stay longest", () => {
  const s = store();
  for (let i = 0; i < 5000; i++) {
    s.receive({ k: "rows", n: i, m: [{ time: 100 + i, kind: i % 1000 ? "checkpoint" : "mark", label: `${i}` }] }, null, 0);
  }
  assert.ok(s.marks.length <= 801);
  assert.equal(s.marks.filter((mark) => mark.kind === "mark").length, 5);
});

test("running, paused, stale and stopped", () => {
  const s = store();
  assert.equal(s.state("running", 1e9), "running", "nothing was ever heard: the first sample is still to come");
  s.receive({ k: "rows", n: 1, s: [0] }, view([row(101, 10)]), 1000);
  assert.equal(s.state("running", 1400), "running");
  assert.equal(s.state("running", 1000 + 60_000), "stale");
  s.receive({ k: "alive", n: 1 }, null, 70_000);
  assert.equal(s.state("running", 70_100), "running");
  s.freeze();
  assert.equal(s.state("running", 70_100), "paused", "a paused view is paused whatever the busy kernel says");
  s.receive({ k: "rows", n: 2, s: [0] }, view([row(105, 99)]), 70_200);
  assert.equal(s.now(0)[1], 10);
  assert.equal(s.end(), 101);
  s.thaw();
  assert.equal(s.now(0)[1], 99);
  assert.equal(s.state("paused", 70_300), "paused");
  assert.equal(s.state("stopped", 1e9), "stopped");
  assert.equal(new Store({ columns: COLUMNS, capacity: 8, period: 60, started: 0 }).isStale(1e9), false);
  const slow = store({ period: 60 });
  slow.receive({ k: "alive" }, null, 0);
  assert.equal(slow.isStale(100_000), false, "at one sample a minute, a minute and a half is nothing");
});

test("a button says why nothing happens yet", () => {
  assert.equal(statusWords("running", null, true), "running");
  assert.equal(statusWords("running", "stop", true), "stopping");
  assert.match(statusWords("running", "stop", false), /when this cell is over/);
  assert.match(statusWords("paused", "pause", false), /after this cell/);
  assert.match(statusWords("stale", "stop", false), /stale/);
  assert.equal(statusWords("stopped", "stop", false), "stopped");
});

test("thinning keeps the peak and the ends; a pause parts the rows", () => {
  const rows = Array.from({ length: 1000 }, (_, i) => row(100 + i / 10, i === 333 ? 900 : 5));
  const kept = thin(rows, 50, 4);
  assert.ok(kept.length <= 52);
  assert.ok(kept.some((each) => each[4] === 900));
  assert.equal(kept[kept.length - 1], rows[999]);
  assert.equal(thin(rows.slice(0, 10), 50, 4).length, 10);
  assert.deepEqual(withoutGaps([row(1, 0), row(2, 0), row(9, 0)], 3).map((part) => part.length), [2, 1]);
  assert.equal(nearest(rows, 133.31), 333);
  assert.equal(nearest([], 1), -1);
});

test("the bar's parts stand on each other, to scale", () => {
  const s = store();
  s.receive({ k: "rows", n: 1, s: [0] }, view([row(101, 300 * MIB, 100 * MIB, 50 * MIB)]), 0);
  const ctx = recorder();
  const where = geometry(700, 220);
  const { top } = drawPanel(ctx, s, panel(s), where);
  const parts = ctx.calls.filter(([name, [x]]) => name === "fillRect" && x === where.barX);
  const heights = parts.map(([, [, , , height]]) => (height / where.plotHeight) * top);
  [300, 100, 50].forEach((size, i) => assert.ok(Math.abs(heights[i] - size * MIB) < 1));
  assert.deepEqual(parts.map(([, , fill]) => fill), ["blue", "yellow", "grey"]);
  const [first, second] = parts.map(([, args]) => args);
  assert.ok(Math.abs(first[1] - (second[1] + second[3])) < 1e-9);
});

test("areas in order, only of layers that there are, broken by a pause", () => {
  const s = store({ capacity: 100 });
  for (const time of [101, 101.1, 101.2, 110, 110.1]) s.receive({ k: "rows", s: [0] }, view([row(time, MIB, 0, MIB)]), 0);
  const ctx = recorder();
  drawPanel(ctx, s, panel(s), geometry(700, 220));
  const fills = ctx.calls.filter(([name]) => name === "fill").map(([, , fill]) => fill);
  assert.deepEqual(fills, ["blue", "grey", "blue", "grey"]);
  const xs = ctx.calls.filter(([name]) => name === "lineTo").map(([, [x]]) => x);
  const where = geometry(700, 220);
  assert.ok(xs.every((x) => x >= where.left - 1 && x <= where.width));
});

test("peak, capacity, marks and the cursor are drawn", () => {
  const s = store({ capacity: 100 });
  for (const time of [101, 102, 103]) s.receive({ k: "rows", s: [0] }, view([row(time, 900 * MIB)]), 0);
  const marks = [
    { time: 101.5, kind: "mark", label: "warm" }, { time: 102, kind: "checkpoint", label: "x = 1" }, { time: 102.5, kind: "cell", label: "In [2]" },
  ];
  const ctx = recorder();
  drawPanel(ctx, s, panel(s, { peak: 950 * MIB, marks, cursor: 102 }), geometry(700, 220));
  const words = ctx.calls.filter(([name]) => name === "fillText").map(([, [text]]) => text);
  for (const expected of ["peak allocated 950 MiB", "capacity 1,000 MiB", "warm", "In [2]", "now"]) assert.ok(words.includes(expected), expected);
  assert.ok(!words.includes("x = 1"), "the names of checkpoints are in the table");
  assert.ok(ctx.calls.some(([name, , colour]) => name === "stroke" && colour === "red"));
});

test("the words of peak and capacity are struck by no line, and stand apart from the names of marks", () => {
  const s = store({ capacity: 100 });
  s.receive({ k: "rows", s: [0] }, view([row(101, 900 * MIB)]), 0);
  for (const peak of [400, 920, 960, 999, 1000]) {
    const ctx = recorder();
    const where = geometry(700, 234);
    drawPanel(ctx, s, panel(s, { peak: peak * MIB, marks: [{ time: 100.5, kind: "cell", label: "In [2]" }] }), where);
    const said = (start) => ctx.calls.find(([name, [text]]) => name === "fillText" && text.startsWith(start))[1][2];
    const level = (size) => where.top + where.plotHeight * (1 - size / 1040);
    for (const [at, own, other] of [[said("peak"), peak, 1000], [said("capacity"), 1000, peak]]) {
      assert.ok(Math.abs(at - level(own)) < 14, "beside its line");
      assert.ok(other === own || level(other) < at - 10 || level(other) > at + 3, `${peak}: struck through`);
    }
    assert.ok(said("capacity") - 10 > said("In [2]"));
  }
});

test("a reader's own marks keep their names where there is no room for all", () => {
  const s = store({ capacity: 100 });
  for (const time of [101, 102, 103]) s.receive({ k: "rows", s: [0] }, view([row(time, 900 * MIB)]), 0);
  const marks = [
    { time: 102, kind: "cell", label: "In [2]" }, { time: 102.01, kind: "mark", label: "mine" }, { time: 102.99, kind: "mark", label: "at the very end of it" },
    { time: 99, kind: "mark", label: "before" },
  ];
  const ctx = recorder();
  const where = geometry(700, 220);
  drawPanel(ctx, s, panel(s, { marks }), where);
  const names = ctx.calls.filter(([name, [, , height]]) => name === "fillText" && height < where.top);
  assert.deepEqual(names.map(([, [text]]) => text), ["mine", "at the very end of it"]);
  for (const [, [text, x]] of names) assert.ok(x + 6 * text.length <= where.left + where.plotWidth + 9, text);
});

test("lines over the areas have an edge of the ground's colour", () => {
  const s = store({ capacity: 100 });
  for (const time of [101, 102]) s.receive({ k: "rows", s: [0] }, view([row(time, 900 * MIB)]), 0);
  const ctx = recorder();
  drawPanel(ctx, s, panel(s, { peak: 900 * MIB, paper: "ground" }), geometry(700, 220));
  const strokes = ctx.calls.filter(([name]) => name === "stroke").map(([, , colour]) => colour);
  const peak = strokes.indexOf("ink");
  assert.equal(strokes[peak - 1], "ground");
});

test("nothing to draw, and a figure that is unavailable, are drawn without an error", () => {
  const s = store();
  drawPanel(recorder(), s, panel(s, { bar: null }), geometry(160, 170));
  s.receive({ k: "rows", s: [0] }, view([[101, NaN, 5, NaN, 5, 5, NaN, 5]]), 0);
  drawPanel(recorder(), s, panel(s), geometry(160, 170));
  assert.equal(describe(s, s.now(0)), "allocated 5 B, reserved 5 B");
  assert.equal(s.height(s.now(0)), 5);
});

test("a moment belongs to the checkpoint before it, if that is near", () => {
  const marks = [{ time: 101, label: "a" }, { time: 102, label: "b" }];
  assert.equal(markAt(marks, 102.1, 0.1).label, "b");
  assert.equal(markAt(marks, 101.2, 0.1).label, "a");
  assert.equal(markAt(marks, 150, 0.1), null);
  assert.equal(markAt([], 1, 0.1), null);
});

/** A page with elements that may come and go. */
function page(names) {
  const made = () => ({ children: [], hidden: false, append(one) { this.children.push(one); }, remove() { this.gone = true; }, contains: () => false });
  const place = (name) => {
    const still = { hidden: false, shows: ["picture"], replaceChildren(...nodes) { this.shows = nodes; } };
    return { ...made(), isConnected: true, dataset: { place: name }, querySelector: () => still, still };
  };
  const places = names.map(place);
  const frames = [];
  let changed;
  Object.assign(globalThis, {
    document: { body: {}, createElement: made, querySelectorAll: () => places.filter((one) => one.isConnected), activeElement: null },
    DOMParser: class { parseFromString(html) { return { body: { childNodes: [html] } }; } },
    MutationObserver: class { constructor(act) { changed = act; } observe() {} disconnect() {} },
    requestAnimationFrame: (act) => frames.push(act),
  });
  return { places, place, change: () => changed(), draw: () => { while (frames.length) frames.shift()(); } };
}

test("a view stands in every place of its name, moves with its output, and leaves a picture", () => {
  const { places, place, change, draw } = page(["a", "b"]);
  let built = 0, ended = 0;
  const leave = inPlaces("a", () => { built += 1; return () => { ended += 1; }; });
  const [first, other] = places;
  assert.deepEqual([first.still.hidden, other.still.hidden, built], [true, false, 1]);
  // The output is drawn anew: the same view, before a frame could show the picture.
  first.isConnected = false;
  places.push(place("a"), place("a"));
  change();
  assert.deepEqual([built, ended, places[2].still.hidden], [2, 0, true]);
  assert.equal(places[2].children[0], first.children[0]);
  draw();
  assert.deepEqual([built, ended], [2, 0]);
  // One goes for good.
  places[3].isConnected = false;
  change();
  draw();
  assert.deepEqual([built, ended], [2, 1]);
  // The end, with a change of the page under way.
  change();
  leave("<p>left</p>");
  draw();
  assert.deepEqual([places[2].still.shows, places[2].still.hidden, ended, built], [["<p>left</p>"], false, 2, 2]);
  assert.deepEqual(other.still.shows, ["picture"]);
});

test("two views of a model share what it knows, and two models do not", () => {
  const model = () => {
    const facts = { columns: COLUMNS, capacity: 8, period: 0.1, started: 100 };
    const listeners = [];
    return {
      sent: [], listeners, get: (name) => facts[name], send(message) { this.sent.push(message); },
      on: (name, act) => listeners.push([name, act]), off: (name, act) => listeners.splice(listeners.findIndex((l) => l[1] === act), 1),
    };
  };
  page([]);
  const [first, second] = [model(), model()];
  const leave = make().initialize({ model: first });
  make().initialize({ model: second });
  assert.deepEqual(first.sent, [{ k: "hello" }]);
  assert.equal(first.listeners.length, 1);
  first.listeners[0][1]({ k: "rows", s: [0] }, [view([row(101, 10)])]);
  leave();
  assert.equal(first.listeners.length, 0);
});
