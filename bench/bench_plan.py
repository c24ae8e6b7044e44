#!/usr/bin/env python3
"""bench.sh plan: what `shardctl plan` predicts of a step beside what the step takes."""
import json
import os
import statistics
import sys
import tempfile

import figures
from figures import finish, show, show_head, start, under_daemons

ABOUT = """Predicted and measured step time of three shapes. A round measures the machine (--calibrate),
then, for each shape, the compute of one worker beside one daemon (its trace), predicts the step of
the whole shape from both, and trains with it. The ratio is predicted over measured, round by round.

Run it alone, or with a priority that others do not have: `chrt -r 1`; or `nice -n -20`, and where the
kernel groups tasks by session (/proc/sys/kernel/sched_autogroup_enabled) in a session of its own
with `echo -20 >/proc/self/autogroup`."""

# name, workers, daemons, shd-gpt's arguments: what bounds it
SHAPES = (
    ("many", 1, 1, ["--layers", "40", "--dim", "16", "--heads", "1", "--seq", "4", "--batch", "1", "--micro-batches", "4"]),
    ("large", 1, 1, ["--layers", "2", "--dim", "1024", "--heads", "1", "--seq", "1", "--batch", "1", "--micro-batches", "1"]),
    ("two", 2, 2, ["--layers", "4", "--dim", "128", "--seq", "128", "--batch", "8", "--micro-batches", "4"]),
)  # fmt: skip

# The plan of the whole shape, asked while this worker trains.
ASK = """
gpt=$1 plan=$2 answer=$3; shift 3
"$gpt" "$@" >/dev/null & worker=$!
sleep "$SECONDS_TO_ASK"
$plan >"$answer"; code=$?
kill "$worker"; wait "$worker"
exit $code
"""


def train(a, log, shape, count):
    name, workers, daemons, gpt = shape
    command = under_daemons(
        a, daemons, "--workers", str(workers), "--",
        *figures.shd_gpt(a, count, log, "--threads", "1", *gpt),
    )  # fmt: skip
    finish("plan", start(command))
    with open(log, encoding="utf-8") as f:
        steps = [json.loads(line)["step_ns"] for line in f]
    return statistics.median(steps[a.warmup :]) * 1e-6


def predict(a, folder, rates, shape):
    name, workers, daemons, gpt = shape
    answer, log = os.path.join(folder, "answer"), os.path.join(folder, "asked")
    shardctl = os.path.join(a.bin, "shardctl")
    plan = f"{shardctl} plan --json --rates {rates} --workers {workers} --daemons {daemons} --threads-per-daemon 1"
    os.environ["SECONDS_TO_ASK"] = str(a.ask)
    command = under_daemons(
        a, 1, "--", "sh", "-c", ASK, "ask", os.path.join(a.bin, "shd-gpt"), plan, answer,
        *figures.shd_gpt(a, 1000000, log, "--threads", "1", *gpt)[1:],
    )  # fmt: skip
    finish("plan", start(command))
    with open(answer, encoding="utf-8") as f:
        time = json.load(f)["time"]
    if time["compute_from"] != "trace":
        sys.exit(f"bench.sh plan: {name}: no compute in the trace")
    return time


def one_round(a, folder, got):
    rates = os.path.join(folder, "rates.json")
    finish("plan", start([os.path.join(a.bin, "shardctl"), "plan", "--calibrate", "--rates", rates]))
    for shape in a.shapes:
        time = predict(a, folder, rates, shape)
        measured = train(a, os.path.join(folder, "steps"), shape, a.steps)
        got[shape[0]].append((time, measured))
        if a.verbose:
            parts = " ".join(f"{k[:-2]} {time[k] * 1e3:.2f}" for k in time if k.endswith("_s"))
            print(f"{shape[0]}: {parts}; measured {measured:.2f}", file=sys.stderr, flush=True)


def main():
    p = figures.steps_parser("plan", ABOUT, 5, "of all", 40, 10)
    p.add_argument("--ask", type=float, default=2, help="seconds of training before the plan is asked for (2)")
    p.add_argument("--shape", help="of " + ", ".join(s[0] for s in SHAPES) + " (all)")
    p.add_argument("--verbose", action="store_true", help="each round's parts on stderr")
    a = figures.parse_steps(p)
    a.shapes = [s for s in SHAPES if a.shape in (None, s[0])]
    got = {s[0]: [] for s in a.shapes}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            one_round(a, folder, got)
    if not a.json:
        print(f"plan: {a.rounds} rounds, medians of {a.steps} steps, the first {a.warmup} not counted; {figures.machine()}")
    show_head(a)
    for name, rounds in got.items():
        bounds = [r[0]["bound"] for r in rounds]
        show(a, f"plan.{name}.predicted", "ms", [r[0]["step_s"] * 1e3 for r in rounds])
        show(a, f"plan.{name}.measured", "ms", [r[1] for r in rounds])
        show(a, f"plan.{name}.ratio", "ratio", [r[0]["step_s"] * 1e3 / r[1] for r in rounds])
        if not a.json:
            print(f"plan.{name} is bound by {max(set(bounds), key=bounds.count)}")


main()
