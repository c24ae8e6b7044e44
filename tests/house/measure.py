#!/usr/bin/env python3
"""measure.py [--source DIR] [--build DIR] [--list]: how far one request goes through the source.

Builds shardd and libshd with -finstrument-functions in --build, runs one daemon and one worker that
does one thing at a time, and prints, of the median request:

  Return   the daemon, from the loop's callback that reads the request to the end of the one that sends
           the Credit, all threads
  acquire  the worker, within shd_acquire(): mapped, with nothing to wait for

files: those whose functions ran. calls: functions entered. moves: how often a thread goes from one file
to another, by a call or by a return. Generated code is not counted, nor the loops over elements: the
inline functions of kernels/cpu's headers. --list prints the functions.

Exit 1 where a request goes further than it may (BOUNDS): work that need not be done for each stays away
from these two, and what they pass stands together.
"""
import argparse
import collections
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
HANDLER, SENDS, ACQUIRE = "op_return_grad", ("mailbox_reply", "op_reply"), "shd_acquire"
BOUNDS = {"Return": {"files": 14, "moves": 60}, "acquire": {"files": 6, "calls": 25}}
Event = collections.namedtuple("Event", "function thread enters")


def run(*command, **options):
    done = subprocess.run(command, text=True, capture_output=True, check=False, **options)
    if done.returncode != 0:
        sys.exit("%s\n%s%s" % (" ".join(command), done.stdout, done.stderr))
    return done.stdout


def build(source, where):
    flags = "-O0 -g -finstrument-functions"
    run("cmake", "-S", source, "-B", where, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
        "-DCMAKE_C_FLAGS_DEBUG=" + flags, "-DSHD_CUDA=OFF",
        "-DCMAKE_C_COMPILER_LAUNCHER=")  # a cache may name the files of another tree
    run("cmake", "--build", where, "--target", "shardd", "shd")
    run("cc", "-O2", "-shared", "-fPIC", "-o", where + "/trace.so", HERE + "/trace.c")
    run("cc", "-O2", "-I", source, "-o", where + "/one_request", HERE + "/one_request.c",
        "-L", where + "/lib", "-lshd", "-Wl,-rpath," + where + "/lib")


def record(where, into):
    """Run a daemon and a worker; their traces are into/daemon and into/worker."""
    def traced(name):
        return dict(os.environ, LD_PRELOAD=where + "/trace.so", HOUSE_TRACE=os.path.join(into, name))
    daemon = subprocess.Popen([where + "/bin/shardd", "--device", "cpu0", "--runtime-dir", into,
                               "--threads", "1", "--log-level", "error"], env=traced("daemon"))
    try:
        end = time.monotonic() + 30
        while not os.path.exists(into + "/cpu0.sock") and time.monotonic() < end:
            time.sleep(0.01)
        run(where + "/one_request", into, env=traced("worker"))
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait()


class Trace:
    """A recorded run: events, and where each function is."""

    def __init__(self, path, source):
        with open(path, "rb") as file:
            maps, _, events = file.read().partition(b"\n\n")
        self.events = [Event(*fields) for fields in struct.iter_unpack("=QII", events)]
        self.name, self.file = {}, {}
        modules = collections.defaultdict(list)
        bases = {}
        ranges = []
        for line in maps.decode().splitlines():
            words = line.split()
            if len(words) == 6 and words[5].startswith("/"):
                low, high = (int(x, 16) for x in words[0].split("-"))
                bases.setdefault(words[5], low)
                ranges.append((low, high, words[5]))
        for function in {event.function for event in self.events}:
            module = next((m for low, high, m in ranges if low <= function < high), None)
            if module:
                modules[module].append(function)
        for module, functions in modules.items():
            lines = run("addr2line", "-f", "-e", module, input="\n".join(
                hex(function - bases[module]) for function in functions)).splitlines()
            for function, name, at in zip(functions, lines[0::2], lines[1::2]):
                self.name[function] = name
                self.file[function] = os.path.relpath(at.rpartition(":")[0], source)

    def named(self, names):
        return {function for function, name in self.name.items() if name in names}

    def counted(self, first, last):
        for event in self.events[first:last + 1]:
            file = self.file.get(event.function, "..")
            if not file.startswith(("..", "build/")) and not (file.startswith("kernels/cpu/") and
                                                              file.endswith(".h")):
                yield event

    def outermost(self, inside):
        """Per event of the thread that enters `inside`: how many functions are open."""
        thread = next(e.thread for e in self.events if e.enters and e.function in inside)
        depth, depths = 0, {}
        for i, event in enumerate(self.events):
            if event.thread == thread:
                depth += 1 if event.enters else -1
                depths[i] = depth
        return depths


def windows_of_returns(trace):
    """[first, last event] from the callback that reads a Return to the end of the one that answers."""
    handlers, sends = trace.named([HANDLER]), trace.named(SENDS)
    depths = trace.outermost(handlers)
    begun = [i for i in depths if trace.events[i].enters and trace.events[i].function in handlers]
    base = min(depth for i, depth in depths.items() if begun[0] <= i <= begun[-1])
    order = sorted(depths)
    place = {i: k for k, i in enumerate(order)}
    for i in begun:
        first = place[i]
        while depths[order[first - 1]] > base:
            first -= 1
        last = place[i]
        while last < len(order) and not (trace.events[order[last]].enters and
                                         trace.events[order[last]].function in sends):
            last += 1
        while last < len(order) and depths[order[last]] > base:
            last += 1
        if last < len(order):
            yield order[first], order[last]


def windows_of_acquires(trace):
    acquires = trace.named([ACQUIRE])
    first = None
    for i, event in enumerate(trace.events):
        if event.function in acquires and event.enters:
            first = i
        elif event.function in acquires:
            yield first, i


def figures(trace, windows):
    """{"moves", "calls", "files"} and the window of the median one."""
    found = []
    for first, last in windows:
        moves, calls, files = 0, 0, set()
        stacks, at = collections.defaultdict(list), {}
        for event in trace.counted(first, last):
            stack = stacks[event.thread]
            if event.enters:
                stack.append(trace.file[event.function])
                files.add(stack[-1])
                calls += 1
            elif stack:
                stack.pop()
            if stack:
                moves += at.get(event.thread, stack[-1]) != stack[-1]
                at[event.thread] = stack[-1]
        found.append((moves, calls, len(files), (first, last)))
    if not found:
        sys.exit("measure.py: no such request in the trace; were %s renamed?" % [HANDLER, SENDS, ACQUIRE])
    moves, calls, files, window = sorted(found)[len(found) // 2]
    return {"files": files, "moves": moves, "calls": calls}, window


def beyond(what, got):
    """A line for each figure that is beyond its bound."""
    return ["%s: %d %s, it may be %d" % (what, got[unit], unit, most)
            for unit, most in BOUNDS[what].items() if got[unit] > most]


def show(trace, window):
    depth = collections.Counter()
    for event in trace.counted(*window):
        if event.enters:
            print("  %d %s%s  %s" % (event.thread, "  " * depth[event.thread], trace.name[event.function],
                                     trace.file[event.function]))
        depth[event.thread] += 1 if event.enters else -1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = os.path.dirname(os.path.dirname(HERE))
    parser.add_argument("--source", default=root)
    parser.add_argument("--build")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    source = os.path.abspath(args.source)
    where = os.path.abspath(args.build or os.path.join(source, "build", "house"))
    build(source, where)
    too_far = []
    into = tempfile.mkdtemp(prefix="shd-house-")
    try:
        record(where, into)
        for what, title, name, windows in (
                ("Return", "one Return, socket to kernel to Credit", "daemon", windows_of_returns),
                ("acquire", "shd_acquire, nothing to wait for", "worker", windows_of_acquires)):
            trace = Trace(os.path.join(into, name), source)
            got, window = figures(trace, list(windows(trace)))
            print("%-40s %3d files, %3d moves, %3d calls" % (title, got["files"], got["moves"], got["calls"]))
            too_far += beyond(what, got)
            if args.list:
                show(trace, window)
    finally:
        shutil.rmtree(into)
    if too_far:
        sys.exit("measure.py: too far\n  " + "\n  ".join(too_far))


if __name__ == "__main__":
    main()
