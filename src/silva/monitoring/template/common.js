
"use strict";
// What a model wrote is shown through textContent only: no string of the data ever becomes markup.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "text") node.textContent = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") node.textContent = value;
    else if (key === "stroke" || key === "fill") node.style[key] = value; // may be a CSS variable
    else node.setAttribute(key, value);
  }
  return node;
}

// ---- numbers -------------------------------------------------------------------------------------
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
function number(v) {
  if (v == null) return "–";
  const size = Math.abs(v);
  if (size >= 1000) return size >= 1e6 ? v.toExponential(2) : whole.format(v);
  if (Number.isInteger(v)) return String(v);
  return size < 0.001 ? v.toExponential(1) : String(Number(v.toPrecision(3)));
}
/** A mark of an axis with marks every `size`: with as many digits as tell them apart. */
function mark(v, size) {
  if (size >= 1 || Math.abs(v) < 200 * size) return number(Number(v.toPrecision(6)));
  return v.toFixed(Math.ceil(-Math.log10(size) - 1e-9));
}
const isShare = (metric) => /success|accuracy|(pass|maj|avg)@/.test(metric);
const percent = (v) => (v == null ? "–" : (100 * v).toFixed(1) + " %");
function duration(s) {
  s = Math.round(s);
  if (s < 60) return `${s} s`;
  return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}
function fact(value, kind) {
  if (kind === "seconds") return duration(value);
  if (kind === "bytes") return (value / 2 ** 30).toFixed(2) + " GiB";
  return kind === "count" ? whole.format(value) : String(value);
}
