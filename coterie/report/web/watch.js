// A run that is still going on: `coterie watch` serves this page with the data beside it.

const RETRY_MS = 3000;
function progress() {
  const p = D.progress,
    done = p.finished === p.runs;
  $("kind").textContent = "watch";
  $("live").hidden = false;
  $("live").textContent = done
    ? `finished: ${p.runs} of ${counted(p.runs, "run")}`
    : `${Math.floor((100 * p.done) / Math.max(1, p.rounds))} %, ${p.finished} of ${counted(p.runs, "run")} finished`;
  return done;
}
async function poll(tag) {
  let next = tag,
    done = false;
  try {
    const reply = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {} });
    if (!reply.ok && reply.status !== 304) throw new Error(String(reply.status));
    if (reply.status === 200) {
      D = await reply.json();
      next = reply.headers.get("ETag");
      start();
    }
    done = progress();
  } catch {
    $("live").textContent = "no answer from the watching process";
  }
  if (!done) setTimeout(() => poll(next), RETRY_MS);
}
