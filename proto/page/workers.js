/* -- Steps: how long collect, decide and apply took, and the open step as it fills ------------- */

const STAGES = ["collect", "decide", "apply"];
const RECENT = 12;

const lastStep = (row) => row.samples[row.samples.length - 1];
const wholeStep = (s) => sum(STAGES, (stage) => s[stage]);

function stageColumn(stage) {
  const fill = (cell, row) => setText(cell, lastStep(row) ? milliseconds(lastStep(row)[stage]) : NONE);
  return { head: capital(stage), cls: "num", fill };
}

function fillChart(cell, row) {
  const bars = row.samples.map((s, i) => ({ at: SAMPLES - row.samples.length + i,
    parts: STAGES.map((stage) => s[stage]) }));
  chart(cell, STAGES.map((stage) => "c-" + stage), bars, SAMPLES, row.full);
}

const stepColumns = [
  { head: "Daemon", cls: "name", fill: (c, row) => setText(c, deviceOf(row.daemon)) },
  { head: "Open step", cls: "num", fill: (c, row) => setText(c, count(row.model.step)) },
  { head: "Phase", fill: (c, row) => setText(c, text(row.model.phase).toLowerCase()) },
  { head: "Gradients in", cls: "full", fill: (c, row) => fillCell(c, row.model) },
  ...STAGES.map(stageColumn),
  { head: "Whole", cls: "num", fill: (c, row) => setText(c,
    lastStep(row) ? milliseconds(wholeStep(lastStep(row))) : NONE) },
  { head: "Recent steps", cls: "full chartcell", fill: fillChart },
];

/* One scale for all daemons, so that their columns compare. One outlier in sixty may be cut. */
function chartScale(rows) {
  const all = rows.flatMap((row) => row.samples.map(wholeStep)).sort((a, b) => a - b);
  return all.length > 0 ? Math.max(all[Math.floor((all.length - 1) * 0.98)], 0.001) : 0;
}

function stepsLead(rows, full) {
  if (rows.length === 0) return "";
  if (full === 0) return "No step has ended yet.";
  return `Collect: opened until all gradients are in. Decide: until a worker commits. Apply: until all units are updated. ` +
    `The times are the last step\u2019s. One column of the chart is one step; of steps that pass within a second, the last. ` +
    `Full height: ${milliseconds(full)}.`;
}

function recentColumns(pairs) {
  const columns = [{ head: "Step", fill: (c, row) => setText(c, count(row.step)) }];
  pairs.forEach(([d], i) => {
    for (const stage of STAGES)
      columns.push({
        head: deviceOf(d) + " " + stage, cls: "num",
        fill: (c, row) => setText(c, row.of[i] ? milliseconds(row.of[i][stage]) : NONE),
      });
  });
  return columns;
}

function recentRows(pairs) {
  const samples = pairs.map(([d, m]) => stepsOf(d, m));
  const steps = [...new Set(samples.flatMap((all) => all.map((s) => s.step)))].sort((a,
    b) => b - a).slice(0, RECENT);
  return steps.map((step) => ({ step, of: samples.map((all) => all.find((s) => s.step === step)) }));
}

function showSteps() {
  const pairs = owners();
  const rows = pairs.map(([d, m]) => ({ daemon: d, model: m, samples: stepsOf(d, m) }));
  const full = chartScale(rows);
  for (const row of rows) row.full = full;
  table(byId("steps-table"), stepColumns, rows, (row) => deviceOf(row.daemon),
    { empty: "No model is loaded." });
  setText(byId("steps-lead"), stepsLead(rows, full));
  byId("steps-legend").hidden = full === 0;
  legend(byId("steps-legend"), [["flat c-collect", "collect"], ["flat c-decide", "decide"],
    ["flat c-apply", "apply"]]);
  const recent = byId("steps-recent");
  tableReset(recent, JSON.stringify(pairs.map(([d]) => deviceOf(d))));
  table(recent, recentColumns(pairs), recentRows(pairs), (row) => row.step,
    { empty: "No step has ended yet." });
}

/* -- Waits: who waits for what, since when, on whom ------------------------------------------- */

const WAITS_SHOWN = 10;
let waitsAll = false;

const person = (p) => text(object(p).name) + (object(p).pid ? " (pid " + p.pid + ")" : "");

function makeWait() {
  return h("li", "", h("span", "age"), h("span", "text"), h("span", "more", h("span", "chip"), h("span"),
    h("span", "chips"), h("span")));
}

function fillWait(node, wait) {
  setClass(node, waitTone(wait));
  const [age, sentence, more] = node.children;
  const [kind, waiter, on, where] = more.children;
  setText(age, duration(wait.since_s));
  setText(sentence, text(wait.text));
  setText(kind, wait.kind);
  setText(waiter, object(wait.who).name ? person(wait.who) +
    (wait.on.length ? " waits on" : "") : wait.on.length ? "on" : "");
  keyed(on, wait.on, (p) => p.session + "\n" + p.pid + "\n" + p.state,
    (p) => h("span", "chip " + (halted(p) ? "bad" : ""), person(p) + (p.state ? ": " + p.state : "")),
      () => {});
  setText(where, "at " + wait.devices.join(", "));
}

function showWaitList() {
  const list = byId("waits-list"), more = byId("waits-more");
  const shown = waitsAll ? state.waits : state.waits.slice(0, WAITS_SHOWN);
  keyed(list, shown.length > 0 ? shown : [null], (w) => (w ? "k" + w.key : ""),
    (w) => (w ? makeWait() : h("li", "none", "Nobody waits.")), (node, w) => w && fillWait(node, w));
  more.hidden = state.waits.length <= WAITS_SHOWN;
  setText(more, waitsAll ? "Show the longest " + WAITS_SHOWN : "Show all " + state.waits.length);
}

/* -- By kind ---------------------------------------------------------------------------------- */

function kindRows() {
  const full = most(state.waited, (w) => most(Object.values(w.kinds), (k) => k.longest));
  const last = state.waited[state.waited.length - 1];
  const kinds = new Set([...Object.keys(WAITS), ...state.waits.map((w) => w.kind)]);
  return [...kinds].map((kind) => ({
    kind, full: Math.max(full, 1),
    now: (last && last.kinds[kind]) || { longest: 0, count: 0 },
    worst: most(state.waited, (w) => (w.kinds[kind] || {}).longest),
    bars: state.waited.map((w) => ({
      at: SAMPLES - 1 - Math.floor((state.at_ms - w.at_ms) / 1000), parts: [(w.kinds[kind] || {}).longest],
    })),
  }));
}

const kindColumns = [
  { head: "For", cls: "nowrap", fill: (c, k) => setText(c, WAITS[k.kind] || k.kind) },
  { head: "Now", cls: "num", fill: (c, k) => setText(c, count(k.now.count)) },
  { head: "Longest", cls: "num", fill: (c, k) => setText(c, k.now.count ? duration(k.now.longest) : NONE) },
  { head: "In 60" + NARROW + "s", cls: "num", fill: (c, k) => setText(c,
    k.worst > 0 ? duration(k.worst) : NONE) },
  { head: "Last minute", cls: "full", fill: (c, k) => chart(c, ["c-wait" + (k.worst >= 10 ? " bad" : "")],
    k.bars, SAMPLES, k.full, "small") },
];

function showWaits() {
  const long = state.waits.filter((w) => w.since_s >= 1).length;
  setText(byId("waits-lead"), state.waits.length === 0 ? "" :
    plural(state.waits.length, "wait") + " now, " + (long ? count(long) +
      " for longer than a second." : "none longer than a second: a step is full of short ones."));
  showWaitList();
  table(byId("waits-kinds"), kindColumns, kindRows(), (k) => k.kind, {});
}

byId("waits-more").addEventListener("click", () => {
  waitsAll = !waitsAll;
  showWaitList();
});

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

/* Copies of gradients compared with another worker's, and how many differed. */
function verifiedChips({ compared, differences, suspect }) {
  const all = compared > 0 ? [["", count(compared) + " compared"]] : [];
  if (differences > 0) all.push([suspect ? "bad" : "warn", count(differences) + " differ"]);
  return all;
}

const workerColumns = [
  { head: "pid", cls: "num", fill: (c, w) => setText(c, w.pid ? String(w.pid) : NONE) },
  { head: "Name", cls: "wrap", fill: (c, w) => setText(c, w.name) },
  { head: "State", fill: (c, w) => chips(c, [[stateTone(w.state), w.state]]) },
  { head: "Does now", cls: "doing full", fill: (c, w) => setText(c, nowText(w)) },
  { head: "Since", cls: "num", fill: (c, w) => setText(c, w.now ? duration(w.now.since_s) : NONE) },
  { head: "Leases", fill: (c, w) => setText(c, [...w.leases].join(", ") || NONE) },
  { head: "Verified", fill: (c, w) => chips(c, verifiedChips(w)) },
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
