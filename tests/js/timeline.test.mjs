// The timeline page without a browser: node --test tests/js
import assert from "node:assert/strict";
import { test } from "node:test";

import { byteTicks, byteWord, drawOver, eventTicks, fragmentation, isPale, layout, mixed, runsOf, segmentAt, since, ticks } from "../../gpumem_magic/timeline_page/draw.js";
import { categoryOf, eventsAround, extentEvents, flameOf, groupsOf, pathsOf, sameIn } from "../../gpumem_magic/timeline_page/lists.js";
import { Machine } from "../../gpumem_magic/timeline_page/machine.js";
import { CACHED, Device, LiveSet, NOTHING, columnsOf, moved, paint, showing, wholeView, zoomed } from "../../gpumem_magic/timeline_page/model.js";

const MIB = 2 ** 20;

/** A device from lives: [born, freed or -1, size in MiB, category], in the order of their births. */
function device(lives, events, more = {}) {
  let before = 0;
  const born = lives.map(([at]) => {
    const step = at - before;
    before = at;
    return step;
  });
  const column = (make) => lives.map(make);
  let top = 0;
  return new Device({
    name: "GPU 0", notes: [], marks: [], reasons: [], events, times: [], opensAt: 0, born,
    lived: column(([at, freed]) => (freed < 0 ? -1 : freed - at)), waited: column(([, freed]) => (freed < 0 ? -1 : 0)),
    requested: column(([, , size]) => size * MIB - 100), size: column(([, , size]) => size * MIB),
    address: column(([, , size]) => (top += size * MIB) - size * MIB), stream: column(() => 0), category: column(([, , , category]) => category),
    evidence: column(() => 0), holder: column(() => -1), reason: column(() => -1), stack: column(() => 0), freedBy: column(() => -1), stacks: [[]], heads: [-1], alike: [0], answer: "", strings: [],
    extents: [[0, top + 10 * MIB, -1, -1, 0, "large", 0]], ...more,
  });
}

const small = (more) => device([[-1, -1, 4, 0], [0, 5, 2, 1], [1, 3, 8, 1], [4, -1, 1, 0]], 6, more);

/** Random lives; the same for the same seed. */
function many(events, seed = 7) {
  let state = seed;
  const random = () => (state = (state * 1103515245 + 12345) % 2147483648) / 2147483648;
  const lives = [];
  const free = new Set();
  for (let i = 0; i < 40; i++) lives.push([-1, -1, 1 + Math.floor(random() * 9), Math.floor(random() * 4)]);
  const used = new Set();
  for (let event = 0; event < events; event++) {
    if (used.has(event) || random() < 0.4) continue;
    let end = event + 1 + Math.floor(random() * events * 0.3);
    while (end < events && (used.has(end) || free.has(end))) end += 1;
    if (end < events) used.add(end);
    lives.push([event, end < events ? end : -1, 1 + Math.floor(random() * 9), Math.floor(random() * 4)]);
  }
  return device(lives, events);
}

test("a set of numbers, in order", () => {
  const set = new LiveSet(5000);
  const into = new Int32Array(5001);
  for (const rank of [4999, 0, 31, 32, 1024, 77]) set.add(rank);
  set.delete(32);
  set.delete(33);
  assert.deepEqual([...into.subarray(0, set.list(into))], [0, 31, 77, 1024, 4999]);
});

test("heights, the live ones and the sums agree at every position, forwards, backwards and after jumps", () => {
  const d = many(5000);
  const order = [...Array(5001).keys()];
  for (const position of [...order.slice(0, 300), ...order.slice(2000, 2300).reverse(), 5000, 0, 4321, 4320, 17]) {
    const stack = d.stackAt(position);
    const slow = [...Array(d.count).keys()].filter((one) => d.isLive(one, position));
    assert.deepEqual([...stack].sort((a, b) => a - b), slow);
    assert.equal(stack.reduce((sum, one) => sum + d.size[one], 0), d.height[position]);
    const sums = d.sums(position, 4);
    assert.equal(sums.allocated, d.height[position]);
    assert.equal(sums.sizes.reduce((a, b) => a + b, 0) + sums.rounding, sums.allocated);
    const order = stack.map((one) => [d.born[one] < 0 ? 0 : 1, d.category[one]]);
    assert.deepEqual(order, [...order].sort((a, b) => a[0] - b[0] || a[1] - b[1]), "what predates the recording, then by categories");
  }
});

test("where an allocation lies in the stack, and which have some words", () => {
  const d = small();
  for (const position of [0, 1, 2, 3, 5, 6]) {
    let beneath = 0;
    for (const one of d.stackAt(position)) {
      assert.deepEqual(d.placeOf(one, position), [beneath, d.size[one]]);
      beneath += d.size[one];
    }
    assert.equal(beneath, d.height[position]);
  }
  const words = (one) => (one === 1 ? "Cache.py:3 Update" : "train.py:9 step");
  assert.deepEqual(d.matching(2, "cache.PY:3", words), [1]);
  assert.deepEqual(d.matching(2, "", words), d.stackAt(2));
  assert.deepEqual(d.matching(2, "nothing", words), []);
});

test("call paths add up, from the outermost frame", () => {
  const d = small();
  const paths = [["main", "load"], ["main", "step", "linear"], ["main", "step"], []];
  const root = pathsOf(d, [0, 1, 2, 3], (one) => paths[one]);
  const asked = [0, 1, 2, 3].map((one) => d.requested[one]);
  assert.equal(root.size, asked.reduce((a, b) => a + b, 0));
  const main = root.parts.get("main");
  assert.deepEqual([main.count, main.size], [3, asked[0] + asked[1] + asked[2]]);
  assert.deepEqual([...main.parts.keys()], ["load", "step"]);
  const step = main.parts.get("step");
  assert.equal(step.parts.get("linear").size, asked[1]);
  assert.deepEqual([categoryOf(main.parts.get("load")), categoryOf(step), categoryOf(main)], [0, 1, null], "main has two categories");
  const again = pathsOf(d, [1, 2], (one) => paths[one]);
  assert.equal(sameIn(again, step), again.parts.get("main").parts.get("step"));
  assert.equal(sameIn(again, main.parts.get("load")), again, "what is gone is not looked at");
});

test("a flame graph has every part where its bytes are, and what is around the one that is looked at", () => {
  const d = many(300);
  const path = (one) => [`a${one % 3}`, `b${one % 5}`, `c${one % 2}`];
  const root = pathsOf(d, d.stackAt(150), path);
  const all = flameOf(root, 0);
  for (const { node, row, from, share } of all) {
    assert.ok(Math.abs(share - node.size / root.size) < 1e-9 && from + share < 1 + 1e-9);
    const inside = all.filter((one) => one.node.above === node);
    if (inside.length) assert.ok(Math.abs(inside.reduce((sum, one) => sum + one.share, 0) - share) < 1e-9);
    for (const one of inside) assert.ok(one.row === row + 1 && one.from >= from - 1e-9 && one.from + one.share <= from + share + 1e-9);
  }
  const focus = root.parts.get("a1").parts.get("b2");
  const part = flameOf(focus, 0);
  assert.deepEqual(part.slice(0, 3).map(({ node, row, share }) => [node.word, row, share]), [["", 0, 1], ["a1", 1, 1], ["b2", 2, 1]]);
  assert.equal(part.length, 3 + focus.parts.size);
  assert.ok(flameOf(root, 0.2).every(({ share }) => share >= 0.2));
});

test("allocations whose stacks read the same are one group, whose sizes add up", () => {
  const d = many(500);
  const stacks = [...Array(d.count).keys()].map((one) => one % 4);
  d.stack = stacks;
  d.alike = [0, 1, 2, 1];
  const live = d.stackAt(250);
  const groups = groupsOf(d, live, (one) => (one % 2 ? "model" : ""));
  assert.equal(groups.reduce((sum, group) => sum + group.size, 0), live.reduce((sum, one) => sum + d.requested[one], 0));
  assert.deepEqual(groups.flatMap((group) => group.members).sort((a, b) => a - b), [...live].sort((a, b) => a - b));
  for (const { members, size, sizes, count } of groups) {
    assert.equal(new Set(members.map((one) => `${d.alike[stacks[one]]} ${d.category[one]} ${one % 2}`)).size, 1);
    assert.equal(sizes.reduce((sum, [asked, times]) => sum + asked * times, 0), size);
    assert.equal(sizes.reduce((sum, [, times]) => sum + times, 0), count);
  }
  assert.ok(groups.some(({ members }) => new Set(members.map((one) => stacks[one])).size === 2));
  assert.deepEqual(groups.map((group) => group.size), groups.map((group) => group.size).sort((a, b) => b - a));
});

test("the events around a moment, each as what it was", () => {
  const d = device([[-1, 6, 4, 0], [1, 3, 8, 1]], 9, {
    waited: [-1, 1], marks: [[5, "out of memory", "error"]], extents: [[0, 20 * MIB, -1, 8, 0, "large", 0, 0], [64 * MIB, 2 * MIB, 0, 7, 0, "small", 1, 0]],
  });
  const around = (position, most) => eventsAround(d, extentEvents(d), position, most).map(({ event, action, one }) => [event, action, one]);
  assert.deepEqual(around(4, 99), [[0, "segment_map", -1], [1, "alloc", 1], [2, "other", -1], [3, "free_requested", 1], [4, "free_completed", 1],
    [5, "out of memory", -1], [6, "free_requested", 0], [7, "segment_unmap", -1], [8, "segment_free", -1]]);
  assert.deepEqual(around(5, 3).map(([event]) => event), [3, 4, 5], "the one before the moment is in the middle");
  assert.deepEqual([around(0, 3).map(([event]) => event), around(9, 3).map(([event]) => event)], [[0, 1, 2], [6, 7, 8]]);
  assert.equal(eventsAround(d, extentEvents(d), 1, 1)[0].size, 2 * MIB);
});

test("the highest position of a stretch is found, and the first of equals", () => {
  const d = many(3000);
  for (const [first, last] of [[0, 3000], [5, 5], [100, 900], [255, 256], [256, 511], [1, 2999], [300, 520]]) {
    let best = first;
    for (let p = first; p <= last; p++) if (d.height[p] > d.height[best]) best = p;
    assert.equal(d.highest(first, last), best, `${first}..${last}`);
  }
});

test("a column shows the highest moment in it, so that no peak is lost", () => {
  const d = many(3000);
  const columns = columnsOf(d, wholeView(d), 100);
  assert.equal(Math.max(...[...columns].map((p) => d.height[p])), d.height[d.peak]);
  const near = columnsOf(d, { x0: 10, x1: 18, y0: 0, y1: 1 }, 80);
  assert.deepEqual([...near].filter((_, k) => k % 10 === 5), [10, 11, 12, 13, 14, 15, 16, 17]);
});

test("the picture has each allocation where its bytes are", () => {
  const d = small();
  const [width, height] = [7, 30];
  const [pixels, pick] = [new Uint32Array(width * height), new Int32Array(width * height)];
  const colours = { shades: [[1, 1, 1], [2, 2, 2]], edge: [11, 12], cached: 8, paper: 9 };
  paint(d, { x0: 0, x1: 7, y0: 0, y1: 30 * MIB }, width, height, colours, pixels, pick);
  const column = (x) => Array.from({ length: height }, (_, row) => pick[(height - 1 - row) * width + x]);
  const expected = (...runs) => runs.flatMap(([one, rows]) => Array(rows).fill(one));
  assert.deepEqual(column(0), expected([0, 4], [CACHED, 21], [NOTHING, 5]));
  assert.deepEqual(column(2), expected([0, 4], [1, 2], [2, 8], [CACHED, 11], [NOTHING, 5]));
  assert.deepEqual(column(5), expected([0, 4], [3, 1], [1, 2], [CACHED, 18], [NOTHING, 5]));
  assert.deepEqual(column(6), expected([0, 4], [3, 1], [CACHED, 20], [NOTHING, 5]));
  assert.equal(pixels[(height - 1) * width], 1);
  assert.equal(pixels[(height - 4) * width], 11, "the upper edge of a tall one");
  assert.deepEqual(runsOf(pick, width, height, 1), [[1, 24, 4, 2], [5, 23, 1, 2]]);
  assert.deepEqual(runsOf(pick, width, height, 99), []);
});

test("a picture of parts is the same part of the whole picture", () => {
  const d = many(400);
  const whole = wholeView(d);
  const colours = { shades: Array.from({ length: 4 }, (_, k) => [k, k, k]), edge: [0, 1, 2, 3], cached: 8, paper: 9 };
  const draw = (view, width, height) => {
    const pick = new Int32Array(width * height);
    paint(d, view, width, height, colours, new Uint32Array(width * height), pick);
    return pick;
  };
  const all = draw({ ...whole, x0: 0, x1: 400 }, 400, 300);
  const part = draw({ ...whole, x0: 120, x1: 200 }, 80, 300);
  for (let row = 0; row < 300; row++) assert.deepEqual(part.slice(row * 80, row * 80 + 80), all.slice(row * 400 + 120, row * 400 + 200));
});

test("a hidden category leaves the stack, and comes back", () => {
  const m = new Machine([small()], 2);
  const before = [...m.device.height];
  m.goTo(3);
  m.select(2);
  m.toggle(1);
  assert.deepEqual(m.device.stackAt(3), [0]);
  assert.equal(m.selected, -1, "what is hidden can't be selected");
  assert.equal(m.device.height[3], 4 * MIB);
  m.toggle(1);
  assert.deepEqual([...m.device.height], before);
});

test("views stay within the recording", () => {
  const d = many(3000);
  const whole = wholeView(d);
  let view = whole;
  for (let k = 0; k < 60; k++) view = zoomed(view, whole, 0.5, 0.9);
  assert.ok(view.x1 - view.x0 >= 8 && view.x1 <= whole.x1);
  for (let k = 0; k < 60; k++) view = zoomed(view, whole, 2, 0.1);
  assert.deepEqual([view.x0, view.x1], [0, whole.x1]);
  const part = zoomed(whole, whole, 0.1, 0.5);
  assert.deepEqual([moved(part, whole, 1e9, 1e15).x1, moved(part, whole, -1e9).x0], [whole.x1, 0]);
  assert.equal(showing(part, whole, 1500), part);
  const seen = showing(part, whole, 2999);
  assert.ok(seen.x0 <= 2999 && 2999 < seen.x1);
  assert.ok(Math.abs(part.x1 - part.x0 - (seen.x1 - seen.x0)) < 1e-6);
});

test("zooming keeps what is under the pointer", () => {
  const d = many(3000);
  const whole = wholeView(d);
  const at = (view, share) => view.x0 + (view.x1 - view.x0) * share;
  let view = whole;
  for (const share of [0.3, 0.7, 0.5]) {
    const before = at(view, share);
    view = zoomed(view, whole, 0.5, share);
    assert.ok(Math.abs(at(view, share) - before) < 1e-6);
  }
});

test("every key does its work, and others are left to the browser", () => {
  const m = new Machine([small()], 2);
  assert.equal(m.key("End"), "marks");
  assert.equal(m.position, 6);
  m.key("ArrowLeft");
  assert.equal(m.position, 5);
  m.key("p");
  assert.equal(m.position, 2);
  assert.equal(m.key("ArrowUp"), "marks");
  assert.equal(m.selected, 0, "from the bottom");
  m.key("ArrowUp");
  m.key("ArrowUp");
  assert.equal(m.selected, 2);
  assert.equal(m.key("ArrowUp"), "", "nothing is above the top");
  m.key("]");
  assert.equal(m.position, 3, "the last moment at which it lives");
  assert.ok(m.device.isLive(2, 3) && !m.device.isLive(2, 4));
  m.key("[");
  assert.equal(m.position, 2);
  m.key("Escape");
  assert.equal(m.selected, -1);
  m.key("ArrowDown");
  assert.equal(m.selected, 2, "from the top");
  m.key("Home");
  assert.equal(m.position, 0);
  m.key("ArrowLeft");
  assert.equal(m.position, 0);
  for (const key of ["a", "Tab", "Enter", "F5"]) assert.equal(m.key(key), null);
  for (const key of ["+", "-", "{", "}", "0", "PageUp", "PageDown", "="]) assert.equal(m.key(key), "all");
});

test("moving to a moment out of sight brings it into sight; within sight nothing is drawn anew but the marks", () => {
  const m = new Machine([many(3000)], 4);
  for (let k = 0; k < 5; k++) m.key("+");
  const { x0, x1 } = m.view;
  assert.equal(m.goTo(Math.floor((x0 + x1) / 2)), "marks");
  assert.equal(m.goTo(x0 > 1500 ? 0 : 3000), "all");
  assert.ok(m.position >= m.view.x0 && m.position < m.view.x1);
  assert.equal(m.reveal(39), "marks", "it lives from before the recording");
});

test("each device keeps what it hides, and choosing one shows all of it", () => {
  const m = new Machine([small(), many(100)], 4);
  m.choose(1);
  assert.equal(m.view.x1, 101);
  m.toggle(0);
  m.choose(0);
  assert.equal(m.device.hidden.size, 0);
});

test("segments at a moment, with what is free between blocks and what waits for a stream", () => {
  const d = small({
    extents: [[0, 20 * MIB, -1, -1, 0, "large", 0], [32 * MIB, 2 * MIB, 2, 4, 0, "small", 0], [40 * MIB, MIB, 1, -1, 7, "large", 1],
      [41 * MIB, MIB, 3, -1, 7, "large", 1]],
    waited: [-1, 0, 2, -1],
  });
  const at = (position) => d.segmentsAt(position);
  assert.deepEqual(at(0).map((s) => s.size / MIB), [20]);
  assert.deepEqual(at(4).map((s) => s.size / MIB), [20, 2, 2], "mapped pages that touch are one segment");
  assert.deepEqual(at(5).map((s) => s.size / MIB), [20, 2]);
  assert.deepEqual(at(3)[0].blocks.map((b) => [b.one, b.offset / MIB, b.size / MIB, b.waiting]), [[0, 0, 4, false], [1, 4, 2, false], [2, 6, 8, false]]);
  assert.deepEqual(at(5)[0].blocks.map((b) => [b.one, b.waiting]), [[0, false], [1, false], [2, true], [3, false]]);
  assert.match(fragmentation(at(5)), /^2 segments, 22\.0 MiB; 7\.0 MiB of it free in 2 pieces, the largest 5\.0 MiB; 8\.0 MiB more waits/);
  assert.match(fragmentation([]), /No segments/);
});

test("segments lie in rows, lose no byte, and are found again", () => {
  const segments = [700, 2, 2, 300, 9000, 1].map((size, k) => ({ address: k, size: size * MIB, blocks: [{ one: k, offset: 0, size: MIB, waiting: false }], used: MIB }));
  const placed = layout(segments, 500);
  for (const segment of segments) {
    const pieces = placed.pieces.filter((piece) => piece.segment === segment);
    assert.equal(pieces[0].from, 0);
    assert.equal(pieces[pieces.length - 1].to, segment.size);
    pieces.slice(1).forEach((piece, k) => assert.equal(piece.from, pieces[k].to));
  }
  for (const piece of placed.pieces) {
    assert.ok(piece.x >= 0 && piece.x + piece.width <= 500.001 && piece.y + piece.height <= placed.height);
    assert.equal(segmentAt(placed, piece.x + piece.width / 2, piece.y + 1).segment, piece.segment);
  }
  assert.equal(segmentAt(placed, placed.pieces[0].x + 0.01, 1).block.one, 0);
  assert.equal(segmentAt(placed, -5, 1), null);
  assert.equal(layout([], 500).pieces.length, 0);
});

test("axes have few, round words, and end even for absurd sizes", () => {
  assert.deepEqual([250, 3100, 12_400_000].map(since), ["250 µs", "3.1 ms", "12.4 s"]);
  assert.deepEqual([0, MIB / 2, 3 * 2 ** 30].map(byteWord), ["0", "512 KiB", "3 GiB"]);
  for (const [low, high] of [[0, 1], [0, 90 * 2 ** 30], [2 ** 63, 2 ** 63 + 4096], [0, 2 ** 90], [5 * MIB, 5 * MIB + 5000]]) {
    assert.ok(byteTicks(low, high).length <= 8, `${low}..${high}`);
    assert.ok(eventTicks(low, high).length <= 10);
  }
  assert.deepEqual(ticks(0, 10, 5, [1, 2, 5]), [0, 2, 4, 6, 8, 10]);
  assert.deepEqual(eventTicks(3, 20000), [5000, 10000, 15000, 20000]);
});

test("words on a colour are dark where it is pale", () => {
  assert.deepEqual(["#FFFFFF", "#CCBB44", "#FFAABB", "#000000", "#AA3377"].map(isPale), [true, true, true, false, false]);
});

test("colours are pixels in the browser's order of bytes", () => {
  assert.equal(mixed("#102030", "#000000", 0), 0xff302010);
  assert.equal(mixed("#FF0000", "#0000FF", 0.5), 0xff800080);
});

test("marks, the moment and the outline are drawn over the stack; errors in the colour of alarm", () => {
  const calls = [];
  const context = new Proxy({ measureText: (words) => ({ width: 6 * words.length }) }, {
    get: (self, name) => (name in self ? self[name] : (...args) => calls.push([name, args, self.fillStyle])),
    set: (self, name, value) => ((self[name] = value), true),
  });
  const d = small({ marks: [[1, "loss.backward()", "statement"], [5, "out of memory", "error"]] });
  const m = new Machine([d], 2);
  m.goTo(3);
  drawOver(context, { x: 70, y: 20, width: 700, height: 300 }, m, { ink: "ink", quiet: "quiet", grid: "grid", alarm: "alarm", focus: "focus",
    paper: "paper", runs: [[10, 10, 5, 5]], thin: { from: 1, to: 2, bytes: 3 * MIB }, ratio: 1, font: "12px sans-serif" });
  const texts = calls.filter(([name]) => name === "fillText");
  assert.ok(texts.some(([, [words]]) => words === "event 2"));
  assert.ok(texts.some(([, [words]]) => words === "loss.backward()"));
  assert.ok(texts.some(([, [words], fill]) => words === "out of memory" && fill === "alarm"));
  assert.ok(calls.some(([name, [x], fill]) => name === "fillRect" && fill === "focus" && x === 80));
  assert.ok(calls.some(([name, [, , , height], fill]) => name === "fillRect" && fill === "focus" && height === 4), "what is too thin is pointed at");
  assert.ok(calls.some(([name]) => name === "fill"));
});

test("an event belongs to the statement that ran then, where one is known", () => {
  const d = small({ marks: [[1, "a = f()", "statement"], [2, "phase", "range"], [3, "", "statement"], [4, "b = g()", "statement"], [5, "out of memory", "error"]] });
  assert.deepEqual([0, 1, 2, 3, 4, 5].map((event) => d.statementAt(event)), ["", "a = f()", "a = f()", "", "b = g()", "b = g()"]);
  assert.equal(small().statementAt(3), "");
});

test("an empty recording is a page too", () => {
  const m = new Machine([device([], 0, { extents: [] })], 2);
  for (const key of ["ArrowUp", "ArrowRight", "+", "-", "0", "p", "End", "]"]) m.key(key, true);
  assert.deepEqual(m.device.sums(0, 2), { sizes: [0, 0], rounding: 0, allocated: 0, reserved: 0 });
  assert.deepEqual(m.device.segmentsAt(0), []);
  paint(m.device, m.view, 5, 5, { shades: [], edge: [], cached: 1, paper: 2 }, new Uint32Array(25), new Int32Array(25));
});
