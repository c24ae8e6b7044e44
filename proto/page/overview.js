/* -- Overview: notices, the longest wait in words, tiles, daemons ----------------------------- */

/* The state of a daemon as chips, what is worst first. */
function daemonChips(d) {
  if (!reachable(d)) return [["bad", "unreachable since " + clock(state.lost.get(deviceOf(d)) ||
    state.at_ms)]];
  const found = [];
  if (d.stale_ms > STALE_MS) found.push(["bad", "loop stuck for " + duration(d.stale_ms / 1000)]);
  if (list(object(d.adopted).refused).length > 0) found.push(["bad", "refused a model"]);
  for (const m of list(d.models)) found.push(...modelChips(m));
  if (found.length > 0) return found;
  return list(d.models).length > 0 ? [["ok", "serving"]] : [["", "no model"]];
}

function modelChips(m) {
  const found = [];
  const c = m.checkpoint;
  if (modelFailed(m)) found.push(["bad", text(m.name) + " failed"]);
  else if (m.ready === false) found.push(["warn", text(m.name) + " not ready"]);
  const why = (object(m.last_cause).text || object(m.last_guard).text);
  const stop = object(m.stopped);
  if (m.stopped) found.push(["bad", "training stopped: " +
    text(object(stop.cause).text || object(stop.guard).text)]);
  else if (m.last_skipped) found.push(["warn", "last step skipped" + (why ? ": " + text(why) : "")]);
  if (c) {
    const share = c.bytes_total > 0 ? " " + Math.floor((100 * c.bytes_done) / c.bytes_total) + NARROW +
      "%" : "";
    found.push(["info", "checkpoint of step " + count(c.step) + " " + text(c.state) +
      (c.state === "writing" ? share : "")]);
  }
  return found;
}

const modelFailed = (m) => typeof m.status === "string" && !/^(SHD_)?OK$/.test(m.status);

function range(values, format) {
  const known = values.filter(isNumber);
  if (known.length === 0) return NONE;
  const low = format(Math.min(...known)), high = format(Math.max(...known));
  return low === high ? low : low + "\u2013" + high;
}

/* -- The longest wait ------------------------------------------------------------------------- */

/* The sentence is the daemon's, or of `shardctl dashboard`, which knows all daemons: the same that
 * `shardctl status` and a worker's error say. */
function headline() {
  const lost = state.daemons.filter((d) => !reachable(d)).length;
  if (state.daemons.length > 0 && lost === state.daemons.length) return ["bad", "No daemon answers."];
  const held = heldUp();
  if (held) return held;
  const [tone, rest] = headlineOfWaits();
  return lost === 0 ? [tone, rest] : [tone || "warn", plural(lost, "daemon does", "daemons do") +
    " not answer. " + rest];
}

function heldUp() {
  const h = state.headline;
  if (typeof h.text !== "string" || h.text === "") return null;
  return [h.halted || h.since_s >= 10 ? "bad" : "warn", text(h.text) + ". " + text(h.remedy) + "."];
}

function headlineOfWaits() {
  const wait = state.waits[0];
  if (wait && wait.since_s >= 1) return [waitTone(wait), "Longest wait: " + wait.text];
  if (state.models.length === 0) return ["", "No model yet: the first worker that opens one brings it."];
  if (trainers().length === 0) return ["", "Nothing waits, and no worker is attached."];
  return ["", "Nothing has waited longer than a second."];
}

/* Screen readers hear of a wait once, not of each tenth of a second of it. */
function announce() {
  const wait = state.waits.find((w) => w.since_s >= 1);
  const key = wait ? wait.key : "";
  const node = byId("announce");
  if (node.dataset.key === key) return;
  node.dataset.key = key;
  setText(node, wait ? "Longest wait: " + wait.text : "Nothing waits longer than a second.");
}

/* -- Tiles ------------------------------------------------------------------------------------ */

const trainers = () => state.workers.filter((w) => w.role !== "admin");

function tiles() {
  const models = owners().map((pair) => pair[1]);
  return [stepTile(models), lossTile(models), rateTile(models), gradientTile(models), workerTile(), waitTile(), memoryTile()];
}

function stepTile(models) {
  const phases = [...new Set(models.map((m) => text(m.phase).toLowerCase()))];
  return { name: "Step", big: range(models.map((m) => m.step), count), sub: phases.join(", ") };
}

/* Owner 0's numbers are the step's. */
function lossTile(models) {
  const m = models.find((one) => one.owner === 0) || models[0];
  const norm = m && isNumber(m.grad_norm) ? "gradient norm " + plain(m.grad_norm) : "";
  return { name: "Loss", big: m ? plain(m.loss) : NONE, sub: m && m.last_skipped ? "last step skipped" : norm };
}

/* Every owner takes part in every step: the slowest one's rate is the model's. */
function rateTile(models) {
  const rates = models.map((m) => object(m.rates).steps_per_s).filter(isNumber);
  const rate = rates.length > 0 ? Math.min(...rates) : NaN;
  return {
    name: "Rate", big: plain(rate), unit: isNumber(rate) ? "steps/s" : "",
    sub: rate > 0 ? milliseconds(1000 / rate) + " a step" : rate === 0 ? "none for 10" + NARROW + "s" : "",
  };
}

function gradientTile(models) {
  const done = sum(models, (m) => m.returned), expected = sum(models, (m) => m.expected);
  const taken = sum(models, (m) => object(m.rates).bytes_per_s);
  return {
    name: "Gradients in", big: models.length ? count(done) : NONE,
    unit: models.length ? "of " + count(expected) : "", sub: models.length ? perSecond(bytes(taken)) : "",
  };
}

function workerTile() {
  const all = trainers();
  const lost = ["stopped", "gone"].map((s) => [all.filter((w) => w.state === s).length,
    s]).filter(([n]) => n > 0);
  const sub = lost.map(([n, s]) => count(n) + " " + s).join(", ");
  return { name: "Workers", big: count(all.length), sub: sub ||
    (all.length ? "none stopped" : "none attached"), bad: lost.length > 0 };
}

function waitTile() {
  const wait = state.waits[0];
  return {
    name: "Longest wait", big: wait ? duration(wait.since_s) : "none",
    sub: wait ? "for " + (WAITS[wait.kind] || wait.kind) : "",
      bad: wait !== undefined && waitTone(wait) === "bad",
  };
}

function memoryTile() {
  const up = state.daemons.filter(reachable);
  return {
    name: "Memory", big: bytes(sum(up, (d) => bytesOf(d).all)),
    sub: "in " + plural(up.length, "daemon") + (up.length < state.daemons.length ? " that answer" : ""),
  };
}

function makeTile() {
  const big = h("span"), unit = h("small");
  const dd = h("dd", "", h("div", "big", big, " ", unit), h("div", "sub"));
  return h("div", "", h("dt"), dd);
}

function fillTile(node, tile) {
  setText(node.querySelector("dt"), tile.name);
  setText(node.querySelector(".big span"), tile.big);
  setText(node.querySelector(".big small"), tile.unit || "");
  setText(node.querySelector(".sub"), tile.sub || "");
  setClass(node.querySelector(".sub"), tile.bad ? "sub bad" : "sub");
}

/* -- Daemons ---------------------------------------------------------------------------------- */

/* "14 of 24" beside its bar; early: gradients that wait for an earlier one. */
function fillCell(cell, model) {
  if (!model) return cell.replaceChildren(NONE);
  let box = cell.querySelector(".fill");
  if (!box) {
    box = h("div", "fill", h("div", "track", h("i"), h("i", "early")), h("span", "nowrap"));
    box.firstChild.setAttribute("aria-hidden", "true");
    cell.replaceChildren(box);
  }
  const [done, early] = box.firstChild.children;
  setWidth(done, model.returned / model.expected);
  setWidth(early, model.waiting / model.expected);
  const waiting = model.waiting > 0 ? ", " + count(model.waiting) + " early" : "";
  setText(box.lastChild, count(model.returned) + " of " + count(model.expected) + waiting);
}

const ofModel = (value) => (cell, d) => {
  const m = modelOf(d);
  setText(cell, m ? value(m) : NONE);
};

const daemonColumns = [
  { head: "Daemon", cls: "name", fill: (c, d) => setText(c, deviceOf(d)) },
  { head: "State", cls: "beside", fill: (c, d) => chips(c, daemonChips(d)) },
  { head: "Step", cls: "num", fill: ofModel((m) => count(m.step)) },
  { head: "Phase", fill: ofModel((m) => text(m.phase).toLowerCase()) },
  { head: "Gradients in", cls: "full", fill: (c, d) => fillCell(c, modelOf(d)) },
  { head: "Steps/s", cls: "num", fill: ofModel((m) => plain(object(m.rates).steps_per_s)) },
  { head: "Sessions", cls: "num", fill: (c, d) => setText(c,
    reachable(d) ? count(list(d.sessions).length) : NONE) },
  { head: "Memory", cls: "num", fill: (c, d) => setText(c, reachable(d) ? bytes(bytesOf(d).all) : NONE) },
  { head: "Up for", cls: "num", fill: (c, d) => setText(c, duration(d.uptime_s)) },
];

const field = (value) => (cell, d) => setText(cell, reachable(d) ? value(d) : NONE);

function adoptedText(d) {
  const a = object(d.adopted);
  if (!a.models) return "none";
  return plural(a.models, "model") + " in " + milliseconds(a.ms);
}

const detailColumns = [
  { head: "Daemon", cls: "name", fill: (c, d) => setText(c, deviceOf(d)) },
  { head: "pid", cls: "num", fill: field((d) => text(d.pid)) },
  { head: "Version", fill: field((d) => text(d.version)) },
  { head: "Kernels", fill: field((d) => text(d.isa) + " \u00d7 " + count(d.threads)) },
  { head: "Segments kept by", fill: field((d) => ({ notify: "service manager",
    none: "nobody" })[d.keeper] || text(d.keeper)) },
  { head: "Adopted", fill: field(adoptedText) },
  { head: "Requests", cls: "num", fill: field((d) => count(d.requests)) },
  { head: "Bad frames", cls: "num", fill: field((d) => count(d.bad_frames)) },
  { head: "Replies dropped", cls: "num", fill: field((d) => count(d.dropped_replies)) },
  { head: "repeated", cls: "num", fill: field((d) => count(d.repeated_replies)) },
  { head: "Snapshot age", cls: "num", fill: field((d) => milliseconds(d.stale_ms)) },
];

/* -- Notices ---------------------------------------------------------------------------------- */

function daemonNotices(d) {
  const device = deviceOf(d);
  if (!reachable(d)) return [["bad", device, "unreachable since " + clock(state.lost.get(device) ||
    state.at_ms) + ": " + d.error]];
  const found = list(object(d.adopted).refused).map((r) => [
    "bad", device, "refused the model \u201c" + text(r.name) + "\u201d it found: " + text(r.status) +
      ", " + text(r.why)]);
  for (const m of list(d.models).filter(modelFailed))
    found.push(["bad", device, "the model \u201c" + text(m.name) + "\u201d has failed: " + m.status]);
  if (d.stale_ms > STALE_MS)
    found.push(["bad", device, "its event loop has not turned for " + duration(d.stale_ms / 1000) +
      ": what is shown of it is that old"]);
  return found;
}

function showNotices(extra) {
  const all = extra.concat(state.daemons.flatMap(daemonNotices));
  keyed(byId("notices"), all, (n) => n[0] + n[1] + n[2].replace(/\d/g, ""),
    (n) => h("p", "notice " + n[0], h("strong", "", n[1]), h("span")),
    (node, n) => setText(node.lastChild, (n[1] ? ": " : "") + n[2]));
}

function showOverview() {
  const [tone, words] = headline();
  setClass(byId("headline"), "headline " + tone);
  setText(byId("headline"), words);
  announce();
  keyed(byId("tiles"), tiles(), (t) => t.name, makeTile, fillTile);
  const options = { empty: "No daemon is here.", row: (d) => (reachable(d) ? "" : "off") };
  table(byId("daemons"), daemonColumns, state.daemons, deviceOf, options);
  table(byId("details"), detailColumns, state.daemons, deviceOf, options);
}
