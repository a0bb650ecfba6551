"use strict";
(() => {
  // -- state ----------------------------------------------------------------------------------------------------------
  let D = JSON.parse(document.getElementById("data").textContent);
  const [SERVED, ADAPTED] = D.stages.map((one) => one.name);
  const state = { method: "", stage: SERVED, base: "", client: -1, axis: "rounds", few: "", conflict: "",
    sort: ["mean", -1], filter: "", shown: "both" };
  const $ = (id) => document.getElementById(id);
  const NS = "http://www.w3.org/2000/svg";
  const RETRY_MS = 3000;

  // -- small words ----------------------------------------------------------------------------------------------------
  function el(tag, attrs, ...children) {
    const svg = tag.startsWith("svg:");
    const node = svg ? document.createElementNS(NS, tag.slice(4)) : document.createElement(tag);
    for (const [name, value] of Object.entries(attrs || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const s = (tag, attrs, ...children) => el("svg:" + tag, attrs, ...children);
  const known = (v) => v !== null && v !== undefined && Number.isFinite(v);
  const mean = (list) => { const x = list.filter(known); return x.length ? x.reduce((a, b) => a + b, 0) / x.length : null; };
  const sum = (list) => list.reduce((a, b) => a + b, 0);
  const extent = (list) => { const x = list.filter(known); return [Math.min(...x), Math.max(...x)]; };
  function quantile(sorted, q) {
    const at = (sorted.length - 1) * q, low = Math.floor(at);
    return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
  }
  const percent = () => D.metric === "accuracy";
  const scaled = (v) => (percent() ? 100 * v : v);
  function fmt(v, digits) {
    if (!known(v)) return "–";
    const x = scaled(v);
    if (digits === undefined) digits = percent() ? 1 : Math.abs(x) >= 100 ? 0 : 3;
    return rounded(x, digits).toFixed(digits).replace("-", "−");
  }
  // Halves away from zero, also where 88.25 was computed as 88.24999999999999: as the tables of the command line do it.
  function rounded(x, digits) {
    const whole = Math.round(+(Math.abs(x) * 10 ** digits).toFixed(9 - digits));
    return whole ? (Math.sign(x) * whole) / 10 ** digits : 0;
  }
  // How much better `to` is than `from`, as the difference of the two numbers as they are shown.
  function gained(to, from, digits = percent() ? 1 : 3) {
    if (!known(to) || !known(from)) return "–";
    const d = rounded((D.higher ? 1 : -1) * (rounded(scaled(to), digits) - rounded(scaled(from), digits)), digits);
    return (d > 0 ? "+" : d < 0 ? "−" : "±") + Math.abs(d).toFixed(digits);
  }
  const unit = () => (percent() ? " %" : "");
  const points = () => (percent() ? " points" : "");
  const signed = (v, digits) => (known(v) ? (v > 0 ? "+" : v < 0 ? "" : "±") + fmt(v, digits) : "–");
  function bytes(n) {
    if (!known(n)) return "–";
    for (const u of ["B", "kB", "MB", "GB"]) {
      if (n < 999.5) return (u === "B" || n >= 9.95 ? n.toFixed(0) : n.toFixed(1)) + " " + u;
      n /= 1000;
    }
    return n.toFixed(1) + " TB";
  }
  function seconds(t) {
    if (!known(t)) return "–";
    return t < 9.95 ? t.toFixed(1) + " s" : t < 120 ? t.toFixed(0) + " s" : t < 7200 ? (t / 60).toFixed(0) + " min"
      : (t / 3600).toFixed(1) + " h";
  }
  function ticks(low, high, count) {
    const span = high - low || 1, rough = span / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * span; i++) found.push(+(i * step).toPrecision(12));
    return found;
  }
  const axisDigits = (values) => {
    const step = values.length > 1 ? Math.abs(scaled(values[1] - values[0])) : 1;
    return percent() ? Math.max(0, Math.min(3, Math.ceil(-Math.log10(step) - 1e-9))) : undefined;
  };
  const scale = (from, to) => (v) => to[0] + ((v - from[0]) / (from[1] - from[0] || 1)) * (to[1] - to[0]);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (i) => `var(--m${i % 10})`;  // as many as page.css has, which stay apart for colour-blind readers
  const dash = (i) => [null, "7 3", "2 3", "8 3 2 3"][Math.floor(i / 5) % 4];  // and twice as many with the dashes
  const methodOf = (name) => D.methods.find((m) => m.name === name);
  const place = (name) => D.methods.findIndex((m) => m.name === name);
  const label = (m, stage) => m.labels[stage];
  const unseenOf = (stage) => D.stages.find((one) => one.name === stage).unseen;
  const plain = (name) => name.split(/[:+]/)[0];
  const better = (a, b) => (D.higher ? a - b : b - a);
  const short = (text, most) => (text.length > most ? text.slice(0, Math.max(4, most - 1)) + "…" : text);
  const className = (k) => (D.labels && D.labels[k] !== undefined ? D.labels[k] : String(k));

  // -- charts ---------------------------------------------------------------------------------------------------------
  const drawn = new Map();
  const watcher = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const one = drawn.get(target);
      if (one && Math.abs(one.width - target.clientWidth) > 1) paint(target);
    }
  });
  function paint(host) {
    const one = drawn.get(host);
    one.width = host.clientWidth;
    if (one.width < 40) return;
    const svg = one.draw(one.width);
    host.replaceChildren(svg);
  }
  function chart(about, draw) {
    const host = el("div", { class: "chart" });
    drawn.set(host, { width: 0, draw: (width) => { const svg = draw(width); svg.setAttribute("aria-label", about); return svg; } });
    watcher.observe(host);
    return host;
  }
  function canvas(width, height, clients) {
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: clients ? 0 : null });
    if (clients) {
      svg.addEventListener("click", (event) => {
        const mark = event.target.closest("[data-client]");
        if (mark) pickClient(+mark.dataset.client === state.client ? -1 : +mark.dataset.client);
      });
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step || !clients.length) return;
        event.preventDefault();
        const at = clients.indexOf(state.client);
        const next = at < 0 ? (step > 0 ? 0 : clients.length - 1) : (at + step + clients.length) % clients.length;
        const where = [...document.querySelectorAll("svg[tabindex]")].indexOf(svg);
        pickClient(clients[next]);
        const again = document.querySelectorAll("svg[tabindex]")[where];
        if (again) again.focus({ preventScroll: true });
      });
    }
    return svg;
  }
  function yAxis(svg, y, values, left, right, form) {
    for (const v of values) {
      svg.append(s("line", { class: "grid", x1: left, x2: right, y1: y(v), y2: y(v) }));
      svg.append(s("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, form(v, axisDigits(values))));
    }
  }
  function xAxis(svg, x, values, bottom, form, top) {
    for (const v of values) {
      if (top !== undefined) svg.append(s("line", { class: "grid", x1: x(v), x2: x(v), y1: top, y2: bottom }));
      svg.append(s("text", { x: x(v), y: bottom + 17, "text-anchor": "middle" }, form(v, axisDigits(values))));
    }
  }
  // Names below a row of marks, `step` apart: level where all fit, else slanted or upright and shortened, with the whole
  // name on hover; only where even that cannot fit, some are left out, never the chosen client's.
  function namePlan(names, step) {
    if (names.every((n) => n.length * 7.2 + 6 < step)) return { angle: 0, most: Infinity, every: 1, depth: 17 };
    const angle = step >= 15 ? 55 : 90, most = Math.min(24, Math.max(...names.map((n) => n.length)));
    return { angle, most, every: Math.ceil(11.5 / step), depth: 14 + 5.9 * most * Math.sin((angle * Math.PI) / 180) };
  }
  function nameMarks(svg, plan, ids, at, step, y) {
    const chosen = ids.indexOf(state.client);
    ids.forEach((i, k) => {
      const on = k === chosen, near = chosen >= 0 && Math.abs(k - chosen) * step < 11.5;
      if (!on && (k % plan.every || near)) return;
      const name = D.clients[i].name, x = at(k), text = short(name, plan.most), tip = text === name ? {} : { "data-tip": name };
      const attrs = plan.angle ? { x: x + 4, y: y + 11, "text-anchor": "end", transform: `rotate(${-plan.angle} ${x + 4} ${y + 11})` } : { x, y: y + 17, "text-anchor": "middle" };
      svg.append(s("text", { ...attrs, class: on ? "on" : "who", "data-client": i, ...tip }, text));
    });
  }
  const path = (pts) => {
    let out = "", pen = false;
    for (const [a, b] of pts) { if (!known(a) || !known(b)) { pen = false; continue; } out += `${pen ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`; pen = true; }
    return out;
  };
  const tip = $("tip");
  document.addEventListener("pointermove", (event) => {
    const mark = event.target.closest && event.target.closest("[data-tip]");
    if (!mark) { tip.hidden = true; return; }
    tip.textContent = mark.dataset.tip;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
    tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
  });
  document.addEventListener("pointerleave", () => { tip.hidden = true; });
  const hover = (key, client) => (client ? { "data-client": key, "data-tip": client } : {});

  function section(id, title, lead, ...parts) {
    const host = $(id);
    host.hidden = false;
    host.replaceChildren(el("h2", {}, title), lead ? el("p", { class: "lead" }, lead) : null, ...parts.flat().filter(Boolean));
    host.querySelectorAll(".chart").forEach((c) => drawn.has(c) && paint(c));
  }
  const key = (...items) => el("div", { class: "key" }, items.map(([mark, style, text]) =>
    el("span", {}, el("i", { class: mark, style }), text)));
  function choose(options, now, on, name) {
    return el("div", { class: "seg", role: "group", "aria-label": name }, options.map(([value, text]) =>
      el("button", { type: "button", "aria-pressed": String(value === now), onclick: () => on(value) }, text)));
  }

  // -- what the charts share ------------------------------------------------------------------------------------------
  const stages = () => D.stages.map((one) => one.name).filter((stage) => D.methods.some((m) => m.values[stage]));
  const value = (m, stage, i) => {
    const own = m.values[D.clients[i].seen ? stage : unseenOf(stage)];
    return own ? own[i] : null;
  };
  function bases() {
    const found = [];
    const global = D.methods.find((m) => m.name === "fedavg") || D.methods.find((m) => plain(m.name) === "fedavg");
    const local = D.methods.find((m) => plain(m.name) === "local");
    if (global) found.push([`${global.name}|${SERVED}`, global.label + ", the global model"]);
    if (global && global.values[ADAPTED]) found.push([`${global.name}|${ADAPTED}`, label(global, ADAPTED)]);
    if (local) found.push([`${local.name}|${SERVED}`, local.label + ", no sharing"]);
    found.push([`|${SERVED}`, `itself, as ${SERVED}`]);
    return found;
  }
  function baseOf(method) {
    const [name, stage] = [state.base.slice(0, state.base.lastIndexOf("|")), state.base.slice(state.base.lastIndexOf("|") + 1)];
    return { m: name ? methodOf(name) : method, stage };
  }
  function pairs() {
    const m = methodOf(state.method), base = baseOf(m);
    return D.clients.map((c, i) => ({ i, seen: c.seen, from: value(base.m, base.stage, i), to: value(m, state.stage, i) }))
      .filter((p) => known(p.from) && known(p.to)).map((p) => ({ ...p, gain: better(p.to, p.from) }));
  }
  const baseName = () => { const b = baseOf(methodOf(state.method)); return label(b.m, b.stage) + (b.m.label === label(b.m, b.stage) ? ` (${b.stage})` : ""); };
  const focusName = () => { const m = methodOf(state.method), l = label(m, state.stage); return l === m.label ? `${l} (${state.stage})` : l; };
  function domain(list, pad) {
    let [low, high] = extent(list);
    if (!Number.isFinite(low)) return [0, 1];
    const air = (high - low) * (pad || 0.05) || Math.abs(high) * 0.05 || 0.01;
    low -= air; high += air;
    return percent() ? [Math.max(-0.012, low), Math.min(1.012, high)] : [low, high];
  }

  // -- the answer -----------------------------------------------------------------------------------------------------
  function answer() {
    $("facts").textContent = D.facts.join("  ·  ");
    $("headline").textContent = D.answer.headline;
    $("sentences").replaceChildren(...D.answer.sentences.map((t) => el("p", { class: "said" }, t)));
    $("caveat").textContent = D.answer.caveat;
    $("caveat").hidden = !D.answer.caveat;
    const fallen = D.methods.filter((m) => m.few && m.few.verdict === "collapsed");
    $("callouts").replaceChildren(
      ...(D.answer.warnings || []).map((t) => el("li", { class: "warning" }, t)),
      ...fallen.map((m) => el("li", {}, el("strong", {}, m.label + ": "), m.few.words + " ", el("a", { href: "#few" }, "See the models"))),
      ...D.notes.map((t) => el("li", {}, t)));
  }

  // -- the table ------------------------------------------------------------------------------------------------------
  const COLUMNS = [
    ["label", "method", 1, "As the command line spells it"], ["stage", "stage", 1, D.stages.map((one) => `${one.name}: ${one.about}`).join("; ")],
    ["mean", "mean", -1, "Unweighted mean over clients, ± standard deviation over seeds"],
    ["worst", "worst", -1, "The worst client"], ["lowest", "low 10 %", -1, "Mean of the worst tenth of the clients"],
    ["client_std", "std", 1, "Standard deviation over clients"], ["jain", "Jain", -1, "Jain's index: 1 when all clients are equal"],
    ["unseen", "unseen", -1, "Mean over clients kept out of training"], ["epsilon", "epsilon", 1, "Privacy spent by all rounds"],
    ["bytes_each_round", "bytes", 1, "Per client and round, down and up"], ["seconds", "time", 1, "Of the training alone"],
    ["round", "round", 1, "The round reported, chosen on validation data"],
  ];
  function table() {
    const all = D.methods.flatMap((m) => m.lines.map((line) => ({ ...line, m, round: mean(line.rounds) })));
    const columns = COLUMNS.filter(([name]) => !["unseen", "epsilon"].includes(name) || all.some((l) => known(l[name])));
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const lines = all.filter((l) => (state.shown === "both" || l.stage === state.shown)
      && words.every((w) => `${l.label} ${l.stage}`.toLowerCase().includes(w)));
    const [by, way] = state.sort;
    const turned = ["mean", "worst", "lowest", "unseen"].includes(by) && !D.higher ? -way : way;
    const block = (l) => (by === "stage" ? 0 : stages().indexOf(l.stage));
    lines.sort((a, b) => {
      if (block(a) !== block(b)) return block(a) - block(b);
      if (typeof a[by] === "string") return way * a[by].localeCompare(b[by]);
      return (known(b[by]) - known(a[by])) || turned * (a[by] - b[by]);
    });
    const best = {};
    for (const stage of stages()) for (const name of ["mean", "worst"]) {
      const values = all.filter((l) => l.stage === stage && known(l[name])).map((l) => l[name]);
      if (values.length > 1) best[stage + name] = D.higher ? Math.max(...values) : Math.min(...values);
    }
    const shown = {
      label: (l) => [el("span", { class: "dot", style: `background:${colour(place(l.method))}` }), l.label,
        l.stage === SERVED && l.steps > 0 ? el("small", { title: "trains before use" }, " ·t") : null,
        l.published ? el("small", { title: "the stage its paper printed" }, " †") : null],
      stage: (l) => l.stage,
      mean: (l) => [fmt(l.mean, percent() ? 2 : 3), l.seeds > 1 ? el("small", {}, ` ± ${fmt(l.mean_spread, percent() ? 2 : 3)}`) : null],
      jain: (l) => (known(l.jain) ? rounded(l.jain, 3).toFixed(3) : "–"), epsilon: (l) => (known(l.epsilon) ? rounded(l.epsilon, 2).toFixed(2) : "–"),
      bytes_each_round: (l) => bytes(l.bytes_each_round), seconds: (l) => seconds(l.seconds),
      round: (l) => { const [a, b] = extent(l.rounds); return a === b ? String(a) : `${a}–${b}`; },
    };
    const head = el("tr", {}, columns.map(([name, text, first, title]) => el("th", {
      scope: "col", class: name === "stage" ? "text" : null,
      "aria-sort": by === name ? (turned > 0 === true ? "ascending" : "descending") : null,
    }, el("button", { type: "button", title, "data-sort": name, onclick: () => {
      state.sort = [name, by === name ? -way : first]; table();
      document.querySelector(`[data-sort="${name}"]`).focus();
    } }, text))));
    const body = lines.map((l) => el("tr", {
      class: "pick" + (l.method === state.method && l.stage === state.stage ? " on" : ""), "data-method": l.method, "data-stage": l.stage,
      onclick: () => { state.method = l.method; state.stage = l.stage; render(); },
    }, columns.map(([name]) => el("td", {
      class: [name === "label" ? "name" : "", name === "stage" ? "text" : "", best[l.stage + name] !== undefined && best[l.stage + name] === l[name] ? "best" : ""].join(" ").trim() || null,
      title: name === "label" ? l.label : null,
    }, shown[name] ? shown[name](l) : fmt(l[name])))));
    const old = $("filter");
    if (old) {
      $("methods").querySelector("thead").replaceChildren(head);
      $("methods").querySelector("tbody").replaceChildren(...body);
      $("methods").querySelector(".seg").replaceWith(shownStages());
    } else {
      const filter = el("input", { id: "filter", type: "search", placeholder: "Filter methods", "aria-label": "Filter methods",
        oninput: (event) => { state.filter = event.target.value; table(); } });
      section("methods", "Methods", "Served: the model a client gets. Adapted: the same after local training. Stages are sorted apart, never mixed. Bold: best mean and best worst client of a stage. Click a line to look at it in all charts below.",
        el("div", { class: "tools" }, filter, shownStages(), el("span", { class: "count", id: "count", role: "status" })),
        el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of methods" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body))));
    }
    $("count").textContent = lines.length === all.length ? `${all.length} lines` : `${lines.length} of ${all.length} lines`;
  }
  const shownStages = () => choose([["both", "both stages"], ...stages().map((x) => [x, x])], state.shown,
    (v) => { state.shown = v; table(); }, "Stages in the table");

  const lineOf = (m, stage) => m.lines.find((l) => l.stage === stage) || {};
  function averageGain(list) {
    const m = methodOf(state.method), base = baseOf(m), to = lineOf(m, state.stage).mean, from = lineOf(base.m, base.stage).mean;
    const whole = list.length === D.clients.filter((c, i) => c.seen && known(value(m, state.stage, i))).length;
    return whole && known(to) && known(from) ? gained(to, from, percent() ? 2 : 3) : signed(mean(list.map((p) => p.gain)), percent() ? 2 : 3);
  }

  // -- every client ---------------------------------------------------------------------------------------------------
  function clients() {
    const list = pairs().filter((p) => p.seen).sort((a, b) => b.gain - a.gain);
    const gains = list.filter((p) => p.gain > 1e-9).length, losses = list.filter((p) => p.gain < -1e-9).length;
    const same = baseOf(methodOf(state.method)).m.name === state.method && baseOf(methodOf(state.method)).stage === state.stage;
    const lead = same ? "This is the method it would be compared with; choose another method, stage or comparison above."
      : [el("span", { class: "strong" }, `${gains} of ${list.length} clients gain, ${losses} lose`), `, ${list.length - gains - losses} stay the same; ${averageGain(list)}${points()} on average. Each line leads a client from ${baseName()} to ${focusName()}.`];
    const about = `Each client's test value with ${baseName()} and with ${focusName()}`;
    section("clients", "Who gains, who loses", lead, el("div", { class: "panel" }, chart(about, (width) => {
      const left = 44, right = width - 8, top = 12, step = (right - left) / Math.max(1, list.length);
      const plan = namePlan(list.map((p) => D.clients[p.i].name), step), bottom = 300, height = bottom + plan.depth + 24;
      const svg = canvas(width, height, list.map((p) => p.i));
      const y = scale(domain(list.flatMap((p) => [p.from, p.to])), [bottom, top]);
      yAxis(svg, y, ticks(...domain(list.flatMap((p) => [p.from, p.to])), 6), left, right, fmt);
      const r = Math.max(1.6, Math.min(5, step * 0.28));
      list.forEach((p, k) => {
        const x = left + step * (k + 0.5), on = p.i === state.client, name = D.clients[p.i].name;
        const tint = p.gain > 1e-9 ? "var(--gain)" : p.gain < -1e-9 ? "var(--loss)" : "var(--same)";
        const dim = state.client >= 0 && !on ? 0.28 : 1;
        if (on) svg.append(s("rect", { x: x - step / 2, width: step, y: top - 6, height: bottom - top + 10, fill: "var(--wash)", rx: 3 }));
        svg.append(s("g", { opacity: dim },
          s("line", { x1: x, x2: x, y1: y(p.from), y2: y(p.to), stroke: tint, "stroke-width": Math.max(1, r * 0.6) }),
          s("circle", { cx: x, cy: y(p.from), r, fill: "var(--panel)", stroke: tint, "stroke-width": 1.4 }),
          s("circle", { cx: x, cy: y(p.to), r: r * 1.05, fill: tint })));
        svg.append(s("rect", { class: "hit", x: x - step / 2, width: step, y: top - 6, height: bottom - top + 10,
          ...hover(p.i, `client ${name}\n${fmt(p.from)} → ${fmt(p.to)}${unit()}  (${gained(p.to, p.from)})`) }));
      });
      nameMarks(svg, plan, list.map((p) => p.i), (k) => left + step * (k + 0.5), step, bottom);
      svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "clients, by gain"));
      return svg;
    }), key(["open", "color:var(--soft)", baseName()], ["", "background:var(--gain)", `${focusName()}, better`], ["", "background:var(--loss)", "worse"])));
  }

  // -- distribution ---------------------------------------------------------------------------------------------------
  function strips(stage, listed, only, printed) {
    return chart(`Distribution over clients of every method, ${stage}`, (width) => {
      const narrow = width < 560, row = narrow ? 50 : 34, left = narrow ? 8 : Math.min(220, width * 0.26), right = width - 46, top = 6;
      const height = top + row * listed.length + 26;
      const svg = canvas(width, height, D.clients.map((_, i) => i).filter(only));
      const values = listed.flatMap((m) => D.clients.map((_, i) => (only(i) ? value(m, stage, i) : null)));
      const x = scale(domain(values), [left + 6, right]);
      xAxis(svg, x, ticks(...domain(values), narrow ? 4 : 8), height - 22, fmt, top);
      listed.forEach((m, k) => {
        const own = D.clients.map((_, i) => ({ i, v: only(i) ? value(m, stage, i) : null })).filter((p) => known(p.v)).sort((a, b) => a.v - b.v);
        const base = top + row * k, y = base + (narrow ? 32 : row / 2), tint = colour(place(m.name)), on = m.name === state.method;
        svg.append(s("text", { x: narrow ? left : left - 6, y: narrow ? base + 14 : y + 4, "text-anchor": narrow ? "start" : "end", class: on ? "on" : "ink" },
          short(label(m, stage), narrow ? 40 : Math.floor(left / 7))));
        if (!own.length) return;
        const sorted = own.map((p) => p.v), average = mean(sorted);
        svg.append(s("rect", { x: x(quantile(sorted, 0.25)), width: Math.max(1, x(quantile(sorted, 0.75)) - x(quantile(sorted, 0.25))), y: y - 10, height: 20, rx: 3, fill: tint, opacity: 0.14 }));
        own.forEach((p, j) => {
          const shift = 14 * (((j * 0.618034 + 0.5) % 1) - 0.5), chosen = p.i === state.client;
          svg.append(s("circle", { cx: x(p.v), cy: y + shift, r: chosen ? 6 : own.length > 60 ? 2.6 : 3.6, fill: chosen ? "var(--accent)" : tint,
            opacity: chosen ? 1 : state.client >= 0 ? 0.25 : 0.75, stroke: chosen ? "var(--panel)" : null, "stroke-width": 1.5,
            ...hover(p.i, `${label(m, stage)}\nclient ${D.clients[p.i].name}: ${fmt(p.v)}${unit()}`) }));
        });
        svg.append(s("line", { x1: x(average), x2: x(average), y1: y - 12, y2: y + 12, stroke: "var(--ink)", "stroke-width": 2 }));
        svg.append(s("text", { x: width, y: y + 4, "text-anchor": "end", class: "ink" }, printed(m, average)));
      });
      return svg;
    });
  }
  const ranked = (stage) => D.methods.filter((m) => m.values[stage]).map((m) => ({ m, v: mean(D.clients.map((c, i) => (c.seen === !stage.startsWith("unseen") ? m.values[stage][i] : null))) }))
    .sort((a, b) => better(known(b.v) ? b.v : -Infinity, known(a.v) ? a.v : -Infinity)).map((p) => p.m);
  function spread() {
    section("spread", "Distribution over clients", `Every dot is a client's test ${D.metric === "accuracy" ? "accuracy in %" : "error"}, stage ${state.stage}; methods by their mean.`,
      el("div", { class: "panel" }, strips(state.stage, ranked(state.stage), (i) => D.clients[i].seen, (m, v) => fmt(known(lineOf(m, state.stage).mean) ? lineOf(m, state.stage).mean : v, percent() ? 2 : 3)),
        key(["", "background:var(--soft)", "a client"], ["bar", "background:var(--ink)", "mean"], ["square", "background:var(--soft);opacity:.3", "middle half of the clients"])));
  }

  const legend = (list, stage) => el("ul", { class: "legend" }, list.map((m) => el("li", {}, el("button", { type: "button", title: m.name, "aria-pressed": String(m.name === state.method), onclick: () => { state.method = m.name; render(); } },
    s("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }, s("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour(place(m.name)), "stroke-width": 3, "stroke-dasharray": dash(place(m.name)) })), el("span", {}, label(m, stage))))));

  // -- convergence ----------------------------------------------------------------------------------------------------
  function convergence() {
    const axes = { rounds: ["by round", (v) => String(v), "round"], bytes: ["by bytes", bytes, "bytes sent by all clients and the server together"], seconds: ["by seconds", seconds, "seconds of training"] };
    const curves = D.methods.filter((m) => m.curve[state.stage]).map((m) => ({ m, x: m.curve[state.axis], y: m.curve[state.stage] }));
    const settled = curves.flatMap(({ y }) => y.mean.slice(Math.floor(y.mean.length / 2)));
    const [allLow, high] = domain(curves.flatMap(({ y }) => y.mean)), [late] = domain(settled);
    const low = D.higher ? Math.max(allLow, late - 0.8 * (high - late)) : allLow;
    const top = D.higher ? high : Math.min(high, domain(settled)[1] + 0.8 * (domain(settled)[1] - allLow));
    const body = chart(`Mean over clients ${axes[state.axis][0]}, ${state.stage}`, (width) => {
      const height = Math.min(380, Math.max(260, width * 0.45)), left = 46, right = width - 12, bottom = height - 42;
      const svg = canvas(width, height);
      const most = Math.max(1e-9, ...curves.map(({ x }) => x[x.length - 1] || 0)), x = scale([0, most], [left, right]), y = scale([low, top], [bottom, 10]);
      yAxis(svg, y, ticks(low, top, 6), left, right, fmt);
      xAxis(svg, x, ticks(0, most, width < 500 ? 4 : 7), bottom, axes[state.axis][1]);
      svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, axes[state.axis][2]));
      const clip = "clip" + Math.random().toString(36).slice(2);
      svg.append(s("clipPath", { id: clip }, s("rect", { x: left, y: 4, width: right - left + 6, height: bottom - 4 })));
      const area = s("g", { "clip-path": `url(#${clip})` });
      svg.append(area);
      const order = curves.slice().sort((a, b) => (a.m.name === state.method) - (b.m.name === state.method));
      for (const { m, x: at, y: on } of order) {
        const focus = m.name === state.method, tint = colour(place(m.name));
        if (focus && m.seeds.length > 1) {
          const up = at.map((v, i) => [x(v), y(on.high[i])]).filter(([, b]) => known(b)), down = at.map((v, i) => [x(v), y(on.low[i])]).filter(([, b]) => known(b)).reverse();
          area.append(s("path", { d: path([...up, ...down]) + "Z", fill: tint, opacity: 0.15 }));
        }
        area.append(s("path", { d: path(at.map((v, i) => [x(v), known(on.mean[i]) ? y(on.mean[i]) : null])), fill: "none", stroke: tint, "stroke-dasharray": dash(place(m.name)),
          "stroke-width": focus ? 2.8 : 1.5, opacity: focus ? 1 : 0.85, "stroke-linejoin": "round" }));
        at.forEach((v, i) => { if (known(on.mean[i])) area.append(s("circle", { cx: x(v), cy: y(on.mean[i]), r: at.length > 1 ? 7 : 4, fill: at.length > 1 ? "transparent" : tint,
          "data-tip": `${label(m, state.stage)}\nround ${m.curve.rounds[i]}: ${fmt(on.mean[i])}${unit()}\n${bytes(m.curve.bytes[i])}, ${seconds(m.curve.seconds[i])}` })); });
      }
      const focus = methodOf(state.method);
      if (state.client >= 0 && focus.tracks && focus.tracks[state.stage]) {
        const where = focus.tracks.rounds.map((t) => focus.curve[state.axis][Math.max(0, focus.curve.rounds.findIndex((r) => r >= t))]);
        area.append(s("path", { d: path(where.map((v, i) => { const val = focus.tracks[state.stage][state.client][i]; return [x(v), known(val) ? y(val) : null]; })), fill: "none", stroke: "var(--ink)", "stroke-width": 1.6, "stroke-dasharray": "2 3" }));
      }
      return svg;
    });
    const extra = state.client >= 0 && methodOf(state.method).tracks ? ` The dotted line is client ${D.clients[state.client].name} with ${focusName()}.` : "";
    section("convergence", "Convergence", `Mean over clients of the test ${D.metric === "accuracy" ? "accuracy in %" : "error"}, ${state.stage}, means over seeds; the shade is the range over seeds of the chosen method.${extra}`,
      el("div", { class: "panel" }, el("div", { class: "tools" }, choose(Object.entries(axes).map(([v, [t]]) => [v, t]), state.axis, (v) => { state.axis = v; convergence(); document.querySelector(`#convergence .seg [aria-pressed="true"]`).focus(); }, "Horizontal axis")), body, legend(curves.map(({ m }) => m), state.stage)));
  }

  // -- newcomers ------------------------------------------------------------------------------------------------------
  const many = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
  const since = (c, k) => (c.high[k] === 0 ? "on arrival" : `${c.low[k] === c.high[k] ? many(c.low[k], "round") : `${c.low[k]} to ${c.high[k]} rounds`} after arrival`);
  function newcomersWords(m) {
    const c = m.newcomers && m.newcomers[state.stage];
    if (!c) return "";
    const capital = (text) => text[0].toUpperCase() + text.slice(1), last = c.age.length - 1, now = `${capital(since(c, 0))}, newcomers have ${fmt(c.mean[0])}${unit()} with ${focusName()}`;
    if (!known(c.start[0])) return `${now}; nobody of the start was left to compare them with.`;
    const beside = `${now}, and the clients from the start ${fmt(c.start[0])}${unit()} at that time; `;
    if (c.reached !== null) return beside + (c.reached ? `${since(c, c.reached)}, newcomers have caught up.` : c.high[0] ? "by then newcomers have caught up." : "newcomers have nothing to catch up.");
    return beside + (last && known(c.start[last]) ? `they have not caught up by the end: ${since(c, last)} it is ${fmt(c.mean[last])} against ${fmt(c.start[last])}${unit()}.` : "they have not caught up.");
  }
  function newcomers() {
    if (!D.churn) { $("newcomers").hidden = true; return; }
    const { rounds, start, arrived, left } = D.churn, having = D.methods.filter((m) => m.newcomers), focus = methodOf(state.method);
    const who = `${many(start, "client")} ${start === 1 ? "was" : "were"} there from the start, ${arrived} arrived in ${many(rounds, "round")} and ${left} left. `;
    if (!having.length) { section("newcomers", "Newcomers", who, el("p", { class: "note" }, "No client that arrived later was there at an evaluation.")); return; }
    const own = (stage) => having.filter((m) => m.newcomers[stage]).map((m) => ({ m, c: m.newcomers[stage] }));
    const both = stages().filter((stage) => own(stage).length), beside = focus.newcomers || {};
    const [low, high] = domain(both.flatMap((stage) => own(stage).flatMap(({ c }) => [...c.mean, ...c.start])));
    const span = Math.max(...both.flatMap((stage) => own(stage).map(({ c }) => c.span))), most = Math.max(1, ...both.flatMap((stage) => own(stage).flatMap(({ c }) => c.age)));
    const panels = both.map((stage) => el("div", { class: "panel" }, el("h3", {}, stage[0].toUpperCase() + stage.slice(1)), el("p", { class: "sub" }, `Test ${percent() ? "accuracy in %" : "error"}, mean over newcomers, ${stage === SERVED ? "of the model they get" : "after their local training"}`),
      chart(`Mean over newcomers by rounds since arrival, ${stage}`, (width) => {
        const height = 300, left = 52, right = width - 12, bottom = height - 58, svg = canvas(width, height);
        const x = scale([0, most], [left + 8, right]), y = scale([low, high], [bottom, 10]);
        yAxis(svg, y, ticks(low, high, 6), left, right, fmt);
        const at = ticks(0, most, 6).filter(Number.isInteger);
        xAxis(svg, x, at, bottom, String);
        svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "rounds since arrival"));
        const mark = (m, c, values, what) => values.forEach((v, k) => { if (known(v)) svg.append(s("circle", { cx: x(c.age[k]), cy: y(v), r: 7, fill: "transparent",
          "data-tip": `${label(m, stage)}${what}\n${since(c, k)}: ${fmt(v)}${unit()}\n${many(c.clients[k], "newcomer")}` })); });
        const line = (c, values, look) => svg.append(s("path", { d: path(c.age.map((a, k) => [x(a), known(values[k]) ? y(values[k]) : null])), fill: "none", "stroke-linejoin": "round", ...look }));
        const lines = own(stage).sort((a, b) => (a.m === focus) - (b.m === focus));
        if (beside[stage]) { line(beside[stage], beside[stage].start, { stroke: "var(--soft)", "stroke-width": 1.6, "stroke-dasharray": "2 3" }); mark(focus, beside[stage], beside[stage].start, ", clients from the start"); }
        for (const { m, c } of lines) {
          const on = m === focus, tint = colour(place(m.name)), dots = c.age.length < 2 || (right - left) / c.age.length > 14;
          line(c, c.mean, { stroke: tint, "stroke-dasharray": dash(place(m.name)), "stroke-width": on ? 2.8 : 1.5, opacity: on ? 1 : 0.85 });
          if (dots) c.mean.forEach((v, k) => svg.append(s("circle", { cx: x(c.age[k]), cy: y(v), r: on ? 3.6 : 2.6, fill: tint, opacity: on ? 1 : 0.85 })));
        }
        for (const { m, c } of lines) mark(m, c, c.mean, "");
        const counted = (lines.find(({ m }) => m === focus) || lines[0]).c;
        svg.append(s("text", { x: left - 8, y: bottom + 34, "text-anchor": "end" }, "clients"));
        const close = (v) => counted.age.reduce((best, a, k) => (Math.abs(a - v) < Math.abs(counted.age[best] - v) ? k : best), 0);
        for (const k of counted.age.length > 8 ? new Set(at.map(close)) : counted.age.keys()) svg.append(s("text", { x: x(counted.age[k]), y: bottom + 34, "text-anchor": "middle" }, counted.clients[k]));
        return svg;
      })));
    section("newcomers", "Newcomers", [el("span", { class: "strong" }, who), newcomersWords(focus), span > 1 ? ` A point gathers ${span} rounds.` : ""], el("div", { class: "two" }, panels),
legend(having, SERVED), key(["dotted", "", `clients from the start at the same time, ${focus.label}`]));
  }

  // -- who holds what -------------------------------------------------------------------------------------------------
  function holds(c) {
    const named = c.classes.map((n, k) => [n, k]).filter(([n]) => n).sort((a, b) => b[0] - a[0]);
    const total = `${sum(c.classes)} samples in ${named.length} class${named.length === 1 ? "" : "es"}`;
    return D.labels && named.length <= 12 ? `${total}\n${named.map(([n, k]) => `${className(k)}: ${n}`).join("\n")}` : total;
  }
  function classes() {
    const held = D.clients.map((c, i) => ({ i, c })).filter((p) => p.c.classes);
    if (!held.length || !D.classes) {
      const sizes = D.clients.every((c) => known(c.train));
      section("classes", "Who holds which class", D.classes === 0 ? "The targets are numbers, so there are no classes." : null,
        el("p", { class: "note" }, D.classes === 0 && sizes ? `Clients hold ${extent(D.clients.map((c) => c.train)).join(" to ")} training samples.` : "This run did not record the clients' classes; runs made by this version do."));
      return;
    }
    const some = held.length > 200 ? held.filter((_, k) => Math.floor(k * 200 / held.length) !== Math.floor((k - 1) * 200 / held.length)) : held;
    const most = Math.max(...some.flatMap((p) => p.c.classes));
    section("classes", "Who holds which class", `Area: samples of a client in a class, all splits together; the largest bubble is ${most} samples.${some.length < held.length ? ` ${some.length} of ${held.length} clients are drawn.` : ""}`,
      el("div", { class: "panel" }, chart("Clients against classes, bubbles by number of samples", (width) => {
        const every = Math.ceil(D.classes / 25), longest = width < 560 ? 12 : 22;
        const widest = Math.max(4, ...Array.from({ length: D.classes }, (_, k) => (k % every ? 0 : short(className(k), longest).length)));
        const left = 12 + Math.max(22, 6.4 * widest), right = width - 6, cell = (right - left) / some.length, row = Math.max(D.classes > 30 ? 6 : 14, Math.min(26, 420 / D.classes));
        const plan = namePlan(some.map((p) => p.c.name), cell), top = 18, bottom = top + row * D.classes, height = bottom + plan.depth + 24, svg = canvas(width, height, some.map((p) => p.i)), r = Math.max(Math.min(cell, row * 1.15) * 0.5, 2);
        for (let k = 0; k < D.classes; k++) {
          const y = top + row * (k + 0.5);
          if (row >= 10) svg.append(s("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
          if (k % every === 0) svg.append(s("text", { x: left - 8, y: y + 4, "text-anchor": "end", ...(short(className(k), longest) === className(k) ? {} : { "data-tip": className(k) }) }, short(className(k), longest)));
        }
        some.forEach((p, j) => {
          const x = left + cell * (j + 0.5), on = p.i === state.client;
          if (on) svg.append(s("rect", { x: x - cell / 2, width: cell, y: top - 4, height: row * D.classes + 8, fill: "var(--wash)", rx: 3 }));
          p.c.classes.forEach((n, k) => { if (n) svg.append(s("circle", { cx: x, cy: top + row * (k + 0.5), r: r * Math.sqrt(n / most), fill: p.c.seen ? "var(--m0)" : "var(--m1)", opacity: on ? 1 : state.client >= 0 ? 0.35 : 0.8 })); });
          svg.append(s("rect", { class: "hit", x: x - cell / 2, width: cell, y: top - 4, height: row * D.classes + 8, ...hover(p.i, `client ${p.c.name}${p.c.seen ? "" : ", unseen"}\n${holds(p.c)}`) }));
        });
        nameMarks(svg, plan, some.map((p) => p.i), (k) => left + cell * (k + 0.5), cell, bottom);
        svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "clients"), s("text", { x: left - 8, y: 8, "text-anchor": "end" }, "class"));
        return svg;
      }), D.clients.some((c) => !c.seen) ? key(["", "background:var(--m0)", "takes part in training"], ["", "background:var(--m1)", "unseen"]) : null));
  }

  // -- few models -----------------------------------------------------------------------------------------------------
  function rgb(name) {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = css(name); probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
  }
  function heat(columns, rows, tint) {
    const board = document.createElement("canvas");
    board.width = columns; board.height = rows;
    const pen = board.getContext("2d"), image = pen.createImageData(columns, rows);
    for (let y = 0; y < rows; y++) for (let x = 0; x < columns; x++) {
      const [r, g, b] = tint(x, y), at = 4 * (y * columns + x);
      image.data[at] = r; image.data[at + 1] = g; image.data[at + 2] = b; image.data[at + 3] = 255;
    }
    pen.putImageData(image, 0, 0);
    return board.toDataURL();
  }
  const mix = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));
  const modelVar = (k) => `--m${k % 10}`;
  const MODEL = (k) => `var(${modelVar(k)})`;
  function lines(about, xs, series, options) {
    return chart(about, (width) => {
      const height = options.height || 220, left = 46, right = width - 10, bottom = height - 40;
      const found = extent(series.flatMap((one) => one.values).concat([0])), [low, high] = options.range || [found[0], found[1] * 1.05 || 1];
      const svg = canvas(width, height, options.clients);
      const x = scale(xs.length > 1 ? extent(xs) : [xs[0] - 1, xs[0] + 1], [left, right]), y = scale([low, high], [bottom, 8]);
      yAxis(svg, y, ticks(low, high, 4), left, right, options.form);
      xAxis(svg, x, ticks(...extent(xs), 5).filter(Number.isInteger), bottom, String);
      svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "round"));
      for (const one of series) {
        const pts = xs.map((t, i) => [x(t), known(one.values[i]) ? y(one.values[i]) : null]);
        svg.append(s("path", { d: path(pts), fill: "none", stroke: one.tint, "stroke-width": one.bold ? 2.6 : options.clients ? 1 : 2, opacity: one.opacity || 1, "stroke-dasharray": one.dash,
          ...(one.client === undefined ? {} : hover(one.client, one.tip)) }));
        if (xs.length === 1) pts.forEach(([a, b]) => known(b) && svg.append(s("circle", { cx: a, cy: b, r: 4, fill: one.tint })));
      }
      return svg;
    });
  }
  const share = (v) => `${Math.round(100 * v)} %`;
  function few() {
    const having = D.methods.filter((m) => m.few);
    if (!having.length) { $("few").hidden = true; return; }
    const m = having.find((one) => one.name === state.few) || having.find((one) => one.name === state.method) || having.find((one) => one.few.verdict === "collapsed") || having[0];
    const f = m.few, K = f.models, parts = [];
    const names = Array.from({ length: K }, (_, k) => `model ${k + 1}`);
    parts.push(el("div", { class: "tools" }, el("label", {}, "Models of ", el("select", { id: "few-method", onchange: (event) => { state.few = event.target.value; few(); $("few-method").focus(); } },
      having.map((one) => el("option", { value: one.name, selected: one === m }, one.label)))), f.end ? el("span", { class: "count" }, `${K} models, seed ${f.seed}`) : null));
    parts.push(el("p", { class: "callout" + (f.verdict === "collapsed" ? "" : " calm"), id: "few-words" }, f.words,
      known(f.worth) && K > 1 ? ` Choosing is worth ${signed(f.worth)}${points()} against giving everybody the best single model.` : ""));
    parts.push(key(...names.map((n, k) => ["square", `background:${MODEL(k)}`, n])));
    const grid = [];
    const order = D.clients.map((_, i) => i).filter((i) => D.clients[i].seen);
    if (f.end) order.sort((a, b) => f.end.choice[a] - f.end.choice[b] || a - b);
    if (f.end && K > 1) grid.push(el("div", { class: "panel" }, el("h3", {}, "Which client uses which model"), el("p", { class: "sub" }, `After the last round: the square is the model a client uses; the number of clients is on the right.`), usage(f, order.filter((i) => known(f.end.choice[i])), K)));
    if (f.mass) grid.push(el("div", { class: "panel" }, el("h3", {}, "Mass per model"), el("p", { class: "sub" }, "Each model's share of the training weight, round by round."),
      lines("Mass per model by round", f.mass.rounds, Array.from({ length: Math.max(...f.mass.share.map((l) => l.length)) }, (_, k) => ({ tint: MODEL(k), values: f.mass.share.map((l) => (known(l[k]) ? l[k] : null)) })), { range: [-0.02, 1.02], form: share })));
    if (f.rounds.length) grid.push(el("div", { class: "panel" }, el("h3", {}, "Weights w over rounds"), el("p", { class: "sub" }, "Colour: the model a client weighs most. Strength: how much more than an even share. A row is a client."), weights(f, order)));
    if (f.rounds.length && state.client >= 0 && D.clients[state.client].seen) grid.push(el("div", { class: "panel" }, el("h3", {}, `Weights w of client ${D.clients[state.client].name}`), el("p", { class: "sub" }, "How it shares itself out over the models."),
      lines("Weights of the chosen client", f.rounds, names.map((_, k) => ({ tint: MODEL(k), values: f.w.map((t) => (t[state.client] && known(t[state.client][k]) ? t[state.client][k] / 100 : null)) })), { range: [-0.02, 1.02], form: share })));
    if (f.alpha.length) grid.push(el("div", { class: "panel" }, el("h3", {}, "Weights alpha over rounds"), el("p", { class: "sub" }, `How much each client counts; an even share would be ${share(1 / order.length)}. A line is a client.`),
      lines("Alpha of every client by round", f.rounds, order.slice().sort((a, b) => (a === state.client) - (b === state.client)).map((i) => ({ client: i, tip: `client ${D.clients[i].name}`, tint: i === state.client ? "var(--accent)" : "var(--soft)", bold: i === state.client, opacity: i === state.client ? 1 : state.client >= 0 ? 0.25 : 0.5, values: f.alpha.map((t) => t[i]) })),
        { form: share, clients: order })));
    if (f.end && K > 1) grid.push(el("div", { class: "panel" }, el("h3", {}, "Model similarity"), el("p", { class: "sub" }, "Distance between two models, in per cent of the mean way a model has gone from its start. Near 0: the same model twice."), similarity(f, K)));
    if (f.apart.length && K > 1 && f.apart.every(Boolean)) {
      const way = f.end ? mean(f.end.moved) : 1;
      const far = f.apart.map((t) => Math.max(...t.flat())) , near = f.apart.map((t) => Math.min(...t.flatMap((l, i) => l.filter((_, j) => j !== i)), Infinity));
      grid.push(el("div", { class: "panel" }, el("h3", {}, "Distance over rounds"), el("p", { class: "sub" }, `The two models farthest apart, and the two nearest (dashed)${f.end ? ", same unit" : ""}.`),
        lines("Distance between models by round", f.rounds, [{ tint: "var(--accent)", values: far.map((v) => v / way) }, { tint: "var(--accent)", dash: "5 3", values: near.map((v) => (Number.isFinite(v) ? v / way : null)) }], { form: f.end ? share : (v) => v.toPrecision(2) })));
    }
    if (!f.rounds.length) grid.push(el("p", { class: "note" }, "The weights w and alpha were not recorded: an earlier version made this run, clients weigh for themselves, or no round was evaluated yet."));
    section("few", "A few models for many clients", "What the methods with several server models did with them. They have collapsed when at least 90 % of the clients use the same model, or when the two models farthest apart differ by at most 10 % of the way they have gone from their start.", ...parts, el("div", { class: "two", style: "margin-top:.8rem" }, grid));
  }
  function usage(f, order, K) {
    return chart("Which client uses which model", (width) => {
      const row = 30, left = 62, right = width - 34, height = row * K + 30, cell = (right - left) / order.length;
      const svg = canvas(width, height, order);
      for (let k = 0; k < K; k++) {
        const y = 6 + row * (k + 0.5), count = order.filter((i) => f.end.choice[i] === k).length;
        svg.append(s("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }));
        svg.append(s("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, `model ${k + 1}`), s("text", { x: width, y: y + 4, "text-anchor": "end", class: "ink" }, String(count)));
      }
      order.forEach((i, j) => {
        const x = left + cell * j, k = f.end.choice[i], on = i === state.client, size = Math.min(cell * 0.82, 18);
        if (on) svg.append(s("rect", { x, width: cell, y: 2, height: row * K + 6, fill: "var(--wash)" }));
        svg.append(s("rect", { x: x + (cell - size) / 2, width: size, y: 6 + row * (k + 0.5) - 9, height: 18, rx: 2, fill: MODEL(k), opacity: state.client >= 0 && !on ? 0.4 : 1 }));
        const test = f.end.test[i] || [];
        svg.append(s("rect", { class: "hit", x, width: cell, y: 2, height: row * K + 6, ...hover(i, `client ${D.clients[i].name} uses model ${k + 1}\n` + test.map((v, n) => `model ${n + 1}: ${fmt(v)}${unit()}`).join("\n")) }));
        if (on) svg.append(s("text", { x: Math.min(Math.max(x + cell / 2, left + 10), right - 10), y: height - 4, "text-anchor": "middle", class: "on" }, D.clients[i].name));
      });
      if (state.client < 0 || !order.includes(state.client)) svg.append(s("text", { x: left, y: height - 4 }, "clients"));
      return svg;
    });
  }
  function weights(f, order) {
    return chart("Weights w of every client by round", (width) => {
      const left = 46, right = width - 6, row = Math.max(2, Math.min(14, 220 / order.length)), height = row * order.length + 42;
      const svg = canvas(width, height, order), paper = rgb("--panel"), grey = rgb("--line"), K = Math.max(...f.w.map((t) => Math.max(0, ...t.filter(Boolean).map((l) => l.length))));
      const tints = Array.from({ length: K }, (_, k) => rgb(modelVar(k)));
      const url = heat(f.rounds.length, order.length, (x, y) => {
        const w = f.w[x][order[y]];
        if (!w) return paper;
        const total = sum(w) || 1, top = w.indexOf(Math.max(...w)), even = 1 / w.length;
        return mix(grey, tints[top], w.length > 1 ? Math.max(0, Math.min(1, (w[top] / total - even) / (1 - even))) : 1);
      });
      svg.append(s("image", { href: url, x: left, y: 4, width: right - left, height: row * order.length, preserveAspectRatio: "none" }));
      order.forEach((i, j) => {
        const on = i === state.client;
        svg.append(s("rect", { class: "hit", x: left, width: right - left, y: 4 + row * j, height: row, ...hover(i, `client ${D.clients[i].name}\nlast: ` + ((f.w[f.w.length - 1][i] || []).map((v, k) => `model ${k + 1} ${v} %`).join(", ") || "did not take part")) }));
        if (on) svg.append(s("rect", { x: left - 1, width: right - left + 2, y: 3 + row * j, height: row + 2, fill: "none", stroke: "var(--ink)", "stroke-width": 1.5 }), s("text", { x: left - 6, y: 8 + row * (j + 0.5), "text-anchor": "end", class: "on" }, short(D.clients[i].name, 6)));
      });
      const x = scale([0, f.rounds.length], [left, right]), every = Math.ceil(f.rounds.length / (width < 420 ? 4 : 7));
      f.rounds.forEach((t, k) => { if (k % every === 0) svg.append(s("text", { x: x(k + 0.5), y: height - 22, "text-anchor": "middle" }, String(t))); });
      svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "round"));
      return svg;
    });
  }
  function similarity(f, K) {
    return chart("Distance between every two models", (width) => {
      const left = 62, cell = Math.min(64, (width - left - 6) / K), height = cell * K + 28, svg = canvas(width, height), way = mean(f.end.moved) || 1;
      const high = Math.max(1e-9, ...f.end.apart.flat()) / way;
      for (let a = 0; a < K; a++) {
        svg.append(s("text", { x: left - 8, y: 4 + cell * (a + 0.5) + 4, "text-anchor": "end" }, `model ${a + 1}`));
        svg.append(s("text", { x: left + cell * (a + 0.5), y: cell * K + 20, "text-anchor": "middle" }, cell > 52 ? `model ${a + 1}` : String(a + 1)));
        for (let b = 0; b < K; b++) {
          const v = f.end.apart[a][b] / way;
          svg.append(s("rect", { x: left + cell * b + 1, y: 4 + cell * a + 1, width: cell - 2, height: cell - 2, rx: 3, fill: "var(--accent)", opacity: a === b ? 0.04 : 0.08 + 0.5 * Math.min(1, v / Math.max(1, high)), "data-tip": `model ${a + 1} and model ${b + 1}\n${share(v)} of the way gone` }));
          if (cell > 26) svg.append(s("text", { x: left + cell * (b + 0.5), y: 4 + cell * (a + 0.5) + 4, "text-anchor": "middle", class: "ink", "pointer-events": "none" }, a === b ? "–" : cell > 44 ? share(v) : Math.round(100 * v)));
        }
      }
      return svg;
    });
  }

  // -- conflicts ------------------------------------------------------------------------------------------------------
  function conflicts() {
    const having = D.methods.filter((m) => m.conflicts);
    if (!having.length) {
      section("conflicts", "Conflicts between clients", null, el("p", { class: "note" }, "No round recorded the angles between updates: methods that upload no update have none."));
      return;
    }
    const withMatrix = having.filter((m) => m.conflicts.cosines);
    const m = withMatrix.find((one) => one.name === state.conflict) || withMatrix.find((one) => one.name === state.method) || withMatrix[0];
    const parts = [];
    const rounds = [...new Set(having.flatMap((one) => one.conflicts.rounds))].sort((a, b) => a - b);
    const ordered = having.slice().sort((a, b) => (a === m) - (b === m));
    parts.push(el("div", { class: "panel" }, el("h3", {}, "Opposing pairs by round"), el("p", { class: "sub" }, `Pairs of clients whose updates point apart (cosine below 0)${m ? `; bold: ${m.label}` : ""}.`),
      lines("Share of opposing pairs by round", rounds, ordered.map((one) => ({ tint: colour(place(one.name)), dash: dash(place(one.name)), bold: one === m, opacity: one === m ? 1 : 0.85, values: rounds.map((t) => { const k = one.conflicts.rounds.indexOf(t); return k < 0 ? null : one.conflicts.opposing[k]; }) })), { range: [-0.02, 1.02], form: share, height: 300 })));
    if (m) {
      const c = m.conflicts.cosines, n = c.length, ids = m.conflicts.clients;
      parts.push(el("div", { class: "panel" }, el("div", { class: "tools" }, el("label", {}, "Cosines of ", el("select", { id: "conflict-method", onchange: (event) => { state.conflict = event.target.value; conflicts(); $("conflict-method").focus(); } },
        withMatrix.map((one) => el("option", { value: one.name, selected: one === m }, one.label))))), el("p", { class: "sub" }, "Between the updates of any two clients in the last round, clients ordered by likeness."),
        chart(`Cosines between the updates of any two clients, ${m.label}`, (width) => {
          const size = Math.min(width - 4, 340), cell = size / n, svg = canvas(width, size + 44, ids || null), zero = rgb("--panel"), up = rgb("--m0"), down = rgb("--m1");
          const x0 = (width - size) / 2;
          svg.append(s("image", { href: heat(n, n, (x, y) => mix(zero, c[y][x] < 0 ? down : up, Math.min(1, Math.abs(c[y][x]) / 100))), x: x0, y: 2, width: size, height: size, preserveAspectRatio: "none" }));
          if (ids) ids.forEach((i, k) => {
            const others = c[k].filter((_, j) => j !== k), against = others.filter((v) => v < 0).length;
            svg.append(s("rect", { class: "hit", x: x0, y: 2 + cell * k, width: size, height: cell, ...hover(i, `client ${D.clients[i].name}\nopposes ${against} of ${others.length} others`) }));
            if (i === state.client) svg.append(s("rect", { x: x0, y: 2 + cell * k, width: size, height: Math.max(cell, 2), fill: "none", stroke: "var(--ink)", "stroke-width": 1.6, "pointer-events": "none" }),
              s("rect", { y: 2, x: x0 + cell * k, height: size, width: Math.max(cell, 2), fill: "none", stroke: "var(--ink)", "stroke-width": 1.6, "pointer-events": "none" }));
          });
          const bar = 120, bx = (width - bar) / 2, by = size + 14, step = bar / 40;
          for (let k = 0; k < 40; k++) { const v = -1 + (2 * k) / 39; svg.append(s("rect", { x: bx + step * k, y: by, width: step + 0.5, height: 8, fill: `rgb(${mix(zero, v < 0 ? down : up, Math.abs(v)).join(",")})` })); }
          svg.append(s("text", { x: bx - 6, y: by + 8, "text-anchor": "end" }, "−1 opposed"), s("text", { x: bx + bar + 6, y: by + 8 }, "1 alike"));
          return svg;
        })));
    }
    section("conflicts", "Conflicts between clients", "Where updates oppose each other, an average serves nobody; aggregators such as confree act on exactly this.", el("div", { class: "two" }, parts));
  }

  // -- gain against data size -----------------------------------------------------------------------------------------
  function size() {
    if (!D.clients.some((c) => known(c.train))) {
      section("size", "Bias and variance: gain against data size", null, el("p", { class: "note" }, "This run did not record how many training samples a client has; runs made by this version do."));
      return;
    }
    const m = methodOf(state.method);
    const list = bases().map(([b]) => b).filter((b) => b.endsWith(`|${SERVED}`) && b !== `|${SERVED}` && !(b === `${m.name}|${SERVED}` && state.stage === SERVED));
    const panels = list.map((b) => {
      const base = methodOf(b.slice(0, b.lastIndexOf("|"))), pts = D.clients.map((c, i) => ({ i, n: c.train, seen: c.seen, g: value(m, state.stage, i), h: value(base, SERVED, i) })).filter((p) => p.seen && p.n > 0 && known(p.g) && known(p.h)).map((p) => ({ ...p, gain: better(p.g, p.h) }));
      if (!pts.length) return null;
      const sorted = pts.map((p) => p.n).sort((a, b) => a - b), middle = quantile(sorted, 0.5);
      const small = mean(pts.filter((p) => p.n <= middle).map((p) => p.gain)), large = mean(pts.filter((p) => p.n > middle).map((p) => p.gain));
      const words = `Clients with at most ${Math.round(middle)} samples: ${signed(small)}${points()}; ${large === null ? "there are no larger ones" : `larger ones: ${signed(large)}${points()}`}.`;
      return el("div", { class: "panel" }, el("h3", {}, `Gain over ${base.label} (${SERVED})`), el("p", { class: "sub" }, words), chart(`Gain of ${focusName()} over ${base.label} against training samples`, (width) => {
        const height = 280, left = 52, right = width - 10, bottom = height - 40, svg = canvas(width, height, pts.slice().sort((a, b) => a.n - b.n).map((p) => p.i));
        const [low, high] = extent(pts.map((p) => p.gain).concat([0])), air = (high - low) * 0.08 || 0.01, y = scale([low - air, high + air], [bottom, 8]);
        const [first, last] = extent(pts.map((p) => Math.log(p.n))), pad = (last - first) * 0.05 || 0.3, x = scale([first - pad, last + pad], [left, right]);
        yAxis(svg, y, ticks(low - air, high + air, 5), left, right, signed);
        const span = Math.exp(last - first), every = [1, 2, 5].flatMap((k) => [1, 10, 100, 1e3, 1e4, 1e5].map((p) => k * p)).sort((a, b) => a - b).filter((v) => Math.log(v) >= first - pad && Math.log(v) <= last + pad);
        xAxis(svg, (v) => x(Math.log(v)), span < 1.5 || every.length < 2 ? [...new Set([sorted[0], Math.round(middle), sorted[sorted.length - 1]])] : every, bottom, String);
        svg.append(s("line", { x1: left, x2: right, y1: y(0), y2: y(0), stroke: "var(--faint)", "stroke-width": 1 }));
        svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "training samples of the client"));
        for (const p of pts.sort((a, b) => (a.i === state.client) - (b.i === state.client))) {
          const on = p.i === state.client;
          svg.append(s("circle", { cx: x(Math.log(p.n)), cy: y(p.gain), r: on ? 7 : 4.2, fill: p.gain > 1e-9 ? "var(--gain)" : p.gain < -1e-9 ? "var(--loss)" : "var(--same)", opacity: on ? 1 : state.client >= 0 ? 0.3 : 0.75, stroke: on ? "var(--ink)" : "var(--panel)", "stroke-width": on ? 2 : 0.8,
            ...hover(p.i, `client ${D.clients[p.i].name}\n${p.n} training samples\n${gained(p.g, p.h)}${points()}`) }));
        }
        return svg;
      }));
    }).filter(Boolean);
    section("size", "Bias and variance: gain against data size", `A client with few samples cannot train alone (variance); one with many pays for a model that is not its own (bias). Shown for ${focusName()}; sharing pays where it gains over Local, personalizing where it gains over the global model.`,
      panels.length ? el("div", { class: "two" }, panels) : el("p", { class: "note" }, "There is neither Local nor FedAvg to compare this method with."));
  }

  // -- unseen clients -------------------------------------------------------------------------------------------------
  function unseen() {
    const ids = D.clients.map((_, i) => i).filter((i) => !D.clients[i].seen), stage = unseenOf(state.stage);
    if (!ids.length || !D.methods.some((m) => m.values[stage])) {
      section("unseen", "Unseen clients", null, el("p", { class: "note" }, "No client was kept out of training; --unseen 4 keeps four, and shows what a client gets that arrives later."));
      return;
    }
    const order = ranked(stage);
    section("unseen", "Unseen clients", `The ${ids.length} client${ids.length > 1 ? "s" : ""} kept out of training, stage ${state.stage}: what somebody gets who arrives after training.`,
      el("div", { class: "panel" }, strips(state.stage, order, (i) => !D.clients[i].seen, (m, v) => fmt(known(lineOf(m, state.stage).unseen) ? lineOf(m, state.stage).unseen : v))));
  }

  // -- reproduce ------------------------------------------------------------------------------------------------------
  function reproduce() {
    const R = D.reproduce, parts = [];
    const block = (text) => el("div", { class: "pre" }, el("pre", { tabindex: 0 }, el("code", {}, text)), el("button", { type: "button", class: "ghost", onclick: (event) => { const b = event.currentTarget; (navigator.clipboard ? navigator.clipboard.writeText(text) : Promise.reject()).then(() => { b.textContent = "Copied"; }, () => { b.textContent = "Select it"; }); } }, "Copy"));
    R.commands.forEach((c) => parts.push(block(c)));
    if (!R.commands.length) parts.push(el("p", { class: "lead" }, "These runs were started from Python; their options are below."));
    for (const e of R.environments) {
      const versions = Object.entries(e.versions || {}).map(([n, v]) => `${n} ${v}`).join(", ");
      parts.push(el("dl", {}, el("dt", {}, "coterie"), el("dd", {}, `${e.coterie || "?"}${e.revision ? `, revision ${e.revision}` : ""}`), el("dt", {}, "Python"), el("dd", {}, `${e.python || "?"}, ${versions}`), el("dt", {}, "machine"), el("dd", {}, `${e.platform || "?"}, ${e.gpu || "no GPU"}, ${e.threads || "?"} threads`)));
    }
    const rest = R.experiments.length ? R.experiments : R.configs;
    parts.push(el("details", {}, el("summary", {}, "All options"), el("pre", { tabindex: 0 }, rest.map((o) => JSON.stringify(o, null, 1)).join("\n"))));
    parts.push(el("details", {}, el("summary", {}, `${D.runs.length} run folders`), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["method", "seed", "rounds", "time", "folder"].map((h) => el("th", { class: h === "folder" ? "text" : null, style: "padding:.4rem .7rem" }, h)))), el("tbody", {}, D.runs.map((r) => el("tr", {}, el("td", {}, r.method), el("td", {}, r.seed), el("td", {}, r.rounds + (r.finished ? "" : " (unfinished)")), el("td", {}, seconds(r.seconds)), el("td", { class: "text" }, r.folder))))))));
    section("reproduce", "Reproduce", "The same seed gives the same result on the same versions and machine.", parts);
    $("foot").textContent = `Written by coterie ${D.coterie}. Numbers are test values at the round chosen on validation data; spread over seeds and spread over clients are never mixed.`;
  }

  // -- the chosen client ----------------------------------------------------------------------------------------------
  function card() {
    const host = $("card"), c = D.clients[state.client];
    host.hidden = !c;
    if (!c) return;
    const facts = [["samples", known(c.train) ? `${c.train} train, ${c.val} validation, ${c.test} test` : `${c.test} test`]];
    if (c.classes && D.classes) facts.push(["classes", `${c.classes.filter(Boolean).length} of ${D.classes}`]);
    const m = methodOf(state.method), p = pairs().find((one) => one.i === state.client);
    if (p) facts.push([`gain`, `${gained(p.to, p.from)}${points()} over ${baseName()}`]);
    for (const one of D.methods) if (one.few && one.few.end && one.few.models > 1 && known(one.few.end.choice[state.client]) && (one === m || one.name === state.few)) facts.push(["model", `${one.few.end.choice[state.client] + 1} of ${one.few.models}, ${one.label}`]);
    const tall = c.classes ? Math.max(1, ...c.classes) : 1;
    const order = ranked(c.seen ? state.stage : unseenOf(state.stage));
    host.replaceChildren(
      el("header", {}, el("h3", {}, `Client ${c.name}`), el("span", { class: "quiet" }, c.seen ? "" : "unseen"), el("button", { type: "button", class: "ghost", "aria-label": "Close", onclick: () => { pickClient(-1); $("client").focus(); } }, "×")),
      el("dl", {}, facts.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])),
      ...(c.classes && D.classes && D.classes <= 40 ? [el("div", { class: "bars", "aria-hidden": "true" }, c.classes.map((n, k) => el("div", { style: `height:${(100 * n) / tall}%`, title: `${D.labels ? "" : "class "}${className(k)}: ${n}` }))), el("div", { class: "bars-x", "aria-hidden": "true" }, c.classes.map((_, k) => el("span", { title: className(k) }, D.classes <= 20 ? (D.labels ? short(className(k), Math.max(4, Math.floor(44 / D.classes))) : k) : "")))] : []),
      el("table", {}, el("thead", {}, el("tr", {}, ["method", ...stages()].map((t) => el("th", {}, t)))), el("tbody", {}, order.map((one) => el("tr", { class: one === m ? "on" : null }, el("td", { title: one.label }, one.label), stages().map((stage) => el("td", {}, fmt(value(one, stage, state.client)))))))));
  }

  // -- controls -------------------------------------------------------------------------------------------------------
  function pickClient(i) {
    state.client = i;
    render();
  }
  function controls() {
    const fill = (id, options, now) => $(id).replaceChildren(...options.map(([v, t]) => el("option", { value: v, selected: String(v) === String(now) }, t)));
    fill("method", D.methods.map((m) => [m.name, m.label]), state.method);
    fill("base", bases(), state.base);
    fill("client", [[-1, "nobody"], ...D.clients.map((c, i) => [i, c.name + (c.seen ? "" : " (unseen)")])], state.client);
    $("stage").replaceChildren(...stages().map((v) => el("button", { type: "button", "aria-pressed": String(v === state.stage), onclick: () => { state.stage = v; render(); $("stage").querySelector(`[aria-pressed="true"]`).focus(); } }, v)));
  }
  $("method").addEventListener("change", (event) => { state.method = event.target.value; render(); });
  $("base").addEventListener("change", (event) => { state.base = event.target.value; render(); });
  $("client").addEventListener("change", (event) => pickClient(+event.target.value));

  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && state.client >= 0) pickClient(-1); });

  const dark = () => { const t = document.documentElement.dataset.theme; return t === "dark" || (t === "auto" && matchMedia("(prefers-color-scheme: dark)").matches); };
  function theme(name) {
    document.documentElement.dataset.theme = name;
    $("theme-name").textContent = dark() ? "Light" : "Dark";
    drawn.forEach((_, host) => { if (host.isConnected) paint(host); else drawn.delete(host); });
  }
  $("theme").addEventListener("click", () => {
    const next = dark() ? "light" : "dark";
    try { localStorage.setItem("coterie-theme", next); } catch { /* a file without storage keeps its theme while open */ }
    theme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(document.documentElement.dataset.theme));

  function settle() {
    if (!methodOf(state.method)) {
      [state.method, state.stage] = D.answer.mean || [D.methods[0].name, stages()[0]];  // what the headline names
      if (bases().length === 1 && stages().includes(ADAPTED)) state.stage = ADAPTED;  // itself, as served
    }
    if (!bases().some(([b]) => b === state.base)) state.base = (bases().find(([b]) => b !== `${state.method}|${state.stage}`) || bases()[0])[0];
    if (state.client >= D.clients.length) state.client = -1;
  }
  function render() {
    drawn.forEach((_, host) => { if (!host.isConnected) { watcher.unobserve(host); drawn.delete(host); } });
    controls(); table(); clients(); spread(); convergence(); newcomers(); classes(); few(); conflicts(); size(); unseen(); card();
  }
  function start() { settle(); answer(); render(); reproduce(); document.title = `coterie report: ${D.title}`; }

  // -- a run that is still going on: `coterie watch` serves this page with the data beside it --------------------------
  function progress() {
    const p = D.progress, done = p.finished === p.runs;
    $("kind").textContent = "watch";
    $("live").hidden = false;
    $("live").textContent = done ? `finished: ${p.runs} of ${p.runs} runs` : `${Math.floor((100 * p.done) / Math.max(1, p.rounds))} %, ${p.finished} of ${p.runs} runs finished`;
    return done;
  }
  async function poll(tag) {
    let next = tag, done = false;
    try {
      const reply = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {} });
      if (!reply.ok && reply.status !== 304) throw new Error(String(reply.status));
      if (reply.status === 200) { D = await reply.json(); next = reply.headers.get("ETag"); start(); }
      done = progress();
    } catch { $("live").textContent = "no answer from the watching process"; }
    if (!done) setTimeout(() => poll(next), RETRY_MS);
  }

  let kept = null;
  try { kept = localStorage.getItem("coterie-theme"); } catch { /* no storage for files here */ }
  theme(kept || document.documentElement.dataset.theme);
  start();
  if (D.live) { progress(); poll(""); }
})();
