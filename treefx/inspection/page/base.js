"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};
const SVG = byId("drawing").namespaceURI; // written out, it would look like an address that the page opens
const draw = (tag, attributes, text) => {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const short = (n) => {
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (n >= size) return (n / size).toFixed(1) + " " + unit;
  return String(n);
};
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
// One element of a group is in the order of Tab; arrow keys move it.
function rove(items, chosen) {
  for (const item of items) item.setAttribute("tabindex", "-1");
  if (chosen) chosen.setAttribute("tabindex", "0");
}
