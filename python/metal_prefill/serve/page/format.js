// Numbers as text.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const inBytes = new Intl.NumberFormat("en", { notation: "compact", style: "unit", unit: "byte", unitDisplay: "narrow" });

export const count = (n) => whole.format(n);
export const decimal = (n) => tenths.format(n);
export const bytes = (n) => inBytes.format(n);

/** "1 token", "2 tokens". */
export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

export function seconds(value) {
  if (value >= 10) return `${count(value)} s`;
  if (value >= 1) return `${decimal(value)} s`;
  const ms = 1000 * value;
  return `${ms >= 10 ? count(ms) : decimal(ms)} ms`;
}

export function rate(tokens, time) {
  if (!(time > 0)) return "–";
  const value = tokens / time;
  return `${value >= 100 ? count(value) : decimal(value)} tok/s`;
}

/** The text on one line, cut to a number of characters. */
export function brief(text, most) {
  const line = text.replace(/\s+/g, " ").trim();
  const characters = Array.from(line);
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : line;
}
