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
