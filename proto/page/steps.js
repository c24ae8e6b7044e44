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
