// The mean over clients by round, by bytes and by seconds.

// Clients' own curves are kept for the metric that decides.
const tracked = () => state.client >= 0 && methodOf(state.method).tracks && looked() === decides();
function convergence() {
  const axes = {
    rounds: ["by round", (v) => String(v), "round"],
    bytes: ["by bytes", bytes, "bytes sent by all clients and the server together"],
    seconds: ["by seconds", seconds, "seconds of training"],
  };
  const curves = D.methods
    .filter((m) => seen(m).curve[state.stage])
    .map((m) => ({ m, x: m.spent[state.axis], y: seen(m).curve[state.stage] }));
  const settled = curves.flatMap(({ y }) => y.mean.slice(Math.floor(y.mean.length / 2)));
  const [allLow, high] = domain(curves.flatMap(({ y }) => y.mean)),
    [late] = domain(settled);
  const low = looked().higher ? Math.max(allLow, late - 0.8 * (high - late)) : allLow;
  const top = looked().higher ? high : Math.min(high, domain(settled)[1] + 0.8 * (domain(settled)[1] - allLow));
  const body = chart(`Mean over clients ${axes[state.axis][0]}, ${state.stage}`, (width) => {
    const height = Math.min(380, Math.max(260, width * 0.45)),
      left = 46,
      right = width - 12,
      bottom = height - 42;
    const svg = canvas(width, height);
    const most = Math.max(1e-9, ...curves.map(({ x }) => x[x.length - 1] || 0)),
      x = scale([0, most], [left, right]),
      y = scale([low, top], [bottom, 10]);
    yAxis(svg, y, ticks(low, top, 6), left, right, fmt);
    xAxis(svg, x, ticks(0, most, width < 500 ? 4 : 7), bottom, axes[state.axis][1]);
    svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, axes[state.axis][2]));
    svg.append(s("text", { x: 0, y: height - 4 }, `mean ${measured()}`));
    const clip = "clip" + Math.random().toString(36).slice(2);
    svg.append(
      s("clipPath", { id: clip }, s("rect", { x: left, y: 4, width: right - left + 6, height: bottom - 4 })),
    );
    const area = s("g", { "clip-path": `url(#${clip})` });
    svg.append(area);
    const order = curves.slice().sort((a, b) => (a.m.name === state.method) - (b.m.name === state.method));
    for (const { m, x: at, y: on } of order) {
      const focus = m.name === state.method,
        tint = colour(place(m.name));
      if (focus && m.seeds.length > 1) {
        const up = at.map((v, i) => [x(v), y(on.high[i])]).filter(([, b]) => known(b)),
          down = at
            .map((v, i) => [x(v), y(on.low[i])])
            .filter(([, b]) => known(b))
            .reverse();
        area.append(s("path", { d: path([...up, ...down]) + "Z", fill: tint, opacity: 0.15 }));
      }
      area.append(
        s("path", {
          d: path(at.map((v, i) => [x(v), known(on.mean[i]) ? y(on.mean[i]) : null])),
          fill: "none",
          stroke: tint,
          "stroke-dasharray": dash(place(m.name)),
          "stroke-width": focus ? 2.8 : 1.5,
          opacity: focus ? 1 : 0.85,
          "stroke-linejoin": "round",
        }),
      );
      at.forEach((v, i) => {
        if (known(on.mean[i]))
          area.append(
            s("circle", {
              cx: x(v),
              cy: y(on.mean[i]),
              r: at.length > 1 ? 7 : 4,
              fill: at.length > 1 ? "transparent" : tint,
              "data-tip":
                `${label(m, state.stage)}\nround ${m.spent.rounds[i]}: ${fmt(on.mean[i])}${unit()}\n` +
                `${bytes(m.spent.bytes[i])}, ${seconds(m.spent.seconds[i])}`,
            }),
          );
      });
    }
    const focus = methodOf(state.method);
    if (tracked() && focus.tracks[state.stage]) {
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
          d: path(
            where.map((v, i) => {
              const val = focus.tracks[state.stage][state.client][i];
              return [x(v), known(val) ? y(val) : null];
            }),
          ),
          fill: "none",
          stroke: "var(--ink)",
          "stroke-width": 1.6,
          "stroke-dasharray": "2 3",
        }),
      );
    }
    return svg;
  });
  const extra = tracked() ? ` The dotted line is client ${D.clients[state.client].name} with ${focusName()}.` : "";
  section(
    "convergence",
    "Convergence",
    `Mean over clients of the test ${measured()} (${direction()}), ${state.stage}, means over seeds; ` +
      `the shade is the range over seeds of the chosen method.${extra}`,
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
      legend(
        curves.map(({ m }) => m),
        state.stage,
      ),
    ),
  );
}
