// The mean over clients by round, by bytes and by seconds.

// Clients' own curves are kept for the metric that decides.
const tracked = () => {
  const own = methodOf(state.method).tracks;
  return state.client >= 0 && looked() === decides() && own && own[state.stage] ? own[state.stage][state.client] : null;
};
const WIDE = 20; // errors that differ by more than this factor are drawn on a logarithmic axis, as in the figures
// From the lowest to the highest value drawn, and how it is drawn.
function heights(curves, own) {
  const all = curves.flatMap(({ y }) => y.mean).concat(own || []).filter(known),
    [least, most] = extent(all);
  if (!looked().higher && !looked().percent && least > 0 && most > WIDE * least)
    return { low: least / 1.2, high: most * 1.2, log: true };
  const late = curves.flatMap(({ y }) => y.mean.slice(Math.floor(y.mean.length / 2))).filter(known),
    [low, high] = domain(all);
  if (!late.length) return { low, high };
  // The way from a fresh model would flatten what matters; the second half of every curve stays in view.
  const [from, to] = domain(late.concat(own || []));
  return looked().higher
    ? { low: Math.max(low, from - 0.8 * (high - from)), high }
    : { low, high: Math.min(high, to + 0.8 * (to - low)) };
}
// Names at the ends of the curves in colour, moved apart where they would touch.
function endNames(svg, ends, x, top, bottom) {
  const gap = 14;
  ends.sort((a, b) => a.y - b.y);
  let last = top - gap;
  for (const one of ends) {
    one.at = Math.max(one.y, last + gap);
    last = one.at;
  }
  for (let k = ends.length - 1, next = bottom + gap; k >= 0; k--) {
    ends[k].at = Math.min(ends[k].at, next - gap);
    next = ends[k].at;
  }
  for (const { m, y, at } of ends)
    svg.append(
      s("path", {
        d: `M${x + 3} ${y.toFixed(1)}L${x + 10} ${at.toFixed(1)}H${x + 16}`,
        fill: "none",
        stroke: colour(m),
        "stroke-width": 1.4,
      }),
      s(
        "text",
        { x: x + 20, y: at + 4, class: m.name === state.method ? "on" : "ink", "data-curve": m.name },
        short(label(m, state.stage), 18),
      ),
    );
}
function convergence() {
  const axes = {
    rounds: ["by round", (v) => String(v), "round"],
    bytes: ["by bytes", bytes, "bytes sent by all clients and the server together"],
    seconds: ["by seconds", seconds, "seconds of training"],
  };
  const having = D.methods.filter((m) => seen(m).curve[state.stage]);
  const curves = having
    .map((m) => ({ m, x: m.spent[state.axis], y: seen(m).curve[state.stage] }))
    .filter(({ y }) => y.mean.some(known));
  if (!curves.length) {
    section("convergence", "Convergence", null, nothing(valueless(methodOf(state.method), state.stage)));
    return;
  }
  const own = tracked(),
    { low, high, log } = heights(curves, own);
  const body = chart(`Mean over clients ${axes[state.axis][0]}, ${state.stage}`, (width) => {
    const named = width >= 620 && state.axis === "rounds",
      height = Math.min(400, Math.max(270, width * 0.45)),
      left = log ? 56 : 46,
      right = width - (named ? 158 : 12),
      bottom = height - 42;
    const svg = canvas(width, height);
    const last = Math.max(0, ...curves.map(({ x }) => x[x.length - 1] || 0)),
      most = last || 1,
      x = scale([0, most], [left + 4, right]),
      straight = scale(log ? [Math.log(low), Math.log(high)] : [low, high], [bottom, 10]),
      y = log ? (v) => straight(Math.log(v)) : straight;
    yAxis(svg, y, log ? logTicks(low, high, 7) : ticks(low, high, 6), left, right, log ? plainly : fmt);
    const across = last ? ticks(0, most, width < 500 ? 4 : 7) : [0];
    xAxis(
      svg,
      x,
      state.axis === "rounds" ? across.filter(Number.isInteger) : across,
      bottom,
      axes[state.axis][1],
    );
    svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, axes[state.axis][2]));
    svg.append(s("text", { x: 0, y: height - 4 }, `mean ${measured()}`));
    const clip = "clip" + Math.random().toString(36).slice(2);
    svg.append(
      s("clipPath", { id: clip }, s("rect", { x: left - 2, y: 4, width: right - left + 8, height: bottom - 2 })),
    );
    const area = s("g", { "clip-path": `url(#${clip})` }),
      ends = [];
    svg.append(area);
    for (const { m, x: at, y: on } of curves.slice().sort((a, b) => layer(a.m) - layer(b.m))) {
      const focus = m.name === state.method,
        points = at.map((v, i) => [x(v), known(on.mean[i]) ? y(on.mean[i]) : null]),
        there = points.map((p, i) => i).filter((i) => known(points[i][1])),
        end = there[there.length - 1];
      if (focus && m.seeds.length > 1) {
        const up = at.map((v, i) => [x(v), y(on.high[i])]).filter(([, b]) => known(b)),
          down = at
            .map((v, i) => [x(v), y(on.low[i])])
            .filter(([, b]) => known(b))
            .reverse();
        area.append(s("path", { d: path([...up, ...down]) + "Z", fill: colour(m), opacity: 0.15 }));
      }
      const told = (i) =>
        `${label(m, state.stage)}\nround ${m.spent.rounds[i]}: ${fmt(on.mean[i])}${unit()}\n` +
        `${bytes(m.spent.bytes[i])}, ${seconds(m.spent.seconds[i])}`;
      const group = curve(m, path(points), told(end));
      for (const i of coloured(m) || there.length === 1 ? there : []) {
        const alone = !known((points[i - 1] || [])[1]) && !known((points[i + 1] || [])[1]); // no line leads there
        group.append(
          s("circle", {
            class: alone ? "dot" : null,
            cx: points[i][0],
            cy: points[i][1],
            r: alone ? 4 : 7,
            fill: alone ? colour(m) : "transparent",
            "data-tip": told(i),
          }),
        );
      }
      area.append(group);
      const [far, near] = points[end];
      if (coloured(m) && far > right - 2) ends.push({ m, y: Math.min(bottom, Math.max(12, near)) });
    }
    if (named) endNames(svg, ends, right, 14, bottom - 2);
    const focus = methodOf(state.method);
    if (own) {
      const where = focus.tracks.rounds.map(
        (t) =>
          focus.spent[state.axis][
            Math.max(
              0,
              focus.spent.rounds.findIndex((r) => r >= t),
            )
          ],
      );
      area.append(
        s("path", {
          d: path(where.map((v, i) => [x(v), known(own[i]) ? y(own[i]) : null])),
          fill: "none",
          stroke: "var(--ink)",
          "stroke-width": 1.6,
          "stroke-dasharray": "2 3",
          "pointer-events": "none",
        }),
      );
    }
    return svg;
  });
  const stops = curves.filter(({ y }) => !known(y.mean[y.mean.length - 1])).map(({ m }) => m.label),
    gone = having.filter((m) => !curves.some((one) => one.m === m)),
    several = D.methods.some((m) => m.seeds.length > 1);
  section(
    "convergence",
    "Convergence",
    `Mean over clients of the test ${measured()} (${direction()}), ${state.stage}` +
      (several ? ", means over seeds; the shade is the range over seeds of the chosen method." : ".") +
      (log ? " The axis is logarithmic." : "") +
      crowdWords() +
      (own ? ` The dotted line is client ${D.clients[state.client].name} with ${focusName()}.` : "") +
      (stops.length ? ` A curve that stops early has no finite mean after that: ${stops.join(", ")}.` : "") +
      (gone.length ? ` Not drawn, as no round has a finite mean: ${gone.map((m) => m.label).join(", ")}.` : ""),
    el(
      "div",
      { class: "panel" },
      el(
        "div",
        { class: "tools" },
        choose(
          Object.entries(axes).map(([v, [t]]) => [v, t]),
          state.axis,
          (v) => {
            state.axis = v;
            convergence();
            document.querySelector(`#convergence .seg [aria-pressed="true"]`).focus();
          },
          "Horizontal axis",
        ),
      ),
      body,
      legend(having, state.stage),
    ),
  );
}
