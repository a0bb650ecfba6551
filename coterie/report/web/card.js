// The card of the chosen client.

const LISTED = 8; // methods that a card lists before it is asked for all
// When a client is there, where clients come and go.
function present(c) {
  if (!known(c.arrives) || (!c.arrives && !known(c.leaves))) return null;
  const from = c.arrives ? `arrived in round ${c.arrives}` : "there from the start",
    gone = known(c.leaves) && c.leaves <= D.churn.rounds;
  return gone ? `${from}, left in round ${c.leaves}` : from;
}
// Its values with the chosen method and the one it is compared with; in words where there is none.
function judged(c) {
  const m = methodOf(state.method),
    p = pairs().find((one) => one.i === state.client);
  if (p) {
    const same = baseOf(m).m === m && baseOf(m).stage === state.stage;
    return (
      `${fmt(p.to)}${unit()} with ${focusName()}` +
      (same ? "" : `, ${gained(p.to, p.from)}${points()} over ${baseName()}`)
    );
  }
  const own = value(m, state.stage, state.client);
  if (known(own)) return `${fmt(own)}${unit()} with ${focusName()}`;
  if (!c.test) return "no test samples, so no value";
  if (known(c.arrives)) return `none with ${focusName()}: it was not there in the round reported`;
  return `none with ${focusName()} on its test samples`;
}
// The methods by what they give this client, the best first: the first few, the chosen one and the baselines, or all.
function listed() {
  const by = (m) => value(m, state.stage, state.client),
    sign = looked().higher ? 1 : -1,
    order = D.methods
      .slice()
      .sort((a, b) => known(by(b)) - known(by(a)) || (known(by(a)) ? sign * (by(b) - by(a)) : 0));
  if (state.whole || order.length <= LISTED + 2) return order;
  const kept = new Set([methodOf(state.method), ...bases().map(([b]) => methodOf(b.slice(0, b.lastIndexOf("|"))))]);
  return order.filter((m, k) => k < LISTED - 2 || kept.has(m));
}
function bars(c) {
  const tall = Math.max(1, ...c.classes);
  return [
    el(
      "div",
      { class: "bars", "aria-hidden": "true" },
      c.classes.map((n, k) =>
        el("div", {
          style: `height:${(100 * n) / tall}%`,
          "data-tip": `${D.labels ? "" : "class "}${className(k)}: ${counted(n, "sample")}`,
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
  ];
}
function card() {
  const host = $("card"),
    c = D.clients[state.client];
  host.hidden = !c;
  if (!c) return;
  const samples = { train: c.train, validation: c.val, test: c.test },
    held = Object.keys(samples).filter((split) => known(samples[split]));
  const facts = [["samples", held.map((split) => `${samples[split]} ${split}`).join(", ")]];
  if (present(c)) facts.push(["rounds", present(c)]);
  if (c.classes && D.classes) facts.push(["classes", `${c.classes.filter(Boolean).length} of ${D.classes}`]);
  facts.push([looked().title, judged(c)]);
  const m = methodOf(state.method);
  for (const one of D.methods) {
    const model = one.few && one.few.end && one.few.models > 1 ? one.few.end.choice[state.client] : null;
    if (known(model) && (one === m || one.name === state.few))
      facts.push(["model", `${model + 1} of ${one.few.models}, ${one.label}`]);
  }
  const rows = listed();
  host.replaceChildren(
    el(
      "header",
      {},
      el("h3", {}, `Client ${c.name}`, c.seen ? null : el("small", {}, "unseen: kept out of training")),
      el(
        "button",
        {
          type: "button",
          class: "ghost",
          "aria-label": "Close",
          onclick: () => {
            pickClient(-1);
            (folded() ? $("chosen") : $("client")).focus();
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
    ...(c.classes && D.classes && D.classes <= 40 ? bars(c) : []),
    el(
      "table",
      {},
      el("caption", {}, `Its test ${measured()}, best ${state.stage} first`),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ["method", ...stages()].map((t) => el("th", { scope: "col" }, t)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((one) =>
          el(
            "tr",
            { class: one === m ? "on" : null },
            el("td", { title: one.label }, one.label),
            stages().map((stage) => el("td", {}, fmt(value(one, stage, state.client)))),
          ),
        ),
      ),
    ),
    ...(rows.length < D.methods.length
      ? [
          el(
            "button",
            {
              type: "button",
              class: "ghost",
              id: "whole",
              onclick: () => {
                state.whole = true;
                card();
                $("card").querySelector("button").focus();
              },
            },
            `All ${D.methods.length} methods`,
          ),
        ]
      : []),
  );
}
