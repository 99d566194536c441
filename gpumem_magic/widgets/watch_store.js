/* What the page of a watch knows, in numbers: words for sizes and times, rows that never outgrow their room, the state of things.

   A row is [time, a size for each layer, allocated, reserved, device_used, peak]: seconds since the epoch, bytes, NaN where
   unavailable. Nothing here needs a browser. */

import { GIB, MIB } from "../units.js";

export const STALE_PERIODS = 3;
const STALE_AT_LEAST = 2500; // ms: a busy interpreter is late now and then

// ---- words

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

/** One row for each of `columns` intervals of time, the highest, and the last row: no peak is lost. */
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
export function withoutGaps(rows, longest) {
  const found = [];
  let last = -Infinity;
  for (const row of rows) {
    if (row[0] - last > longest) found.push([]);
    found[found.length - 1].push(row);
    last = row[0];
  }
  return found;
}

/** How far apart two rows may be without a pause between them, in seconds: a few samples, and what a busy machine is late. */
export function longestGap(rows, period, perRow) {
  const thinned = rows.length ? (rows[rows.length - 1][0] - rows[0][0]) / rows.length : 0;
  return Math.max(2.5, 5 * period, 4 * period * perRow, 3 * thinned);
}

/** The place of the row nearest to a time; -1 without rows. */
export function nearest(rows, time) {
  let best = -1;
  for (let i = 0; i < rows.length; i++) {
    if (best < 0 || Math.abs(rows[i][0] - time) <= Math.abs(rows[best][0] - time)) best = i;
  }
  return best;
}
