#!/usr/bin/env python3
"""A training step while a process pins each step it can and reads all of it, over the same step while nobody does.

The training of `bench.sh status`: two daemons, two workers (one compute thread each), if not told otherwise. Blocks of a few seconds
alternate: A, the reader pins the step after its last and adds up every parameter; B, it is there and pins nothing.
A block's figure is the median time of its steps; readers.ratio is A/B pair by pair, at most 1.05 wanted where a
processor is to spare for the reader, which needs what it needs of the same processors.

readers.fresh_ms: from a step's commit (the owners' clock) to its weights mapped in the reader. readers.file_ms, beside it:
the same bytes written to a file, synced and read from it, the same as a safetensors file without its header; in memory, or
in --files DIR.
"""
import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib

import bench_status
from figures import machine, parser, ratios, show, show_head


def parse():
    p = parser("readers", __doc__)
    p.add_argument("--pairs", type=int, default=20, help="pairs of A and B (20)")
    p.add_argument("--seconds", type=float, default=3, help="of a block (3)")
    p.add_argument("--daemons", type=int, default=2, help="with one thread each (2)")
    p.add_argument("--workers", type=int, default=2, help="with one thread each (2)")
    p.add_argument("--files", default="/dev/shm", metavar="DIR", help="where the file beside is written (/dev/shm)")
    p.add_argument("--reader", help=argparse.SUPPRESS)  # of this program's own: where its reader attaches
    p.add_argument("gpt", nargs="*", metavar="-- SHD-GPT-ARGUMENT", help="e.g. -- --dim 512")
    a = p.parse_args()
    if a.daemons < 1 or a.workers < 1 or a.pairs < 1:
        p.error(f"--daemons {a.daemons}, --workers {a.workers} and --pairs {a.pairs} must be positive")
    return a


def read_all(model, sizes):
    for unit, size in enumerate(sizes):
        zlib.adler32((ctypes.c_uint8 * size).from_address(model.pinned(unit)))


def file_ms(model, sizes, folder):
    with tempfile.NamedTemporaryFile(dir=folder) as f:
        begin = time.monotonic_ns()
        for unit, size in enumerate(sizes):
            f.write((ctypes.c_uint8 * size).from_address(model.pinned(unit)))
        f.flush()
        os.fsync(f.fileno())
        with open(f.name, "rb") as g:
            while g.read(1 << 24):
                pass
        return (time.monotonic_ns() - begin) * 1e-6


def committed_ns(libshd, model, step):
    """When the step began, which the one before it was committed for."""
    row, start, count = libshd.library.sized(libshd._c.shd_step_row), ctypes.c_uint64(step - 1), ctypes.c_uint32()
    model.session.call(libshd.library.lib.shd_history, model.handle, ctypes.byref(start), ctypes.byref(row), 1,
                       ctypes.byref(count))  # fmt: skip
    return row.time_ns if count.value and row.step == step - 1 else None


def be_reader(address, files):
    """Orders on stdin: "pin", "rest" and, for what was seen so far, "end"."""
    import select

    import libshd

    model = libshd.Session(address, name="bench reader", reader=True).attach(wait=60)
    width = 4 if model.dtype == libshd._c.SHD_F32 else 2
    sizes = [model.unit_elems(unit) * width for unit in range(len(model.unit_names()))]
    seen, step, pins = {"pins": 0, "bytes": sum(sizes), "fresh_ms": [], "file_ms": []}, 0, False
    while True:
        if select.select([sys.stdin], [], [], 0 if pins else None)[0]:
            order = sys.stdin.readline().strip()
            if order in ("end", ""):
                break
            pins = order == "pin"
            if not pins and step:
                if len(seen["file_ms"]) < 20:
                    seen["file_ms"].append(file_ms(model, sizes, files))
                model.unpin()
            step = 0
            continue
        step = model.pin(step + 1)
        now_ns = time.time_ns()
        seen["pins"] += 1
        if seen["pins"] % 2 == 0 and (then_ns := committed_ns(libshd, model, step)):
            seen["fresh_ms"].append((now_ns - then_ns) * 1e-6)
        read_all(model, sizes)
    print(json.dumps(seen), flush=True)


class Reader:
    """Pins while `asking` is set, as bench_status's clients ask."""

    def __init__(self, a, address):
        env = {**os.environ, "PYTHONPATH": os.path.join(a.bin, "..", "python")}
        command = [sys.executable, os.path.abspath(__file__), "--reader", address, "--files", a.files]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.asking = self

    def order(self, what):
        print(what, file=self.process.stdin, flush=True)

    def set(self):
        self.order("pin")

    def clear(self):
        self.order("rest")

    def end(self):
        return json.loads(self.process.communicate("end\n")[0])


def main():
    a = parse()
    if a.reader:
        be_reader(a.reader, a.files)
        return
    base = "/run" if os.geteuid() == 0 else os.environ.get("XDG_RUNTIME_DIR")
    with tempfile.TemporaryDirectory(prefix="shd-bench-", dir=base) as folder:
        log = os.path.join(folder, "steps")
        processes = bench_status.start_all(a, folder, log, a.daemons, a.workers, a.gpt)
        reader = Reader(a, os.path.join(folder, "run"))
        try:
            while len(bench_status.read_steps(log)) < 3:  # all pages are there
                if any(p.poll() is not None for p in processes):
                    sys.exit("bench.sh readers: a daemon or a worker has ended")
                time.sleep(0.2)
            read, alone = [], []
            for i in range(a.pairs):
                for pins in (True, False) if i % 2 == 0 else (False, True):
                    (read if pins else alone).append(bench_status.block(a, log, reader, pins))
            seen = reader.end()
        finally:
            for p in [*reversed(processes), reader.process]:
                p.kill()
                p.wait()
    if not a.json:
        print(f"readers: {a.daemons} daemons, {a.workers} workers, {seen['bytes'] * 1e-6:.1f} MB of parameters, {seen['pins']} pins, "
              f"{a.pairs} pairs of {a.seconds:g} s blocks; {machine()}")  # fmt: skip
    show_head(a)
    show(a, "readers.ratio", "ratio", ratios(read, alone))
    show(a, "readers.read_ms", "ms", read)
    show(a, "readers.alone_ms", "ms", alone)
    show(a, "readers.fresh_ms", "ms", seen["fresh_ms"])
    show(a, "readers.file_ms", "ms", seen["file_ms"])


if __name__ == "__main__":
    main()
