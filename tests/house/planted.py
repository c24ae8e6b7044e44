#!/usr/bin/env python3
"""planted.py [--check] [--dir DIR] [ROOM...]: does a bug in a room turn a test of that room's folder red?

Makes a copy of HEAD in DIR (build/planted of this tree; it is kept, so that the next run builds less), and
there for each room below: plants one bug, builds the tests that lie in tests/unit/ROOM (tests/cuda for
kernels/cuda), runs them, and takes the bug out. Prints a row each: room, file, the test that failed. Exit 1
when a bug was not found, 2 when a text to be replaced is not there exactly once: then plant it anew. All of
it takes some ten minutes; --check only looks whether each text is there. tests/sim/sim_bugs.cmake has more, which the simulator has to find.
"""
import argparse
import os
import re
import subprocess
import sys
from collections import namedtuple

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAMS = ("shardctl", "shardd", "shd-gpt")

# tests: of ctest, in the room's folder. text is replaced by bug; it is in the file once.
Bug = namedtuple("Bug", "room file tests text bug")
BUGS = [
    Bug("daemon/core", "lease.c", "lease", "last_handed_ns(g) < last_handed_ns(", "last_handed_ns(g) > last_handed_ns("),
    Bug("daemon/core", "sweep.c", "sweep", "u < s->map->units && s->apart[u] == 0 && bytes", "u < s->map->units && bytes"),
    Bug("daemon/base", "log.c", "log", "if (site->said < BURST)", "if (site->said <= BURST)"),
    Bug("daemon/net", "conn.c", "abuse", "if (!frame->more && !c->skipping)", "if (!frame->more)"),
    Bug("daemon/op", "op_links.c", "requests", "req->unit >= m->spec->unit_count", "req->unit > m->spec->unit_count"),
    Bug("daemon/model", "adopt.c", "adopt_state", "spec_returns(spec) == h->micros && m->trail.chunk_count == h->chunk_count &&\n"
        "        model_state_bytes(m) == h->state_bytes", "spec_returns(spec) == h->micros && m->trail.chunk_count == h->chunk_count"),
    Bug("daemon/view", "waits.c", "http", "        if (w->on[i].session == p.session && w->on[i].pid == p.pid)\n"
        "            return;\n", "        if (w->on[i].session == p.session || w->on[i].pid == p.pid)\n            continue;\n"),
    Bug("client/session", "address.c", "client_session", "strlen(address->devices[i]) == bytes && memcmp", "memcmp"),
    Bug("client/plan", "plan.c", "plan plan_order", "victim == NOWHERE || distance > furthest", "victim == NOWHERE || distance < furthest"),
    Bug("client/paths", "decide.c", "client_decide", "last->good_steps >= LOSS_SCALE_GROWTH",
        "last->good_steps > LOSS_SCALE_GROWTH"),
    Bug("client/run", "hold.c", "client_policy client_follow", "m->held.units + 1 > p->max_live_units",
        "m->held.units > p->max_live_units"),
    Bug("client/checkpoint", "restore.c", "checkpoint checkpoint_bad", "r == SHD_OK && strcmp(hex, info->digest) != 0",
        "r == SHD_OK && hex[0] == '\\0'"),
    Bug("client/ctl/plan", "plan_source.c", "ctl_plan", "equals == NULL || equals == tie", "equals == NULL"),
    Bug("client/ctl/run", "revive.c", "ctl_up ctl_keeper", "c->starts >= max && *oldest_ns", "c->starts > max && *oldest_ns"),
    Bug("client/ctl/run", "revive.c", "ctl", "    kill(-c->pid, SIGKILL); /*", "    /*"),
    Bug("client/ctl/base", "rundir.c", "ctl_rundir", "(st.st_mode & 022) != 0", "(st.st_mode & 002) != 0"),
    Bug("client/ctl/state", "drain.c", "ctl_drain", "if (now_ns >= dr->deadline_ns)\n            return timed_out",
        "if (now_ns < dr->deadline_ns)\n            return timed_out"),
    Bug("client/ctl/doctor", "doctor_host.c", "ctl_doctor", "missing == 0", "missing > 0"),
    Bug("client/ctl/watch", "status.c", "ctl_status", "if (j->wait_count == 0)", "if (j->wait_count <= 1)"),
    Bug("proto/wire", "wire.c", "proto_wire proto_wire_fuzz", "if (value >= min && value <= max)",
        "if (value >= min && value <= max + 1)"),
    Bug("proto/spec", "spec_node.c", "proto_spec proto_spec_errors", "bytes >= SPEC_NAME_BYTES_MAX",
        "bytes > SPEC_NAME_BYTES_MAX"),
    Bug("proto/share", "board.c", "proto_share", "units > SHD_UNITS_MAX || bytes < board_bytes(units)",
        "units > SHD_UNITS_MAX"),
    Bug("proto/base", "flags.c", "proto_base", "errno == ERANGE || (double)n < flag->min || (double)n > flag->max",
        "errno == ERANGE || (double)n < flag->min || (double)n >= flag->max"),
    Bug("proto/files", "safetensors.c", "proto_safetensors", "if (end > data_bytes)", "if (end > data_bytes + 1)"),
    Bug("proto/gpu", "nccl.c", "proto_gpu", "result == NCCL_REMOTE_ERROR || result == NCCL_SYSTEM_ERROR",
        "result == NCCL_REMOTE_ERROR"),
    Bug("kernels/cpu", "trail.c", "kern_trail", "if (f->chunk >= count)", "if (f->chunk > count)"),
    Bug("kernels/cuda", "update.cu", "cuda_kern_update", "a.runs[j].first_elem + a.runs[j].elems <= i + k",
        "a.runs[j].first_elem + a.runs[j].elems < i + k"),
]


def run(*command, cwd, **options):
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                          **options)


def must(*command, cwd):
    done = run(*command, cwd=cwd)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}:\n{done.stdout[-4000:]}")
    return done.stdout


def copy_of_head(where):
    """The working tree at HEAD, configured."""
    head = must("git", "rev-parse", "HEAD", cwd=ROOT).strip()
    if not os.path.exists(os.path.join(where, ".git")):
        must("git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, where, cwd=ROOT)
    must("git", "checkout", "--quiet", "--force", "--detach", head, cwd=where)
    must("cmake", "--preset", "release", cwd=where)


def build(bug, where):
    has = must("ninja", "-C", "build/release", "-t", "targets", "all", cwd=where)
    programs = [f"test_{t}" for t in bug.tests.split() if re.search(rf"^test_{t}:", has, re.M)]
    return run("cmake", "--build", "--preset", "release", "--target", *(programs or PROGRAMS), cwd=where)


def found_by(bug, where):
    """What failed: TEST()s, or the test of ctest. None: nothing."""
    done = run("ctest", "--test-dir", "build/release", "--output-on-failure", "-R", f"^({'|'.join(bug.tests.split())})$",
               cwd=where)
    if "No tests were found" in done.stdout:
        sys.exit(f"{bug.room}: no test {bug.tests}")
    names = re.findall(r"^FAILED  (\w+)", done.stdout, re.M) or re.findall(r"^\s*\d+ - (\w+) \(", done.stdout, re.M)
    return f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}" if names and done.returncode else None


def text_of(bug, where):
    """What the file is without the bug."""
    path = os.path.join(where, bug.room, bug.file)
    if not os.path.exists(path):
        print(f"{bug.room}/{bug.file} is not there: plant that bug anew", file=sys.stderr)
        sys.exit(2)
    with open(path, encoding="utf-8") as f:
        right = f.read()
    if right.count(bug.text) != 1:
        print(f"{bug.room}/{bug.file} has {right.count(bug.text)} times, not once: {bug.text}", file=sys.stderr)
        sys.exit(2)
    return right


def plant(bug, where):
    path = os.path.join(where, bug.room, bug.file)
    right = text_of(bug, where)
    try:
        with open(path, "w", encoding="utf-8") as f:
            f.write(right.replace(bug.text, bug.bug))
        built = build(bug, where)
        if built.returncode != 0:
            sys.exit(f"{bug.room}: the bug does not compile:\n{built.stdout[-3000:]}")
        return found_by(bug, where)
    finally:
        with open(path, "w", encoding="utf-8") as f:
            f.write(right)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--dir", default=os.path.join(ROOT, "build/planted"))
    parser.add_argument("rooms", nargs="*", metavar="ROOM")
    args = parser.parse_args()
    if args.check:
        for bug in BUGS:
            text_of(bug, ROOT)
        return 0
    copy_of_head(args.dir)
    missed = 0
    for bug in BUGS:
        if args.rooms and bug.room not in args.rooms:
            continue
        test = plant(bug, args.dir)
        missed += test is None
        print(f"{bug.room:18} {bug.file:15} {test or 'NOT FOUND by ' + bug.tests}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
