// What the reader chooses with: menus, keys and the theme.

function pickClient(i) {
  state.client = i;
  render();
}
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

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && state.client >= 0) pickClient(-1);
});

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
