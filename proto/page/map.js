/* -- Shard map: units down, owners across ----------------------------------------------------- */

const MARKS = { applying: "updating", frozen: "frozen", blank: "no values yet" };

/* The units of the chosen model in forward order, each with its cell of every owner. */
function mapRows(pairs) {
  const rows = new Map();
  pairs.forEach(([d, m], i) => {
    for (const u of list(m.units)) {
      const name = text(u.name);
      const row = rows.get(name) || { name, frozen: u.frozen, elems: 0, cells: pairs.map(() => null) };
      row.elems += u.elems || 0;
      row.cells[i] = { unit: u, model: m, daemon: d };
      rows.set(name, row);
    }
  });
  return [...rows.values()];
}

function newestVersion(rows) {
  let newest = 0;
  for (const row of rows)
    for (const c of row.cells) if (c && !row.frozen) newest = Math.max(newest, c.unit.version || 0,
      updatesTo(c.model));
  return newest;
}

/* The version its units are on their way to; 0 when they are not. */
const updatesTo = (m) => (m.phase === "APPLYING" && isNumber(m.step) ? m.step + 1 : 0);

function cellState(cell, newest) {
  if (!cell) return "absent";
  if (!isNumber(cell.unit.version)) return "blank";
  if (cell.unit.frozen) return "frozen";
  if (cell.unit.version >= newest) return "current";
  return cell.unit.version < updatesTo(cell.model) ? "applying" : "behind";
}

function fillMapCell(td, cell, newest) {
  const kind = cellState(cell, newest);
  setClass(td, "cell " + kind);
  if (!td.firstChild) td.append(h("div", "", h("b"), h("span", "mark"), h("span", "in")));
  const [version, mark, gradients] = td.firstChild.children;
  setText(version, cell ? count(cell.unit.version) : NONE);
  setText(mark, kind === "behind" ? "\u2212" + count(newest - cell.unit.version) : MARKS[kind] || "");
  const taken = cell && !cell.unit.frozen && isNumber(cell.unit.returned);
  setText(gradients, taken ? cell.unit.returned + "/" + text(cell.model.micro_batches) : "");
}

function mapColumns(pairs, newest) {
  const columns = [{ head: "Unit", fill: (c, row) => setText(c, row.name) }];
  pairs.forEach(([d], i) =>
    columns.push({ head: deviceOf(d), cls: "cell", fill: (c, row) => fillMapCell(c, row.cells[i], newest) }));
  columns.push({ head: "Elements", cls: "num", fill: (c, row) => setText(c, short(row.elems)) });
  return columns;
}

function mapLead(rows, pairs, newest) {
  if (rows.length === 0) return "";
  const counts = { current: 0, applying: 0, behind: 0, frozen: 0, blank: 0, absent: 0 };
  for (const row of rows) for (const c of row.cells) counts[cellState(c, newest)]++;
  const parts = [count(counts.current) + " current at version " + count(newest)];
  if (counts.applying) parts.push(count(counts.applying) + " being updated");
  if (counts.behind) parts.push(count(counts.behind) + " behind");
  if (counts.frozen) parts.push(count(counts.frozen) + " frozen");
  if (counts.blank) parts.push(count(counts.blank) + " without values yet");
  if (counts.absent) parts.push(count(counts.absent) + " not there");
  const missing = (pairs[0][1].owners || 0) - pairs.length;
  if (missing > 0) parts.push(plural(missing, "owner") + " not shown: " +
    (missing === 1 ? "it does" : "they do") + " not answer here");
  return plural(rows.length, "unit") + " \u00d7 " + plural(pairs.length, "owner") + ": " +
    parts.join(", ") + ".";
}

function showMap() {
  const pairs = owners(), rows = mapRows(pairs), newest = newestVersion(rows), node = byId("map-table");
  tableReset(node, JSON.stringify([state.model, pairs.map(([d]) => deviceOf(d))]));
  table(node, mapColumns(pairs, newest), rows, (row) => row.name, { empty: "No model is loaded." });
  setText(byId("map-lead"), mapLead(rows, pairs, newest));
  byId("map-legend").hidden = rows.length === 0;
  legend(byId("map-legend"), [
    ["current", "current"], ["applying", "updating: from the version shown"], ["behind",
      "behind, \u2212 by how many versions"],
    ["frozen", "frozen: never updated"], ["", "3/4: gradients in of micro-batches"]]);
}

/* -- Memory by kind ---------------------------------------------------------------------------- */

function fillStack(cell, row) {
  let bar = cell.firstElementChild;
  if (!bar) {
    bar = h("div", "stack", ...MEMORY.map((kind) => h("i", "m-" + kind)));
    bar.setAttribute("aria-hidden", "true");
    cell.append(bar);
  }
  bar.hidden = row.total;
  MEMORY.forEach((kind, i) => setWidth(bar.children[i], row.bytes[kind] / row.full));
}

const memoryColumns = [
  { head: "Daemon", cls: "name", fill: (c, row) => setText(c, row.name) },
  { head: "Share", cls: "full wide", fill: fillStack },
  ...MEMORY.map((kind) => ({
    head: capital(kind), cls: "num", fill: (c, row) => setText(c, bytes(row.bytes[kind])),
  })),
  { head: "All", cls: "num", fill: (c, row) => setText(c, bytes(row.bytes.all)) },
  { head: "Spilled ever", cls: "num", fill: (c, row) => setText(c, bytes(row.bytes.spilled)) },
];

function showMemory() {
  const rows = state.daemons.filter(reachable).map((d) => ({ name: deviceOf(d), bytes: bytesOf(d) }));
  const full = Math.max(1, most(rows, (row) => row.bytes.all));
  const keys = [...MEMORY, "all", "spilled"];
  if (rows.length > 1) {
    const total = Object.fromEntries(keys.map((key) => [key, sum(rows, (row) => row.bytes[key])]));
    rows.push({ name: "All daemons", bytes: total, total: true });
  }
  for (const row of rows) row.full = full;
  const options = { empty: "No daemon answers.", row: (row) => (row.total ? "sum" : "") };
  table(byId("memory-table"), memoryColumns, rows, (row) => (row.total ? "=" : "") + row.name, options);
  byId("memory-legend").hidden = rows.length === 0;
  legend(byId("memory-legend"), MEMORY.map((kind) => ["flat m-" + kind, kind]));
  setText(byId("memory-lead"), rows.length === 0 ? "" :
    "All models. State: weights, moments and gradient sums. Publish: what workers read. Inbox: where they write gradients. " +
    "Spill: gradients set aside so that a slot is free.");
}
