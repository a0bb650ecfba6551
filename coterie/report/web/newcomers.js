// Clients that arrive during training, by rounds since their arrival, seen by the metric that decides.

const read = (v, digits) => fmt(v, digits, decides());

const since = (c, k) =>
  c.high[k] === 0
    ? "on arrival"
    : `${c.low[k] === c.high[k] ? counted(c.low[k], "round") : `${c.low[k]} to ${c.high[k]} rounds`} after arrival`;
function newcomersWords(m) {
  const c = m.newcomers && m.newcomers[state.stage];
  if (!c) return "";
  const last = c.age.length - 1,
    now = `${capital(since(c, 0))}, newcomers have ${read(c.mean[0])}${unit(decides())} with ${focusName()}`;
  if (!known(c.start[0])) return `${now}; nobody of the start was left to compare them with.`;
  const beside = `${now}, and the clients from the start ${read(c.start[0])}${unit(decides())} at that time; `;
  if (c.reached !== null)
    return (
      beside +
      (c.reached
        ? `${since(c, c.reached)}, newcomers have caught up.`
        : c.high[0]
          ? "by then newcomers have caught up."
          : "newcomers have nothing to catch up.")
    );
  return (
    beside +
    (last && known(c.start[last])
      ? `they have not caught up by the end: ${since(c, last)} it is ` +
        `${read(c.mean[last])} against ${read(c.start[last])}${unit(decides())}.`
      : "they have not caught up.")
  );
}
function newcomers() {
  if (!D.churn) {
    $("newcomers").hidden = true;
    return;
  }
  const { rounds, start, arrived, left } = D.churn,
    having = D.methods.filter((m) => m.newcomers),
    focus = methodOf(state.method);
  const who =
    `${counted(start, "client")} ${start === 1 ? "was" : "were"} there from the start, ` +
    `${arrived} arrived in ${counted(rounds, "round")} and ${left} left. `;
  if (!having.length) {
    section(
      "newcomers",
      "Newcomers",
      who,
      nothing("No client that arrived later was there at an evaluation."),
    );
    return;
  }
  const own = (stage) => having.filter((m) => m.newcomers[stage]).map((m) => ({ m, c: m.newcomers[stage] }));
  const both = stages().filter((stage) => own(stage).length),
    beside = focus.newcomers || {};
  const [low, high] = domain(
    both.flatMap((stage) => own(stage).flatMap(({ c }) => [...c.mean, ...c.start])),
    0,
    decides(),
  );
  const span = Math.max(...both.flatMap((stage) => own(stage).map(({ c }) => c.span))),
    most = Math.max(1, ...both.flatMap((stage) => own(stage).flatMap(({ c }) => c.age)));
  const panels = both.map((stage) =>
    panel(
      capital(stage),
      `Test ${measured(decides())}, mean over newcomers, ` +
        (stage === SERVED ? "of the model they get" : "after their local training"),
      chart(`Mean over newcomers by rounds since arrival, ${stage}`, (width) => {
        const height = 300,
          left = 52,
          right = width - 12,
          bottom = height - 58,
          svg = canvas(width, height);
        const x = scale([0, most], [left + 8, right]),
          y = scale([low, high], [bottom, 10]);
        yAxis(svg, y, ticks(low, high, 6), left, right, read, decides());
        const at = ticks(0, most, 6).filter(Number.isInteger);
        xAxis(svg, x, at, bottom, String);
        svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "rounds since arrival"));
        const mark = (m, c, values, what) =>
          values.forEach((v, k) => {
            if (known(v))
              svg.append(
                s("circle", {
                  cx: x(c.age[k]),
                  cy: y(v),
                  r: 7,
                  fill: "transparent",
                  "data-tip":
                    `${label(m, stage)}${what}\n${since(c, k)}: ${read(v)}${unit(decides())}\n` +
                    counted(c.clients[k], "newcomer"),
                }),
              );
          });
        const line = (c, values, look) =>
          svg.append(
            s("path", {
              d: path(c.age.map((a, k) => [x(a), known(values[k]) ? y(values[k]) : null])),
              fill: "none",
              "stroke-linejoin": "round",
              ...look,
            }),
          );
        const lines = own(stage).sort((a, b) => layer(a.m) - layer(b.m));
        if (beside[stage]) {
          line(beside[stage], beside[stage].start, {
            stroke: "var(--soft)",
            "stroke-width": 1.6,
            "stroke-dasharray": "2 3",
          });
          mark(focus, beside[stage], beside[stage].start, ", clients from the start");
        }
        for (const { m, c } of lines) {
          const on = m === focus,
            tint = colour(m),
            dots = c.age.length < 2 || (right - left) / c.age.length > 14;
          svg.append(
            curve(m, path(c.age.map((a, k) => [x(a), known(c.mean[k]) ? y(c.mean[k]) : null])), label(m, stage)),
          );
          if (dots && coloured(m))
            c.mean.forEach((v, k) =>
              svg.append(
                s("circle", { cx: x(c.age[k]), cy: y(v), r: on ? 3.6 : 2.6, fill: tint, opacity: on ? 1 : 0.85 }),
              ),
            );
        }
        for (const { m, c } of lines.filter((one) => coloured(one.m))) mark(m, c, c.mean, "");
        const told = (lines.find(({ m }) => m === focus) || lines[0]).c;
        svg.append(s("text", { x: left - 8, y: bottom + 34, "text-anchor": "end" }, "clients"));
        const close = (v) =>
          told.age.reduce((best, a, k) => (Math.abs(a - v) < Math.abs(told.age[best] - v) ? k : best), 0);
        for (const k of told.age.length > 8 ? new Set(at.map(close)) : told.age.keys())
          svg.append(s("text", { x: x(told.age[k]), y: bottom + 34, "text-anchor": "middle" }, told.clients[k]));
        return svg;
      }),
    ),
  );
  section(
    "newcomers",
    "Newcomers",
    [
      el("span", { class: "strong" }, who),
      newcomersWords(focus),
      span > 1 ? ` A point gathers ${span} rounds.` : "",
      crowdWords(),
    ],
    el("div", { class: "two" }, panels),
    legend(having, SERVED),
    key(["dotted", "", `clients from the start at the same time, ${focus.label}`]),
  );
}
