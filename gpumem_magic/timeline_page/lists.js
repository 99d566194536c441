/* What is told of a moment in lists: allocations of one stack together, their call paths as a flame graph, and the events around it.
   Pure: numbers in, numbers out. */

const MOST_DEEP = 80;
const NEARLY_ALL = 0.9;

/** Allocations of one category whose stacks read the same as groups, the largest first: {members (the largest first), size, sizes, count}.

   sizes: [asked for, how many], those with the most bytes first. ownerOf: an allocation -> what held it as a whole. */
export function groupsOf(device, some, ownerOf) {
  const found = new Map();
  for (const one of some) {
    const key = [device.category[one], device.evidence[one], device.reason[one], device.alike[device.stack[one]], ownerOf(one)].join("|");
    if (!found.has(key)) found.set(key, []);
    found.get(key).push(one);
  }
  const groups = [...found.values()].map((members) => {
    const sizes = new Map();
    for (const one of members) sizes.set(device.requested[one], (sizes.get(device.requested[one]) ?? 0) + 1);
    return {
      members: members.sort((a, b) => device.requested[b] - device.requested[a] || a - b),
      size: members.reduce((sum, one) => sum + device.requested[one], 0),
      sizes: [...sizes].sort((a, b) => b[0] * b[1] - a[0] * a[1]),
      count: members.length,
    };
  });
  return groups.sort((a, b) => b.size - a.size || a.members[0] - b.members[0]);
}

const part = (word, above) => ({ word, above, size: 0, count: 0, categories: new Map(), parts: new Map() });

/** The call paths of some allocations, outermost frame first: {word, above, size, count, categories: number -> bytes, parts: word ->
   the same}. pathOf: an allocation -> its words. */
export function pathsOf(device, some, pathOf) {
  const root = part("", null);
  for (const one of some) {
    const [size, category] = [device.requested[one], device.category[one]];
    let node = root;
    for (const word of [null, ...pathOf(one).slice(0, MOST_DEEP)]) {
      if (word !== null) {
        if (!node.parts.has(word)) node.parts.set(word, part(word, node));
        node = node.parts.get(word);
      }
      node.size += size;
      node.count += 1;
      node.categories.set(category, (node.categories.get(category) ?? 0) + size);
    }
  }
  return root;
}

/** The category of nearly all bytes in a part; null where several share it. */
export function categoryOf(node) {
  const [category, size] = [...node.categories].reduce((best, one) => (one[1] > best[1] ? one : best), [null, -1]);
  return size >= NEARLY_ALL * node.size ? category : null;
}

/** The part of `root` that has the same words around it as `node` had in an earlier tree; the root where there is none. */
export function sameIn(root, node) {
  const words = [];
  for (let at = node; at?.above; at = at.above) words.unshift(at.word);
  let found = root;
  for (const word of words) {
    if (!found.parts.has(word)) return root;
    found = found.parts.get(word);
  }
  return found;
}

/** Where each part of a flame graph lies: [{node, row, from, share}], with shares of the width. What is around `focus` has all of
   it; parts below `least` are left out. */
export function flameOf(focus, least) {
  const placed = [];
  const around = [];
  for (let at = focus; at; at = at.above) around.unshift(at);
  around.forEach((node, row) => placed.push({ node, row, from: 0, share: 1 }));
  const place = (node, row, from) => {
    let left = from;
    for (const child of [...node.parts.values()].sort((a, b) => b.size - a.size)) {
      const share = child.size / Math.max(focus.size, 1);
      if (share < least) break;
      placed.push({ node: child, row, from: left, share });
      place(child, row + 1, left);
      left += share;
    }
  };
  place(focus, around.length, 0);
  return placed;
}

/** The events around a position, as the allocator's own words: [{event, action, one, size}]; one: the allocation that it is about, or -1.
   extents: `extentEvents`' answer. */
export function eventsAround(device, extents, position, most) {
  const first = Math.max(Math.min(position - 1 - Math.floor(most / 2), device.events - most), 0);
  const marks = new Map(device.marks.filter(([, , kind]) => kind === "error").map(([at, words]) => [at, words]));
  const found = [];
  for (let event = first; event < Math.min(first + most, device.events); event++) {
    const [born, freed, done] = [device.births[event], device.deaths[event], device.ends[event]];
    const one = born >= 0 ? born : freed >= 0 ? freed : done;
    const ended = one >= 0 && device.done[one] === event ? "free_completed" : "free_requested";
    if (one >= 0) found.push({ event, action: born >= 0 ? "alloc" : ended, one, size: device.requested[one] });
    else if (extents.has(event)) found.push({ event, one: -1, ...extents.get(event) });
    else found.push({ event, action: marks.get(event) ?? "other", one: -1, size: 0 });
  }
  return found;
}

/** The events that brought memory from the driver or gave it back: event -> {action, size}. */
export function extentEvents(device) {
  const found = new Map();
  for (const [, size, born, gone, , , expandable] of device.extents) {
    for (const [event, action] of [[born, expandable ? "segment_map" : "segment_alloc"], [gone, expandable ? "segment_unmap" : "segment_free"]]) {
      if (event >= 0) found.set(event, { action, size: size + (found.get(event)?.size ?? 0) });
    }
  }
  return found;
}
