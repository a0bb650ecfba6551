// The card of the chosen client.

function card() {
  const host = $("card"),
    c = D.clients[state.client];
  host.hidden = !c;
  if (!c) return;
  const facts = [
    ["samples", known(c.train) ? `${c.train} train, ${c.val} validation, ${c.test} test` : `${c.test} test`],
  ];
  if (c.classes && D.classes) facts.push(["classes", `${c.classes.filter(Boolean).length} of ${D.classes}`]);
  const m = methodOf(state.method),
    p = pairs().find((one) => one.i === state.client);
  if (p) facts.push([`gain`, `${gained(p.to, p.from)}${points()} over ${baseName()}`]);
  for (const one of D.methods)
    if (
      one.few &&
      one.few.end &&
      one.few.models > 1 &&
      known(one.few.end.choice[state.client]) &&
      (one === m || one.name === state.few)
    )
      facts.push(["model", `${one.few.end.choice[state.client] + 1} of ${one.few.models}, ${one.label}`]);
  const tall = c.classes ? Math.max(1, ...c.classes) : 1;
  const order = ranked(c.seen ? state.stage : unseenOf(state.stage));
  host.replaceChildren(
    el(
      "header",
      {},
      el("h3", {}, `Client ${c.name}`),
      el("span", { class: "quiet" }, c.seen ? "" : "unseen"),
      el(
        "button",
        {
          type: "button",
          class: "ghost",
          "aria-label": "Close",
          onclick: () => {
            pickClient(-1);
            $("client").focus();
          },
        },
        "×",
      ),
    ),
    el(
      "dl",
      {},
      facts.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)]),
    ),
    ...(c.classes && D.classes && D.classes <= 40
      ? [
          el(
            "div",
            { class: "bars", "aria-hidden": "true" },
            c.classes.map((n, k) =>
              el("div", {
                style: `height:${(100 * n) / tall}%`,
                title: `${D.labels ? "" : "class "}${className(k)}: ${n}`,
              }),
            ),
          ),
          el(
            "div",
            { class: "bars-x", "aria-hidden": "true" },
            c.classes.map((_, k) =>
              el(
                "span",
                { title: className(k) },
                D.classes <= 20 ? (D.labels ? short(className(k), Math.max(4, Math.floor(44 / D.classes))) : k) : "",
              ),
            ),
          ),
        ]
      : []),
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ["method", ...stages()].map((t) => el("th", {}, t)),
        ),
      ),
      el(
        "tbody",
        {},
        order.map((one) =>
          el(
            "tr",
            { class: one === m ? "on" : null },
            el("td", { title: one.label }, one.label),
            stages().map((stage) => el("td", {}, fmt(value(one, stage, state.client)))),
          ),
        ),
      ),
    ),
  );
}
