"use strict";
// Small helpers. Texts are only ever set with textContent, so nothing in the data is read as HTML.
const SVG = "http://www.w3.org/2000/svg";

function element(name, classes, ...inside) {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  made.append(...inside.filter((each) => each !== null && each !== undefined)
    .map((each) => typeof each === "object" ? each : document.createTextNode(String(each))));
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

// A line of short facts; each is an element, so that there is space between them.
function headLine(...inside) {
  return element("div", "head", ...inside.filter((each) => each).map((each) => typeof each === "string" ? element("span", "", each) : each));
}

function labelled(text, control, classes) {
  return element("label", classes || "", text, control);
}

function choice(options, onChange) {
  const made = element("select");
  for (const [value, text] of options) {
    const option = element("option", "", text);
    option.value = value;
    made.append(option);
  }
  made.addEventListener("change", onChange);
  return made;
}

function button(text, onClick) {
  const made = element("button", "", text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

function noteList(notes) {
  return notes.length ? element("ul", "notes", ...notes.map((each) => element("li", "", each))) : null;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2);
  return Number.isInteger(value) && digits !== 3 ? String(value) : value.toFixed(digits);
}

function dataOf(id) {
  const found = document.getElementById(id);
  return found ? JSON.parse(found.textContent) : null;
}
