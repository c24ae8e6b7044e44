/* -- Polling: each second; slower when hidden or when nobody answers --------------------------- */

const EVERY_MS = 1000, HIDDEN_MS = 10000, BACKOFF_MS_MAX = 15000, TIMEOUT_MS = 8000;
const poll = { timer: 0, failures: 0, failed_ms: 0, why: "", paused: false, busy: false };

async function ask(path) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), TIMEOUT_MS);
  try {
    const answer = await fetch(path, { cache: "no-store", credentials: "same-origin",
      signal: abort.signal });
    if (!answer.ok) throw new Error("HTTP status " + answer.status);
    return await answer.json();
  } catch (e) {
    throw abort.signal.aborted ? new Error("no answer within " + TIMEOUT_MS / 1000 + " s") : e;
  } finally {
    clearTimeout(timer);
  }
}

/* What is behind the page without it: an answer that does not come is said beside the map. */
async function askUnits() {
  const question = unitsQuestion(), model = state.model;
  if (question === null) return;
  try {
    takeUnits(model, object(await ask(question)));
  } catch (e) {
    missUnits(model, e instanceof Error ? e.message : String(e));
  }
}

async function turn() {
  if (poll.busy) return;
  poll.busy = true;
  clearTimeout(poll.timer);
  try {
    const answer = await ask("status");
    if (answer === null || typeof answer !== "object") throw new Error("the answer is no status document");
    take(answer, Date.now());
    poll.failures = 0;
    await askUnits();
  } catch (e) {
    if (poll.failures++ === 0) poll.failed_ms = Date.now();
    poll.why = e instanceof Error ? e.message : String(e);
  }
  poll.busy = false;
  show();
  next();
}

function next() {
  clearTimeout(poll.timer);
  if (poll.paused) return;
  const after_ms = poll.failures > 0 ? Math.min(BACKOFF_MS_MAX,
    EVERY_MS * 2 ** (poll.failures - 1)) : EVERY_MS;
  poll.timer = setTimeout(turn, document.hidden ? Math.max(HIDDEN_MS, after_ms) : after_ms);
}

/* -- Drawing ----------------------------------------------------------------------------------- */

function lostNotice() {
  if (poll.failures === 0) return [];
  const old = state.at_ms ? " Below is what was true at " + clock(state.at_ms) + "." : "";
  return [["bad", "No answer since " + clock(poll.failed_ms), poll.why + "." + old]];
}

function liveText() {
  if (poll.failures > 0) return ["bad", "unreachable since " + clock(poll.failed_ms)];
  if (poll.paused) return ["paused", "paused at " + clock(state.at_ms)];
  return state.at_ms ? ["ok", "live, " + clock(state.at_ms)] : ["", "connecting"];
}

function showHead(errors) {
  const [tone, words] = liveText();
  setClass(document.querySelector(".live"), "live " + tone);
  setText(byId("live-text"), words);
  document.documentElement.classList.toggle("cut", poll.failures > 0);
  const steps = range(owners().map((pair) => pair[1].step), count);
  document.title = (poll.failures > 0 ? "no answer \u00b7 " : steps !== NONE ? "step " + steps +
    " \u00b7 " : "") + "shardd";
  showCount("nav-waits", state.waits.filter((w) => w.since_s >= 1).length,
    state.waits.some((w) => waitTone(w) === "bad") ? "bad" : "warn");
  showCount("nav-workers", trainers().length, trainers().some(halted) ? "bad" : "");
  showCount("nav-errors", errors.length, errors.some((e) => errorTone(text(e.level)) === "bad") ? "bad" : "warn");
}

function showCount(id, n, tone) {
  setText(byId(id), n > 0 ? String(n) : "");
  setClass(byId(id), "count " + tone);
}

function showModels() {
  const pick = byId("model-pick"), select = byId("model-select");
  pick.hidden = state.models.length < 2;
  keyed(select, state.models, (name) => name, (name) => h("option", "", name), (node,
    name) => (node.value = name));
  if (state.model !== null && select.value !== state.model) select.value = state.model;
}

function show() {
  const errors = allErrors();
  showHead(errors);
  showNotices(lostNotice());
  if (state.at_ms === 0) return;
  showModels();
  showOverview();
  showMap();
  showSteps();
  showHeat();
  showWaits();
  showMemory();
  showWorkers();
  showErrors(errors);
  const versions = [...new Set(state.daemons.filter(reachable).map((d) => text(d.version)))];
  setText(byId("foot"), (versions.length ? "shardd " + versions.join(", ") + ". " : "") +
    "The same values as JSON: /status.");
}

/* -- Controls ---------------------------------------------------------------------------------- */

const THEMES = ["auto", "light", "dark"];
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

function storedTheme() {
  try {
    const theme = localStorage.getItem("shardd-theme");
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto"; /* storage is refused: the choice lasts as long as the page */
  }
}

let theme = storedTheme();

function useTheme() {
  const dark = theme === "dark" || (theme === "auto" && darkSystem.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  setText(byId("theme"), "Theme: " + theme);
}

byId("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  try {
    localStorage.setItem("shardd-theme", theme);
  } catch {
    /* as above */
  }
  useTheme();
});

byId("pause").addEventListener("click", () => {
  poll.paused = !poll.paused;
  setText(byId("pause"), poll.paused ? "Resume" : "Pause");
  if (poll.paused) clearTimeout(poll.timer);
  else turn();
  show();
});

byId("model-select").addEventListener("change", (event) => {
  state.model = event.target.value;
  show();
  askUnits().then(showHeat);
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !poll.paused) turn();
});
darkSystem.addEventListener("change", useTheme);

/* The section that is being read, in the navigation. */
function markSection() {
  const sections = [...document.querySelectorAll("main > section")];
  const end = window.innerHeight + window.scrollY >= document.documentElement.scrollHeight - 2;
  const above = sections.filter((s) => s.getBoundingClientRect().top < 140);
  const current = end && window.scrollY > 0 ? sections[sections.length - 1] : above[above.length - 1] ||
    sections[0];
  for (const a of document.querySelectorAll("nav a")) {
    if (a.hash === "#" + current.id) a.setAttribute("aria-current", "true");
    else a.removeAttribute("aria-current");
  }
}

addEventListener("scroll", markSection, { passive: true });
useTheme();
markSection();
turn();
