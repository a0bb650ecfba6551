// Numbers and the words for them; they are rounded as in the tables of the command line.

const known = (v) => v !== null && v !== undefined && Number.isFinite(v);
const mean = (list) => {
  const x = list.filter(known);
  return x.length ? x.reduce((a, b) => a + b, 0) / x.length : null;
};
const sum = (list) => list.reduce((a, b) => a + b, 0);
const extent = (list) => {
  const x = list.filter(known);
  return [Math.min(...x), Math.max(...x)];
};
function quantile(sorted, q) {
  const at = (sorted.length - 1) * q,
    low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}
// A metric's scale says how its values are read: its title, whether they are shares (in %), whether higher is better.
const decides = () => D.metrics[0];
const looked = () => D.metrics.find((one) => one.name === state.metric) || decides();
const scaled = (v, of = looked()) => (of.percent ? 100 * v : v);
const fine = (of = looked()) => (of.percent ? 2 : 3); // decimals of a mean over clients
function fmt(v, digits, of = looked()) {
  if (!known(v)) return "–";
  const x = scaled(v, of);
  if (digits === undefined) digits = of.percent ? 1 : Math.abs(x) >= 100 ? 0 : 3;
  return written(x, digits);
}
// From 100,000 on as a power of ten: the error of a model that diverged has more digits than anybody reads.
function written(x, digits) {
  const text =
    Math.abs(x) >= 1e5
      ? x.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2")
      : rounded(x, digits).toFixed(digits);
  return text.replace(/^-/, "−");
}
// Halves away from zero, also where 88.25 was computed as 88.24999999999999: as the tables of the command line do it.
function rounded(x, digits) {
  const whole = Math.round(+(Math.abs(x) * 10 ** digits).toFixed(9 - digits));
  return whole ? (Math.sign(x) * whole) / 10 ** digits : 0;
}
// How much better `to` is than `from`, as the difference of the two numbers as they are shown.
function gained(to, from, digits = looked().percent ? 1 : 3) {
  if (!known(to) || !known(from)) return "–";
  const d = rounded((looked().higher ? 1 : -1) * (rounded(scaled(to), digits) - rounded(scaled(from), digits)), digits);
  return (d > 0 ? "+" : d < 0 ? "−" : "±") + written(Math.abs(d), digits);
}
const measured = (of = looked()) => of.title + (of.percent ? " in %" : "");
const direction = (of = looked()) => `${of.higher ? "higher" : "lower"} is better`;
const unit = (of = looked()) => (of.percent ? " %" : "");
const points = (of = looked()) => (of.percent ? " points" : "");
const signed = (v, digits, of = looked()) =>
  known(v) ? (v > 0 ? "+" : v < 0 ? "" : "±") + fmt(v, digits, of) : "–";
function bytes(n) {
  if (!known(n)) return "–";
  for (const u of ["B", "kB", "MB", "GB"]) {
    if (n < 999.5) return (u === "B" || n >= 9.95 ? n.toFixed(0) : n.toFixed(1)) + " " + u;
    n /= 1000;
  }
  return n.toFixed(1) + " TB";
}
function seconds(t) {
  if (!known(t)) return "–";
  return t < 9.95
    ? t.toFixed(1) + " s"
    : t < 120
      ? t.toFixed(0) + " s"
      : t < 7200
        ? (t / 60).toFixed(0) + " min"
        : (t / 3600).toFixed(1) + " h";
}
function ticks(low, high, count) {
  const span = high - low || 1,
    rough = span / Math.max(1, count),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++)
    found.push(+(i * step).toPrecision(12));
  return found;
}
// 1, 2, 5, 10, ... on a logarithmic axis; of very many the powers of ten alone, thinned.
function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)),
    last = Math.ceil(Math.log10(high)),
    powers = Array.from({ length: last - first + 1 }, (_, k) => 10 ** (first + k));
  const all = powers.flatMap((p) => [p, 2 * p, 5 * p]).filter((v) => v >= low && v <= high);
  const some = all.length <= count ? all : powers.filter((v) => v >= low && v <= high);
  return some.filter((_, k) => k % Math.ceil(some.length / count) === 0).map((v) => +v.toPrecision(12));
}
const plainly = (v) => (v >= 1e5 || v < 1e-4 ? v.toExponential(0) : String(v));
const axisDigits = (values, of = looked()) => {
  const step = values.length > 1 ? Math.abs(scaled(values[1] - values[0], of)) : 1;
  return Math.max(0, Math.min(of.percent ? 3 : 6, Math.ceil(-Math.log10(step) - 1e-9)));
};
const scale = (from, to) => (v) => to[0] + ((v - from[0]) / (from[1] - from[0] || 1)) * (to[1] - to[0]);
const better = (a, b) => (looked().higher ? a - b : b - a);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
// A count with its noun: 1 round, 2 rounds.
const counted = (n, noun, plural = noun + "s") => `${n} ${n === 1 ? noun : plural}`;
