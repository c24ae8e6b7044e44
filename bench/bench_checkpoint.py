#!/usr/bin/env python3
"""What a checkpoint costs a training that goes on, and what a restore costs beside an attach.

In one run (W workers, D daemons) windows of N steps alternate:

  plain     nothing is saved
  every     `shardctl checkpoint --every E` (50) runs beside it
  solid     `shardctl checkpoint` runs again as soon as it is done

A window's figure is its mean step time, so a slow step counts as often as it comes; the first steps
of a window do not count. checkpoint.every.ratio and .solid.ratio are a round's window over the mean
of the plain ones before and after it; the line's figure is the median over rounds, at most 1.03
wanted for `every`. Disk and daemons share the workers' CPUs here: ratios are an upper bound of what
a host with cores to spare sees.

restore.ms: shd_restore() of that model by D fresh daemons, every byte read (from the page cache) and
hashed; attach.ms: shd_connect() and shd_model_attach() afterwards, what a worker that is started
again needs when the daemons live.

Arguments for shd-gpt replace its default model, e.g. -- --dim 256 --layers 6.
"""
import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from figures import parser, ratios, shd_gpt, show, show_head, under_daemons

SKIP = 10  # first steps of a window


def parse():
    p = parser("checkpoint", __doc__)
    p.add_argument("--rounds", type=int, default=7, help="rounds of plain, every, plain, solid (7)")
    p.add_argument("--window", type=int, default=110, help="steps of a window (110)")
    p.add_argument("--every", type=int, default=50, help="steps between checkpoints (50)")
    p.add_argument("--daemons", type=int, default=2)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--dir", help="where to save (a temporary directory)")
    p.add_argument("--inner", help=argparse.SUPPRESS)
    p.add_argument("gpt", nargs="*", metavar="-- SHD-GPT-ARGUMENT")
    return p.parse_args()


# -- Inside: the worker of `shardctl run` ---------------------------------------------------------


class Training:
    """shd-gpt processes whose steps are followed in rank 0's log."""

    def __init__(self, a, work):
        self.log = os.path.join(work, "steps")
        common = shd_gpt(a, 1000000, self.log, "--threads", "1", *a.gpt)
        self.processes = []
        for rank in range(a.workers):
            env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "RANK": str(rank)}
            env.update(WORLD_SIZE=str(a.workers), LOCAL_WORLD_SIZE=str(a.workers), LOCAL_RANK=str(rank))
            self.processes.append(subprocess.Popen(common, env=env, stdout=subprocess.DEVNULL))
        self.file, self.steps = None, []

    def wait(self, count):
        """Until so many steps are in the log."""
        while len(self.steps) < count:
            if self.file is None and os.path.exists(self.log):
                self.file = open(self.log, encoding="utf-8")
            line = self.file.readline() if self.file is not None else ""
            if line.endswith("\n"):
                self.steps.append(json.loads(line)["step_ns"])
            elif any(p.poll() is not None for p in self.processes):
                sys.exit("bench.sh checkpoint: shd-gpt ended early")
            else:
                if line:
                    self.file.seek(self.file.tell() - len(line))
                time.sleep(0.005)

    def window(self, steps):
        """Mean ms of the next so many steps behind the first SKIP."""
        first = len(self.steps)
        self.wait(first + steps)
        return statistics.mean(self.steps[first + SKIP :]) * 1e-6

    def end(self):
        for p in self.processes:
            p.terminate()
        for p in self.processes:
            p.wait()


def stop(process):
    process.terminate()
    process.wait()


def inner(a):
    folder = a.inner
    training = Training(a, folder)
    saves = os.path.join(a.dir or folder, "ckpt")
    ctl = [os.path.join(a.bin, "shardctl"), "checkpoint", saves, "--keep", "1", "--json"]
    plain, every, solid, seconds = [], [], [], []
    training.wait(20)
    plain.append(training.window(a.window))
    for _ in range(a.rounds):
        saver = subprocess.Popen([*ctl, "--every", str(a.every)], stdout=subprocess.DEVNULL)
        every.append(training.window(a.window))
        stop(saver)
        plain.append(training.window(a.window))
        loop = f"while :; do {' '.join(ctl)} || exit 1; done"
        out = os.path.join(folder, "solid")
        with open(out, "a", encoding="utf-8") as f:
            saver = subprocess.Popen(["sh", "-c", loop], stdout=f, start_new_session=True)
            solid.append(training.window(a.window))
            os.killpg(saver.pid, 15)
            saver.wait()
        plain.append(training.window(a.window))
    training.end()
    with open(out, encoding="utf-8") as f:
        lines = [json.loads(line) for line in f if line.endswith("}\n")]
    seconds = [line["seconds"] for line in lines]
    show(a, "checkpoint.plain.step.ms", "ms", plain)
    for name, values, shift in (("every", every, 0), ("solid", solid, 1)):
        around = [(plain[2 * i + shift] + plain[2 * i + 1 + shift]) / 2 for i in range(a.rounds)]
        show(a, f"checkpoint.{name}.ratio", "1", ratios(values, around))
    show(a, "checkpoint.save.ms", "ms", [s * 1e3 for s in seconds])
    show(a, "checkpoint.mib", "MiB", [lines[-1]["bytes"] / 2**20])
    subprocess.run(ctl, check=True, stdout=subprocess.DEVNULL)


# -- Restore --------------------------------------------------------------------------------------


class Options(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t), ("address", ctypes.c_char_p), ("name", ctypes.c_char_p),
        ("slots", ctypes.c_uint32), ("threads", ctypes.c_uint32), ("timeout_ms", ctypes.c_uint64),
    ]  # fmt: skip


def timed(function, *arguments):
    start = time.monotonic()
    code = function(*arguments)
    if code != 0:
        sys.exit(f"bench.sh checkpoint: {arguments[-1]._obj.raw[4:].split(bytes(1))[0].decode()}")
    return (time.monotonic() - start) * 1e3


def restore(a):
    """As the worker of fresh daemons: restore, then attach by another session."""
    shd = ctypes.CDLL(os.path.join(a.bin, "../lib/libshd.so"))
    e = ctypes.create_string_buffer(260)
    s, t, m = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    options = ctypes.byref(Options(ctypes.sizeof(Options)))
    timed(shd.shd_connect, options, ctypes.byref(s), ctypes.byref(e))
    saves = os.path.join(a.dir or a.inner[8:], "ckpt").encode()
    ms = timed(shd.shd_restore, s, ctypes.c_char_p(saves), None, None, ctypes.byref(e))
    attach = timed(shd.shd_connect, options, ctypes.byref(t), ctypes.byref(e))
    attach += timed(shd.shd_model_attach, t, None, ctypes.byref(m), ctypes.byref(e))
    print(json.dumps([ms, attach]))


def run(a, inner_argument, **more):
    command = [
        sys.executable, os.path.abspath(__file__), "--bin", a.bin, "--rounds", str(a.rounds),
        "--window", str(a.window), "--every", str(a.every), "--workers", str(a.workers),
        "--inner", inner_argument, *(["--json"] if a.json else []), *(["--dir", a.dir] if a.dir else []),
        "--", *a.gpt,
    ]  # fmt: skip
    command = under_daemons(a, a.daemons, "--workers", "1", "--", *command)
    return subprocess.run(command, check=True, **more)


def main():
    a = parse()
    a.bin = os.path.abspath(a.bin)
    if a.inner and a.inner.startswith("restore:"):
        restore(a)
        return
    if a.inner:
        inner(a)
        return
    folder = tempfile.mkdtemp()
    try:
        show_head(a)
        run(a, folder)
        pairs = []
        for _ in range(a.rounds):
            out = run(a, f"restore:{folder}", stdout=subprocess.PIPE, text=True).stdout
            pairs.append(json.loads(out.strip().splitlines()[-1]))
        show(a, "restore.ms", "ms", [p[0] for p in pairs])
        show(a, "attach.ms", "ms", [p[1] for p in pairs])
    finally:
        shutil.rmtree(folder)


main()
