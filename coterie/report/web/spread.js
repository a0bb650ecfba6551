// The distribution over clients, those that train and those kept out of training.

function strips(stage, listed, only, printed) {
  return chart(`Distribution over clients of every method, ${stage}`, (width) => {
    const narrow = width < 560,
      row = narrow ? 50 : 34,
      left = narrow ? 8 : Math.min(220, width * 0.26),
      right = width - 46,
      top = 6;
    const height = top + row * listed.length + 42;
    const svg = canvas(width, height, D.clients.map((_, i) => i).filter(only));
    const values = listed.flatMap((m) => D.clients.map((_, i) => (only(i) ? value(m, stage, i) : null)));
    const x = scale(domain(values), [left + 6, right]);
    xAxis(svg, x, ticks(...domain(values), narrow ? 4 : 8), height - 38, fmt, top);
    svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, `test ${measured()} of a client`));
    listed.forEach((m, k) => {
      const own = D.clients
        .map((_, i) => ({ i, v: only(i) ? value(m, stage, i) : null }))
        .filter((p) => known(p.v))
        .sort((a, b) => a.v - b.v);
      const base = top + row * k,
        y = base + (narrow ? 32 : row / 2),
        tint = coloured(m) ? colour(m) : "var(--same)",
        on = m.name === state.method;
      svg.append(
        s(
          "text",
          {
            x: narrow ? left : left - 6,
            y: narrow ? base + 14 : y + 4,
            "text-anchor": narrow ? "start" : "end",
            class: on ? "on" : "ink",
          },
          short(label(m, stage), narrow ? 40 : Math.floor(left / 7)),
        ),
      );
      if (!own.length) {
        svg.append(s("text", { x: left + 6, y: y + 4 }, "no finite value"));
        return;
      }
      const sorted = own.map((p) => p.v),
        average = mean(sorted);
      svg.append(
        s("rect", {
          x: x(quantile(sorted, 0.25)),
          width: Math.max(1, x(quantile(sorted, 0.75)) - x(quantile(sorted, 0.25))),
          y: y - 10,
          height: 20,
          rx: 3,
          fill: tint,
          opacity: 0.14,
        }),
      );
      own.forEach((p, j) => {
        const shift = 14 * (((j * 0.618034 + 0.5) % 1) - 0.5),
          chosen = p.i === state.client;
        svg.append(
          s("circle", {
            cx: x(p.v),
            cy: y + shift,
            r: chosen ? 6 : own.length > 60 ? 2.6 : 3.6,
            fill: chosen ? "var(--accent)" : tint,
            opacity: chosen ? 1 : state.client >= 0 ? 0.25 : 0.75,
            stroke: chosen ? "var(--panel)" : null,
            "stroke-width": 1.5,
            ...hover(p.i, `${label(m, stage)}\nclient ${D.clients[p.i].name}: ${fmt(p.v)}${unit()}`),
          }),
        );
      });
      svg.append(
        s("line", {
          x1: x(average),
          x2: x(average),
          y1: y - 12,
          y2: y + 12,
          stroke: "var(--ink)",
          "stroke-width": 2,
        }),
      );
      svg.append(s("text", { x: width, y: y + 4, "text-anchor": "end", class: "ink" }, printed(m, average)));
    });
    return svg;
  });
}
const ranked = (stage) =>
  D.methods
    .filter((m) => m.values[stage])
    .map((m) => ({
      m,
      v: mean(D.clients.map((c, i) => (c.seen === stage in m.labels ? seen(m).values[stage][i] : null))),
    }))
    .sort((a, b) => better(known(b.v) ? b.v : -Infinity, known(a.v) ? a.v : -Infinity))
    .map((p) => p.m);
// The client that a method serves worst by the metric looked at, of those that train.
function servedWorst(m, stage) {
  const own = D.clients
    .map((c, i) => ({ i, v: c.seen ? value(m, stage, i) : null }))
    .filter((p) => known(p.v))
    .sort((a, b) => better(a.v, b.v));
  return own.length ? own[0] : null;
}
function worstWords() {
  const worst = servedWorst(methodOf(state.method), state.stage);
  return worst
    ? ` Served worst by ${focusName()}: client ${D.clients[worst.i].name} with ${fmt(worst.v)}${unit()}.`
    : "";
}
function spread() {
  section(
    "spread",
    "Distribution over clients",
    `Every dot is a client's test ${measured()} (${direction()}), stage ${state.stage}; methods by their mean.` +
      worstWords(),
    el(
      "div",
      { class: "panel" },
      strips(
        state.stage,
        ranked(state.stage),
        (i) => D.clients[i].seen,
        (m, v) => fmt(known(lineOf(m, state.stage).mean) ? lineOf(m, state.stage).mean : v, fine()),
      ),
      key(
        ["", "background:var(--soft)", "a client"],
        ["bar", "background:var(--ink)", "mean"],
        ["square", "background:var(--soft);opacity:.3", "middle half of the clients"],
      ),
    ),
  );
}

function unseen() {
  const ids = D.clients.map((_, i) => i).filter((i) => !D.clients[i].seen),
    stage = unseenOf(state.stage);
  if (!ids.length || !D.methods.some((m) => m.values[stage])) {
    section(
      "unseen",
      "Unseen clients",
      null,
      nothing(D.missing.unseen || `No method was evaluated on unseen clients, ${state.stage}.`),
    );
    return;
  }
  const order = ranked(stage);
  section(
    "unseen",
    "Unseen clients",
    `The ${counted(ids.length, "client")} kept out of training, stage ${state.stage}: ` +
      "what somebody gets who arrives after training.",
    el(
      "div",
      { class: "panel" },
      strips(
        state.stage,
        order,
        (i) => !D.clients[i].seen,
        (m, v) => fmt(known(lineOf(m, state.stage).unseen) ? lineOf(m, state.stage).unseen : v),
      ),
    ),
  );
}
