#!/usr/bin/env python3
"""What a slow worker costs the others, where workers take work as they come.

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
import json
import os
import statistics
import subprocess
import sys
import tempfile

from figures import machine, parser, show, show_head


MODEL = ["--dim", "128", "--layers", "4", "--seq", "64", "--batch", "4"]


def parse():
    p = parser("elastic", __doc__)
    p.add_argument("--rounds", type=int, default=7, help="of A, B and C (7)")
    p.add_argument("--steps", type=int, default=80, help="steps of a run (80)")
    p.add_argument("--warmup", type=int, default=10, help="first steps that do not count (10)")
    p.add_argument("--slow", type=float, default=10, help="the slow worker takes so many times as long (10)")
    p.add_argument("--daemons", type=int, default=2)
    p.add_argument("--micro-batches", type=int, default=4, help="of a step (4)")
    p.add_argument("gpt", nargs="*", metavar="-- SHD-GPT-ARGUMENT", help="e.g. -- --dim 512")
    a = p.parse_args()
    if a.rounds < 1 or a.warmup < 0 or a.steps <= a.warmup:
        p.error(f"--steps {a.steps} must exceed --warmup {a.warmup}, --rounds {a.rounds} be positive")
    return a


def run(a, folder, workers, more):
    """(median step ms, digest line)"""
    log = os.path.join(folder, "steps")
    command = [
        os.path.join(a.bin, "shardctl"), "run", "--daemons", str(a.daemons), "--elastic",
        "--workers", str(workers), "--threads-per-daemon", "1", "--",
        os.path.join(a.bin, "shd-gpt"), "--steps", str(a.steps), "--threads", "1",
        "--micro-batches", str(a.micro_batches), "--eval-every", "0", "--sample", "0",
        "--log-every", str(a.steps), "--json", log, *(a.gpt or MODEL), *more,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    digest = done.stdout.splitlines()[-1:]
    if done.returncode != 0 or not digest or not digest[0].startswith("digest "):
        sys.stderr.write(done.stdout + done.stderr)
        sys.exit(f"bench.sh elastic: failed with {done.returncode}: {' '.join(command)}")
    with open(log, encoding="utf-8") as f:
        steps = [json.loads(line) for line in f]
    os.remove(log)
    counted = [s["step_ns"] for s in steps if s["step"] > a.warmup]
    return statistics.median(counted) / 1e6, digest[0]


def main():
    a = parse()
    kinds = [
        ("two", 2, []),
        ("slow", 3, ["--slow", f"{a.slow:g}", "--slow-rank", "2"]),
        ("three", 3, []),
    ]  # fmt: skip
    ms = {kind: [] for kind, _, _ in kinds}
    digests = set()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(a.rounds):
            for kind, workers, more in kinds:
                step_ms, digest = run(a, folder, workers, more)
                ms[kind].append(step_ms)
                digests.add(digest)
    if len(digests) != 1:
        sys.exit("bench.sh elastic: different digests: " + ", ".join(sorted(digests)))
    if not a.json:
        print(
            f"elastic: {a.daemons} daemons, {a.micro_batches} micro-batches, slow worker {a.slow:g}x; "
            f"{a.rounds} rounds of {a.steps} steps, first {a.warmup} not counted; "
            f"shd-gpt {' '.join(a.gpt or MODEL)}; {machine()}"
        )
    show_head(a)
    for kind, _, _ in kinds:
        show(a, f"elastic.{kind}_ms", "ms", ms[kind])
    show(a, "elastic.slow_ratio", "ratio", [b / x for b, x in zip(ms["slow"], ms["two"])])
    show(a, "elastic.healthy_ratio", "ratio", [c / x for c, x in zip(ms["three"], ms["two"])])


if __name__ == "__main__":
    main()
