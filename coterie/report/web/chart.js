// Drawing: charts that follow the width of the page, their axes and names, tips, and the frame of a section.

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
  drawn.set(host, {
    width: 0,
    draw: (width) => {
      const svg = draw(width);
      svg.setAttribute("aria-label", about);
      return svg;
    },
  });
  watcher.observe(host);
  return host;
}
function canvas(width, height, clients) {
  const svg = s("svg", {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    tabindex: clients ? 0 : null,
  });
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
function yAxis(svg, y, values, left, right, form, of) {
  for (const v of values) {
    svg.append(s("line", { class: "grid", x1: left, x2: right, y1: y(v), y2: y(v) }));
    svg.append(s("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, form(v, axisDigits(values, of))));
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
  const angle = step >= 15 ? 55 : 90,
    most = Math.min(24, Math.max(...names.map((n) => n.length)));
  return { angle, most, every: Math.ceil(11.5 / step), depth: 14 + 5.9 * most * Math.sin((angle * Math.PI) / 180) };
}
function nameMarks(svg, plan, ids, at, step, y) {
  const chosen = ids.indexOf(state.client);
  ids.forEach((i, k) => {
    const on = k === chosen,
      near = chosen >= 0 && Math.abs(k - chosen) * step < 11.5;
    if (!on && (k % plan.every || near)) return;
    const name = D.clients[i].name,
      x = at(k),
      text = short(name, plan.most),
      tip = text === name ? {} : { "data-tip": name };
    const attrs = plan.angle
      ? { x: x + 4, y: y + 11, "text-anchor": "end", transform: `rotate(${-plan.angle} ${x + 4} ${y + 11})` }
      : { x, y: y + 17, "text-anchor": "middle" };
    svg.append(s("text", { ...attrs, class: on ? "on" : "who", "data-client": i, ...tip }, text));
  });
}
const path = (pts) => {
  let out = "",
    pen = false;
  for (const [a, b] of pts) {
    if (!known(a) || !known(b)) {
      pen = false;
      continue;
    }
    out += `${pen ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`;
    pen = true;
  }
  return out;
};
const tip = $("tip");
document.addEventListener("pointermove", (event) => {
  const mark = event.target.closest && event.target.closest("[data-tip]");
  if (!mark) {
    tip.hidden = true;
    return;
  }
  tip.textContent = mark.dataset.tip;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top =
    (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
});
document.addEventListener("pointerleave", () => {
  tip.hidden = true;
});
const hover = (key, client) => (client ? { "data-client": key, "data-tip": client } : {});

function rgb(name) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = css(name);
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
}
function heat(columns, rows, tint) {
  const board = document.createElement("canvas");
  board.width = columns;
  board.height = rows;
  const pen = board.getContext("2d"),
    image = pen.createImageData(columns, rows);
  for (let y = 0; y < rows; y++)
    for (let x = 0; x < columns; x++) {
      const [r, g, b] = tint(x, y),
        at = 4 * (y * columns + x);
      image.data[at] = r;
      image.data[at + 1] = g;
      image.data[at + 2] = b;
      image.data[at + 3] = 255;
    }
  pen.putImageData(image, 0, 0);
  return board.toDataURL();
}
const mix = (a, b, t) => a.map((v, i) => Math.round(v + (b[i] - v) * t));
function lines(about, xs, series, options) {
  return chart(about, (width) => {
    const height = options.height || 220,
      left = 46,
      right = width - 10,
      bottom = height - 40;
    const found = extent(series.flatMap((one) => one.values).concat([0])),
      [low, high] = options.range || [found[0], found[1] * 1.05 || 1];
    const svg = canvas(width, height, options.clients);
    const x = scale(xs.length > 1 ? extent(xs) : [xs[0] - 1, xs[0] + 1], [left, right]),
      y = scale([low, high], [bottom, 8]);
    yAxis(svg, y, ticks(low, high, 4), left, right, options.form);
    xAxis(svg, x, ticks(...extent(xs), 5).filter(Number.isInteger), bottom, String);
    svg.append(s("text", { x: right, y: height - 4, "text-anchor": "end" }, "round"));
    for (const one of series) {
      const pts = xs.map((t, i) => [x(t), known(one.values[i]) ? y(one.values[i]) : null]);
      if (one.m) {
        const look = one.bold ? { "stroke-width": 2.8 } : {};
        svg.append(curve(one.m, path(pts), one.tip, look));
      } else
        svg.append(
          s("path", {
            d: path(pts),
            fill: "none",
            stroke: one.tint,
            "stroke-width": one.bold ? 2.6 : options.clients ? 1 : 2,
            opacity: one.opacity || 1,
            "stroke-dasharray": one.dash,
            ...(one.client === undefined ? {} : hover(one.client, one.tip)),
          }),
        );
      pts.forEach(([a, b], i) => {
        if (known(b) && !known((pts[i - 1] || [])[1]) && !known((pts[i + 1] || [])[1]))
          svg.append(s("circle", { cx: a, cy: b, r: 4, fill: one.m ? colour(one.m) : one.tint })); // no line gets there
      });
    }
    return svg;
  });
}
const share = (v) => `${Math.round(100 * v)} %`;
function section(id, title, lead, ...parts) {
  const host = $(id);
  host.hidden = false;
  const found = [el("h2", {}, title), lead && el("p", { class: "lead" }, lead), ...parts.flat()];
  host.replaceChildren(...found.filter(Boolean)); // null would be written out as a word
  host.querySelectorAll(".chart").forEach((c) => drawn.has(c) && paint(c));
}
// A sentence in place of a chart that would be empty.
const nothing = (why) => el("p", { class: "note" }, why);
const key = (...items) =>
  el(
    "div",
    { class: "key" },
    items.map(([mark, style, text]) => el("span", {}, el("i", { class: mark, style }), text)),
  );
function choose(options, now, on, name) {
  return el(
    "div",
    { class: "seg", role: "group", "aria-label": name },
    options.map(([value, text]) =>
      el("button", { type: "button", "aria-pressed": String(value === now), onclick: () => on(value) }, text),
    ),
  );
}
const panel = (title, sub, ...parts) =>
  el("div", { class: "panel" }, el("h3", {}, title), el("p", { class: "sub" }, sub), ...parts);
