/* -- Heat map: units down, steps across, shades by the logarithm ------------------------------- */

const HEAT_UNITS = 128, HEAT_STEPS = 120, HEAT_STEPS_MIN = 30, HEAT_KEPT = 256;
const HEAT = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"];
const HEAT_RANGE = 1e4; /* the smallest values share a shade */
const MEASURES = {
  grad: { button: "heat-grad", head: "Norm", words: "gradient norm" },
  ratio: { button: "heat-ratio", head: "Ratio", words: "update/weight" },
};
const heat = { by: "grad", unit: null, step: null, map: null }; /* unit, step: the cell that is read */

/* The open step of all owners: those before it can be asked for. */
const openStep = () => Math.min(...owners().map(([, m]) => m.step || 0));

/* All owners of the chosen model answer, or the one that the page is of. */
function allAnswer() {
  const pairs = owners();
  return pairs.length > 0 && (state.daemons.length === 1 || pairs.length === pairs[0][1].owners);
}

/* What to ask, or null: nothing is new. */
function unitsQuestion() {
  const known = state.units.get(state.model);
  if (!allAnswer()) return null;
  const open = openStep();
  if (open === 0 || (known && known.next === open)) return null;
  return "units?model=" + encodeURIComponent(state.model) +
    (known && known.next >= 0 ? "&from=" + Math.min(known.next, open) : "");
}

const unitsRow = (r) => ({ step: r.step, skipped: r.skipped === true, guard: r.guard || null,
  bad: new Set(list(r.bad)), grad: list(r.grad), ratio: list(r.ratio) });

/* Steps after the one that is next were gone back from. */
function takeUnits(name, answer) {
  const fresh = list(answer.rows).filter((r) => isNumber(object(r).step)).map(unitsRow);
  const known = state.units.get(name) || { rows: [] };
  const first = fresh.length > 0 ? fresh[0].step : answer.next;
  state.units.set(name, {
    names: list(answer.units).map(text), count: answer.unit_count, next: answer.next || 0,
    every: answer.every || 0, part: isNumber(answer.owner) && answer.owners > 1, why: "",
    rows: [...known.rows.filter((r) => r.step < first), ...fresh].slice(-HEAT_KEPT),
  });
}

function missUnits(name, why) {
  state.units.set(name, { names: [], rows: [], next: -1, every: 0, ...state.units.get(name), why });
}

/* -- What is drawn ------------------------------------------------------------------------------ */

/* From the smallest value shown to the largest, which differ by a factor of 2 at least. */
function shade(value) {
  const { low, full } = heat.map;
  const share = value > 0 ? Math.log(value / low) / Math.log(full / low) : 0;
  return Math.max(0, Math.min(HEAT.length - 1, Math.floor(share * HEAT.length)));
}

/* Of the chosen model and measure: units that have a value, and steps that have one. */
function heatMap() {
  const known = state.units.get(state.model) || { names: [], rows: [], why: "" };
  const has = (r, u) => isNumber(r[heat.by][u]) || r.bad.has(u);
  const rows = known.rows.filter((r) => heat.by === "grad" || r.ratio.some(isNumber)).slice(-HEAT_STEPS);
  const units = known.names.map((name, u) => ({ name, u })).filter(({ u }) => rows.some((r) => has(r, u)));
  const full = most(rows, (r) => most(r[heat.by], (x) => x));
  const least = Math.min(...rows.map((r) => Math.min(...r[heat.by].filter((x) => x > 0))));
  const low = Math.max(full / HEAT_RANGE, Math.min(full / 2, least));
  return { known, rows, units: units.slice(0, HEAT_UNITS), all: units.length, full, low,
    columns: Math.max(HEAT_STEPS_MIN, rows.length) };
}

const valueText = (x) => (!isNumber(x) ? NONE :
  x === 0 || (x >= 1e-3 && x < 1e5) ? x.toPrecision(3) : x.toExponential(2));

function heatStrip(cell, unit) {
  const { rows, columns } = heat.map, classes = [...HEAT, "hbad", "hskip", "hat"];
  let svg = cell.querySelector("svg");
  if (!svg) {
    svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("class", "chart heat");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    for (const name of classes)
      svg.append(document.createElementNS(SVG, "path")), svg.lastChild.setAttribute("class", name);
    cell.append(svg);
  }
  svg.shdUnit = unit;
  setAttr(svg, "viewBox", "0 0 " + columns + " 10");
  const paths = classes.map(() => "");
  rows.forEach((r, i) => {
    const x = columns - rows.length + i, value = r[heat.by][unit.u];
    if (isNumber(value)) paths[shade(value)] += `M${x} 0h.94v10h-.94z`;
    if (r.bad.has(unit.u)) paths[HEAT.length] += `M${x} 0l.94 10m0-10l-.94 10`;
    if (r.skipped) paths[HEAT.length + 1] += `M${x} 8h.94v2h-.94z`;
    if (unit.name === heat.unit && r.step === heat.step) paths[HEAT.length + 2] = `M${x} 0h.94v10h-.94z`;
  });
  paths.forEach((d, i) => setAttr(svg.children[i], "d", d));
}

const lastRow = () => heat.map.rows[heat.map.rows.length - 1];

function lastText(unit) {
  const r = lastRow();
  return r.bad.has(unit.u) ? "not finite" : valueText(r[heat.by][unit.u]);
}

function heatLead() {
  const { known, rows, all } = heat.map;
  const lacks = known.why || (rows.length > 0 && !allAnswer() ? "not all owners answer" : "");
  const why = lacks ? ` Not up to date: ${lacks}.` : "";
  if (rows.length === 0) return why.trim();
  const what = heat.by === "grad" ? "Of each unit\u2019s part of the mean gradient, before clipping" :
    `How far an update moved a unit\u2019s parameters, over their norm; of each ${count(known.every)}th step`;
  return `${what}, steps ${count(rows[0].step)} to ${count(lastRow().step)}.` +
    (known.part ? " This owner\u2019s slices alone: shardctl dashboard adds all owners\u2019." : "") +
    (all > HEAT_UNITS ? ` The first ${HEAT_UNITS} of ${count(all)} units.` : "") + why;
}

function heatEmpty() {
  const { known } = heat.map;
  if (heat.by === "grad" || known.rows.length === 0) return "No step was seen to end yet.";
  return `No update was measured yet: each ${count(known.every)}th is.`;
}

/* Shades with the least value of each. */
function heatLegend() {
  const node = byId("heat-legend"), { low, full, rows } = heat.map;
  const least = (k) => low * (full / low) ** (k / HEAT.length);
  const entries = HEAT.map((cls, k) => [cls, k > 0 ? "\u2265" + NARROW + valueText(least(k)) : "less"]).reverse();
  const signature = [low, full].join();
  node.hidden = rows.length === 0;
  if (node.dataset.signature === signature) return;
  node.dataset.signature = signature;
  node.replaceChildren();
  legend(node, [...entries, ["", "\u00d7 not finite"], ["hskip flat", "skipped step"]]);
}

/* -- The cell that is read ---------------------------------------------------------------------- */

function cellText() {
  const r = heat.map.rows.find((row) => row.step === heat.step);
  const unit = heat.map.units.find((u) => u.name === heat.unit);
  if (!r || !unit) return "";
  const value = r.bad.has(unit.u) ? "not finite" : valueText(r[heat.by][unit.u]);
  return `${unit.name}, step ${count(r.step)}: ${MEASURES[heat.by].words} ${value}` +
    (r.skipped ? `, skipped: ${r.guard || "not finite"}` : "");
}

function readCell(unit, step) {
  heat.unit = unit;
  heat.step = step;
  showHeat();
}

function pointAt(event) {
  const svg = event.target.closest("svg.heat");
  if (!svg) return;
  const box = svg.getBoundingClientRect(), { rows, columns } = heat.map;
  const at = Math.floor(((event.clientX - box.left) / box.width) * columns) - (columns - rows.length);
  if (rows[at]) readCell(svg.shdUnit.name, rows[at].step);
}

const clamp = (x, end) => Math.max(0, Math.min(end - 1, x));

function heatKey(event) {
  const { rows, units } = heat.map;
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
    Home: [0, -rows.length], End: [0, rows.length] };
  const move = moves[event.key];
  if (!move || rows.length === 0 || units.length === 0) return;
  event.preventDefault();
  const unit = units.findIndex((u) => u.name === heat.unit), at = rows.findIndex((r) => r.step === heat.step);
  const first = unit < 0 || at < 0;
  readCell(units[clamp(first ? 0 : unit + move[0], units.length)].name,
    rows[clamp(first ? rows.length - 1 : at + move[1], rows.length)].step);
  const strip = [...document.querySelectorAll("#norms-table svg")].find((s) => s.shdUnit.name === heat.unit);
  if (strip) strip.closest("tr").scrollIntoView({ block: "nearest" });
}

function showHeat() {
  const node = byId("norms-table");
  heat.map = heatMap();
  const columns = [
    { head: "Unit", cls: "name", fill: (c, unit) => setText(c, unit.name) },
    { head: MEASURES[heat.by].head, cls: "num beside", fill: (c, unit) => setText(c, lastText(unit)) },
    { head: "Recent steps", cls: "full chartcell", fill: heatStrip },
  ];
  tableReset(node, state.model + "\n" + heat.by);
  table(node, columns, heat.map.units, (unit) => unit.name, { empty: heatEmpty() });
  node.dataset.step = heat.map.rows.length > 0 ? lastRow().step : "";
  for (const [by, m] of Object.entries(MEASURES)) setAttr(byId(m.button), "aria-pressed", String(by === heat.by));
  setText(byId("norms-lead"), heatLead());
  setText(byId("heat-at"), cellText() || "Point at a cell, or focus the map and press the arrow keys, to read it.");
  byId("heat-at").hidden = heat.map.rows.length === 0;
  heatLegend();
}

for (const [by, m] of Object.entries(MEASURES))
  byId(m.button).addEventListener("click", () => {
    heat.by = by;
    showHeat();
  });
byId("norms-table").addEventListener("pointermove", pointAt);
byId("norms-table").addEventListener("pointerdown", pointAt);
byId("heat").addEventListener("keydown", heatKey);
