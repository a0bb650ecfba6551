// The table of methods, sorted and filtered by its reader.

const COLUMNS = [
  ["label", "method", 1, "As the command line spells it"],
  ["stage", "stage", 1, D.stages.map((one) => `${one.name}: ${one.about}`).join("; ")],
  ["mean", "mean", -1, "Unweighted mean over clients, ± standard deviation over seeds"],
  ["worst", "worst", -1, "The worst client"],
  ["lowest", "low 10 %", -1, "Mean of the worst tenth of the clients"],
  ["client_std", "std", 1, "Standard deviation over clients"],
  ["jain", "Jain", -1, "Jain's index: 1 when all clients are equal"],
  ["unseen", "unseen", -1, "Mean over clients kept out of training"],
  ["epsilon", "epsilon", 1, "Privacy spent by all rounds"],
  ["bytes_each_round", "bytes", 1, "Per client and round, down and up"],
  ["seconds", "time", 1, "Of the training alone"],
  ["round", "round", 1, "The round reported, chosen on validation data"],
];
function table() {
  const all = D.methods.flatMap((m) => seen(m).lines.map((line) => ({ ...line, m, round: mean(line.rounds) })));
  const columns = COLUMNS.filter(
    ([name]) => !["unseen", "epsilon"].includes(name) || all.some((l) => known(l[name])),
  );
  const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const lines = all.filter(
    (l) =>
      (state.shown === "both" || l.stage === state.shown) &&
      words.every((w) => `${l.label} ${l.stage}`.toLowerCase().includes(w)),
  );
  const [by, way] = state.sort;
  const turned = ["mean", "worst", "lowest", "unseen"].includes(by) && !looked().higher ? -way : way;
  const block = (l) => (by === "stage" ? 0 : stages().indexOf(l.stage));
  lines.sort((a, b) => {
    if (block(a) !== block(b)) return block(a) - block(b);
    if (typeof a[by] === "string") return way * a[by].localeCompare(b[by]);
    return known(b[by]) - known(a[by]) || turned * (a[by] - b[by]);
  });
  // Bold is the best of a stage as it is printed, unless more than half of the methods have it: it tells nobody apart.
  const printed = { mean: (l) => fmt(l.mean, fine()), worst: (l) => fmt(l.worst) };
  const best = {};
  for (const stage of stages())
    for (const name of ["mean", "worst"]) {
      const group = all.filter((l) => l.stage === stage),
        behind = group.some((l) => l.outcome === "not finished"),
        values = behind ? [] : group.filter((l) => !l.outcome).map((l) => l[name]).filter(known);
      if (group.length < 2 || !values.length) continue;
      const text = printed[name]({ [name]: looked().higher ? Math.max(...values) : Math.min(...values) });
      if (2 * group.filter((l) => printed[name](l) === text).length <= group.length) best[stage + name] = text;
    }
  const shown = {
    label: (l) => [
      el("span", { class: "dot", style: `background:${colour(l.m)}` }),
      l.label,
      l.stage === SERVED && l.steps > 0 ? el("small", { title: "trains before use" }, " ·t") : null,
      l.printed ? el("small", { title: "the stage its paper printed" }, " †") : null,
    ],
    stage: (l) => l.stage,
    mean: (l) => [
      l.outcome ? el("small", { class: "unranked", title: l.why }, `${l.outcome} `) : null,
      fmt(l.mean, fine()),
      l.seeds > 1 ? el("small", {}, ` ± ${fmt(l.mean_spread, fine())}`) : null,
    ],
    jain: (l) => (known(l.jain) ? rounded(l.jain, 3).toFixed(3) : "–"),
    epsilon: (l) => (known(l.epsilon) ? rounded(l.epsilon, 2).toFixed(2) : "–"),
    bytes_each_round: (l) => bytes(l.bytes_each_round),
    seconds: (l) => seconds(l.seconds),
    round: (l) => {
      const [a, b] = extent(l.rounds);
      return a === b ? String(a) : `${a}–${b}`;
    },
  };
  const head = el(
    "tr",
    {},
    columns.map(([name, text, first, title]) =>
      el(
        "th",
        {
          scope: "col",
          class: name === "stage" ? "text" : null,
          "aria-sort": by === name ? (turned > 0 === true ? "ascending" : "descending") : null,
        },
        el(
          "button",
          {
            type: "button",
            title,
            "data-sort": name,
            onclick: () => {
              state.sort = [name, by === name ? -way : first];
              table();
              document.querySelector(`[data-sort="${name}"]`).focus();
            },
          },
          text,
        ),
      ),
    ),
  );
  const body = lines.map((l) =>
    el(
      "tr",
      {
        class: "pick" + (l.method === state.method && l.stage === state.stage ? " on" : ""),
        "data-method": l.method,
        "data-stage": l.stage,
        onclick: () => {
          state.method = l.method;
          state.stage = l.stage;
          render();
        },
      },
      columns.map(([name]) =>
        el(
          "td",
          {
            class:
              [
                name === "label" ? "name" : "",
                name === "stage" ? "text" : "",
                !l.outcome && name in printed && best[l.stage + name] === printed[name](l) ? "best" : "",
              ]
                .join(" ")
                .trim() || null,
            title: name === "label" ? l.label : null,
          },
          shown[name] ? shown[name](l) : fmt(l[name]),
        ),
      ),
    ),
  );
  const old = $("filter");
  if (old) {
    $("methods").querySelector("thead").replaceChildren(head);
    $("methods")
      .querySelector("tbody")
      .replaceChildren(...body);
    $("methods").querySelector(".seg").replaceWith(shownStages());
  } else {
    const filter = el("input", {
      id: "filter",
      type: "search",
      placeholder: "Filter methods",
      "aria-label": "Filter methods",
      oninput: (event) => {
        state.filter = event.target.value;
        table();
      },
    });
    section(
      "methods",
      "Methods",
      D.stages.map((one) => `${capital(one.name)}: ${one.about}. `).join("") +
        "Stages are sorted apart, never mixed. Bold: best mean and best worst client of a stage, " +
        "where at most half of the methods have it. " +
        "Click a line to look at it in all charts below.",
      el(
        "div",
        { class: "tools" },
        filter,
        shownStages(),
        el("span", { class: "count", id: "count", role: "status" }),
        el("span", { class: "count", id: "by", role: "status" }),
      ),
      el(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of methods" },
        el("table", {}, el("thead", {}, head), el("tbody", {}, body)),
      ),
    );
  }
  $("by").textContent =
    `Test ${measured()}, ${direction()}` +
    (looked() === decides() ? "." : `; ${decides().title} decides the answer and the round.`);
  $("count").textContent =
    lines.length === all.length ? counted(all.length, "line") : `${lines.length} of ${counted(all.length, "line")}`;
}
const shownStages = () =>
  choose(
    [["both", "both stages"], ...stages().map((x) => [x, x])],
    state.shown,
    (v) => {
      state.shown = v;
      table();
    },
    "Stages in the table",
  );
