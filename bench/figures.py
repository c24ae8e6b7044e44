"""The shared parts of the benchmarks in Python: flags that all have, runs of shd-gpt, and how figures are shown."""
import argparse
import json
import os
import statistics
import subprocess
import sys


def parser(name, about):
    p = argparse.ArgumentParser(
        prog=f"bench.sh {name}", description=about, formatter_class=argparse.RawTextHelpFormatter
    )
    here = os.path.dirname(os.path.abspath(__file__))
    p.add_argument("--bin", default=os.path.join(here, "../build/release/bin"), help=argparse.SUPPRESS)
    p.add_argument("--json", action="store_true", help="one object a line")
    return p


def steps_parser(name, about, rounds, what, steps, warmup):
    """A parser for rounds of runs; what: of what there are so many rounds."""
    p = parser(name, about)
    p.add_argument("--rounds", type=int, default=rounds, help=f"{what} ({rounds})")
    p.add_argument("--steps", type=int, default=steps, help=f"steps of a run ({steps})")
    p.add_argument("--warmup", type=int, default=warmup, help=f"first steps that do not count ({warmup})")
    p.add_argument("gpt", nargs="*", metavar="-- SHD-GPT-ARGUMENT", help="e.g. -- --dim 512")
    return p


def parse_steps(p, warmup_min=0):
    a = p.parse_args()
    if a.rounds < 1 or a.warmup < warmup_min or a.steps <= a.warmup:
        p.error(f"--steps {a.steps} must exceed --warmup {a.warmup}, --rounds {a.rounds} be positive")
    return a


def shd_gpt(a, steps, log, *more):
    """A command that trains without evaluation and sample, and logs its steps."""
    return [
        os.path.join(a.bin, "shd-gpt"), "--steps", str(steps), "--eval-every", "0", "--sample", "0",
        "--log-every", str(steps), "--json", log, *more,
    ]  # fmt: skip


def under_daemons(a, daemons, *command):
    """The command under `shardctl run`; what comes before "--" is for that."""
    return [
        os.path.join(a.bin, "shardctl"), "run", "--daemons", str(daemons), "--threads-per-daemon", "1", *command,
    ]  # fmt: skip


def start(command):
    """Start a process with one thread for each library, and no place in another run."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDD_ADDRESS"):
        env.pop(name, None)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def finish(name, process):
    """Its standard output; what else it said is shown only when it failed."""
    out, err = process.communicate()
    if process.returncode != 0:
        sys.stderr.write(out + err)
        sys.exit(f"bench.sh {name}: failed with {process.returncode}: {' '.join(process.args)}")
    return out


def read_steps(a, name, log, count=None):
    """The steps behind the warm-up that a run has logged; count: how many there are with it."""
    with open(log, encoding="utf-8") as f:
        steps = [json.loads(line) for line in f]
    if count is not None and len(steps) != count:
        sys.exit(f"bench.sh {name}: {log} has {len(steps)} steps, expected {count}")
    return [s for s in steps if s["step"] > a.warmup]


def median_ms(steps):
    return statistics.median(s["step_ns"] for s in steps) * 1e-6


def same_digest(name, digests):
    if len(set(digests)) != 1:
        sys.exit(f"bench.sh {name}: different digests: " + ", ".join(sorted(set(digests))))


def ratios(a, b):
    return [x / y for x, y in zip(a, b)]


def machine():
    return f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"


def show_head(a):
    if not a.json:
        print(f"{'name':<44} {'median':>10} {'min':>10} {'max':>10}  {'unit':<6} n", flush=True)


def show(a, name, unit, values):
    median, low, high = statistics.median(values), min(values), max(values)
    if a.json:
        median, low, high = (float(f"{x:.6g}") for x in (median, low, high))
        figure = {"name": name, "value": median, "unit": unit, "min": low, "max": high}
        print(json.dumps({**figure, "n": len(values)}), flush=True)
    else:
        print(f"{name:<44} {median:10.4f} {low:10.4f} {high:10.4f}  {unit:<6} {len(values)}", flush=True)
