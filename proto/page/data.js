/* -- What the daemons say, put together ------------------------------------------------------- */

const list = (x) => (Array.isArray(x) ? x : []);
const object = (x) => (x !== null && typeof x === "object" ? x : {});
const sum = (items, value) => items.reduce((total, item) => total + (Number(value(item)) || 0), 0);
const most = (items, value) => items.reduce((top, item) => Math.max(top, Number(value(item)) || 0), 0);

const STALE_MS = 2000; /* as /healthz has it */
const SAMPLES = 60;
const MEMORY = ["state", "publish", "inbox", "board", "ledger", "spill"];
const WAITS = {
  gradients: "missing gradients",
  turn: "an earlier micro-batch",
  unit: "parameters of a unit",
  slot: "a free gradient slot",
  commit: "a commit",
  transfer: "a transfer by NCCL",
  join: "a connection by NCCL",
};

const state = {
  daemons: [], /* of the last answer */
  models: [], /* their names */
  model: null, /* the chosen one */
  waits: [],
  workers: [],
  steps: new Map(), /* device + model: [{step, collect, decide, apply}], oldest first */
  units: new Map(), /* model: what /units said, its rows oldest first */
  waited: [], /* [{at_ms, kinds: {kind: {longest, count}}}], oldest first */
  lost: new Map(), /* device: when it was first unreachable */
  headline: null, /* who holds training up, as the one who answers sees it */
  at_ms: 0, /* when the last answer came */
};

/* A daemon sends its own document, `shardctl dashboard` one with all of a node. */
function take(document, now_ms) {
  const all = Array.isArray(document.daemons) ? document.daemons : [document];
  state.daemons = all.filter((d) => d !== null && typeof d === "object");
  state.headline = object(document.headline);
  state.at_ms = now_ms;
  const names = state.daemons.flatMap((d) => list(d.models).map((m) => text(m.name)));
  state.models = [...new Set(names)].sort();
  if (!state.models.includes(state.model)) state.model = state.models[0] ?? null;
  state.waits = mergedWaits();
  state.workers = mergedWorkers();
  noteLost(now_ms);
  noteSteps();
  noteWaits(now_ms);
}

const reachable = (d) => typeof d.error !== "string";
const deviceOf = (d) => text(d.device);
const modelOf = (d, name) => list(d.models).find((m) => text(m.name) === (name ?? state.model));
/* [daemon, model] of the chosen model, in the order of its owners. */
function owners() {
  const pairs = state.daemons.map((d) => [d, modelOf(d)]).filter((pair) => pair[1]);
  return pairs.sort((a, b) => (a[1].owner ?? 0) - (b[1].owner ?? 0));
}

function noteLost(now_ms) {
  const lost = state.daemons.filter((d) => !reachable(d)).map(deviceOf);
  for (const device of [...state.lost.keys()]) if (!lost.includes(device)) state.lost.delete(device);
  for (const device of lost) if (!state.lost.has(device)) state.lost.set(device, now_ms);
}

function noteSteps() {
  for (const d of state.daemons)
    for (const m of list(d.models)) {
      const key = deviceOf(d) + "\n" + text(m.name);
      const samples = state.steps.get(key) || [];
      const times = object(m.times_ms);
      const last = samples[samples.length - 1];
      if (m.step > 0 && isNumber(times.apply) && (!last || last.step !== m.step - 1))
        samples.push({ step: m.step - 1, collect: times.collect, decide: times.decide, apply: times.apply });
      state.steps.set(key, samples.slice(-SAMPLES));
    }
}

const stepsOf = (d, m) => state.steps.get(deviceOf(d) + "\n" + text(m.name)) || [];

function noteWaits(now_ms) {
  const kinds = {};
  for (const w of state.waits) {
    const k = (kinds[w.kind] = kinds[w.kind] || { longest: 0, count: 0 });
    k.longest = Math.max(k.longest, w.since_s);
    k.count++;
  }
  state.waited.push({ at_ms: now_ms, kinds });
  state.waited = state.waited.filter((w) => now_ms - w.at_ms < SAMPLES * 1000);
}

/* Several daemons may tell of one wait: the same text but for its duration. */
function mergedWaits() {
  const merged = new Map();
  for (const d of state.daemons)
    for (const w of list(d.waits)) {
      const key = JSON.stringify([w.kind, object(w.who).pid, text(w.text).replace(/[\d.]+ (ms|s|min|h)\b/g,
        "")]);
      const known = merged.get(key);
      if (known) known.devices.push(deviceOf(d));
      if (known && known.since_s >= (w.since_s || 0)) continue;
      const devices = known ? known.devices : [deviceOf(d)];
      merged.set(key, { ...w, key, devices, since_s: w.since_s || 0, kind: text(w.kind), on: list(w.on) });
    }
  return [...merged.values()].sort((a, b) => b.since_s - a.since_s);
}

const halted = (process) => process.state === "stopped" || process.state === "gone";

function waitTone(wait) {
  if (wait.since_s < 1) return "";
  return wait.on.some(halted) || wait.since_s >= 10 ? "bad" : "warn";
}

/* A worker has a session with each daemon; a process is told by its pid, else by its session. */
function mergedWorkers() {
  const merged = new Map();
  for (const d of state.daemons)
    for (const s of list(d.sessions)) {
      const key = s.pid ? s.pid + "\n" + text(s.name) : deviceOf(d) + "\n" + s.id;
      const w = merged.get(key) || newWorker(key, s);
      merged.set(key, w);
      addSession(w, d, s);
    }
  const rank = (w) => (halted(w) ? 0 : w.role === "admin" ? 2 : 1);
  return [...merged.values()].sort((a, b) => rank(a) - rank(b) || a.pid - b.pid || (a.key < b.key ? -1 : 1));
}

const newWorker = (key, s) => ({
  key, pid: s.pid || 0, uid: s.uid, name: text(s.name), role: text(s.role), state: text(s.state),
  devices: [], paths: new Set(), leases: new Set(), slots: 0, slots_waiting: 0, pending: 0, age_s: 0,
  compared: 0, differences: 0, suspect: false,
    now: null, unit: null,
});

/* A worker says a unit by its name or by its index in the model. */
function unitName(d, unit) {
  if (!isNumber(unit)) return unit ?? null;
  const units = list(d.models).length === 1 ? list(d.models[0].units) : [];
  return units[unit] ? text(units[unit].name) : "unit " + unit;
}

function addSession(w, d, s) {
  w.devices.push(deviceOf(d));
  w.slots = Math.max(w.slots, s.slots || 0); /* a slot spans all owners */
  w.slots_waiting = Math.max(w.slots_waiting, s.slots_waiting || 0);
  w.pending += s.requests_pending || 0;
  w.age_s = Math.max(w.age_s, s.age_s || 0);
  if (halted(s)) w.state = s.state;
  if (s.path) w.paths.add(s.path);
  if (s.now && !w.now) {
    w.now = s.now;
    w.unit = unitName(d, s.now.unit);
  }
  for (const m of list(d.models)) {
    for (const lease of list(m.leases))
      if (lease.session === s.id) w.leases.add(lease.group + (lease.backup ? " (backup)" : ""));
    for (const v of list(object(m.verify).workers))
      if (v.pid === s.pid) addVerified(w, v);
  }
}

/* Each owner compares its own slices: what one has found is a fault. */
function addVerified(w, v) {
  w.compared = Math.max(w.compared, v.compared || 0);
  w.differences = Math.max(w.differences, v.differences || 0);
  w.suspect = w.suspect || v.suspect === true;
}

function bytesOf(d) {
  const total = {};
  for (const kind of MEMORY) total[kind] = sum(list(d.models), (m) => object(m.bytes)[kind]);
  total.all = sum(MEMORY, (kind) => total[kind]);
  total.spilled = sum(list(d.models), (m) => object(m.bytes).spilled);
  return total;
}
