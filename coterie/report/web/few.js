// Methods with a few models: who uses which, weights, and how far the models are apart.

const modelVar = (k) => `--m${k % 10}`;
const MODEL = (k) => `var(${modelVar(k)})`;
function few() {
  const having = D.methods.filter((m) => m.few);
  if (!having.length) {
    $("few").hidden = true;
    return;
  }
  const m =
    having.find((one) => one.name === state.few) ||
    having.find((one) => one.name === state.method) ||
    having.find((one) => one.few.verdict === "collapsed") ||
    having[0];
  const f = m.few,
    K = f.models,
    parts = [];
  const names = Array.from({ length: K }, (_, k) => `model ${k + 1}`);
  parts.push(
    chooser(
      "few-method",
      "Models of ",
      having,
      m,
      (name) => {
        state.few = name;
        few();
      },
      f.end ? el("span", { class: "count" }, `${counted(K, "model")}, seed ${f.seed}`) : null,
    ),
  );
  parts.push(
    el(
      "p",
      { class: "callout" + (f.verdict === "collapsed" ? "" : " calm"), id: "few-words" },
      f.words,
      known(f.worth) && K > 1
        ? ` Choosing is worth ${signed(f.worth, undefined, f.end.scale)}${points(f.end.scale)} against giving ` +
          "everybody the best single model."
        : "",
    ),
  );
  parts.push(key(...names.map((n, k) => ["square", `background:${MODEL(k)}`, n])));
  const grid = [];
  const order = D.clients.map((_, i) => i).filter((i) => D.clients[i].seen);
  if (f.end) order.sort((a, b) => f.end.choice[a] - f.end.choice[b] || a - b);
  if (f.end && K > 1)
    grid.push(
      panel(
        "Which client uses which model",
        `After the last round: the square is the model a client uses; the number of clients is on the right.`,
        usage(
          f,
          order.filter((i) => known(f.end.choice[i])),
          K,
        ),
      ),
    );
  if (f.mass)
    grid.push(
      panel(
        "Mass per model",
        "Each model's share of the training weight, round by round.",
        lines(
          "Mass per model by round",
          f.mass.rounds,
          Array.from({ length: Math.max(...f.mass.share.map((l) => l.length)) }, (_, k) => ({
            tint: MODEL(k),
            values: f.mass.share.map((l) => (known(l[k]) ? l[k] : null)),
          })),
          { range: [-0.02, 1.02], form: share },
        ),
      ),
    );
  if (f.rounds.length)
    grid.push(
      panel(
        "Weights w over rounds",
        "Colour: the model a client weighs most. Strength: how much more than an even share. A row is a client.",
        weights(f, order),
      ),
    );
  if (f.rounds.length && state.client >= 0 && D.clients[state.client].seen)
    grid.push(
      panel(
        `Weights w of client ${D.clients[state.client].name}`,
        "How it shares itself out over the models.",
        lines(
          "Weights of the chosen client",
          f.rounds,
          names.map((_, k) => ({
            tint: MODEL(k),
            values: f.w.map((t) => (t[state.client] && known(t[state.client][k]) ? t[state.client][k] / 100 : null)),
          })),
          { range: [-0.02, 1.02], form: share },
        ),
      ),
    );
  if (f.alpha.length)
    grid.push(
      panel(
        "Weights alpha over rounds",
        `How much each client counts; an even share would be ${share(1 / order.length)}. A line is a client.`,
        lines(
          "Alpha of every client by round",
          f.rounds,
          order
            .slice()
            .sort((a, b) => (a === state.client) - (b === state.client))
            .map((i) => ({
              client: i,
              tip: `client ${D.clients[i].name}`,
              tint: i === state.client ? "var(--accent)" : "var(--soft)",
              bold: i === state.client,
              opacity: i === state.client ? 1 : state.client >= 0 ? 0.25 : 0.5,
              values: f.alpha.map((t) => t[i]),
            })),
          { form: share, clients: order },
        ),
      ),
    );
  if (f.end && K > 1)
    grid.push(
      panel(
        "Model similarity",
        "Distance between two models, in per cent of the mean way a model has gone from its start. " +
          "Near 0: the same model twice.",
        similarity(f, K),
      ),
    );
  if (f.apart.some(Boolean) && K > 1) {
    const way = f.end ? mean(f.end.moved) : 1;
    const far = f.apart.map((t) => t && Math.max(...t.flat())),
      near = f.apart.map((t) => t && Math.min(...t.flatMap((l, i) => l.filter((_, j) => j !== i)), Infinity));
    grid.push(
      panel(
        "Distance over rounds",
        `The two models farthest apart, and the two nearest (dashed)${f.end ? ", same unit" : ""}.`,
        lines(
          "Distance between models by round",
          f.rounds,
          [
            { tint: "var(--accent)", values: far.map((v) => (known(v) ? v / way : null)) },
            { tint: "var(--accent)", dash: "5 3", values: near.map((v) => (Number.isFinite(v) ? v / way : null)) },
          ],
          { form: f.end ? share : (v) => v.toPrecision(2) },
        ),
      ),
    );
  }
  if (!f.rounds.length) grid.push(nothing(f.unweighed));
  section(
    "few",
    "A few models for many clients",
    "What the methods with several server models did with them. They have collapsed when at least 90 % of the " +
      "clients use the same model, or when the two models farthest apart differ by at most 10 % of the way they have " +
      "gone from their start.",
    ...parts,
    el("div", { class: "two", style: "margin-top:.8rem" }, grid),
  );
}
function usage(f, order, K) {
  return chart("Which client uses which model", (width) => {
    const row = 30,
      left = 62,
      right = width - 34,
      height = row * K + 30,
      cell = (right - left) / order.length;
    const svg = canvas(width, height, order);
    for (let k = 0; k < K; k++) {
      const y = 6 + row * (k + 0.5),
        count = order.filter((i) => f.end.choice[i] === k).length;
      svg.append(s("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
      svg.append(
        s("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, `model ${k + 1}`),
        s("text", { x: width, y: y + 4, "text-anchor": "end", class: "ink" }, String(count)),
      );
    }
    order.forEach((i, j) => {
      const x = left + cell * j,
        k = f.end.choice[i],
        on = i === state.client,
        size = Math.min(cell * 0.82, 18);
      if (on) svg.append(s("rect", { x, width: cell, y: 2, height: row * K + 6, fill: "var(--wash)" }));
      svg.append(
        s("rect", {
          x: x + (cell - size) / 2,
          width: size,
          y: 6 + row * (k + 0.5) - 9,
          height: 18,
          rx: 2,
          fill: MODEL(k),
          opacity: state.client >= 0 && !on ? 0.4 : 1,
        }),
      );
      const test = f.end.test[i] || [];
      svg.append(
        s("rect", {
          class: "hit",
          x,
          width: cell,
          y: 2,
          height: row * K + 6,
          ...hover(
            i,
            `client ${D.clients[i].name} uses model ${k + 1}\n` +
              test.map((v, n) => `model ${n + 1}: ${fmt(v, undefined, f.end.scale)}${unit(f.end.scale)}`).join("\n"),
          ),
        }),
      );
      if (on)
        svg.append(
          s(
            "text",
            {
              x: Math.min(Math.max(x + cell / 2, left + 10), right - 10),
              y: height - 4,
              "text-anchor": "middle",
              class: "on",
            },
            D.clients[i].name,
          ),
        );
    });
    if (state.client < 0 || !order.includes(state.client))
      svg.append(s("text", { x: left, y: height - 4 }, "clients"));
    return svg;
  });
}
function weights(f, order) {
  return chart("Weights w of every client by round", (width) => {
    const left = 46,
      right = width - 6,
      row = Math.max(2, Math.min(14, 220 / order.length)),
      height = row * order.length + 42;
    const svg = canvas(width, height, order),
      paper = rgb("--panel"),
      grey = rgb("--line"),
      K = Math.max(...f.w.map((t) => Math.max(0, ...t.filter(Boolean).map((l) => l.length))));
    const tints = Array.from({ length: K }, (_, k) => rgb(modelVar(k)));
    const url = heat(f.rounds.length, order.length, (x, y) => {
      const w = f.w[x][order[y]];
      if (!w) return paper;
      const total = sum(w) || 1,
        top = w.indexOf(Math.max(...w)),
        even = 1 / w.length;
      return mix(grey, tints[top], w.length > 1 ? Math.max(0, Math.min(1, (w[top] / total - even) / (1 - even))) : 1);
    });
    svg.append(
      s("image", {
        href: url,
        x: left,
        y: 4,
        width: right - left,
        height: row * order.length,
        preserveAspectRatio: "none",
      }),
    );
    order.forEach((i, j) => {
      const on = i === state.client;
      svg.append(
        s("rect", {
          class: "hit",
          x: left,
          width: right - left,
          y: 4 + row * j,
          height: row,
          ...hover(
            i,
            `client ${D.clients[i].name}\nlast: ` +
              ((f.w[f.w.length - 1][i] || []).map((v, k) => `model ${k + 1} ${v} %`).join(", ") ||
                "no weights recorded"),
          ),
        }),
      );
      if (on)
        svg.append(
          s("rect", {
            x: left - 1,
            width: right - left + 2,
            y: 3 + row * j,
            height: row + 2,
            fill: "none",
            stroke: "var(--ink)",
            "stroke-width": 1.5,
          }),
          s(
            "text",
            { x: left - 6, y: 8 + row * (j + 0.5), "text-anchor": "end", class: "on" },
            short(D.clients[i].name, 6),
          ),
        );
    });
    const x = scale([0, f.rounds.length], [left, right]),
      every = Math.ceil(f.rounds.length / (width < 420 ? 4 : 7));
    f.rounds.forEach((t, k) => {
      if (k % every === 0)
        svg.append(s("text", { x: x(k + 0.5), y: height - 22, "text-anchor": "middle" }, String(t)));
    });
    svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "round"));
    return svg;
  });
}
function similarity(f, K) {
  return chart("Distance between every two models", (width) => {
    const left = 62,
      cell = Math.min(64, (width - left - 6) / K),
      height = cell * K + 28,
      svg = canvas(width, height),
      way = mean(f.end.moved) || 1;
    const high = Math.max(1e-9, ...f.end.apart.flat()) / way;
    for (let a = 0; a < K; a++) {
      svg.append(s("text", { x: left - 8, y: 4 + cell * (a + 0.5) + 4, "text-anchor": "end" }, `model ${a + 1}`));
      svg.append(
        s(
          "text",
          { x: left + cell * (a + 0.5), y: cell * K + 20, "text-anchor": "middle" },
          cell > 52 ? `model ${a + 1}` : String(a + 1),
        ),
      );
      for (let b = 0; b < K; b++) {
        const v = f.end.apart[a][b] / way;
        svg.append(
          s("rect", {
            x: left + cell * b + 1,
            y: 4 + cell * a + 1,
            width: cell - 2,
            height: cell - 2,
            rx: 3,
            fill: "var(--accent)",
            opacity: a === b ? 0.04 : 0.08 + 0.5 * Math.min(1, v / Math.max(1, high)),
            "data-tip": `model ${a + 1} and model ${b + 1}\n${share(v)} of the way gone`,
          }),
        );
        if (cell > 26)
          svg.append(
            s(
              "text",
              {
                x: left + cell * (b + 0.5),
                y: 4 + cell * (a + 0.5) + 4,
                "text-anchor": "middle",
                class: "ink",
                "pointer-events": "none",
              },
              a === b ? "–" : cell > 44 ? share(v) : Math.round(100 * v),
            ),
          );
      }
    }
    return svg;
  });
}
