/* Bytes to words in the pages, as `units.py` writes them. MiB = 2^20 and GiB = 2^30. */

export const MIB = 2 ** 20;
export const GIB = 2 ** 30;

/** Bytes with the unit that keeps three or four digits: 512 B, 8.1 MiB, 1,278 MiB, 14.7 GiB. */
export function human(size) {
  const fixed = (x) => x.toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
  if (size < 1024) return `${size} B`;
  if (size < MIB) return `${fixed(size / 1024)} KiB`;
  if (size < 100 * MIB) return `${fixed(size / MIB)} MiB`;
  if (size < 10 * GIB) return `${Math.round(size / MIB).toLocaleString("en")} MiB`;
  return `${fixed(size / GIB)} GiB`;
}
