// Commands, versions and options, at the bottom.

function reproduce() {
  const R = D.reproduce,
    parts = [];
  const block = (text) =>
    el(
      "div",
      { class: "pre" },
      el("pre", { tabindex: 0 }, el("code", {}, text)),
      el(
        "button",
        {
          type: "button",
          class: "ghost",
          onclick: (event) => {
            const b = event.currentTarget;
            (navigator.clipboard ? navigator.clipboard.writeText(text) : Promise.reject()).then(
              () => {
                b.textContent = "Copied";
              },
              () => {
                b.textContent = "Select it";
              },
            );
          },
        },
        "Copy",
      ),
    );
  R.commands.forEach((c) => parts.push(block(c)));
  if (!R.commands.length)
    parts.push(el("p", { class: "lead" }, `These runs were started ${R.started}; their options are below.`));
  for (const e of R.environments) {
    const versions = Object.entries(e.versions || {})
      .map(([n, v]) => `${n} ${v}`)
      .join(", ");
    parts.push(
      el(
        "dl",
        {},
        el("dt", {}, "coterie"),
        el("dd", {}, `${e.coterie || "?"}${e.revision ? `, revision ${e.revision}` : ""}`),
        el("dt", {}, "Python"),
        el("dd", {}, `${e.python || "?"}, ${versions}`),
        el("dt", {}, "machine"),
        el("dd", {}, `${e.platform || "?"}, ${e.gpu || "no GPU"}, ${e.threads || "?"} threads`),
      ),
    );
  }
  const rest = R.experiments.length ? R.experiments : R.configs;
  parts.push(
    el(
      "details",
      {},
      el("summary", {}, "All options"),
      el("pre", { tabindex: 0 }, rest.map((o) => JSON.stringify(o, null, 1)).join("\n")),
    ),
  );
  parts.push(
    el(
      "details",
      {},
      el("summary", {}, counted(D.runs.length, "run folder")),
      el(
        "div",
        { class: "scroll" },
        el(
          "table",
          {},
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              ["method", "seed", "rounds", "time", "folder"].map((h) =>
                el("th", { class: h === "folder" ? "text" : null, style: "padding:.4rem .7rem" }, h),
              ),
            ),
          ),
          el(
            "tbody",
            {},
            D.runs.map((r) =>
              el(
                "tr",
                {},
                el("td", {}, r.method),
                el("td", {}, r.seed),
                el("td", {}, r.rounds + (r.finished ? "" : " (unfinished)")),
                el("td", {}, seconds(r.seconds)),
                el("td", { class: "text" }, r.folder),
              ),
            ),
          ),
        ),
      ),
    ),
  );
  section("reproduce", "Reproduce", "The same seed gives the same result on the same versions and machine.", parts);
  $("foot").textContent =
    `Written by coterie ${D.coterie}. Numbers are test values at the round chosen on validation data; ` +
    "spread over seeds and spread over clients are never mixed.";
}
