// Gain against data size.

function size() {
  if (!D.clients.some((c) => known(c.train))) {
    section(
      "size",
      "Bias and variance: gain against data size",
      null,
      nothing(D.missing.sizes),
    );
    return;
  }
  const m = methodOf(state.method);
  const list = bases()
    .map(([b]) => b)
    .filter(
      (b) =>
        b.endsWith(`|${SERVED}`) && b !== `|${SERVED}` && !(b === `${m.name}|${SERVED}` && state.stage === SERVED),
    );
  const named = (b) => methodOf(b.slice(0, b.lastIndexOf("|"))).label;
  const panels = list
    .map((b) => {
      const base = methodOf(b.slice(0, b.lastIndexOf("|"))),
        pts = D.clients
          .map((c, i) => ({ i, n: c.train, seen: c.seen, g: value(m, state.stage, i), h: value(base, SERVED, i) }))
          .filter((p) => p.seen && p.n > 0 && known(p.g) && known(p.h))
          .map((p) => ({ ...p, gain: better(p.g, p.h) }));
      if (!pts.length) return null;
      const sorted = pts.map((p) => p.n).sort((a, b) => a - b),
        middle = quantile(sorted, 0.5);
      const small = mean(pts.filter((p) => p.n <= middle).map((p) => p.gain)),
        large = mean(pts.filter((p) => p.n > middle).map((p) => p.gain));
      const words =
        `Clients with at most ${counted(Math.round(middle), "sample")}: ${signed(small)}${points()}; ` +
        (large === null ? "there are no larger ones." : `larger ones: ${signed(large)}${points()}.`);
      return panel(
        `Gain over ${base.label} (${SERVED})`,
        words,
        chart(`Gain of ${focusName()} over ${base.label} against training samples`, (width) => {
          const height = 280,
            left = 52,
            right = width - 10,
            bottom = height - 40,
            svg = canvas(
              width,
              height,
              pts
                .slice()
                .sort((a, b) => a.n - b.n)
                .map((p) => p.i),
            );
          const [low, high] = extent(pts.map((p) => p.gain).concat([0])),
            air = (high - low) * 0.08 || 0.01,
            y = scale([low - air, high + air], [bottom, 8]);
          const [first, last] = extent(pts.map((p) => Math.log(p.n))),
            pad = (last - first) * 0.05 || 0.3,
            x = scale([first - pad, last + pad], [left, right]);
          yAxis(svg, y, ticks(low - air, high + air, 5), left, right, signed);
          const span = Math.exp(last - first),
            every = [1, 2, 5]
              .flatMap((k) => [1, 10, 100, 1e3, 1e4, 1e5].map((p) => k * p))
              .sort((a, b) => a - b)
              .filter((v) => Math.log(v) >= first - pad && Math.log(v) <= last + pad);
          xAxis(
            svg,
            (v) => x(Math.log(v)),
            span < 1.5 || every.length < 2
              ? [...new Set([sorted[0], Math.round(middle), sorted[sorted.length - 1]])]
              : every,
            bottom,
            String,
          );
          svg.append(
            s("line", { x1: left, x2: right, y1: y(0), y2: y(0), stroke: "var(--faint)", "stroke-width": 1 }),
          );
          svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "training samples of the client"));
          for (const p of pts.sort((a, b) => (a.i === state.client) - (b.i === state.client))) {
            const on = p.i === state.client;
            svg.append(
              s("circle", {
                cx: x(Math.log(p.n)),
                cy: y(p.gain),
                r: on ? 7 : 4.2,
                fill: p.gain > 1e-9 ? "var(--gain)" : p.gain < -1e-9 ? "var(--loss)" : "var(--same)",
                opacity: on ? 1 : state.client >= 0 ? 0.3 : 0.75,
                stroke: on ? "var(--ink)" : "var(--panel)",
                "stroke-width": on ? 2 : 0.8,
                ...hover(
                  p.i,
                  `client ${D.clients[p.i].name}\n${p.n} training samples\n${gained(p.g, p.h)}${points()}`,
                ),
              }),
            );
          }
          return svg;
        }),
      );
    })
    .filter(Boolean);
  section(
    "size",
    "Bias and variance: gain against data size",
    `A client with few samples cannot train alone (variance); one with many pays for a model that is not its own ` +
      `(bias). Shown for ${focusName()}; sharing pays where it gains over Local, personalizing where it gains ` +
      "over the global model.",
    panels.length
      ? el("div", { class: "two" }, panels)
      : nothing(
          list.length
            ? `No client has a finite value both with ${focusName()} and with ${list.map(named).join(" or ")}.`
            : "There is neither Local nor FedAvg to compare this method with.",
        ),
  );
}
