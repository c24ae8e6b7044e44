#!/usr/bin/env python3
"""tidy.py [--all] [--deep] [--record]: clang-tidy on what the release build compiles, warnings as errors.

A file that was clean is looked at again when it, a header that it includes, its compile command,
.clang-tidy or clang-tidy itself has changed. What was clean is known twice: names of clean files, by a
hash of all that, lie in ~/.cache/shardd-tidy (or $XDG_CACHE_HOME); and tests/house/tidied.txt names a
commit of which every file was clean, with the clang-tidy that said so, for a machine that has no such
names yet: only what differs from that commit is looked at (a changed CMakeLists.txt: all below it). A
clone that lacks the commit looks at everything, and so does --all, the second stage, which nobody waits
for. --record, on a tree without changes, trusts no commit, and writes there that this one is clean.

The analyzer, which takes nearly all of the time, follows 75,000 steps in a function: a third of its
default takes a quarter of the time; and it leaves out the tests, which sanitizers see run. --deep lets
it have all.
"""
import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(ROOT, "build/release")
TIDY = "clang-tidy-14"
ROOMS = ("proto", "kernels", "daemon", "client", "examples", "bench", "tests")
SHALLOWER = [f"--extra-arg={word}" for word in ("-Xclang", "-analyzer-config", "-Xclang", "max-nodes=75000")]
RECORD = os.path.join(ROOT, "tests/house/tidied.txt")
NOT_ANALYZED = ["--checks=-clang-analyzer-*"]
KEPT_S = 30 * 24 * 3600


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def read(path):
    with open(path, "rb") as f:
        return f.read()


class Contents:
    """Hashes of files: of ours by what is in them, of the system's by size and time."""

    def __init__(self):
        self.known = {}

    def hash_of(self, path):
        if path not in self.known:
            if path.startswith(ROOT):
                self.known[path] = hashlib.sha256(read(path)).hexdigest()
            else:
                s = os.stat(path)
                self.known[path] = f"{s.st_size} {s.st_mtime_ns}"
        return self.known[path]


def includes():
    """{object file: the files it was made from}, as ninja has noted them."""
    found, current = {}, []
    for line in output("ninja", "-C", BUILD, "-t", "deps").splitlines():
        if line.startswith("    "):
            current.append(os.path.normpath(os.path.join(BUILD, line.strip())))
        elif ":" in line:
            current = found[line.split(":")[0]] = []
    return found


def version():
    """What but the sources decides what is found, in one word."""
    text = re.search(r"version (\S+)", output(TIDY, "--version"))[1] + read(os.path.join(ROOT, ".clang-tidy")).decode()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True).stdout


def same_as_recorded():
    """A function that says of a file, made of others, whether all of it is as in the recorded commit."""
    try:
        commit, by = read(RECORD).decode().split()
        changed = {os.path.join(ROOT, p) for p in git("diff", "--name-only", "--no-renames", commit).splitlines()}
        changed |= {os.path.join(ROOT, p) for p in git("ls-files", "--others", "--exclude-standard").splitlines()}
    except (OSError, ValueError, subprocess.CalledProcessError):
        return lambda path, made_of: False
    below = tuple(os.path.dirname(p) + os.sep for p in changed if os.path.basename(p) == "CMakeLists.txt")
    if by != version():
        return lambda path, made_of: False
    if any(p.endswith(".proto") for p in changed):
        changed |= {os.path.join(BUILD, "proto", name) for name in os.listdir(os.path.join(BUILD, "proto"))}
    return lambda path, made_of: not path.startswith(below) and changed.isdisjoint([path, *made_of])


def files():
    """{path: (key, whether it is as in the recorded commit)} of each C file of ours; several compilations
    of one are one."""
    common, same = version(), same_as_recorded()
    deps, contents, found = includes(), Contents(), {}
    for entry in json.loads(read(os.path.join(BUILD, "compile_commands.json"))):
        path = entry["file"]
        if not path.endswith(".c") or os.path.relpath(path, ROOT).split(os.sep)[0] not in ROOMS:
            continue
        command = entry["command"].replace(ROOT, "")
        made_of = deps.get(entry["command"].split(" -o ")[1].split()[0], [path])
        text = "\n".join([common, command, *sorted(f"{p.replace(ROOT, '')} {contents.hash_of(p)}" for p in made_of)])
        found.setdefault(path, []).append((text, same(path, made_of)))
    return {path: (hashlib.sha256("\n".join(text for text, _ in several).encode()).hexdigest(),
                   all(is_same for _, is_same in several)) for path, several in found.items()}


def look_at(path, deep):
    less = NOT_ANALYZED if path.startswith(os.path.join(ROOT, "tests")) else SHALLOWER
    done = subprocess.run([TIDY, "-p", BUILD, "--quiet", *([] if deep else less), path], check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return path, done.returncode == 0, done.stdout


def clean_names():
    """The folder of the names of clean files, without old ones."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(base, "shardd-tidy")
    os.makedirs(folder, exist_ok=True)
    for entry in os.scandir(folder):
        if entry.stat().st_mtime < time.time() - KEPT_S:
            os.unlink(entry.path)
    return folder


def main():
    words = set(sys.argv[1:])
    if words - {"--all", "--deep", "--record"}:
        sys.exit(__doc__.splitlines()[0])
    deep, record = "--deep" in words, "--record" in words
    if record and git("status", "--porcelain"):
        sys.exit("--record: commit first, as what it names is a commit")
    folder, known = clean_names(), files()
    names = {path: os.path.join(folder, key + ("-deep" if deep else "")) for path, (key, _) in known.items()}
    trusted = {p for p, (_, same) in known.items() if same and not (deep or record)}
    todo = [p for p, name in names.items() if "--all" in words or not (p in trusted or os.path.exists(name))]
    todo.sort(key=os.path.getsize, reverse=True)  # the long ones first
    print(f"{len(todo)} of {len(names)} files", flush=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for path, clean, text in pool.map(lambda p: look_at(p, deep), todo):
            if clean:
                with open(names[path], "w", encoding="utf-8"):
                    pass
            else:
                print(text, flush=True)
                failed += 1
    print(f"{failed} files with findings")
    if record and not failed:
        with open(RECORD, "w", encoding="utf-8") as f:
            f.write(f"{git('rev-parse', 'HEAD').strip()} {version()}\n")
    return failed > 0


sys.exit(main())
