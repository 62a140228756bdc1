// The ticks of a chart's value axis.

/** From 0 to at least `highest`, about four steps of 1, 2 or 5 times a power of ten; `isWhole`: no step below 1. */
export function ticks(highest, isWhole) {
  const rough = highest / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const round = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const step = isWhole ? Math.max(1, round) : round;
  return Array.from({ length: Math.ceil((highest / step) * 0.999) + 1 }, (_, i) => i * step);
}
