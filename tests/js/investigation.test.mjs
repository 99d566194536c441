// The stepper without a browser: node --test tests/js
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  barOf, beside, clamp, figuresOf, largestHole, legendOf, positionWords, scaleOf, stepForKey, stripOf, stripWords,
} from "../../gpumem_magic/investigation/stepper.js";
import { MIB, mib } from "../../gpumem_magic/units.js";

const kinds = ["parameters", "activations", "cached", "context", "free"].map((name) => ({ name, label: name, colour: "#000" }));
const step = (more = {}) => ({
  kind: "statement", title: "x = 1", line: 3, last: 3, used: 400 * MIB, change: 0, published: null, allocated: 200 * MIB, reserved: 300 * MIB,
  smi: 400 * MIB, peak: 200 * MIB, categories: { parameters: 200 * MIB, cached: 100 * MIB, context: 100 * MIB }, words: ["Nothing."], strip: [0, 1], ...more,
});
const facts = (more = {}) => ({
  device: "virtual T4", capacity: 1000 * MIB, headline: "", wanted: 250 * MIB, present: ["parameters", "cached", "context"], kinds,
  listing: [[3, "x = 1"]],
  segments: [
    { size: 100 * MIB, pool: "large", pieces: [[60 * MIB, 0, "weight"], [40 * MIB, 4]] },
    { size: 200 * MIB, pool: "large", pieces: [[140 * MIB, 0], [60 * MIB, 4]] },
  ],
  steps: [step(), step({ kind: "error", published: 390 * MIB, change: -3 * MIB, peak: 260 * MIB }), step({ strip: null })], ...more,
});

test("figures are whole MiB, and what is not known says so", () => {
  assert.deepEqual([mib(3769 * MIB), mib(12 * MIB, true), mib(-12 * MIB, true), mib(null), mib(0, true)], ["3,769", "+12", "-12", "n/a", "+0"]);
});

test("keys lead to steps", () => {
  const steps = Array.from({ length: 40 }, () => step());
  assert.equal(stepForKey("ArrowRight", 3, steps), 4);
  assert.equal(stepForKey("ArrowLeft", 3, steps), 2);
  assert.equal(stepForKey("PageDown", 3, steps), 7);
  assert.equal(stepForKey("PageUp", 3, steps), 0);
  assert.equal(stepForKey("Home", 3, steps), 0);
  assert.equal(stepForKey("End", 3, steps), 39);
  assert.equal(stepForKey("ArrowRight", 39, steps), 39);
  assert.equal(stepForKey("ArrowLeft", 0, steps), 0);
  assert.equal(stepForKey("a", 3, steps), null);
  for (const wrong of [NaN, undefined, -5, 1e9]) assert.ok([0, 39].includes(clamp(wrong, 40)));
});

test("arrows pass over steps in which nothing moved, and stop at the ends", () => {
  const steps = [true, false, true, true, false, true, true].map((quiet) => step({ quiet }));
  assert.equal(stepForKey("ArrowRight", 1, steps), 4);
  assert.equal(stepForKey("ArrowLeft", 4, steps), 1);
  assert.equal(stepForKey("ArrowLeft", 1, steps), 0);
  assert.equal(stepForKey("ArrowRight", 4, steps), 6);
  assert.equal(beside(steps, 6, 1), 6);
  assert.equal(beside(steps, 0, -1), 0);
  assert.equal(stepForKey("PageDown", 1, steps), 2);
});

test("a bar's parts touch each other and add up to what is in use", () => {
  const parts = barOf(facts(), 0);
  assert.deepEqual(parts.map(({ name }) => name), ["parameters", "cached", "context"]);
  let at = 0;
  for (const part of parts) {
    assert.ok(Math.abs(part.start - at) < 1e-9);
    at += part.size;
  }
  assert.ok(Math.abs(at - 0.4) < 1e-9);
  const full = facts();
  full.steps[0].used = 2000 * MIB; // more than the card has: a limit of another kind
  assert.ok(barOf(full, 0).every(({ start, size }) => start + size <= 1));
});

test("a small program fills the picture on a large card; the card's end is there where it is near, or where a request failed", () => {
  const small = facts({ capacity: 40000 * MIB, wanted: null, steps: [step(), step({ used: 500 * MIB, peak: 300 * MIB })] });
  assert.equal(scaleOf(small), 500 * MIB);
  assert.ok(Math.abs(barOf(small, 0).at(-1).start + barOf(small, 0).at(-1).size - 0.8) < 1e-9, "one scale for all steps");
  assert.equal(Object.fromEntries(figuresOf(small, 0))["nvidia-smi"], "400 of 40,000 MiB");
  assert.equal(scaleOf({ ...small, capacity: 800 * MIB }), 800 * MIB);
  assert.equal(scaleOf({ ...small, wanted: MIB }), 40000 * MIB);
  assert.equal(scaleOf({ ...small, capacity: 450 * MIB }), 500 * MIB, "more than the card has is drawn whole");
});

test("a strip is to scale, within its width, and keeps its scale from step to step", () => {
  for (const width of [240, 700, 1052]) {
    const { segments, end, perByte } = stripOf(facts(), 0, width);
    assert.ok(end <= width);
    assert.ok(Math.abs(segments[1].width / segments[0].width - 2) < 1e-9);
    assert.equal(perByte, stripOf(facts(), 1, width).perByte);
    for (const { x, width: wide, pieces } of segments) {
      assert.ok(Math.abs(pieces.reduce((sum, piece) => sum + piece.width, 0) - wide) < 1e-9);
      assert.equal(pieces[0].x, x);
    }
    assert.ok(segments[0].x + segments[0].width < segments[1].x);
  }
  assert.equal(stripOf(facts(), 2, 700), null);
  const crowded = facts({ segments: Array.from({ length: 5000 }, () => ({ size: MIB / 8, pool: "small", pieces: [[MIB / 8, 0]] })) });
  crowded.steps = [step({ strip: crowded.segments.map((_, number) => number) })];
  assert.ok(stripOf(crowded, 0, 700).end <= 700);
});

test("the largest hole is found, and said", () => {
  assert.equal(largestHole(stripOf(facts(), 0, 700)).bytes, 60 * MIB);
  assert.equal(largestHole(null), null);
  assert.equal(stripWords(facts(), 0), "2 segments, 300 MiB: the largest free piece is 60 MiB");
  assert.equal(stripWords(facts(), 1), "2 segments, 300 MiB: the largest free piece is 60 MiB; 250 MiB are wanted in one piece");
  assert.equal(stripWords(facts(), 2), "");
});

test("published figures are beside ours only where somebody published some", () => {
  const terms = (all, n) => figuresOf(all, n).map(([term]) => term);
  assert.deepEqual(terms(facts(), 0), ["nvidia-smi", "published", "change", "reserved", "allocated"]);
  assert.deepEqual(Object.fromEntries(figuresOf(facts(), 1)), {
    "nvidia-smi": "400 MiB", published: "390 MiB (ours is +10)", change: "-3 MiB", reserved: "300 MiB", allocated: "200 MiB", "peak within": "260 MiB",
  });
  assert.ok(!terms(facts({ steps: [step()] }), 0).includes("published"));
  assert.equal(Object.fromEntries(figuresOf(facts({ steps: [step({ smi: null })] }), 0))["nvidia-smi"], "n/a");
});

test("a reader who sees nothing is told the place", () => {
  assert.equal(positionWords(facts(), 1), "step 2 of 3: line 3, x = 1");
  assert.equal(positionWords(facts({ steps: [step({ line: 0, title: "before" })] }), 0), "step 1 of 1: before");
});

test("the legend names what is drawn, once", () => {
  assert.deepEqual(legendOf(facts()).map(({ name }) => name), ["parameters", "cached", "context"]);
  assert.deepEqual(legendOf(facts({ present: ["parameters"] })).map(({ name }) => name), ["parameters", "free"]);
});
