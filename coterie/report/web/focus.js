// The method, stage, comparison and client in focus, and what every chart asks of them.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (i) => `var(--m${i % 10})`; // as many as page.css has, which stay apart for colour-blind readers
const dash = (i) => [null, "7 3", "2 3", "8 3 2 3"][Math.floor(i / 5) % 4]; // and twice as many with the dashes
const methodOf = (name) => D.methods.find((m) => m.name === name);
const place = (name) => D.methods.findIndex((m) => m.name === name);
const label = (m, stage) => m.labels[stage];
const unseenOf = (stage) => D.stages.find((one) => one.name === stage).unseen;
const plain = (name) => name.split(/[:+]/)[0];
const className = (k) => (D.labels && D.labels[k] !== undefined ? D.labels[k] : String(k));
const stages = () => D.stages.map((one) => one.name).filter((stage) => D.methods.some((m) => m.values[stage]));
const seen = (m) => (looked() === decides() ? m : m.watched[looked().name]); // a method by the metric looked at
const value = (m, stage, i) => {
  const own = seen(m).values[D.clients[i].seen ? stage : unseenOf(stage)];
  return own ? own[i] : null;
};
function bases() {
  const found = [];
  const global = D.methods.find((m) => m.name === "fedavg") || D.methods.find((m) => plain(m.name) === "fedavg");
  const local = D.methods.find((m) => plain(m.name) === "local");
  if (global) found.push([`${global.name}|${SERVED}`, global.label + ", the global model"]);
  if (global && global.values[ADAPTED]) found.push([`${global.name}|${ADAPTED}`, label(global, ADAPTED)]);
  if (local) found.push([`${local.name}|${SERVED}`, local.label + ", no sharing"]);
  found.push([`|${SERVED}`, `itself, as ${SERVED}`]);
  return found;
}
function baseOf(method) {
  const [name, stage] = [
    state.base.slice(0, state.base.lastIndexOf("|")),
    state.base.slice(state.base.lastIndexOf("|") + 1),
  ];
  return { m: name ? methodOf(name) : method, stage };
}
function pairs() {
  const m = methodOf(state.method),
    base = baseOf(m);
  return D.clients
    .map((c, i) => ({ i, seen: c.seen, from: value(base.m, base.stage, i), to: value(m, state.stage, i) }))
    .filter((p) => known(p.from) && known(p.to))
    .map((p) => ({ ...p, gain: better(p.to, p.from) }));
}
const baseName = () => {
  const b = baseOf(methodOf(state.method));
  return label(b.m, b.stage) + (b.m.label === label(b.m, b.stage) ? ` (${b.stage})` : "");
};
const focusName = () => {
  const m = methodOf(state.method),
    l = label(m, state.stage);
  return l === m.label ? `${l} (${state.stage})` : l;
};
function domain(list, pad, of = looked()) {
  let [low, high] = extent(list);
  if (!Number.isFinite(low)) return [0, 1];
  const air = (high - low) * (pad || 0.05) || Math.abs(high) * 0.05 || 0.01;
  low -= air;
  high += air;
  return of.percent ? [Math.max(-0.012, low), Math.min(1.012, high)] : [low, high];
}
const lineOf = (m, stage) => seen(m).lines.find((l) => l.stage === stage) || {};
const legend = (list, stage) =>
  el(
    "ul",
    { class: "legend" },
    list.map((m) =>
      el(
        "li",
        {},
        el(
          "button",
          {
            type: "button",
            title: m.name,
            "aria-pressed": String(m.name === state.method),
            onclick: () => {
              state.method = m.name;
              render();
            },
          },
          s(
            "svg",
            { viewBox: "0 0 22 8", "aria-hidden": "true" },
            s("line", {
              x1: 0,
              x2: 22,
              y1: 4,
              y2: 4,
              stroke: colour(place(m.name)),
              "stroke-width": 3,
              "stroke-dasharray": dash(place(m.name)),
            }),
          ),
          el("span", {}, label(m, stage)),
        ),
      ),
    ),
  );
