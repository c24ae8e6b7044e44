#!/usr/bin/env python3
"""Where a model's memory is under each arrangement, as predicted and as measured.

One row each: `shardctl plan` says what it takes, then it runs: `shardctl up`, two daemons of one thread (one in the
first row), two workers of one thread that train shd-gpt; 10.8 M parameters unless arguments say otherwise.

  worker    MiB of parameters and gradients that a worker holds at once, at most
  owner     MiB of memory that the fullest daemon counts for the model, at most (/status)
  files     MiB that all daemons have on files
  fetched   MiB of parameters that a worker reads in a step
  returned  MiB of gradients that it hands back
  step      ms, and over the row "optimizer state shared out" of the same round

Memory and bytes must be as predicted; the step's time is measured alone.
"""
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from figures import finish, machine, parse_steps, read_steps, shd_gpt, show, start, steps_parser

MIB = 1 << 20
SIZE = ["--layers", "6", "--dim", "384", "--heads", "6", "--seq", "128", "--batch", "4"]
BASE = "shared"
ROWS = (  # name, daemons, flags of `shardctl plan`, of shd-gpt, of `shardctl up`
    ("one", 1, ["--strategy", "zero1"], ["--strategy", "zero1"], []),
    (BASE, 2, ["--strategy", "zero1"], ["--strategy", "zero1"], []),
    ("zero2", 2, ["--strategy", "zero2"], ["--strategy", "zero2"], []),
    ("zero3", 2, ["--strategy", "zero3"], ["--strategy", "zero3"], []),
    ("bound", 2, ["--prefetch", "none", "--forward-prefetch", "0", "--max-live-units", "2"],
     ["--prefetch", "none", "--forward-prefetch", "0", "--max-live-units", "2"], []),
    ("bf16", 2, [], ["--precision", "bf16"], []),
    ("int8", 2, [], ["--moments", "int8"], []),
    ("file", 2, ["--state", "file"], [], ["--state", "file:"]),
    ("tiles", 2, ["--prefetch", "none", "--forward-prefetch", "0", "--max-live-units", "1"],
     ["--tiles", "4", "--prefetch", "none", "--forward-prefetch", "0", "--max-live-units", "1"], []),
    ("codec", 2, [], ["--precision", "bf16", "--codec", "int8", "--grad-codec", "int8"], []),
    ("accumulate", 2, [], ["--micro-batches", "4", "--accumulate", "local:2"], []),
)  # fmt: skip
WORLD = 2


def parse():
    names = ", ".join(row[0] for row in ROWS)
    p = steps_parser("memory", __doc__, 3, "rounds of all rows", 8, 2)
    p.add_argument("--rows", help=f"of {names} (all)")
    p.add_argument("--dir", default="/var/tmp", help="where files of the state go (/var/tmp)")
    a = parse_steps(p)
    wanted = a.rows.split(",") if a.rows else [row[0] for row in ROWS]
    if set(wanted) - {row[0] for row in ROWS}:
        p.error(f"--rows {a.rows}: there are {names}")
    a.rows = [row for row in ROWS if row[0] in wanted]
    return a


def shardctl(a, *arguments):
    return [os.path.join(a.bin, "shardctl"), *arguments]


def gpt_flags(a, row):
    return [*SIZE, "--micro-batches", str(WORLD), *row[3], *a.gpt]


def predict(a, folder, row):
    spec = os.path.join(folder, "spec.json")
    with open(spec, "w", encoding="utf-8") as f:
        f.write(finish("memory", start([os.path.join(a.bin, "shd-gpt"), "--print-spec", *gpt_flags(a, row)])))
    plan = json.loads(finish("memory", start(shardctl(
        a, "plan", "--spec", spec, "--json", "--workers", str(WORLD), "--daemons", str(row[1]), *row[2]))))  # fmt: skip
    cost, owners = plan["cost"], plan["owners"]
    return {
        "worker": cost["live_bytes_max"] / MIB,
        "owner": owners["bytes_max"] / MIB,
        "files": owners["total_file_bytes"] / MIB,
        "fetched": cost["fetched_bytes"] / MIB,
        "returned": cost["returned_bytes"] / MIB,
    }


def status(path):
    """The model of a daemon; None before there is one."""
    answer = b""
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(b"GET /status HTTP/1.0\r\nHost: localhost\r\n\r\n")
        while data := s.recv(1 << 20):
            answer += data
    models = json.loads(answer.partition(b"\r\n\r\n")[2])["models"]
    return models[0]["bytes"] if models else None


def in_memory(b):
    """Of a state on files `counted` has all, `state` what is in memory of it; gradients that wait for a slow worker come
    and go, and the plan has them by themselves."""
    return b["counted"] - b["spill"] - b["state_on_files"] + (b["state"] if b["state_on_files"] else 0)


def watch(run, daemons, workers):
    """The most that they count while the workers train."""
    counted, files = 0, 0
    while any(w.poll() is None for w in workers):
        all_bytes = [b for b in (status(os.path.join(run, f"cpu{i}.status")) for i in range(daemons)) if b]
        counted = max([counted, *(in_memory(b) for b in all_bytes)])
        files = max(files, sum(b["state_on_files"] for b in all_bytes))
        time.sleep(0.005)
    return counted, files


def train(a, folder, row, run):
    workers = []
    for rank in range(WORLD):
        log = os.path.join(folder, "log") if rank == 0 else os.devnull
        command = shd_gpt(a, a.steps, log, "--address", run, "--threads", "1", *gpt_flags(a, row))
        place = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
        env = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    counted, files = watch(run, row[1], workers)
    for w in workers:
        finish("memory", w)
    steps = read_steps(a, "memory", os.path.join(folder, "log"), a.steps)
    return {
        "worker": max(s["live_bytes_max"] for s in steps) / MIB,
        "owner": counted / MIB,
        "files": files / MIB,
        "fetched": statistics.median(s["bytes_fetched"] for s in steps) / MIB,
        "returned": statistics.median(s["bytes_returned"] for s in steps) / MIB,
        "step": statistics.median(s["step_ns"] for s in steps) * 1e-6,
    }


def measure(a, folder, row):
    run = os.path.join(folder, "run")
    disk = tempfile.mkdtemp(prefix="shardd-bench-", dir=a.dir)
    up = [flag + disk if flag == "file:" else flag for flag in row[4]]
    try:
        finish("memory", start(shardctl(a, "up", "--daemons", str(row[1]), "--threads-per-daemon", "1", "-d", run, *up)))
        return train(a, folder, row, run)
    finally:
        finish("memory", start(shardctl(a, "down", "--yes", "-d", run)))
        shutil.rmtree(disk)


def differ(predicted, measured):
    """Bytes that were counted are those that were said."""
    return [k for k in predicted if abs(predicted[k] - measured[k]) > 0.005 * max(predicted[k], 1)]


def table(a, predicted, measured):
    columns = ("worker", "owner", "files", "fetched", "returned")
    print(f"{'row':<12}" + "".join(f"{c:>18}" for c in columns) + f"{'step ms':>10}{'ratio':>8}")
    for name, *_ in a.rows:
        figures = measured[name]
        cells = (f"{predicted[name][c]:8.2f} {figures[0][c]:8.2f}" for c in columns)
        step = statistics.median(f["step"] for f in figures)
        ratio = statistics.median(f["ratio"] for f in figures)
        print(f"{name:<12}" + "".join(f"{c:>18}" for c in cells) + f"{step:10.1f}{ratio:8.3f}", flush=True)


def main():
    a = parse()
    predicted, measured, wrong = {}, {}, []
    if not a.json:
        print(f"memory: {WORLD} workers and daemons of 1 thread; {a.rounds} rounds of {a.steps} steps, first {a.warmup} "
              f"not counted; shd-gpt {' '.join(SIZE + a.gpt)}; {machine()}; each: predicted, measured, in MiB",
              flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="shardd-bench-") as folder:
        for row in a.rows:
            predicted[row[0]] = predict(a, folder, row)
        for _ in range(a.rounds):
            turn = {row[0]: measure(a, folder, row) for row in a.rows}
            base = turn.get(BASE, next(iter(turn.values())))["step"]
            for name, figures in turn.items():
                figures["ratio"] = figures["step"] / base
                measured.setdefault(name, []).append(figures)
                wrong += [f"{name}.{k}: {predicted[name][k]:.3f} predicted, {figures[k]:.3f} measured"
                          for k in differ(predicted[name], figures)]  # fmt: skip
    if not a.json:
        table(a, predicted, measured)
    for name in measured if a.json else ():
        for key in measured[name][0]:
            show(a, f"memory.{name}.{key}", "ratio" if key == "ratio" else "ms" if key == "step" else "MiB",
                 [f[key] for f in measured[name]])  # fmt: skip
            if key in predicted[name]:
                show(a, f"memory.{name}.{key}_plan", "MiB", [predicted[name][key]])
    if wrong:
        sys.exit("bench.sh memory: not as predicted: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
