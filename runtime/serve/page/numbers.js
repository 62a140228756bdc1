// Numbers as the page writes them.

const NONE = "–";
const format = (value, digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }).format(value);
const significant = (value) => format(value, value < 10 ? 2 : value < 100 ? 1 : 0);

export const count = (value) => (value === null ? NONE : format(value, 0));
export const rate = (value) => (value === null ? NONE : format(value, value < 100 ? 1 : 0));
export const percent = (value) => (value === null ? NONE : `${significant(100 * value)}%`);

export function seconds(value) {
  if (value === null) return NONE;
  return value < 1 ? `${significant(1000 * value)} ms` : `${significant(value)} s`;
}
