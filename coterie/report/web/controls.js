// What the reader chooses with: menus, keys and the theme.

// What is in the middle of the screen stays there when a card takes its place beside the charts.
function pickClient(i) {
  const middle = [...document.querySelectorAll("main > section")].find((one) => {
    const box = one.getBoundingClientRect();
    return !one.hidden && box.top <= innerHeight / 2 && box.bottom >= innerHeight / 2;
  });
  const before = middle ? middle.getBoundingClientRect().top : 0;
  state.client = i;
  render();
  if (middle) scrollBy({ top: middle.getBoundingClientRect().top - before, behavior: "instant" });
}
// On a narrow screen the bar is one line that says what is chosen, and opens.
function open(wide) {
  $("chosen").setAttribute("aria-expanded", String(wide));
}
const opened = () => $("chosen").getAttribute("aria-expanded") === "true";
const folded = () => getComputedStyle($("chosen")).display !== "none";
function controls() {
  const fill = (id, options, now) =>
    $(id).replaceChildren(
      ...options.map(([v, t]) => el("option", { value: v, selected: String(v) === String(now) }, t)),
    );
  fill(
    "method",
    D.methods.map((m) => [m.name, m.label]),
    state.method,
  );
  fill("base", bases(), state.base);
  fill(
    "metric",
    D.metrics.map((one) => [one.name, one.title]),
    state.metric,
  );
  $("metric").parentElement.hidden = D.metrics.length < 2;
  fill(
    "client",
    [[-1, "nobody"], ...D.clients.map((c, i) => [i, c.name + (c.seen ? "" : " (unseen)")])],
    state.client,
  );
  $("chosen").replaceChildren(
    el("strong", {}, focusName()),
    ` against ${baseName()}`,
    state.client >= 0 ? `, client ${D.clients[state.client].name}` : "",
    looked() === decides() ? "" : `, ${looked().title}`,
  );
  $("stage").replaceChildren(
    ...stages().map((v) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": String(v === state.stage),
          onclick: () => {
            state.stage = v;
            render();
            $("stage").querySelector(`[aria-pressed="true"]`).focus();
          },
        },
        v,
      ),
    ),
  );
}
$("method").addEventListener("change", (event) => {
  state.method = event.target.value;
  render();
});
$("base").addEventListener("change", (event) => {
  state.base = event.target.value;
  render();
});
$("metric").addEventListener("change", (event) => {
  state.metric = event.target.value;
  render();
});
$("client").addEventListener("change", (event) => pickClient(+event.target.value));

$("chosen").addEventListener("click", () => open(!opened()));
document.addEventListener("pointerdown", (event) => {
  if (opened() && !event.target.closest(".controls")) open(false);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (opened() && folded()) {
    open(false);
    $("chosen").focus();
  } else if (state.client >= 0) pickClient(-1);
});
// Anchors stop below the bar, however high it is.
new ResizeObserver(() => {
  const bar = document.querySelector(".controls");
  document.documentElement.style.setProperty("--bar", `${bar.offsetHeight}px`);
}).observe(document.querySelector(".controls"));

const dark = () => {
  const t = document.documentElement.dataset.theme;
  return t === "dark" || (t === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
};
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme-name").textContent = dark() ? "Light" : "Dark";
  drawn.forEach((_, host) => {
    if (host.isConnected) paint(host);
    else drawn.delete(host);
  });
}
$("theme").addEventListener("click", () => {
  const next = dark() ? "light" : "dark";
  try {
    localStorage.setItem("coterie-theme", next);
  } catch {
    /* a file without storage keeps its theme while open */
  }
  theme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  theme(document.documentElement.dataset.theme),
);
