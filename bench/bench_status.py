#!/usr/bin/env python3
"""A training step while ten clients look, over the same step while nobody does.

One training with two daemons and two workers (one compute thread each). Blocks of a few seconds
alternate: A, ten clients ask each daemon once a second, five for /status and five for /metrics,
evenly spread; B, nobody asks. A block's figure is the median time of its steps, as `shd-gpt --json` reports it;
status.ratio is A/B pair by pair, at most 1.01 wanted. The clients are one process that reads and
forgets; what it needs of the same processors is in A as well.
"""
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from figures import machine, parser, ratios, shd_gpt, show, show_head

CLIENTS = 10


def parse():
    p = parser("status", __doc__)
    p.add_argument("--pairs", type=int, default=20, help="pairs of A and B (20)")
    p.add_argument("--seconds", type=float, default=3, help="of a block (3)")
    return p.parse_args()


def ask(path, url, took_ns):
    start_ns = time.monotonic_ns()
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(path)
        s.sendall(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % url)
        while s.recv(1 << 20):
            pass
    took_ns.append(time.monotonic_ns() - start_ns)


class Clients(threading.Thread):
    """Ask while `asking` is set."""

    def __init__(self, paths):
        super().__init__(daemon=True)
        self.paths, self.asking, self.took_ns = paths, threading.Event(), []

    def run(self):
        urls = (b"/status", b"/metrics")
        jobs = [(p, urls[c % 2]) for c in range(CLIENTS) for p in self.paths]
        due = time.monotonic()
        while True:
            for job in jobs:
                self.asking.wait()
                ask(*job, self.took_ns)
                due = max(due + 1 / len(jobs), time.monotonic() - 0.1)
                time.sleep(max(0, due - time.monotonic()))


def start(command, log, **env):
    with open(log, "w", encoding="utf-8") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env})


def start_all(a, folder, log, daemons=2, workers=2, gpt=()):
    run = os.path.join(folder, "run")
    processes = [
        start([os.path.join(a.bin, "shardd"), "--device", f"cpu{i}", "--runtime-dir", run, "--threads", "1"],
              os.path.join(folder, f"shardd{i}"))
        for i in range(daemons)
    ]  # fmt: skip
    time.sleep(0.5)
    for r in range(workers):
        more = ("--address", run, "--threads", "1", *gpt)
        command = shd_gpt(a, 1000000, log if r == 0 else os.devnull, *more)
        processes.append(start(command, os.path.join(folder, f"worker{r}"), RANK=str(r), WORLD_SIZE=str(workers),
                               LOCAL_WORLD_SIZE=str(workers), OMP_NUM_THREADS="1"))
    return processes


def read_steps(log):
    if not os.path.exists(log):
        return []  # its worker has only begun
    with open(log, encoding="utf-8") as f:
        lines = f.read().split("\n")[:-1]
    return [json.loads(line)["step_ns"] for line in lines]


def block(a, log, clients, asking):
    """Median step ms of a block; the steps at its borders do not count."""
    (clients.asking.set if asking else clients.asking.clear)()
    time.sleep(0.3)
    before = len(read_steps(log))
    time.sleep(a.seconds)
    steps = read_steps(log)[before + 1 :]
    if not steps:
        sys.exit("bench.sh status: no step in a block; the workers' logs say more")
    return statistics.median(steps) * 1e-6


def main():
    a = parse()
    base = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")
    with tempfile.TemporaryDirectory(prefix="shd-bench-", dir=base) as folder:
        log = os.path.join(folder, "steps")
        processes = start_all(a, folder, log)
        try:
            clients = Clients([os.path.join(folder, "run", f"cpu{i}.status") for i in range(2)])
            clients.start()
            time.sleep(4)
            looked, alone = [], []
            for i in range(a.pairs):
                for asking in (True, False) if i % 2 == 0 else (False, True):
                    (looked if asking else alone).append(block(a, log, clients, asking))
        finally:
            clients.asking.clear()
            time.sleep(0.3)
            for p in reversed(processes):
                p.kill()
                p.wait()
    if not a.json:
        print(f"status: 2 daemons, 2 workers, {CLIENTS} clients, {a.pairs} pairs of {a.seconds:g} s blocks; "
              f"{machine()}")
    show_head(a)
    show(a, "status.ratio", "ratio", ratios(looked, alone))
    show(a, "status.looked_ms", "ms", looked)
    show(a, "status.alone_ms", "ms", alone)
    show(a, "status.answer_ms", "ms", [ns * 1e-6 for ns in clients.took_ns])


if __name__ == "__main__":
    main()
