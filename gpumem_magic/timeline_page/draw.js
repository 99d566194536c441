/* Numbers to drawing: words, axes, colours, and where segments and outlines lie. No page here, only a canvas's context. */

import { counted, GIB, MIB, human } from "../units.js";

const LONGEST_MARK = 40; // characters over the picture

/** Microseconds as 250 µs, 3.1 ms or 12.4 s. */
export function since(microseconds) {
  if (Math.abs(microseconds) < 1e3) return `${microseconds} µs`;
  return Math.abs(microseconds) < 1e6 ? `${(microseconds / 1e3).toFixed(1)} ms` : `${(microseconds / 1e6).toFixed(1)} s`;
}

export const count = (number) => number.toLocaleString("en");

/** About `most` round values between low and high; steps: those to try, the last is doubled. */
export function ticks(low, high, most, steps) {
  let step = steps[0];
  for (let k = 0; (high - low) / step > most; k++) step = steps[k] ?? step * 2;
  // Counted, and not added up: beside an enormous value a step may be too small to change it.
  const first = Math.ceil(low / step) * step;
  const found = [];
  for (let k = 0; k <= most + 1 && first + k * step <= high; k++) found.push(first + k * step);
  return found;
}

export const byteTicks = (low, high) => ticks(low, high, 6, [1024]);

export function eventTicks(low, high) {
  const steps = [];
  for (let power = 1; power < 1e9; power *= 10) steps.push(power, 2 * power, 5 * power);
  return ticks(low, high, 8, steps);
}

export function byteWord(size) {
  const [unit, name] = size >= GIB ? [GIB, "GiB"] : size >= MIB ? [MIB, "MiB"] : [1024, "KiB"];
  return size ? `${(size / unit).toLocaleString("en", { maximumFractionDigits: 2 })} ${name}` : "0";
}

// ---- colours

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const packed = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

/** A colour and a share of another, "#RRGGBB" each, as a pixel. */
export function mixed(hex, other, share) {
  const [a, b] = [channels(hex), channels(other)];
  return packed(a.map((value, k) => Math.round(value * (1 - share) + b[k] * share)));
}

/** Whether dark words read better on a colour ("#RRGGBB") than pale ones. */
export function isPale(hex) {
  const [red, green, blue] = channels(hex).map((value) => (value <= 10 ? value / 3294 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.198;
}

/** The pixels' colours for a theme ("light" or "dark"); neighbours of one category differ a little. */
export function pixelColours(data, theme, paper, ink) {
  return {
    shades: data.categories.map((one) => [0, 0.1, 0.2].map((share) => mixed(one[theme], paper, share))),
    edge: data.categories.map((one) => mixed(one[theme], paper, 0.55)),
    cached: mixed(data.cached[theme], ink, 0),
    paper: mixed(paper, paper, 0),
  };
}

/** Where an allocation lies in the picture: rectangles [x, y, width, height], equal columns as one. */
export function runsOf(pick, width, height, one) {
  const found = [];
  for (let x = 0; x < width; x++) {
    let y = 0;
    while (y < height && pick[y * width + x] !== one) y += 1;
    if (y === height) continue;
    let end = y;
    while (end < height && pick[end * width + x] === one) end += 1;
    const last = found[found.length - 1];
    if (last && last[0] + last[2] === x && last[1] === y && last[3] === end - y) last[2] += 1;
    else found.push([x, y, 1, end - y]);
  }
  return found;
}

// ---- segments

const ROW = 15;
const GAP = 2;
const MOST_ROWS = 12;

/** Segments side by side in rows, as words in a text, each as wide as it is big: {height, scale, pieces}.

   A piece is a part of a segment in one row: {segment, x, y, width, height, from, to} with from and to in bytes. */
export function layout(segments, width) {
  const total = segments.reduce((sum, segment) => sum + segment.size, 0);
  const scale = Math.max(total / (width * MOST_ROWS), 1);
  const pieces = [];
  let [x, row] = [0, 0];
  for (const segment of segments) {
    let from = 0;
    const least = Math.max(segment.size / scale, 3);
    const perByte = least / segment.size;
    if (width - x < 3) [x, row] = [0, row + 1];
    while (from < segment.size) {
      const wide = Math.min((segment.size - from) * perByte, width - x);
      const to = wide >= (segment.size - from) * perByte ? segment.size : from + wide / perByte;
      pieces.push({ segment, x, y: row * (ROW + GAP), width: wide, height: ROW, from, to });
      from = to;
      x += wide;
      if (from < segment.size) [x, row] = [0, row + 1];
    }
    x += GAP;
    if (x >= width) [x, row] = [0, row + 1];
  }
  return { height: (row + 1) * (ROW + GAP), scale, pieces };
}

/** Draws what `layout` placed. fills: category -> colour. */
export function drawSegments(context, placed, device, { fills, free, outline, selected }) {
  for (const piece of placed.pieces) {
    context.fillStyle = free;
    context.fillRect(piece.x, piece.y, piece.width, piece.height);
    const perByte = piece.width / (piece.to - piece.from);
    for (const block of piece.segment.blocks) {
      const [low, high] = [Math.max(block.offset, piece.from), Math.min(block.offset + block.size, piece.to)];
      if (low >= high) continue;
      const [x, width] = [piece.x + (low - piece.from) * perByte, (high - low) * perByte];
      context.fillStyle = fills[device.category[block.one]];
      context.globalAlpha = block.waiting ? 0.45 : 1;
      // A hairline of the free colour stays between neighbours that are wide enough.
      context.fillRect(x, piece.y, width > 3 ? width - 0.6 : width, piece.height);
      context.globalAlpha = 1;
      if (block.one === selected) {
        context.strokeStyle = outline;
        context.lineWidth = 2;
        context.strokeRect(x + 1, piece.y + 1, Math.max(width - 2, 1), piece.height - 2);
      }
    }
  }
}

/** What lies at a place: {segment, block or null}, or null. */
export function segmentAt(placed, x, y) {
  const piece = placed.pieces.find((one) => x >= one.x && x < one.x + one.width && y >= one.y && y < one.y + one.height);
  if (!piece) return null;
  const byte = piece.from + ((x - piece.x) / piece.width) * (piece.to - piece.from);
  const block = piece.segment.blocks.find((one) => byte >= one.offset && byte < one.offset + one.size);
  return { segment: piece.segment, block: block ?? null };
}

/** "999 segments, 22.2 GiB; 535 MiB of it free in 212 pieces, the largest 50.0 MiB." */
export function fragmentation(segments) {
  let [total, free, pieces, largest, waiting] = [0, 0, 0, 0, 0];
  for (const segment of segments) {
    total += segment.size;
    let at = 0;
    for (const end of [...segment.blocks, { offset: segment.size, size: 0 }]) {
      const gap = end.offset - at;
      if (gap > 0) [free, pieces, largest] = [free + gap, pieces + 1, Math.max(largest, gap)];
      at = end.offset + end.size;
      if (end.waiting) waiting += end.size;
    }
  }
  if (!segments.length) return "No segments: PyTorch held no memory.";
  const words = `${counted(segments.length, "segment")}, ${human(total)}`;
  const more = waiting ? `; ${human(waiting)} more waits for a stream` : "";
  if (!free) return `${words}; none of it is free${more}.`;
  const split = `in ${counted(pieces, "piece")}, the largest ${human(largest)}`;
  return `${words}; ${human(free)} of it free ${split}${more}.`;
}

// ---- over the stack

/** Axes, marks, the moment and the outline of what is selected. `box` is where the stack lies: {x, y, width, height}. */
export function drawOver(context, box, machine, { ink, quiet, grid, alarm, focus, paper, runs, thin, ratio, font }) {
  const { view, device, position } = machine;
  const xOf = (at) => box.x + ((at - view.x0) / (view.x1 - view.x0)) * box.width;
  const yOf = (size) => box.y + box.height - ((size - view.y0) / (view.y1 - view.y0)) * box.height;
  context.font = font;
  context.fillStyle = quiet;
  context.strokeStyle = grid;
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const size of byteTicks(view.y0, view.y1)) {
    const y = Math.round(yOf(size)) + 0.5;
    context.beginPath();
    context.moveTo(box.x, y);
    context.lineTo(box.x + box.width, y);
    context.stroke();
    context.fillText(byteWord(size), box.x - 7, Math.max(y, 7));
  }
  context.textAlign = "center";
  context.textBaseline = "top";
  for (const event of eventTicks(view.x0, Math.min(view.x1, device.events))) {
    const x = xOf(event + 0.5);
    context.fillRect(x, box.y + box.height, 1, 4);
    const half = context.measureText(count(event)).width / 2;
    context.fillText(count(event), Math.min(x, box.x + box.width - half), box.y + box.height + 6);
  }
  for (const [x, y, width, height] of runs) {
    const [left, top, wide, tall] = [box.x + x / ratio, box.y + y / ratio, width / ratio, height / ratio];
    context.fillStyle = focus;
    context.globalAlpha = 0.4;
    context.fillRect(left, top, wide, tall);
    context.globalAlpha = 1;
    for (const edge of [top, top + tall - 2]) context.fillRect(left, edge, wide, 2);
    // A hairline of the paper's colour, so that the edge is seen on any category.
    context.fillStyle = paper;
    for (const edge of [top - 1, top + tall]) context.fillRect(left, edge, wide, 1);
  }
  if (thin) drawThin(context, box, { xOf, yOf }, thin, { focus, paper });
  drawMarks(context, box, machine, xOf, { quiet, alarm });
  if (position >= view.x0 - 1 && position < view.x1) {
    const x = xOf(position + 0.5);
    context.strokeStyle = ink;
    context.setLineDash([5, 4]);
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, box.y);
    context.lineTo(x, box.y + box.height);
    context.stroke();
    context.setLineDash([]);
    const words = !device.events ? "" : position === device.peak ? "peak" : position ? `event ${count(position - 1)}` : "start";
    const room = context.measureText(words).width + 10;
    const left = x + room > box.x + box.width ? x - room : x;
    context.fillStyle = ink;
    context.textAlign = "left";
    context.textBaseline = "top";
    context.fillText(words, left + 5, box.y + 3);
  }
}

/** What is selected and too thin to have a pixel of its own: a bar as long as it lives, {from, to, bytes}, and a wedge that points at it. */
function drawThin(context, box, { xOf, yOf }, { from, to, bytes }, { focus, paper }) {
  const [left, right] = [Math.max(xOf(from), box.x), Math.min(xOf(to), box.x + box.width)];
  const y = Math.min(Math.max(yOf(bytes), box.y + 2), box.y + box.height - 2);
  if (right < left) return;
  const wide = Math.max(right - left, 3);
  context.fillStyle = paper;
  context.fillRect(left - 1, y - 3, wide + 2, 6);
  context.fillStyle = focus;
  context.fillRect(left, y - 2, wide, 4);
  context.beginPath();
  context.moveTo(left, y);
  context.lineTo(left - 8, y - 6);
  context.lineTo(left - 8, y + 6);
  context.fill();
}

/** Ticks above the axis, with words where they have room; memory that ran out is a line through the picture. */
function drawMarks(context, box, { device, view }, xOf, { quiet, alarm }) {
  let free = -Infinity;
  context.textAlign = "left";
  context.textBaseline = "bottom";
  for (const [position, words, kind] of device.marks) {
    if (!words || position < view.x0 || position > view.x1) continue;
    const x = xOf(position + 0.5);
    const bad = kind === "error";
    context.fillStyle = bad ? alarm : quiet;
    context.fillRect(x, bad ? box.y : box.y - 6, bad ? 1.5 : 1, bad ? box.height : 6);
    const short = words.length > LONGEST_MARK ? `${words.slice(0, LONGEST_MARK - 1)}…` : words;
    const wide = context.measureText(short).width;
    // At the right edge the words stand on the other side of their place.
    const from = x + wide < box.x + box.width ? x + 3 : x - wide - 3;
    if (from < free) continue;
    context.fillText(short, from, box.y - 2);
    free = Math.max(x, from + wide) + 14;
  }
}
