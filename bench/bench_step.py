#!/usr/bin/env python3
"""bench_step.py step | elastic | recompute: medians of a training step's time, of runs that alternate."""
import os
import re
import sys
import tempfile

from figures import (
    finish, machine, median_ms, parse_steps, ratios, read_steps, same_digest, shd_gpt, show, show_head, start,
    steps_parser, under_daemons,
)  # fmt: skip

STEP = """A training step with daemons, over the same compute without any exchange.

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

ELASTIC = """What a slow worker costs the others, where workers take work as they come.

A: shardctl run --elastic --workers 2 -- shd-gpt ...: two healthy workers
B: the same with 3 workers, of which one computes X times slower (shd-gpt --slow X --slow-rank 2: it
   sleeps after each unit, so it takes no processor from the others)
C: 3 healthy workers

Rounds alternate A B C A B C ...; a round's figure is the median time of rank 0's steps after the
warm-up, in which the owners learn who is slow. elastic.slow_ratio is B/A round by round: 1 when a
slow worker costs nothing, at most 1.15 wanted. elastic.healthy_ratio is C/A: what a third healthy
worker gives; with fewer processors than workers, nothing. All end with the same digest, or the
benchmark fails. Arguments for shd-gpt replace the model's.
"""

RECOMPUTE = """What `shd-gpt --recompute` costs in time and saves in memory.

A: shd-gpt --standalone ...
B: the same with --recompute

Rounds alternate A B A B ...; a round's figures:

  step_ms   median time of the steps after the warm-up
  cpu_ms    a step's processor time: that of the run, less that of one of the warm-up steps alone.
            Says the same on a machine that others use
  peak_mb   the process's largest resident memory
  ratio     B/A of step_ms, cpu_ratio of cpu_ms, round by round

Backward is about twice a forward, and all of a forward but the last product of a block (a third of
its products' arithmetic) is done again, in all layers but the last: expect somewhat less than 4/3.
Both end with the same digest, or the benchmark fails. Arguments for shd-gpt replace the model's.
"""

TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../docs/design.md")


# -- step -----------------------------------------------------------------------------------------


def step_run(a, folder):
    """A: (median step ms, share of time waited)."""
    log = os.path.join(folder, "run")
    gpt = shd_gpt(a, a.steps, log, "--threads", "1", "--micro-batches", str(a.micro_batches), *a.model)
    finish("step", start(under_daemons(a, a.daemons, "--workers", str(a.workers), "--", *gpt)))
    steps = read_steps(a, "step", log, a.steps)
    return median_ms(steps), sum(s.get("wait_ns", 0) for s in steps) / sum(s["step_ns"] for s in steps)


def step_standalone(a, folder):
    """B: median step ms over all processes."""
    logs = [os.path.join(folder, f"alone{i}") for i in range(a.workers)]
    share = str(a.micro_batches // a.workers)
    more = ("--threads", "1", "--micro-batches", share, *a.model, "--standalone")
    processes = [start(shd_gpt(a, a.steps, log, *more)) for log in logs]
    for process in processes:
        finish("step", process)
    return median_ms([s for log in logs for s in read_steps(a, "step", log, a.steps)])


def step_measure(a, prefix, model):
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
            ms, share = step_run(a, folder)
            run.append(ms)
            waited.append(share)
            alone.append(step_standalone(a, folder))
    show_head(a)
    show(a, f"{prefix}.ratio", "ratio", ratios(run, alone))
    show(a, f"{prefix}.run_ms", "ms", run)
    show(a, f"{prefix}.standalone_ms", "ms", alone)
    show(a, f"{prefix}.wait_share", "share", waited)


def step():
    p = steps_parser("step", STEP, 5, "pairs of A and B", 20, 5)
    p.add_argument("--daemons", type=int, default=2, help="daemons in A (2)")
    p.add_argument("--workers", type=int, default=2, help="workers in A, processes in B (2)")
    p.add_argument("--micro-batches", type=int, default=4, help="of a step in A (4)")
    a = parse_steps(p)
    if a.micro_batches % a.workers != 0:
        p.error(f"--micro-batches {a.micro_batches} is not a multiple of --workers {a.workers}")
    step_measure(a, "step", a.gpt or ["--dim", "256", "--layers", "6"])
    if not a.gpt:
        step_measure(a, "step.small", [])


# -- elastic --------------------------------------------------------------------------------------


def elastic_run(a, folder, workers, more):
    """(median step ms, digest line)"""
    log = os.path.join(folder, "steps")
    gpt = shd_gpt(a, a.steps, log, "--threads", "1", "--micro-batches", str(a.micro_batches), *a.gpt, *more)
    command = under_daemons(a, a.daemons, "--elastic", "--workers", str(workers), "--", *gpt)
    digest = finish("elastic", start(command)).splitlines()[-1:]
    if not digest or not digest[0].startswith("digest "):
        sys.exit(f"bench.sh elastic: no digest from {' '.join(command)}")
    steps = read_steps(a, "elastic", log)
    os.remove(log)
    return median_ms(steps), digest[0]


def elastic():
    p = steps_parser("elastic", ELASTIC, 7, "of A, B and C", 80, 10)
    p.add_argument("--slow", type=float, default=10, help="the slow worker takes so many times as long (10)")
    p.add_argument("--daemons", type=int, default=2)
    p.add_argument("--micro-batches", type=int, default=4, help="of a step (4)")
    a = parse_steps(p)
    a.gpt = a.gpt or ["--dim", "128", "--layers", "4", "--seq", "64", "--batch", "4"]
    kinds = [
        ("two", 2, []),
        ("slow", 3, ["--slow", f"{a.slow:g}", "--slow-rank", "2"]),
        ("three", 3, []),
    ]  # fmt: skip
    ms, digests = {kind: [] for kind, _, _ in kinds}, []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            for kind, workers, more in kinds:
                step_ms, digest = elastic_run(a, folder, workers, more)
                ms[kind].append(step_ms)
                digests.append(digest)
    same_digest("elastic", digests)
    if not a.json:
        print(
            f"elastic: {a.daemons} daemons, {a.micro_batches} micro-batches, slow worker {a.slow:g}x; "
            f"{a.rounds} rounds of {a.steps} steps, first {a.warmup} not counted; "
            f"shd-gpt {' '.join(a.gpt)}; {machine()}"
        )
    show_head(a)
    for kind, _, _ in kinds:
        show(a, f"elastic.{kind}_ms", "ms", ms[kind])
    show(a, "elastic.slow_ratio", "ratio", ratios(ms["slow"], ms["two"]))
    show(a, "elastic.healthy_ratio", "ratio", ratios(ms["three"], ms["two"]))


# -- recompute ------------------------------------------------------------------------------------


def recompute_run(a, folder, count, more):
    """(median step ms, processor ms, peak MB, MB of activations as shd-gpt says, digest line)"""
    log, out = os.path.join(folder, "steps"), os.path.join(folder, "out")
    command = [
        *shd_gpt(a, count, log, "--standalone", "--threads", str(a.threads)),
        "--data", TEXT, "--micro-batches", "1", *a.gpt, *more,
    ]  # fmt: skip
    with open(out, "wb") as f:
        child = os.posix_spawn(
            command[0], command, {**os.environ, "OMP_NUM_THREADS": "1"},
            file_actions=[(os.POSIX_SPAWN_DUP2, f.fileno(), 1), (os.POSIX_SPAWN_DUP2, f.fileno(), 2)],
        )  # fmt: skip
        _, status, usage = os.wait4(child, 0)
    with open(out, encoding="utf-8", errors="replace") as f:
        text = f.read()
    held = re.search(r"^activations ([0-9.]+) MB", text, re.M)
    digest = re.search(r"^digest .*", text, re.M)
    if status != 0 or not held or not digest:
        sys.stderr.write(text)
        sys.exit(f"bench.sh recompute: failed: {' '.join(command)}")
    counted = read_steps(a, "recompute", log) if count > a.warmup else [{"step_ns": 0}]
    cpu, peak = (usage.ru_utime + usage.ru_stime) * 1e3, usage.ru_maxrss * 1024 / 1e6
    return median_ms(counted), cpu, peak, float(held[1]), digest[0]


def recompute_round(a, folder, more):
    _, before, *_ = recompute_run(a, folder, a.warmup, more)
    step_ms, cpu, *rest = recompute_run(a, folder, a.steps, more)
    return (step_ms, (cpu - before) / (a.steps - a.warmup), *rest)


def recompute():
    p = steps_parser("recompute", RECOMPUTE, 7, "of A and B", 8, 2)
    p.add_argument("--threads", type=int, default=1, help="compute threads (1)")
    a = parse_steps(p, warmup_min=1)
    a.gpt = a.gpt or ["--layers", "8", "--dim", "256", "--heads", "4", "--seq", "256", "--batch", "4"]
    sides = (("plain", []), ("recompute", ["--recompute"]))
    got = {name: [] for name, _ in sides}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            for name, more in sides:
                got[name].append(recompute_round(a, folder, more))
    same_digest("recompute", [r[-1] for rounds in got.values() for r in rounds])
    if not a.json:
        print(
            f"recompute: {a.threads} threads; {a.rounds} rounds of {a.steps} steps, first {a.warmup} not "
            f"counted; shd-gpt {' '.join(a.gpt)}; {machine()}"
        )
    show_head(a)
    for name, rounds in got.items():
        for at, what in enumerate(("step_ms", "cpu_ms", "peak_mb", "activations_mb")):
            show(a, f"recompute.{name}.{what}", what[-2:].replace("mb", "MB"), [r[at] for r in rounds])
    for at, name in enumerate(("ratio", "cpu_ratio")):
        show(a, f"recompute.{name}", "ratio", ratios(*([r[at] for r in got[s]] for s in ("recompute", "plain"))))


if __name__ == "__main__":
    names = {"step": step, "elastic": elastic, "recompute": recompute}
    names[sys.argv.pop(1)]()
