// Whose updates oppose whose.

function conflicts() {
  const having = D.methods.filter((m) => m.conflicts);
  if (!having.length) {
    section(
      "conflicts",
      "Conflicts between clients",
      null,
      nothing(D.missing.conflicts),
    );
    return;
  }
  const withMatrix = having.filter((m) => m.conflicts.cosines);
  const m =
    withMatrix.find((one) => one.name === state.conflict) ||
    withMatrix.find((one) => one.name === state.method) ||
    withMatrix[0];
  const parts = [];
  const rounds = [...new Set(having.flatMap((one) => one.conflicts.rounds))].sort((a, b) => a - b);
  const ordered = having.slice().sort((a, b) => (a === m ? 3 : layer(a)) - (b === m ? 3 : layer(b)));
  parts.push(
    panel(
      "Opposing pairs by round",
      `Pairs of clients whose updates point apart (cosine below 0)${m ? `; bold: ${m.label}` : ""}.${crowdWords()}`,
      lines(
        "Share of opposing pairs by round",
        rounds,
        ordered.map((one) => ({
          m: one,
          tip: one.label,
          bold: one === m,
          values: rounds.map((t) => {
            const k = one.conflicts.rounds.indexOf(t);
            return k < 0 ? null : one.conflicts.opposing[k];
          }),
        })),
        { range: [-0.02, 1.02], form: share, height: 300 },
      ),
      legend(having, SERVED),
    ),
  );
  if (m) {
    const c = m.conflicts.cosines,
      n = c.length,
      ids = m.conflicts.clients;
    parts.push(
      el(
        "div",
        { class: "panel" },
        chooser("conflict-method", "Cosines of ", withMatrix, m, (name) => {
          state.conflict = name;
          conflicts();
        }),
        el(
          "p",
          { class: "sub" },
          "Between the updates of any two clients in the last round, clients ordered by likeness.",
        ),
        chart(`Cosines between the updates of any two clients, ${m.label}`, (width) => {
          const size = Math.min(width - 4, 340),
            cell = size / n,
            svg = canvas(width, size + 44, ids || null),
            zero = rgb("--panel"),
            up = rgb("--m0"),
            down = rgb("--m1");
          const x0 = (width - size) / 2;
          svg.append(
            s("image", {
              href: heat(n, n, (x, y) => mix(zero, c[y][x] < 0 ? down : up, Math.min(1, Math.abs(c[y][x]) / 100))),
              x: x0,
              y: 2,
              width: size,
              height: size,
              preserveAspectRatio: "none",
            }),
          );
          if (ids)
            ids.forEach((i, k) => {
              const others = c[k].filter((_, j) => j !== k),
                against = others.filter((v) => v < 0).length;
              svg.append(
                s("rect", {
                  class: "hit",
                  x: x0,
                  y: 2 + cell * k,
                  width: size,
                  height: cell,
                  ...hover(i, `client ${D.clients[i].name}\nopposes ${against} of ${others.length} others`),
                }),
              );
              if (i === state.client)
                svg.append(
                  s("rect", {
                    x: x0,
                    y: 2 + cell * k,
                    width: size,
                    height: Math.max(cell, 2),
                    fill: "none",
                    stroke: "var(--ink)",
                    "stroke-width": 1.6,
                    "pointer-events": "none",
                  }),
                  s("rect", {
                    y: 2,
                    x: x0 + cell * k,
                    height: size,
                    width: Math.max(cell, 2),
                    fill: "none",
                    stroke: "var(--ink)",
                    "stroke-width": 1.6,
                    "pointer-events": "none",
                  }),
                );
            });
          const bar = 120,
            bx = (width - bar) / 2,
            by = size + 14,
            step = bar / 40;
          for (let k = 0; k < 40; k++) {
            const v = -1 + (2 * k) / 39;
            svg.append(
              s("rect", {
                x: bx + step * k,
                y: by,
                width: step + 0.5,
                height: 8,
                fill: `rgb(${mix(zero, v < 0 ? down : up, Math.abs(v)).join(",")})`,
              }),
            );
          }
          svg.append(
            s("text", { x: bx - 6, y: by + 8, "text-anchor": "end" }, "−1 opposed"),
            s("text", { x: bx + bar + 6, y: by + 8 }, "1 alike"),
          );
          return svg;
        }),
      ),
    );
  }
  section(
    "conflicts",
    "Conflicts between clients",
    "Where updates oppose each other, an average serves nobody; aggregators such as confree act on exactly this.",
    el("div", { class: "two" }, parts),
  );
}
