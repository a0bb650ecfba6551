// The answer, at the top.

function answer() {
  $("title").textContent = D.title;
  $("title").title = D.title;
  $("facts").textContent = D.facts.join("  ·  ");
  $("headline").textContent = D.answer.headline;
  $("sentences").replaceChildren(...D.answer.sentences.map((t) => el("p", { class: "said" }, t)));
  $("caveat").textContent = D.answer.caveat;
  $("caveat").hidden = !D.answer.caveat;
  const fallen = D.methods.filter((m) => m.few && m.few.verdict === "collapsed");
  $("callouts").replaceChildren(
    ...(D.answer.warnings || []).map((t) => el("li", { class: "warning" }, t)),
    ...fallen.map((m) =>
      el("li", {}, el("strong", {}, m.label + ": "), m.few.words + " ", el("a", { href: "#few" }, "See the models")),
    ),
    ...D.notes.map((t) => el("li", {}, t)),
  );
}
