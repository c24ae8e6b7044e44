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
