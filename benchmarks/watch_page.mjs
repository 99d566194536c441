// What the page of a watch keeps after a day at 10 Hz: node --expose-gc benchmarks/watch_page.mjs [samples]
import make from "../gpumem_magic/widgets/watch.js";

const samples = Number(process.argv[2] ?? 864_000);
const LAYERS = 15;
const columns = ["time", ...Array.from({ length: LAYERS }, (_, i) => `layer${i}`), "allocated", "reserved", "device_used", "peak"];
const facts = { columns, capacity: 4096, period: 0.1, started: 0, state: "running", series: [], layers: [] };
let hear;
const model = { get: (name) => facts[name], send() {}, off() {}, on: (_, act) => { hear = act; } };
make().initialize({ model });

const used = () => {
  globalThis.gc();
  const { heapUsed, external, arrayBuffers } = process.memoryUsage();
  return heapUsed + Math.max(external, arrayBuffers);
};
const before = used();
let highest = before;
for (let i = 1; i <= samples; i++) {
  const numbers = new Float64Array(columns.length);
  for (let j = 1; j < columns.length; j++) numbers[j] = 1e6 * ((i * j) % 97);
  numbers[0] = i / 10;
  const message = { k: "rows", n: i, s: [0] };
  if (i % 5 === 0) message.m = [{ time: i / 10, kind: i % 3000 ? "checkpoint" : "mark", label: `loss.backward() of turn ${i}`, line: 7, count: 3 }];
  hear(message, [new DataView(numbers.buffer)]);
  if (i % Math.ceil(samples / 20) === 0) highest = Math.max(highest, used());
}
console.log(JSON.stringify({ samples, before, after: used(), highest }));
