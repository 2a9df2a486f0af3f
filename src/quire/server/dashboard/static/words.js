// Numbers and states in words, the same as the rest of Quire says them.

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = Math.abs(count), unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  const digits = unit === 0 ? 0 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return `${count < 0 ? "−" : ""}${value.toFixed(digits)} ${units[unit]}`;
}

export const number = (value) => Math.round(value).toLocaleString("en");

export const several = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// In the order in which they are explained.
export const STATES = {
  s: { name: "shared", means: "several sequences read it; there is one copy" },
  h: { name: "held", means: "one sequence’s" },
  r: { name: "spare", means: "a sequence’s, and nothing in it can be read: not yet, or no more" },
  c: { name: "cached", means: "no sequence’s now; a prompt that begins alike finds it" },
  e: { name: "empty", means: "has pages, and nothing in them" },
  ".": { name: "not committed", means: "an address without pages: it costs nothing" },
};
