// Who is confused with whom, client by client from the worst served on, and how often each class is found.

const counts = (m, stage) => (m.confusion && m.confusion[stage]) || null;
// The client whose matrix is shown: the one chosen on the page, the one chosen here, else the worst served.
function confusedClient(c) {
  const kept = (i) => c.clients.some((one) => one.client === i);
  if (state.client >= 0 && kept(state.client)) return state.client;
  if (state.confused === "all") return "all";
  return kept(state.confused) ? state.confused : c.clients[0].client;
}
function tint(name, share) {
  return share > 0 ? `background:color-mix(in srgb, var(${name}) ${Math.round(8 + 44 * share)}%, var(--panel))` : null;
}
// Whether the names of classes fit side by side, beside so many pixels of other columns.
const level = (names, beside) =>
  sum(names.map((n) => 18 + Math.max(20, 7.6 * Math.min(16, n.length)))) + beside <
  $("answer").clientWidth - 40;
function mostConfused(one) {
  const found = one.counts
    .flatMap((line, a) => line.map((n, b) => ({ n, of: one.held[a], a, b })))
    .filter((p) => p.a !== p.b && p.n)
    .sort((p, q) => q.n - p.n || q.n / q.of - p.n / p.of)
    .slice(0, 3);
  const name = (k) => `${D.labels ? "" : "class "}${className(one.classes[k])}`;
  return found.length
    ? ` Most often confused: ${found.map((p) => `${name(p.a)} answered ${name(p.b)} (${p.n} of ${p.of})`).join(", ")}.`
    : " Every sample was answered right.";
}
function matrixTable(one, caption) {
  const names = one.classes.map(className),
    upright = !level(names, 300);
  const head = (text, attrs) => el("th", { scope: "col", ...attrs }, text);
  return el(
    "div",
    { class: "scroll fit", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      { class: "matrix" + (upright ? " upright" : "") },
      el("caption", {}, caption),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { class: "corner", scope: "col" }, "true \\ answered"),
          names.map((n) => head(el("span", {}, short(n, 16)), { title: n })),
          head("samples", { class: "total" }),
          head("recall", { class: "total" }),
        ),
      ),
      el(
        "tbody",
        {},
        one.counts.map((line, a) => {
          const of = one.held[a];
          return el(
            "tr",
            {},
            el("th", { scope: "row", title: names[a] }, short(names[a], 16)),
            line.map((n, b) =>
              el(
                "td",
                {
                  class: n ? null : "none",
                  style: tint(a === b ? "--gain" : "--loss", of ? n / of : 0),
                  "data-tip": n ? `${names[a]} answered ${names[b]}\n${n} of ${counted(of, "sample")}` : null,
                },
                n,
              ),
            ),
            el("td", { class: "total" }, of),
            el("td", { class: "total" }, of ? share(line[a] / of) : "–"),
          );
        }),
      ),
    ),
  );
}
function confusion() {
  const m = methodOf(state.method),
    c = counts(m, state.stage);
  if (D.classes === 0) {
    $("confusion").hidden = true;
    return;
  }
  if (!c || !c.clients.length) {
    const why = (D.missing.confusion && D.missing.confusion[m.name]) || {};
    section(
      "confusion",
      "Who is confused with whom",
      null,
      nothing(why[state.stage] || "No client that trains has test samples."),
    );
    return;
  }
  const now = confusedClient(c),
    one = now === "all" ? c.all : c.clients.find((p) => p.client === now);
  const whole = m.values[state.stage],
    told = (i) => `${D.clients[i].name}: ${fmt(whole[i], undefined, decides())}${unit(decides())}`,
    worst = c.clients[0].client;
  const who =
    now === "all"
      ? "All clients that train, together, "
      : `Client ${D.clients[now].name}${now === worst ? `, the worst served by ${decides().title}` : ""}, `;
  const cut = [];
  if (c.clients.length < c.of)
    cut.push(`Of ${c.of} clients, the ${c.clients.length} served worst have their matrix on this page.`);
  if (one.classes.length < one.of)
    cut.push(`Of ${one.of} classes, the ${one.classes.length} most often mistaken are shown.`);
  const menu = el(
    "select",
    {
      id: "confused",
      onchange: (event) => {
        const value = event.target.value;
        state.confused = value === "all" ? "all" : +value;
        if (state.client >= 0) state.client = value === "all" ? -1 : +value;
        render();
        $("confused").focus();
      },
    },
    c.clients.map((p) => el("option", { value: p.client, selected: p.client === now }, told(p.client))),
    el("option", { value: "all", selected: now === "all" }, "all clients together"),
  );
  section(
    "confusion",
    "Who is confused with whom",
    [
      el("span", { class: "strong" }, `${who}${focusName()}.`),
      mostConfused(one),
      " A row is the true class, a column the answer; numbers are test samples" +
        (m.seeds.length > 1 ? `, ${m.seeds.length} seeds together` : "") +
        ". Clients are listed from the worst served on.",
    ],
    el("div", { class: "tools" }, el("label", {}, "Client ", menu)),
    matrixTable(one, `Samples by true class and answer, ${now === "all" ? "all clients" : D.clients[now].name}`),
    key(
      ["square", "background:var(--gain);opacity:.55", "right"],
      ["square", "background:var(--loss);opacity:.55", "taken for another class"],
    ),
    cut.length ? el("p", { class: "sub", id: "confusion-cut" }, cut.join(" ")) : null,
  );
}

function recalls() {
  const listed = D.recalled.classes,
    having = D.methods.filter((m) => counts(m, state.stage));
  if (!listed.length || !having.length) {
    $("recall").hidden = true;
    return;
  }
  const names = listed.map(className),
    upright = !level(names, 160);
  const cell = (found, k) => {
    if (!found) return el("td", { class: "none" }, "–");
    const [right, of, worst, its, held] = found;
    return el(
      "td",
      {
        style: tint("--loss", 1 - right / of),
        "data-tip":
          `${names[k]}: ${share(right / of)} of ${counted(of, "sample")} found\n` +
          `worst client ${D.clients[worst].name}: ${its} of ${held}`,
      },
      rounded(100 * (right / of), 1).toFixed(1),
      el("small", {}, rounded(100 * (its / held), 0).toFixed(0)),
    );
  };
  section(
    "recall",
    "Recall by class",
    `How many of a class's test samples a method finds, in %, all clients that train together, stage ${state.stage}; ` +
      "small: the client with the lowest recall of that class. The stronger the colour, the more are missed.",
    el(
      "div",
      { class: "scroll fit", tabindex: 0, role: "region", "aria-label": "Recall by class" },
      el(
        "table",
        { class: "matrix recall" + (upright ? " upright" : "") },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            el("th", { class: "corner", scope: "col" }, "method"),
            names.map((n) => el("th", { scope: "col", title: n }, el("span", {}, short(n, 16)))),
          ),
        ),
        el(
          "tbody",
          {},
          having.map((m) =>
            el(
              "tr",
              { class: m.name === state.method ? "on" : null },
              el("th", { scope: "row", title: m.name }, short(label(m, state.stage), 24)),
              counts(m, state.stage).recall.map(cell),
            ),
          ),
        ),
      ),
    ),
    listed.length < D.recalled.of
      ? el("p", { class: "sub" }, `Of ${D.recalled.of} classes, the ${listed.length} of the lowest recall are shown.`)
      : null,
  );
}
