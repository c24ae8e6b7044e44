/* -- DOM: names and texts come from others, so they only ever become text nodes --------------- */

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

/* h("td", "num", child, ...): an element of a class; children are nodes or text. */
function h(tag, cls, ...children) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  node.append(...children);
  return node;
}

/* The setters write only what changed: a reader's selection and a screen reader stay in place. */
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setClass(node, cls) {
  if (node.className !== cls) node.className = cls;
}

function setAttr(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

function setWidth(node, share) {
  const width = (100 * Math.min(1, Math.max(0, share || 0))).toFixed(2) + "%";
  if (node.style.width !== width) node.style.width = width;
}

/* Make the children of parent those of items, in order; a child with the same key is kept. */
function keyed(parent, items, keyOf, make, update) {
  const old = parent.shdChildren || new Map();
  const now = new Map();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (now.has(key)) continue;
    const node = old.get(key) || make(item);
    now.set(key, node);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
    update(node, item);
  }
  for (const [key, node] of old) if (!now.has(key)) node.remove();
  parent.shdChildren = now;
}

/* A table from columns {head, cls, fill(cell, item)}; the first column names the row. Roles are
 * said aloud because the narrow layout takes them from the elements. options: empty, the text of a
 * table without rows; row(tr, item), for classes. */
function table(node, columns, items, keyOf, options) {
  if (!node.tHead) tableHead(node, columns);
  const body = node.tBodies[0];
  const rows = items.length > 0 ? items : [null];
  const make = (item) => (item === null ? emptyRow(columns, options.empty) : tableRow(columns));
  keyed(body, rows, (item) => (item === null ? "" : "k" + keyOf(item)), make, (tr, item) => {
    if (item === null) return setText(tr.cells[0], options.empty);
    columns.forEach((column, i) => column.fill(tr.cells[i], item));
    setClass(tr, options.row ? options.row(item) : "");
  });
}

function tableHead(node, columns) {
  node.setAttribute("role", "table");
  const tr = node.createTHead().insertRow();
  tr.setAttribute("role", "row");
  for (const column of columns) {
    const th = h("th", /^num/.test(column.cls) ? "num" : "", column.head);
    th.scope = "col";
    th.setAttribute("role", "columnheader");
    tr.append(th);
  }
  node.createTBody();
}

function tableRow(columns) {
  const tr = h("tr");
  tr.setAttribute("role", "row");
  columns.forEach((column, i) => {
    const cell = h(i === 0 ? "th" : "td", column.cls || "");
    cell.setAttribute("role", i === 0 ? "rowheader" : "cell");
    if (i === 0) cell.scope = "row";
    else cell.dataset.label = column.head;
    tr.append(cell);
  });
  return tr;
}

function emptyRow(columns, text) {
  const td = h("td", "empty", text);
  td.colSpan = columns.length;
  return h("tr", "", td);
}

/* Start a table anew where its columns changed. */
function tableReset(node, signature) {
  if (node.dataset.signature === signature) return;
  node.dataset.signature = signature;
  node.replaceChildren();
}

/* chips(node, [[tone, text], ...]) */
function chips(node, list) {
  let box = node.firstElementChild;
  if (!box) node.append((box = h("span", "chips")));
  keyed(box, list, (c) => c[0] + c[1], (c) => h("span", "chip " + c[0], c[1]), () => {});
}

/* Columns of a chart that share one scale, as one path per class. bars: [{at, parts: [height]}],
 * at counted in columns from the left, heights in the unit of full. */
function chart(cell, classes, bars, columns, full, size) {
  let svg = cell.querySelector("svg");
  if (!svg) {
    svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "chart " + (size || ""));
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    for (const _ of classes) svg.append(document.createElementNS(SVG, "path"));
    cell.append(svg);
  }
  setAttr(svg, "viewBox", "0 0 " + columns + " 100");
  const paths = classes.map(() => "");
  for (const bar of bars) {
    let base = 100;
    bar.parts.forEach((part, i) => {
      const height = full > 0 ? Math.min(base, (100 * (part || 0)) / full) : 0;
      if (height <= 0) return;
      base -= height;
      paths[i] += `M${bar.at + 0.1} ${base.toFixed(1)}h.8v${height.toFixed(1)}h-.8z`;
    });
  }
  paths.forEach((d, i) => {
    setAttr(svg.children[i], "class", classes[i]);
    setAttr(svg.children[i], "d", d);
  });
}

function legend(node, entries) {
  if (node.childElementCount > 0) return;
  for (const [swatch, text] of entries)
    node.append(h("li", "", swatch ? h("span", "swatch " + swatch) : "", text));
}

/* -- Numbers for people; what is not there is an en dash -------------------------------------- */

const NONE = "\u2013";
const NARROW = "\u202f";
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

function fixed(x, digits) {
  const parts = x.toFixed(digits).split(".");
  parts[0] = parts[0].replace(/\B(?=(\d{3})+$)/g, NARROW);
  return parts.join(".");
}

/* Three digits that count: 0.42, 4.2, 42, 420, 4 200. */
function plain(x) {
  if (!isNumber(x)) return NONE;
  const size = Math.abs(x);
  return fixed(x, size >= 100 || size === 0 ? 0 : size >= 1 ? 1 : size >= 0.095 ? 2 : 3);
}

const count = (x) => (isNumber(x) ? fixed(x, 0) : NONE);

function scaled(x, base, units) {
  let unit = 0;
  for (; Math.abs(x) >= base && unit + 1 < units.length; unit++) x /= base;
  const digits = unit === 0 || Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? 1 : 2;
  return fixed(x, digits) + (units[unit] ? NARROW + units[unit] : "");
}

const bytes = (x) => (isNumber(x) ? scaled(x, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]) : NONE);
const short = (x) => (isNumber(x) ? scaled(x, 1000, ["", "k", "M", "G", "T"]) : NONE);
const perSecond = (text) => (text === NONE ? NONE : text + NARROW + "/s");

function milliseconds(x) {
  if (!isNumber(x)) return NONE;
  return x >= 1000 ? duration(x / 1000) : plain(x) + NARROW + "ms";
}

function duration(s) {
  if (!isNumber(s)) return NONE;
  if (s < 0.9995) return fixed(Math.max(0, s) * 1000, 0) + NARROW + "ms";
  if (s < 59.95) return fixed(s, 1) + NARROW + "s";
  const whole = Math.round(s);
  if (whole < 3600) return two(whole, 60, "min", "s");
  if (whole < 86400) return two(Math.floor(whole / 60), 60, "h", "min");
  return two(Math.floor(whole / 3600), 24, "d", "h");
}

const two = (x, base, big, small) =>
  Math.floor(x / base) + NARROW + big + " " + (x % base) + NARROW + small;

const capital = (word) => word[0].toUpperCase() + word.slice(1);
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
const plural = (n, one, many) => count(n) + " " + (n === 1 ? one : many || one + "s");
const text = (x) => (x === undefined || x === null || x === "" ? NONE : String(x));
