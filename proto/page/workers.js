/* -- Workers, and errors ----------------------------------------------------------------------- */

function nowText({ now, unit }) {
  if (!now) return "says nothing";
  const parts = [text(now.what)];
  if (unit !== null) parts.push(unit);
  const where = [];
  if (isNumber(now.micro)) where.push("micro-batch " + count(now.micro));
  if (isNumber(now.step)) where.push("step " + count(now.step));
  return parts.join(" ") + (where.length ? ", " + where.join(" of ") : "");
}

const stateTone = (s) => ({ running: "ok", sleeping: "", stopped: "bad", gone: "bad" })[s] ?? "";

const workerColumns = [
  { head: "pid", cls: "num", fill: (c, w) => setText(c, w.pid ? String(w.pid) : NONE) },
  { head: "Name", cls: "wrap", fill: (c, w) => setText(c, w.name) },
  { head: "State", fill: (c, w) => chips(c, [[stateTone(w.state), w.state]]) },
  { head: "Does now", cls: "doing full", fill: (c, w) => setText(c, nowText(w)) },
  { head: "Since", cls: "num", fill: (c, w) => setText(c, w.now ? duration(w.now.since_s) : NONE) },
  { head: "Leases", fill: (c, w) => setText(c, [...w.leases].join(", ") || NONE) },
  { head: "Slots in use", cls: "num", fill: (c, w) => setText(c, w.slots ? count(w.slots_waiting) +
    " of " + count(w.slots) : NONE) },
  { head: "Pending", cls: "num", fill: (c, w) => setText(c, count(w.pending)) },
  { head: "Path", fill: (c, w) => setText(c, [...w.paths].join(", ") || NONE) },
  { head: "Role", fill: (c, w) => setText(c, w.role) },
  { head: "Daemons", cls: "num", fill: (c, w) => setText(c, count(w.devices.length)) },
  { head: "Attached", cls: "num", fill: (c, w) => setText(c, duration(w.age_s)) },
];

function workersLead() {
  const all = trainers(), tools = state.workers.length - all.length;
  const parts = [];
  for (const kind of ["running", "sleeping", "stopped", "gone"]) {
    const n = all.filter((w) => w.state === kind).length;
    if (n > 0) parts.push(count(n) + " " + kind);
  }
  return (all.length ? plural(all.length, "worker") + ": " + parts.join(", ") + "." : "") +
    (tools ? " " + plural(tools, "tool") + " of administrators at the end." : "");
}

function showWorkers() {
  const options = { empty: "No worker is attached.",
    row: (w) => (halted(w) ? "alert" : w.role === "admin" ? "off" : "") };
  table(byId("workers-table"), workerColumns, state.workers, (w) => w.key, options);
  setText(byId("workers-lead"), workersLead());
}

/* -- Errors ------------------------------------------------------------------------------------ */

function allErrors() {
  const all = state.daemons.flatMap((d) => list(d.errors).map((e, i) => ({ ...e, device: deviceOf(d),
    at: i })));
  return all.sort((a, b) => (b.time_s || 0) - (a.time_s || 0));
}

function errorTime(e) {
  if (!isNumber(e.time_s)) return NONE;
  const then = new Date(1000 * e.time_s);
  const today = then.toDateString() === new Date(state.at_ms).toDateString();
  return (today ? "" : then.toLocaleDateString("en-CA") + " ") + clock(then.getTime());
}

const errorTone = (level) => (/^err/i.test(level) ? "bad" : /^warn/i.test(level) ? "warn" : "");

const errorColumns = [
  { head: "Time", cls: "nowrap", fill: (c, e) => setText(c, errorTime(e)) },
  { head: "Daemon", cls: "name", fill: (c, e) => setText(c, e.device) },
  { head: "Level", fill: (c, e) => chips(c, [[errorTone(text(e.level)), text(e.level)]]) },
  { head: "Message", cls: "wrap full wide", fill: (c, e) => setText(c, text(e.text)) },
];

function showErrors(errors) {
  table(byId("errors-table"), errorColumns, errors, (e) => JSON.stringify([e.device, e.time_s, e.text,
    e.at]), { empty: "No warning and no error." });
  setText(byId("errors-lead"), errors.length ? "The last 16 of each daemon, newest first." : "");
}
