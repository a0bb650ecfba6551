// Who gains, who loses: every client from the comparison's value to the method's.

function averageGain(list) {
  const m = methodOf(state.method),
    base = baseOf(m),
    to = lineOf(m, state.stage).mean,
    from = lineOf(base.m, base.stage).mean;
  const whole = list.length === D.clients.filter((c, i) => c.seen && known(value(m, state.stage, i))).length;
  return whole && known(to) && known(from)
    ? gained(to, from, fine())
    : signed(mean(list.map((p) => p.gain)), fine());
}
function clients() {
  const list = pairs()
    .filter((p) => p.seen)
    .sort((a, b) => b.gain - a.gain);
  const gains = list.filter((p) => p.gain > 1e-9).length,
    losses = list.filter((p) => p.gain < -1e-9).length;
  const same =
    baseOf(methodOf(state.method)).m.name === state.method && baseOf(methodOf(state.method)).stage === state.stage;
  if (!list.length) {
    const m = methodOf(state.method),
      base = baseOf(m),
      none = D.clients.every((c, i) => !c.seen || !known(value(m, state.stage, i)));
    const why = none ? valueless(m, state.stage) : valueless(base.m, base.stage);
    section("clients", "Who gains, who loses", null, nothing(`There is nobody to compare. ${why}`));
    return;
  }
  const lead = same
    ? "This is the method it would be compared with; choose another method, stage or comparison above."
    : [
        el("span", { class: "strong" }, `${gains} of ${counted(list.length, "client")} gain, ${losses} lose`),
        `, ${list.length - gains - losses} stay the same; ${averageGain(list)}${points()} on average. ` +
          `Each line leads a client from ${baseName()} to ${focusName()}.`,
      ];
  const about = `Each client's test ${measured()} with ${baseName()} and with ${focusName()}`;
  section(
    "clients",
    "Who gains, who loses",
    lead,
    el(
      "div",
      { class: "panel" },
      chart(about, (width) => {
        const left = 44,
          right = width - 8,
          top = 12,
          step = (right - left) / Math.max(1, list.length);
        const plan = namePlan(
            list.map((p) => D.clients[p.i].name),
            step,
          ),
          bottom = 300,
          height = bottom + plan.depth + 24;
        const svg = canvas(
          width,
          height,
          list.map((p) => p.i),
        );
        const y = scale(domain(list.flatMap((p) => [p.from, p.to])), [bottom, top]);
        yAxis(svg, y, ticks(...domain(list.flatMap((p) => [p.from, p.to])), 6), left, right, fmt);
        const r = Math.max(1.6, Math.min(5, step * 0.28));
        list.forEach((p, k) => {
          const x = left + step * (k + 0.5),
            on = p.i === state.client,
            name = D.clients[p.i].name;
          const tint = p.gain > 1e-9 ? "var(--gain)" : p.gain < -1e-9 ? "var(--loss)" : "var(--same)";
          const dim = state.client >= 0 && !on ? 0.28 : 1;
          if (on)
            svg.append(
              s("rect", {
                x: x - step / 2,
                width: step,
                y: top - 6,
                height: bottom - top + 10,
                fill: "var(--wash)",
                rx: 3,
              }),
            );
          svg.append(
            s(
              "g",
              { opacity: dim },
              s("line", {
                x1: x,
                x2: x,
                y1: y(p.from),
                y2: y(p.to),
                stroke: tint,
                "stroke-width": Math.max(1, r * 0.6),
              }),
              s("circle", { cx: x, cy: y(p.from), r, fill: "var(--panel)", stroke: tint, "stroke-width": 1.4 }),
              s("circle", { cx: x, cy: y(p.to), r: r * 1.05, fill: tint }),
            ),
          );
          svg.append(
            s("rect", {
              class: "hit",
              x: x - step / 2,
              width: step,
              y: top - 6,
              height: bottom - top + 10,
              ...hover(p.i, `client ${name}\n${fmt(p.from)} → ${fmt(p.to)}${unit()}  (${gained(p.to, p.from)})`),
            }),
          );
        });
        nameMarks(
          svg,
          plan,
          list.map((p) => p.i),
          (k) => left + step * (k + 0.5),
          step,
          bottom,
        );
        svg.append(
          s("text", { x: right, y: height - 4, "text-anchor": "end" }, "clients, by gain"),
          s("text", { x: 0, y: height - 4 }, measured()),
        );
        return svg;
      }),
      key(
        ["open", "color:var(--soft)", baseName()],
        ["", "background:var(--gain)", `${focusName()}, better`],
        ["", "background:var(--loss)", "worse"],
      ),
    ),
  );
}
