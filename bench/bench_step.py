#!/usr/bin/env python3
"""A training step with daemons, over the same compute without any exchange.

A: shardctl run --daemons D --workers W -- shd-gpt ...: W workers share a step's M micro-batches;
   parameters and optimizer state live in D daemons.
B: W concurrent `shd-gpt --standalone` processes, each with M/W micro-batches a step, a model of its
   own and one thread that updates it; nothing is exchanged.

Both have one compute thread per worker. Rounds alternate A B A B ...; a round's figure is the median
time of its steps after the warm-up (B: of both processes' steps), as `shd-gpt --json` reports it.
step.ratio is A/B round by round: the price of the exchange, at most 1.05 wanted. In B each process
updates the whole model, in A each daemon its slice, so B does W times A's optimizer work.

Two models are measured: 4.9 M parameters (step.*), and the one shd-gpt has by default, 0.84 M
(step.small.*), where a message per unit and micro-batch weighs more than the bytes. Arguments for
shd-gpt replace the first and drop the second.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

from figures import machine, parser, show, show_head


MODEL = ["--dim", "256", "--layers", "6"]


def parse():
    p = parser("step", __doc__)
    p.add_argument("--rounds", type=int, default=5, help="pairs of A and B (5)")
    p.add_argument("--steps", type=int, default=20, help="steps of a run (20)")
    p.add_argument("--warmup", type=int, default=5, help="first steps that do not count (5)")
    p.add_argument("--daemons", type=int, default=2, help="daemons in A (2)")
    p.add_argument("--workers", type=int, default=2, help="workers in A, processes in B (2)")
    p.add_argument("--micro-batches", type=int, default=4, help="of a step in A (4)")
    p.add_argument("gpt", nargs="*", metavar="-- SHD-GPT-ARGUMENT", help="e.g. -- --dim 512")
    a = p.parse_args()
    if a.micro_batches % a.workers != 0:
        p.error(f"--micro-batches {a.micro_batches} is not a multiple of --workers {a.workers}")
    if a.rounds < 1 or a.warmup < 0 or a.steps <= a.warmup:
        p.error(f"--steps {a.steps} must exceed --warmup {a.warmup}, --rounds {a.rounds} be positive")
    return a


def gpt_command(a, micro_batches, log):
    return [
        os.path.join(a.bin, "shd-gpt"), "--steps", str(a.steps), "--threads", "1",
        "--micro-batches", str(micro_batches), "--eval-every", "0", "--sample", "0",
        "--log-every", str(a.steps), "--json", log, *a.model,
    ]  # fmt: skip


def read_steps(a, log):
    """The steps of one worker behind the warm-up: [(ns, ns waited)]."""
    with open(log, encoding="utf-8") as f:
        steps = [json.loads(line) for line in f]
    if len(steps) != a.steps:
        sys.exit(f"bench.sh step: {log} has {len(steps)} steps, expected {a.steps}")
    return [(s["step_ns"], s["wait_ns"]) for s in steps[a.warmup :]]


def finish(command, process):
    """Wait for a process; its output is shown only when it failed."""
    output = process.communicate()[0]
    if process.returncode != 0:
        sys.stderr.write(output)
        sys.exit(f"bench.sh step: failed with {process.returncode}: {' '.join(command)}")


def start(command):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDD_ADDRESS"):
        env.pop(name, None)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def round_run(a, folder):
    """A: (median step ms, share of time waited)."""
    log = os.path.join(folder, "run")
    command = [
        os.path.join(a.bin, "shardctl"), "run", "--daemons", str(a.daemons),
        "--workers", str(a.workers), "--threads-per-daemon", "1", "--",
        *gpt_command(a, a.micro_batches, log),
    ]  # fmt: skip
    finish(command, start(command))
    steps = read_steps(a, log)
    waited = sum(w for _, w in steps) / sum(ns for ns, _ in steps)
    return statistics.median(ns for ns, _ in steps) * 1e-6, waited


def round_standalone(a, folder):
    """B: median step ms over all processes."""
    logs = [os.path.join(folder, f"alone{i}") for i in range(a.workers)]
    commands = [
        [*gpt_command(a, a.micro_batches // a.workers, log), "--standalone"] for log in logs
    ]
    processes = [start(command) for command in commands]
    for command, process in zip(commands, processes):
        finish(command, process)
    return statistics.median(ns for log in logs for ns, _ in read_steps(a, log)) * 1e-6


def measure(a, prefix, model):
    a.model = model
    if not a.json:
        print(
            f"{prefix}: {a.daemons} daemons, {a.workers} workers, {a.micro_batches} micro-batches, "
            f"1 thread each; {a.rounds} rounds of {a.steps} steps, first {a.warmup} not counted; "
            f"shd-gpt {' '.join(model) or '(defaults)'}; {machine()}"
        )
    run, alone, waited = [], [], []
    with tempfile.TemporaryDirectory(prefix="shardd-bench-") as folder:
        for _ in range(a.rounds):
            ms, share = round_run(a, folder)
            run.append(ms)
            waited.append(share)
            alone.append(round_standalone(a, folder))
    show_head(a)
    show(a, f"{prefix}.ratio", "ratio", [x / y for x, y in zip(run, alone)])
    show(a, f"{prefix}.run_ms", "ms", run)
    show(a, f"{prefix}.standalone_ms", "ms", alone)
    show(a, f"{prefix}.wait_share", "share", waited)


def main():
    a = parse()
    measure(a, "step", a.gpt or MODEL)
    if not a.gpt:
        measure(a, "step.small", [])


if __name__ == "__main__":
    main()
