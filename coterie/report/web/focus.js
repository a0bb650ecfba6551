// The method, stage, comparison and client in focus, and what every chart asks of them.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// Up to CROWD methods have a colour each. Of more, nobody could tell the lines apart: the TOP best, the chosen one and
// the one it is compared with are in colour, all others grey until a reader points at them.
const CROWD = 8,
  TOP = 5;
let places = new Map();
function recolour() {
  const few = D.methods.length <= CROWD,
    first = few ? D.methods : ranked(state.stage).slice(0, TOP);
  const names = first.concat(few ? [] : [methodOf(state.method), baseOf(methodOf(state.method)).m]).map((m) => m.name);
  places = new Map([...new Set(names)].map((name, i) => [name, i]));
}
const crowded = () => D.methods.length > CROWD;
const coloured = (m) => places.has(m.name);
const colour = (m) => (coloured(m) ? `var(--m${places.get(m.name) % 10})` : "var(--other)");
const dash = (m) => (coloured(m) && places.get(m.name) >= 5 ? "7 3" : null); // lines differ in more than their colour
// Grey lines first, the chosen one last and above all.
const layer = (m) => (m.name === state.method ? 2 : coloured(m) ? 1 : 0);
const crowdWords = () =>
  crowded()
    ? ` In colour: the ${TOP} best, the chosen method and the one it is compared with. The others are grey: point at ` +
      "one, or choose it from the list."
    : "";
const methodOf = (name) => D.methods.find((m) => m.name === name);
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
// Why a method has no value in a stage, by the metric looked at.
function valueless(m, stage) {
  if (!D.clients.some((c) => c.seen && c.test > 0)) return "No client has test data.";
  const name = label(m, stage) === m.label ? `${m.label} (${stage})` : label(m, stage);
  return m.infinite.includes(stage)
    ? `With ${name}, the test ${looked().title} is not a finite number: its training diverged.`
    : `No client has a value of ${looked().title} on its test data with ${name}.`;
}
// Curves of a method light up together with its name in a legend.
function light(name, on) {
  for (const one of document.querySelectorAll(`[data-curve="${CSS.escape(name)}"]`)) one.classList.toggle("lit", on);
}
function choice(m, stage) {
  return el(
    "li",
    {},
    el(
      "button",
      {
        type: "button",
        title: m.name,
        "data-method": m.name,
        "aria-pressed": String(m.name === state.method),
        onpointerenter: () => light(m.name, true),
        onpointerleave: () => light(m.name, false),
        onfocus: () => light(m.name, true),
        onblur: () => light(m.name, false),
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
          stroke: colour(m),
          "stroke-width": 3,
          "stroke-dasharray": dash(m),
        }),
      ),
      el("span", {}, label(m, stage)),
    ),
  );
}
// The methods in colour, and the grey ones behind a word: each can be chosen.
function legend(list, stage) {
  const shown = list.filter(coloured).sort((a, b) => places.get(a.name) - places.get(b.name)),
    others = list.filter((m) => !coloured(m));
  const names = el(
    "ul",
    { class: "legend" },
    shown.map((m) => choice(m, stage)),
  );
  if (!others.length) return names;
  return el(
    "div",
    {},
    names,
    el(
      "details",
      {
        class: "others",
        open: state.others,
        ontoggle: (event) => {
          state.others = event.target.open;
        },
      },
      el("summary", {}, `${counted(others.length, "other method", "other methods")}, grey`),
      el(
        "ul",
        { class: "legend" },
        others.map((m) => choice(m, stage)),
      ),
    ),
  );
}
// One method's line: a wide invisible one below it catches the pointer, a click chooses the method.
function curve(m, d, tip, look = {}) {
  const group = s(
    "g",
    { class: "curve", "data-curve": m.name },
    s("path", { class: "reach", d, fill: "none", "stroke-width": 12, "data-tip": tip }),
    s("path", {
      class: "line",
      d,
      fill: "none",
      stroke: colour(m),
      "stroke-dasharray": dash(m),
      "stroke-width": layer(m) === 2 ? 2.8 : layer(m) ? 1.7 : 1.1,
      "stroke-linejoin": "round",
      "stroke-linecap": "round",
      ...look,
    }),
  );
  group.addEventListener("click", () => {
    state.method = m.name;
    render();
  });
  return group;
}
