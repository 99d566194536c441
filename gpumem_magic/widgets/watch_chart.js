/* One device's chart on a canvas: numbers in, drawing calls out. Needs no more of a browser than the canvas's context. */

import { human } from "../units.js";
import { longestGap, scaleTop, withoutGaps, thin, ticks, timeTicks } from "./watch_store.js";

const TAG = 14; // the height of words with their ground, in CSS pixels

/** Where things are on a canvas of this size, in CSS pixels. Over the plot: the names of marks, and room for the capacity's word. */
export function geometry(width, height) {
  const narrow = width < 420;
  const bar = narrow ? 24 : 36;
  const left = narrow ? 58 : 70;
  const right = bar + (narrow ? 20 : 30);
  return { width, height, left, top: 16 + TAG, plotWidth: Math.max(width - left - right, 10), plotHeight: height - 40 - TAG, bar, barX: width - bar - 8 };
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
  const gap = longestGap(rows, view.period, view.perRow);
  for (const run of withoutGaps(rows, gap)) {
    const last = run[run.length - 1];
    const until = last === rows[rows.length - 1] ? Math.min(view.end, last[0] + gap) : last[0] + view.period;
    drawAreas(ctx, store, run, until, x, y, view.fills);
  }
  drawMarks(ctx, view, x, floor, upper, left + plotWidth, line, edged, text);
  const drawn = [];
  if (view.peak > 0) drawn.push([view.peak, left + plotWidth, `peak allocated ${human(view.peak)}`, view.ink, "right"]);
  if (view.capacity > 0 && view.capacity <= top) drawn.push([view.capacity, width - 4, `capacity ${human(view.capacity)}`, view.alarm, "left"]);
  for (const [size, end, , colour] of drawn) {
    edged(left, y(size), end, y(size), colour, colour === view.alarm ? [6, 4] : [], colour === view.alarm ? 1 : 0.8);
  }
  // Words stand above their line, or below it where another line is.
  for (const [size, , words, ink, align] of drawn) {
    const crossed = drawn.some(([other]) => other > size && y(size) - y(other) < TAG);
    const at = crossed ? y(size) + TAG - 2 : y(size) - 4;
    tag(ctx, words, align === "left" ? left + 4 : left + plotWidth - 3, at, { ...view, ink }, align);
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
    text(words, from, upper - TAG - 5, mark.kind === "mark" ? view.ink : view.quiet);
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
