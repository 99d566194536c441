/* Bytes to words in the pages, as `units.py` writes them. MiB = 2^20 and GiB = 2^30. */

export const MIB = 2 ** 20;
export const GIB = 2 ** 30;

/** "1 segment", "1,024 segments". */
export function counted(number, one) {
  return `${number.toLocaleString("en")} ${one}${number === 1 ? "" : "s"}`;
}

/** To the nearest whole number, and halves to the even one, as Python rounds. */
const rounded = (x) => {
  const nearest = Math.round(x);
  return (Math.abs(x % 1) === 0.5 && nearest % 2 ? nearest - 1 : nearest) + 0;
};

/** Whole MiB with thousands separators (no unit); "n/a" for what is not known. */
export function mib(size, signed = false) {
  if (size === null || size === undefined) return "n/a";
  const whole = rounded(size / MIB);
  return `${signed && whole >= 0 ? "+" : ""}${whole.toLocaleString("en")}`;
}

/** Bytes for a sentence beside a report's: whole MiB as there. */
export const amount = (size) => (size < 100 * MIB ? human(size) : `${mib(size)} MiB`);

/** Bytes with the unit that keeps three or four digits: 512 B, 8.1 MiB, 1,278 MiB, 14.7 GiB. */
export function human(size) {
  const fixed = (x) => (rounded(10 * x) / 10).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  if (size < 1024) return `${size} B`;
  if (size < MIB) return `${fixed(size / 1024)} KiB`;
  if (size < 100 * MIB) return `${fixed(size / MIB)} MiB`;
  if (size < 10 * GIB) return `${mib(size)} MiB`;
  return `${fixed(size / GIB)} GiB`;
}
