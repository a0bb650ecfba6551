// Who holds which class.

function holds(c) {
  const named = c.classes
    .map((n, k) => [n, k])
    .filter(([n]) => n)
    .sort((a, b) => b[0] - a[0]);
  const total = `${counted(sum(c.classes), "sample")} in ${counted(named.length, "class", "classes")}`;
  return D.labels && named.length <= 12
    ? `${total}\n${named.map(([n, k]) => `${className(k)}: ${n}`).join("\n")}`
    : total;
}
function classes() {
  const held = D.clients.map((c, i) => ({ i, c })).filter((p) => p.c.classes);
  if (!held.length || !D.classes) {
    const sizes = D.clients.every((c) => known(c.train));
    section(
      "classes",
      "Who holds which class",
      D.classes === 0 ? "The targets are numbers, so there are no classes." : null,
      nothing(
        D.missing.classes ||
          (sizes
            ? `Clients hold ${[...new Set(extent(D.clients.map((c) => c.train)))].join(" to ")} training samples.`
            : D.missing.sizes),
      ),
    );
    return;
  }
  const some =
    held.length > 200
      ? held.filter((_, k) => Math.floor((k * 200) / held.length) !== Math.floor(((k - 1) * 200) / held.length))
      : held;
  const most = Math.max(...some.flatMap((p) => p.c.classes));
  section(
    "classes",
    "Who holds which class",
    `Area: samples of a client in a class, all splits together; the largest bubble is ${counted(most, "sample")}.` +
      (some.length < held.length ? ` ${some.length} of ${held.length} clients are drawn.` : ""),
    el(
      "div",
      { class: "panel" },
      chart("Clients against classes, bubbles by number of samples", (width) => {
        const every = Math.ceil(D.classes / 25),
          longest = width < 560 ? 12 : 22;
        const widest = Math.max(
          4,
          ...Array.from({ length: D.classes }, (_, k) => (k % every ? 0 : short(className(k), longest).length)),
        );
        const left = 12 + Math.max(22, 6.4 * widest),
          right = width - 6,
          cell = (right - left) / some.length,
          row = Math.max(D.classes > 30 ? 6 : 14, Math.min(26, 420 / D.classes));
        const plan = namePlan(
            some.map((p) => p.c.name),
            cell,
          ),
          top = 18,
          bottom = top + row * D.classes,
          height = bottom + plan.depth + 24,
          svg = canvas(
            width,
            height,
            some.map((p) => p.i),
          ),
          r = Math.max(Math.min(cell, row * 1.15) * 0.5, 2);
        for (let k = 0; k < D.classes; k++) {
          const y = top + row * (k + 0.5);
          if (row >= 10) svg.append(s("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
          if (k % every === 0)
            svg.append(
              s(
                "text",
                {
                  x: left - 8,
                  y: y + 4,
                  "text-anchor": "end",
                  ...(short(className(k), longest) === className(k) ? {} : { "data-tip": className(k) }),
                },
                short(className(k), longest),
              ),
            );
        }
        some.forEach((p, j) => {
          const x = left + cell * (j + 0.5),
            on = p.i === state.client;
          if (on)
            svg.append(
              s("rect", {
                x: x - cell / 2,
                width: cell,
                y: top - 4,
                height: row * D.classes + 8,
                fill: "var(--wash)",
                rx: 3,
              }),
            );
          p.c.classes.forEach((n, k) => {
            if (n)
              svg.append(
                s("circle", {
                  cx: x,
                  cy: top + row * (k + 0.5),
                  r: r * Math.sqrt(n / most),
                  fill: p.c.seen ? "var(--m0)" : "var(--m1)",
                  opacity: on ? 1 : state.client >= 0 ? 0.35 : 0.8,
                }),
              );
          });
          svg.append(
            s("rect", {
              class: "hit",
              x: x - cell / 2,
              width: cell,
              y: top - 4,
              height: row * D.classes + 8,
              ...hover(p.i, `client ${p.c.name}${p.c.seen ? "" : ", unseen"}\n${holds(p.c)}`),
            }),
          );
        });
        nameMarks(
          svg,
          plan,
          some.map((p) => p.i),
          (k) => left + cell * (k + 0.5),
          cell,
          bottom,
        );
        svg.append(
          s("text", { x: right, y: height - 4, "text-anchor": "end" }, "clients"),
          s("text", { x: left - 8, y: 8, "text-anchor": "end" }, "class"),
        );
        return svg;
      }),
      D.clients.some((c) => !c.seen)
        ? key(["", "background:var(--m0)", "takes part in training"], ["", "background:var(--m1)", "unseen"])
        : null,
    ),
  );
}
