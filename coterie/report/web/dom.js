// Elements of the page.

const $ = (id) => document.getElementById(id);
const NS = "http://www.w3.org/2000/svg";
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
// A menu of methods; what lies beside it stands in the same line.
function chooser(id, words, having, now, choose, ...beside) {
  const onchange = (event) => {
    choose(event.target.value);
    $(id).focus();
  };
  const options = having.map((one) => el("option", { value: one.name, selected: one === now }, one.label));
  return el("div", { class: "tools" }, el("label", {}, words, el("select", { id, onchange }, options)), ...beside);
}
const short = (text, most) => (text.length > most ? text.slice(0, Math.max(4, most - 1)) + "…" : text);
