#!/usr/bin/env python3
"""What `shd-gpt --recompute` costs in time and saves in memory.

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
import json
import os
import re
import statistics
import sys
import tempfile

from figures import machine, parser, show, show_head

MODEL = ["--layers", "8", "--dim", "256", "--heads", "4", "--seq", "256", "--batch", "4"]
TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../docs/design.md")


def parse():
    p = parser("recompute", __doc__)
    p.add_argument("--rounds", type=int, default=7, help="of A and B (7)")
    p.add_argument("--steps", type=int, default=8, help="steps of a run (8)")
    p.add_argument("--warmup", type=int, default=2, help="first steps that do not count (2)")
    p.add_argument("--threads", type=int, default=1, help="compute threads (1)")
    p.add_argument("gpt", nargs="*", metavar="-- SHD-GPT-ARGUMENT", help="e.g. -- --dim 512")
    a = p.parse_args()
    if a.rounds < 1 or a.warmup < 1 or a.steps <= a.warmup:
        p.error(f"--steps {a.steps} must exceed --warmup {a.warmup}, --rounds {a.rounds} be positive")
    return a


def run(a, folder, count, more):
    """(median step ms, processor ms, peak MB, MB of activations as shd-gpt says, digest line)"""
    log, out = os.path.join(folder, "steps"), os.path.join(folder, "out")
    command = [
        os.path.join(a.bin, "shd-gpt"), "--standalone", "--steps", str(count), "--threads",
        str(a.threads), "--data", TEXT, "--micro-batches", "1", "--eval-every", "0", "--sample", "0",
        "--json", log,
        *(a.gpt or MODEL), *more,
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
    with open(log, encoding="utf-8") as f:
        steps = [json.loads(line) for line in f]
    counted = [s["step_ns"] for s in steps if s["step"] > a.warmup or count <= a.warmup]
    cpu, peak = (usage.ru_utime + usage.ru_stime) * 1e3, usage.ru_maxrss * 1024 / 1e6
    return statistics.median(counted) / 1e6, cpu, peak, float(held[1]), digest[0]


def one_round(a, folder, more):
    _, before, *_ = run(a, folder, a.warmup, more)
    step, cpu, *rest = run(a, folder, a.steps, more)
    return (step, (cpu - before) / (a.steps - a.warmup), *rest)


def main():
    a = parse()
    sides = (("plain", []), ("recompute", ["--recompute"]))
    got = {name: [] for name, _ in sides}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            for name, more in sides:
                got[name].append(one_round(a, folder, more))
    digests = {r[-1] for rounds in got.values() for r in rounds}
    if len(digests) != 1:
        sys.exit("bench.sh recompute: different digests: " + ", ".join(sorted(digests)))
    if not a.json:
        print(
            f"recompute: {a.threads} threads; {a.rounds} rounds of {a.steps} steps, first {a.warmup} not "
            f"counted; shd-gpt {' '.join(a.gpt or MODEL)}; {machine()}"
        )
    show_head(a)
    for name, rounds in got.items():
        for at, what in enumerate(("step_ms", "cpu_ms", "peak_mb", "activations_mb")):
            show(a, f"recompute.{name}.{what}", what[-2:].replace("mb", "MB"), [r[at] for r in rounds])
    for at, name in enumerate(("ratio", "cpu_ratio")):
        ratios = [b[at] / p[at] for p, b in zip(got["plain"], got["recompute"])]
        show(a, f"recompute.{name}", "ratio", ratios)


if __name__ == "__main__":
    main()
