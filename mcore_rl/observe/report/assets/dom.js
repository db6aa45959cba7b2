"use strict";
// Elements, compressed blocks, and the selection that the parts of the page share. Texts of models reach the page through
// text nodes only.

const COLORS = ["#3b82f6", "#ef8e3b", "#22a06b", "#c94fb7", "#d64545", "#7a6ff0", "#1aa3b8", "#8a8f98"];

const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "style") Object.assign(made.style, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function table(head, rows, rowClass = "") {
  const cells = (tag, values) => values.map((value) => element(tag, {}, value instanceof Node ? value : visible(value)));
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...cells("th", head))),
    element("tbody", {}, ...rows.map((row) => element("tr", { class: rowClass }, ...cells("td", row))))));
}

// Characters that are invisible or reorder the text around them: controls, directional marks, half surrogate pairs.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]|\p{Surrogate}/gu;

function visible(value) {
  const text = String(value), fragment = document.createDocumentFragment();
  let last = 0;
  for (const match of text.matchAll(HIDDEN)) {
    const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    fragment.append(text.slice(last, match.index), element("span", { class: "control" }, `U+${code}`));
    last = match.index + match[0].length;
  }
  fragment.append(text.slice(last));
  return fragment;
}

const loaded = new Map();

const blockElement = (name) => document.querySelector(`script[data-block="${name}"]`);

// Resolves to the content of a block: base64 of zlib of JSON. Missing blocks are empty lists. The last 64 are kept.
function block(name) {
  if (!loaded.has(name)) {
    const source = blockElement(name);
    loaded.set(name, source ? inflate(source.textContent) : Promise.resolve([]));
    if (loaded.size > 64) loaded.delete(loaded.keys().next().value);
  }
  return loaded.get(name);
}

function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

const selection = { run: 0, step: null };
const listeners = [];

function select(change) {
  Object.assign(selection, change);
  for (const listener of listeners) listener(change);
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function format(value) {
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function hint(text, event) {
  const box = byId("hint") ?? document.body.appendChild(element("div", { id: "hint" }));
  box.style.display = text ? "block" : "none";
  if (!text) return;
  box.replaceChildren(visible(text));
  box.style.left = `${Math.max(0, Math.min(event.clientX + 12, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${event.clientY + 16}px`;
}

// Canvas of the width of its parent, in device pixels, with `draw` called now and when the width or theme changes.
function canvas(parent, height, draw) {
  const made = element("canvas", { style: { height: `${height}px` } });
  parent.replaceChildren(made);
  const redraw = () => {
    const ratio = devicePixelRatio || 1;
    made.width = made.clientWidth * ratio;
    made.height = height * ratio;
    const context = made.getContext("2d");
    context.scale(ratio, ratio);
    draw(context, made.clientWidth, height);
  };
  new ResizeObserver(redraw).observe(made);
  made.redraw = redraw;
  return made;
}
