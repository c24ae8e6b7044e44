#!/usr/bin/env python3
"""tidy.py [--all] [--deep] [--record]: clang-tidy on what the release build compiles, warnings as errors.

A file that was clean is looked at again when it, a header that it includes, its compile command,
.clang-tidy or clang-tidy itself has changed. What was clean is known twice: names of clean files, by a
hash of all that, lie in ~/.cache/shardd-tidy (or $XDG_CACHE_HOME); and tests/house/tidied.txt names a
commit of which every file was clean, with the clang-tidy that said so, for a machine that has no such
names yet: only what differs from that commit is looked at. A clone that lacks the commit looks at
everything, and so does --all, the second stage, which nobody waits for. --record, on a tree without
changes, trusts no commit, and writes there that this one is clean.

The analyzer, which takes nearly all of the time, follows 75,000 steps in a function: a third of its
default takes a quarter of the time; it leaves out the tests, which sanitizers see run, and, until the
second stage, what is itself as in that commit, where a header that it includes or a CMakeLists.txt above
it is not: the other checks read that anew. --deep lets it have all.
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
    """{object file: the files it was made from}, as ninja has noted them where it was built last: in release,
    or in dev, which builds what release does not run."""
    found, times, current = {}, {}, []
    for build in (BUILD, os.path.join(ROOT, "build/dev")):
        if not os.path.exists(os.path.join(build, ".ninja_deps")):
            continue
        for line in output("ninja", "-C", build, "-t", "deps").splitlines():
            if line.startswith("    "):
                path = os.path.normpath(os.path.join(build, line.strip()))
                current.append(path.replace(build + os.sep, BUILD + os.sep))
            elif match := re.match(r"(\S+): #deps \d+, deps mtime (\d+) ", line):
                current = []
                if times.get(match[1], 0) < int(match[2]):
                    times[match[1]], found[match[1]] = int(match[2]), current
    return found


def version():
    """What but the sources decides what is found, in one word."""
    text = re.search(r"version (\S+)", output(TIDY, "--version"))[1] + read(os.path.join(ROOT, ".clang-tidy")).decode()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def git(*words):
    # Whoever has checked the tree out may be another user.
    return subprocess.run(["git", "-c", f"safe.directory={ROOT}", "-C", ROOT, *words], check=True, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True).stdout


# How much of a file differs from the recorded commit: nothing, what it is made of or how, or itself.
SAME, AROUND, ITSELF = range(3)


def since_recorded():
    """A function that says of a file, made of others, how much of it differs from the recorded commit."""
    try:
        commit, by = read(RECORD).decode().split()
        changed = {os.path.join(ROOT, p) for p in git("diff", "--name-only", "--no-renames", commit).splitlines()}
        changed |= {os.path.join(ROOT, p) for p in git("ls-files", "--others", "--exclude-standard").splitlines()}
    except (OSError, ValueError, subprocess.CalledProcessError):
        return lambda path, made_of: ITSELF
    below = tuple(os.path.dirname(p) + os.sep for p in changed if os.path.basename(p) == "CMakeLists.txt")
    if by != version():
        return lambda path, made_of: ITSELF
    if any(p.endswith(".proto") for p in changed):
        changed |= {os.path.join(BUILD, "proto", name) for name in os.listdir(os.path.join(BUILD, "proto"))}

    def differs(path, made_of):
        if path in changed:
            return ITSELF
        return AROUND if path.startswith(below) or not changed.isdisjoint(made_of) else SAME
    return differs


def files():
    """{path: (key, how much of it differs from the recorded commit)} of each C file of ours; several
    compilations of one are one."""
    common, differs = version(), since_recorded()
    deps, contents, found = includes(), Contents(), {}
    for entry in json.loads(read(os.path.join(BUILD, "compile_commands.json"))):
        path = entry["file"]
        if not path.endswith(".c") or os.path.relpath(path, ROOT).split(os.sep)[0] not in ROOMS:
            continue
        command = entry["command"].replace(ROOT, "")
        made_of = deps.get(entry["command"].split(" -o ")[1].split()[0], [path])
        text = "\n".join([common, command, *sorted(f"{p.replace(ROOT, '')} {contents.hash_of(p)}" for p in made_of)])
        found.setdefault(path, []).append((text, differs(path, made_of)))
    return {path: (hashlib.sha256("\n".join(text for text, _ in several).encode()).hexdigest(),
                   max(much for _, much in several)) for path, several in found.items()}


def look_at(path, options, mark):
    done = subprocess.run([TIDY, "-p", BUILD, "--quiet", *options, path], check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return mark, done.returncode == 0, done.stdout


def clean_names():
    """The folder of the names of clean files, without old ones."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(base, "shardd-tidy")
    os.makedirs(folder, exist_ok=True)
    for entry in os.scandir(folder):
        if entry.stat().st_mtime < time.time() - KEPT_S:
            os.unlink(entry.path)
    return folder


def to_look_at(words):
    """[(path, options, the file whose being there says that it is clean)] of what is not known to be clean."""
    deep, trusting = "--deep" in words, words.isdisjoint({"--all", "--deep", "--record"})
    folder, found = clean_names(), []
    for path, (key, much) in files().items():
        clean = os.path.join(folder, key + ("-deep" if deep else ""))
        if "--all" not in words and (os.path.exists(clean) or trusting and much == SAME):
            continue
        if deep:
            options = []
        elif path.startswith(os.path.join(ROOT, "tests")):
            options = NOT_ANALYZED
        elif trusting and much == AROUND:
            options, clean = NOT_ANALYZED, clean + "-not-analyzed"
            if os.path.exists(clean):
                continue
        else:
            options = SHALLOWER
        found.append((path, options, clean))
    return sorted(found, key=lambda f: (f[1] != NOT_ANALYZED, os.path.getsize(f[0])), reverse=True)  # the long ones first


def main():
    words = set(sys.argv[1:])
    if words - {"--all", "--deep", "--record"}:
        sys.exit(__doc__.splitlines()[0])
    record = "--record" in words
    if record and git("status", "--porcelain"):
        sys.exit("--record: commit first, as what it names is a commit")
    todo = to_look_at(words)
    print(f"{len(todo)} files, {sum(options != NOT_ANALYZED for _, options, _ in todo)} of them with the analyzer",
          flush=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for mark, clean, text in pool.map(lambda f: look_at(*f), todo):
            if clean:
                with open(mark, "w", encoding="utf-8"):
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
