// The last file: draws the page.

function settle() {
  state.metric = looked().name;
  if (!methodOf(state.method)) {
    [state.method, state.stage] = D.answer.mean || [D.methods[0].name, stages()[0]]; // what the headline names
    if (bases().length === 1 && stages().includes(ADAPTED)) state.stage = ADAPTED; // itself, as served
  }
  if (!bases().some(([b]) => b === state.base))
    state.base = (bases().find(([b]) => b !== `${state.method}|${state.stage}`) || bases()[0])[0];
  if (state.client >= D.clients.length) state.client = -1;
}
function render() {
  document.body.classList.toggle("carded", state.client >= 0);
  recolour();
  drawn.forEach((_, host) => {
    if (!host.isConnected) {
      watcher.unobserve(host);
      drawn.delete(host);
    }
  });
  controls();
  table();
  clients();
  spread();
  convergence();
  newcomers();
  classes();
  confusion();
  recalls();
  few();
  conflicts();
  size();
  unseen();
  card();
}
function start() {
  settle();
  answer();
  render();
  reproduce();
  document.title = `coterie report: ${D.title}`;
}
let kept = null;
try {
  kept = localStorage.getItem("coterie-theme");
} catch {
  /* no storage for files here */
}
theme(kept || document.documentElement.dataset.theme);
start();
if (D.live) {
  progress();
  poll("");
}
