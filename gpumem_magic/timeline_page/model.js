/* What the timeline page knows, without a page: the allocations of a recording, which of them are live where, and the picture
   as pixels. Pure: numbers in, numbers out, so that it is tested without a browser.

   "Position p" is the moment after the first p events. An allocation is live at the positions after its alloc event up to the
   event that frees it. Allocations are stacked by category, then by age, what predates the recording below all; their place in that
   order is their rank. */

export const NEVER = 2 ** 31 - 1;
export const NOTHING = -1; // what lies at a pixel, where it is no allocation
export const CACHED = -2;
const STRIDE = 1024; // a kept list of the live ones every so many positions, so that no jump is long
const BLOCK = 256;
const FEWEST = 8; // positions that a view shows at least

/** Whole numbers below a limit, each in or out, visited in order. */
export class LiveSet {
  constructor(size) {
    this.words = new Uint32Array((size >>> 5) + 1);
    this.groups = new Uint32Array((this.words.length >>> 5) + 1);
  }

  add(rank) {
    this.words[rank >>> 5] |= 1 << (rank & 31);
    this.groups[rank >>> 10] |= 1 << ((rank >>> 5) & 31);
  }

  delete(rank) {
    const word = rank >>> 5;
    this.words[word] &= ~(1 << (rank & 31));
    if (this.words[word] === 0) this.groups[rank >>> 10] &= ~(1 << (word & 31));
  }

  set(words, groups) {
    this.words.set(words);
    this.groups.set(groups);
  }

  /** Writes the members, in order, into `into`; returns how many. */
  list(into) {
    let count = 0;
    for (let g = 0; g < this.groups.length; g++) {
      for (let group = this.groups[g]; group; group &= group - 1) {
        const place = (g << 5) + 31 - Math.clz32(group & -group);
        for (let word = this.words[place]; word; word &= word - 1) into[count++] = (place << 5) + 31 - Math.clz32(word & -word);
      }
    }
    return count;
  }
}

const running = (steps) => {
  let sum = 0;
  return Int32Array.from(steps, (step) => (sum += step));
};

/** One device's recording. `data` is what `timeline_page/data.py` writes; its columns are as long as there are allocations. */
export class Device {
  constructor(data) {
    Object.assign(this, { name: data.name, notes: data.notes, marks: data.marks, reasons: data.reasons, events: data.events });
    this.opensAt = data.opensAt;
    this.statements = data.marks.filter(([, , kind]) => kind === "statement");
    this.stacks = data.stacks;
    [this.heads, this.alike, this.answer] = [data.heads, data.alike, data.answer];
    this.strings = data.strings;
    this.times = data.times.length ? Float64Array.from(data.times) : null;
    this.born = running(data.born);
    const count = (this.count = this.born.length);
    this.freed = Int32Array.from(data.lived, (lived, i) => (lived < 0 ? NEVER : this.born[i] + lived));
    this.done = Int32Array.from(data.waited, (waited, i) => (waited < 0 ? NEVER : this.freed[i] + waited));
    this.size = Float64Array.from(data.size);
    this.requested = Float64Array.from(data.requested);
    this.address = Float64Array.from(data.address);
    this.category = Uint8Array.from(data.category);
    this.evidence = Uint8Array.from(data.evidence);
    this.stack = data.stack;
    this.freedBy = data.freedBy;
    this.reason = data.reason;
    this.stream = data.stream;
    this.holder = data.holder;
    this.extents = data.extents;
    this.present = new Set(this.category);
    const order = Array.from({ length: count }, (_, i) => i);
    const predates = (one) => (this.born[one] < 0 ? 0 : 1);
    order.sort((a, b) => predates(a) - predates(b) || this.category[a] - this.category[b] || a - b);
    this.byRank = Int32Array.from(order);
    this.rank = new Int32Array(count);
    order.forEach((one, rank) => (this.rank[one] = rank));
    this.births = new Int32Array(this.events).fill(-1);
    this.deaths = new Int32Array(this.events).fill(-1);
    this.ends = new Int32Array(this.events).fill(-1); // where a free is complete
    for (let i = 0; i < count; i++) {
      if (this.born[i] >= 0) this.births[this.born[i]] = i;
      if (this.freed[i] >= 0 && this.freed[i] < this.events) this.deaths[this.freed[i]] = i;
      if (this.done[i] >= 0 && this.done[i] < this.events) this.ends[this.done[i]] = i;
    }
    this.hidden = new Set();
    this.shown = new Float64Array(count);
    this.measure();
    this.reserved = this.steps(this.extents.map(([, size, born, gone]) => [born, gone < 0 ? NEVER : gone, size]));
    this.scratch = new Int32Array(count + 1);
    this.sweep = new Sweep(this);
    this.peak = this.highest(0, this.events);
  }

  /** The statement during which an event came, where the recording is of a cell; "" elsewhere. */
  statementAt(event) {
    let [low, high] = [0, this.statements.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.statements[middle][0] <= event) low = middle + 1; else high = middle;
    }
    return low ? this.statements[low - 1][1] : "";
  }

  /** The heights of the stack at every position, of what is not hidden, and where each interval is highest. */
  measure() {
    const lives = [];
    for (let i = 0; i < this.count; i++) {
      const size = this.hidden.has(this.category[i]) ? 0 : this.size[i];
      this.shown[this.rank[i]] = size;
      if (size) lives.push([this.born[i], this.freed[i], size]);
    }
    this.height = this.steps(lives);
    this.tops = [];
    for (let p = 0; p <= this.events; p += BLOCK) this.tops.push(this.scan(p, Math.min(p + BLOCK - 1, this.events)));
  }

  /** The sum of sizes at every position. lives: [born, freed, size]. */
  steps(lives) {
    const sums = new Float64Array(this.events + 1);
    for (const [born, freed, size] of lives) {
      if (freed < 0) continue;
      sums[born + 1] += size;
      if (freed < this.events) sums[freed + 1] -= size;
    }
    for (let p = 1; p <= this.events; p++) sums[p] += sums[p - 1];
    return sums;
  }

  hide(category, hidden) {
    if (hidden) this.hidden.add(category);
    else this.hidden.delete(category);
    this.measure();
    this.sweep.weigh();
  }

  scan(first, last) {
    let best = first;
    for (let p = first + 1; p <= last; p++) if (this.height[p] > this.height[best]) best = p;
    return best;
  }

  /** The first position with the highest stack among first..last. */
  highest(first, last) {
    const [from, to] = [Math.ceil(first / BLOCK), Math.floor((last + 1) / BLOCK)];
    if (from >= to) return this.scan(first, last);
    let best = this.scan(first, Math.max(from * BLOCK - 1, first));
    for (let b = from; b < to; b++) if (this.height[this.tops[b]] > this.height[best]) best = this.tops[b];
    if (to * BLOCK <= last) {
      const rest = this.scan(to * BLOCK, last);
      if (this.height[rest] > this.height[best]) best = rest;
    }
    return best;
  }

  isLive(one, position) {
    return this.born[one] < position && position <= this.freed[one];
  }

  /** The live allocations at a position that are not hidden, from the bottom of the stack to its top. */
  stackAt(position) {
    this.sweep.moveTo(position);
    const count = this.sweep.live.list(this.scratch);
    const found = [];
    for (let k = 0; k < count; k++) {
      const one = this.byRank[this.scratch[k]];
      if (!this.hidden.has(this.category[one])) found.push(one);
    }
    return found;
  }

  /** Bytes at a position: asked for, by category; the blocks' rounding; allocated; reserved. */
  sums(position, categories) {
    const sizes = new Array(categories).fill(0);
    let [asked, allocated] = [0, 0];
    this.sweep.moveTo(position);
    const count = this.sweep.live.list(this.scratch);
    for (let k = 0; k < count; k++) {
      const one = this.byRank[this.scratch[k]];
      sizes[this.category[one]] += this.requested[one];
      asked += this.requested[one];
      allocated += this.size[one];
    }
    return { sizes, rounding: allocated - asked, allocated, reserved: this.reserved[position] };
  }

  /** Where an allocation lies in the stack at a position at which it is live: [bytes beneath it, its own]. */
  placeOf(one, position) {
    let beneath = 0;
    for (const other of this.stackAt(position)) {
      if (other === one) break;
      beneath += this.size[other];
    }
    return [beneath, this.size[one]];
  }

  /** The allocations at a position whose words have a text in them, in any case. words: an allocation -> a text. */
  matching(position, text, words) {
    const sought = text.toLowerCase();
    const live = this.stackAt(position);
    return sought ? live.filter((one) => words(one).toLowerCase().includes(sought)) : live;
  }

  /** The segments at a position, by address, each with its blocks: {one, offset, size, waiting}; what is between is free. */
  segmentsAt(position) {
    const there = this.extents.filter(([, , born, gone]) => born < position && position <= (gone < 0 ? NEVER : gone));
    there.sort((a, b) => a[0] - b[0]);
    const segments = [];
    for (const [address, size, , , stream, pool, expandable, stack] of there) {
      const last = segments[segments.length - 1];
      const touches = last && last.address + last.size === address && last.stream === stream && last.pool === pool;
      if (touches && expandable && last.expandable) last.size += size;
      else segments.push({ address, size, stream, pool, expandable, stack, blocks: [], used: 0 });
    }
    const used = [];
    for (let i = 0; i < this.count; i++) if (this.born[i] < position && position <= this.done[i]) used.push(i);
    used.sort((a, b) => this.address[a] - this.address[b]);
    let s = 0;
    for (const one of used) {
      while (s < segments.length && segments[s].address + segments[s].size <= this.address[one]) s += 1;
      if (s === segments.length) break;
      const segment = segments[s];
      const offset = this.address[one] - segment.address;
      if (offset < 0) continue;
      const size = Math.min(this.size[one], segment.size - offset);
      segment.blocks.push({ one, offset, size, waiting: position > this.freed[one] });
      segment.used += size;
    }
    return segments;
  }
}

/** The set of live allocations, moved forwards and backwards through the events.

   weights: what the shown ones in each word of the set add up to, so that words too small to be seen are passed over. */
class Sweep {
  constructor(device) {
    this.device = device;
    this.live = new LiveSet(device.count);
    this.weights = new Float64Array(this.live.words.length);
    this.position = 0;
    this.kept = [];
    for (let i = 0; i < device.count; i++) if (device.isLive(i, 0)) this.live.add(device.rank[i]);
    this.stride = Math.max(STRIDE, Math.ceil(device.events / 128));
    this.keep();
    for (let event = 0; event < device.events; event++) {
      this.forward(event);
      if ((event + 1) % this.stride === 0) this.keep();
    }
    this.position = device.events;
    this.weigh();
  }

  weigh() {
    this.weights.fill(0);
    const count = this.live.list(this.device.scratch);
    for (let k = 0; k < count; k++) this.weights[this.device.scratch[k] >>> 5] += this.device.shown[this.device.scratch[k]];
  }

  keep() {
    this.kept.push([this.live.words.slice(), this.live.groups.slice()]);
  }

  forward(event) {
    const { births, deaths } = this.device;
    if (births[event] >= 0) this.add(births[event]);
    if (deaths[event] >= 0) this.remove(deaths[event]);
  }

  backward(event) {
    const { births, deaths } = this.device;
    if (deaths[event] >= 0) this.add(deaths[event]);
    if (births[event] >= 0) this.remove(births[event]);
  }

  add(one) {
    const rank = this.device.rank[one];
    this.live.add(rank);
    this.weights[rank >>> 5] += this.device.shown[rank];
  }

  remove(one) {
    const rank = this.device.rank[one];
    this.live.delete(rank);
    this.weights[rank >>> 5] -= this.device.shown[rank];
  }

  moveTo(position) {
    const nearest = Math.floor(position / this.stride);
    if (Math.abs(position - this.position) > this.stride) {
      this.live.set(...this.kept[nearest]);
      this.position = nearest * this.stride;
      this.weigh();
    }
    while (this.position < position) this.forward(this.position++);
    while (this.position > position) this.backward(--this.position);
  }
}

// ---- views: which positions [x0, x1) and bytes [y0, y1) are in sight

export function wholeView(device) {
  const top = Math.max(device.hidden.size ? 0 : highestOf(device.reserved), device.height[device.highest(0, device.events)], 1);
  return { x0: 0, x1: device.events + 1, y0: 0, y1: top * 1.04 };
}

const highestOf = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 0);

function held(low, high, least, most) {
  const span = Math.min(Math.max(high - low, least), most);
  const start = Math.min(Math.max((low + high - span) / 2, 0), most - span);
  return [start, start + span];
}

/** The view with a part of `whole` that is `factor` as long, around a share (0..1) of it that stays where it is. */
export function zoomed(view, whole, factor, share, axis = "x") {
  const [a, b] = [`${axis}0`, `${axis}1`];
  const span = (view[b] - view[a]) * factor;
  const middle = view[a] + (view[b] - view[a]) * share;
  const least = axis === "x" ? Math.min(FEWEST, whole.x1) : 4096;
  const length = Math.min(Math.max(span, least), whole[b]);
  const [low, high] = held(middle - length * share, middle + length * (1 - share), least, whole[b]);
  return { ...view, [a]: low, [b]: high };
}

export function moved(view, whole, x, y = 0) {
  const [x0, x1] = held(view.x0 + x, view.x1 + x, 0, whole.x1);
  const [y0, y1] = held(view.y0 + y, view.y1 + y, 0, whole.y1);
  return { x0, x1, y0, y1 };
}

/** The view with a position in sight; itself where it is. */
export function showing(view, whole, position) {
  if (position >= view.x0 && position < view.x1) return view;
  return moved(view, whole, position + 0.5 - (view.x0 + view.x1) / 2);
}

/** For each column of pixels the position that it shows: the one with the highest stack in it, so that no peak is lost. */
export function columnsOf(device, view, width) {
  const found = new Int32Array(width);
  const step = (view.x1 - view.x0) / width;
  for (let column = 0; column < width; column++) {
    const first = Math.min(Math.max(Math.floor(view.x0 + column * step), 0), device.events);
    const last = Math.min(Math.max(Math.ceil(view.x0 + (column + 1) * step) - 1, first), device.events);
    found[column] = last > first ? device.highest(first, last) : first;
  }
  return found;
}

/** Draws the stack into `pixels` (32-bit colours, rows from the top), and what lies at each pixel into `pick`.

   colours: {shades: category -> three colours, edge: category -> colour of a block's upper edge, cached, paper}. */
export function paint(device, view, width, height, colours, pixels, pick) {
  const { byRank, category, shown, hidden, sweep } = device;
  const { words, groups } = sweep.live;
  const positions = columnsOf(device, view, width);
  const perPixel = (view.y1 - view.y0) / height;
  let before = -1;
  for (let column = 0; column < width; column++) {
    const position = positions[column];
    if (position === before) {
      for (let at = column; at < pixels.length; at += width) {
        pixels[at] = pixels[at - 1];
        pick[at] = pick[at - 1];
      }
      continue;
    }
    before = position;
    sweep.moveTo(position);
    let bytes = -view.y0;
    let row = 0; // filled so far, from the bottom
    let next = perPixel / 2; // from here on the row is more than half full
    for (let g = 0; g < groups.length && row < height; g++) {
      for (let group = groups[g]; group; group &= group - 1) {
        const place = (g << 5) + 31 - Math.clz32(group & -group);
        if (bytes + sweep.weights[place] < next) {
          bytes += sweep.weights[place];
          continue;
        }
        for (let word = words[place]; word; word &= word - 1) {
          const rank = (place << 5) + 31 - Math.clz32(word & -word);
          bytes += shown[rank];
          if (bytes < next) continue;
          const end = Math.min(Math.round(bytes / perPixel), height);
          const one = byRank[rank];
          const colour = colours.shades[category[one]][one % 3];
          const edge = end - row > 3 ? end - 1 : -1;
          for (; row < end; row++) {
            const at = (height - 1 - row) * width + column;
            pixels[at] = row === edge ? colours.edge[category[one]] : colour;
            pick[at] = one;
          }
          next = (row + 0.5) * perPixel;
        }
      }
    }
    const reserved = hidden.size ? row : Math.min(Math.round((device.reserved[position] - view.y0) / perPixel), height);
    for (; row < height; row++) {
      const at = (height - 1 - row) * width + column;
      pixels[at] = row < reserved ? colours.cached : colours.paper;
      pick[at] = row < reserved ? CACHED : NOTHING;
    }
  }
}
