#!/usr/bin/env python3
"""check_house.py [--root DIR] [--write-allowed | --circles | --measures]: the rules of the source tree.

What is looked at: *.c and *.h (and what *.cu and *.cuh include) under the folders of PRODUCT.
A call is any mention of another file's function or variable: who takes a function's address to hand
it over knows it as well. A call through a pointer is none.

 circle    no .c file reaches itself by calls through other .c files
 declared  what a header declares, the .c of its name defines (client/shd.h has all that is public)
 include,  layers.txt lists the folders, top first: nothing includes or calls what is further up,
 upward    and a folder with a list of its own nothing else
 headers   a .c of daemon/ sees at most HEADERS_MAX headers of ours, directly or not
 fields    a struct has at most FIELDS_MAX

allowed.txt lists the findings that may be there, one a line: the finding, then `# why`. A finding that
is not listed fails, and so does a line that is no finding any more. A number at the end of a finding
(headers, fields) is its bound: it may be lower.

  --write-allowed  write allowed.txt anew, keeping the reasons
  --circles        print each circle, and by which names its files are tied
  --measures       print the figures
"""
import argparse
import collections
import os
import re
import subprocess
import sys

PRODUCT = ("daemon", "client", "proto", "kernels", "examples")
PUBLIC = "client/shd.h"
HEADERS_MAX = 20
FIELDS_MAX = 30
# Of what computes and nothing else (marked `pure` in layers.txt): no clock, no thread, no file.
PURE_SYSTEM = {"assert.h", "ctype.h", "float.h", "inttypes.h", "limits.h", "math.h", "regex.h",
               "stdarg.h", "stdatomic.h", "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h",
               "string.h"}


def run_ctags(root, files, kinds):
    """(name, file, first line, last line, scope, is static) of each tag."""
    command = ["ctags", "--languages=C", "--langmap=C:.c.h", "--kinds-C=" + kinds, "--fields=+neKsS",
               "-I", "SHD_API", "--sort=no", "-f", "-", "-L", "-"]
    out = subprocess.run(command, cwd=root, input="\n".join(files), capture_output=True, text=True,
                         check=True).stdout
    for line in out.splitlines():
        name, path, rest = line.split("\t", 2)
        field = dict(re.findall(r"\t(line|end|struct|union):(\S+)", rest))
        first = int(field["line"])
        yield (name, path, first, int(field.get("end", first)),
               field.get("struct", field.get("union", "")), rest.endswith("\tfile:") or "\tfile:\t" in rest)


def without_text(source):
    """The source without comments, strings and characters; its lines stay where they are."""
    def blank(match):
        return "\n" * match.group(0).count("\n") + " "
    pattern = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, blank, source, flags=re.S)


class Tree:
    """What the rules ask about a source tree."""

    def __init__(self, root):
        self.root = root
        self.files = sorted(
            os.path.relpath(os.path.join(at, name), root)
            for top in PRODUCT for at, _, names in os.walk(os.path.join(root, top))
            for name in names if name.endswith((".c", ".h", ".cu", ".cuh")))
        self.text, self.includes, self.system = {}, {}, {}
        for path in self.files:
            with open(os.path.join(root, path), encoding="utf-8") as file:
                source = file.read()
            self.text[path] = without_text(source)
            self.system[path] = re.findall(r"^\s*#\s*include\s*<([^>]+)>", source, re.M)
            self.includes[path] = [
                found for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', source, re.M)
                for found in (name, os.path.normpath(os.path.join(os.path.dirname(path), name)))
                if found in self.text or os.path.isfile(os.path.join(root, found))]
        self.sources = [f for f in self.files if f.endswith(".c")]
        self.headers = [f for f in self.files if f.endswith(".h")]
        self.seen = {path: self.see(path) for path in self.files}
        self.find_names()
        self.find_calls()

    def see(self, path):
        """The headers of ours that a file includes, directly or not."""
        seen, todo = set(), list(self.includes[path])
        while todo:
            header = todo.pop()
            if header not in seen:
                seen.add(header)
                todo += self.includes.get(header, [])
        return seen

    def find_names(self):
        self.owner, self.own = {}, collections.defaultdict(set)
        for name, path, _, _, _, static in run_ctags(self.root, self.sources, "fv"):
            self.own[path].add(name)
            if not static:
                self.owner[name] = path
        self.declared = collections.defaultdict(set)
        for name, path, *_ in run_ctags(self.root, self.headers, "px"):
            if name in self.owner:
                self.declared[path].add(name)
        self.fields = collections.Counter()
        for _, path, _, _, scope, _ in run_ctags(self.root, self.sources + self.headers, "m"):
            self.fields[path, scope] += 1

    def find_calls(self):
        """calls[f][g]: the names of g that f mentions. An inline function of x.h counts as x.c's."""
        self.calls = collections.defaultdict(lambda: collections.defaultdict(set))
        where = collections.defaultdict(set)  # the headers that declare a name
        for header, names in self.declared.items():
            for name in names:
                where[name].add(header)
        for path, text in list(self.inline_bodies().items()) + [(f, self.text[f]) for f in self.sources]:
            source = path[:-2] + ".c"
            text = re.sub(r"\b(struct|enum|union)\s+\w+", "", text)
            for name in set(re.findall(r"(?<![.>\w])[A-Za-z_]\w*", text)):
                owner = self.owner.get(name, source)
                if owner != source and name not in self.own[source] and where[name] & self.seen[path]:
                    self.calls[source][owner].add(name)

    def inline_bodies(self):
        """The text of each header's inline functions, where a .c of its name is there."""
        bodies = collections.defaultdict(str)
        for _, path, first, last, _, _ in run_ctags(self.root, self.headers, "f"):
            if path[:-2] + ".c" in self.text:
                bodies[path] += "\n".join(self.text[path].split("\n")[first - 1:last]) + "\n"
        return bodies

    def circles(self):
        """The strongly connected groups of more than one file (Tarjan)."""
        index, low, stack, on, found = {}, {}, [], set(), []
        sys.setrecursionlimit(10000)

        def visit(v):
            index[v] = low[v] = len(index)
            stack.append(v)
            on.add(v)
            for w in self.calls.get(v, ()):
                if w not in index:
                    visit(w)
                    low[v] = min(low[v], low[w])
                elif w in on:
                    low[v] = min(low[v], index[w])
            if low[v] == index[v]:
                group = stack[stack.index(v):]
                del stack[stack.index(v):]
                on.difference_update(group)
                if len(group) > 1:
                    found.append(sorted(group))
        for path in self.sources:
            if path not in index:
                visit(path)
        return sorted(found)


class Layers:
    """layers.txt: FOLDER [only PATH...] [pure], top first; and `apart A B`."""

    def __init__(self, path):
        self.rank, self.only, self.pure, self.apart = {}, {}, set(), []
        with open(path, encoding="utf-8") as file:
            lines = [line.split("#")[0].split() for line in file]
        for words in filter(None, lines):
            if words[0] == "apart":
                self.apart.append(words[1:])
                continue
            folder = words[0]
            self.rank[folder] = len(self.rank)
            if "pure" in words:
                self.pure.add(folder)
                words.remove("pure")
            if len(words) > 1:
                assert words[1] == "only", "layers.txt: FOLDER [only PATH...] [pure]: " + folder
                self.only[folder] = words[2:]

    def allows(self, user, used):
        """May a file of ours know another?"""
        a, b = os.path.dirname(user), os.path.dirname(used)
        if a == b:
            return True
        if any(under(user, x) and under(used, y) or under(user, y) and under(used, x)
               for x, y in self.apart):
            return False
        if a in self.only:
            return any(under(used, path) for path in self.only[a])
        return self.rank.get(a, -1) < self.rank.get(b, -1)


def under(path, folder):
    return path == folder or path.startswith(folder + "/")


def findings(tree, layers):
    """{finding: bound or None}; a bound is what may not be passed, however much is allowed."""
    found = {}
    for group in tree.circles():
        for path in group:
            found["circle " + path] = None
    for header, names in tree.declared.items():
        for name in names:
            if tree.owner[name] != header[:-2] + ".c" and header != PUBLIC:
                found["declared %s %s %s" % (header, name, tree.owner[name])] = None
    for folder in {os.path.dirname(path) for path in tree.files} - set(layers.rank):
        found["folder %s is not in layers.txt" % folder] = None
    for path in tree.files:
        for header in tree.includes[path]:
            if not layers.allows(path, header):
                found["include %s %s" % (path, header)] = None
        if os.path.dirname(path) in layers.pure:
            for header in set(tree.system[path]) - PURE_SYSTEM:
                found["include %s <%s>" % (path, header)] = None
        for used, names in tree.calls.get(path, {}).items():
            if not layers.allows(path, used):
                for name in names:
                    found["upward %s %s %s" % (path, name, used)] = None
        if path.endswith(".c") and under(path, "daemon") and len(tree.seen[path]) > HEADERS_MAX:
            found["headers " + path] = len(tree.seen[path])
    for (path, scope), count in tree.fields.items():
        if count > FIELDS_MAX:
            found["fields %s %s" % (path, scope)] = count
    return found


def read_allowed(path):
    """{finding: (bound or None, reason)}"""
    allowed = {}
    if not os.path.exists(path):
        return allowed
    with open(path, encoding="utf-8") as file:
        for line in file:
            finding, _, reason = (part.strip() for part in line.partition(" # "))
            if finding and not finding.startswith("#"):
                match = re.fullmatch(r"((?:headers|fields) .*) (\d+)", finding)
                allowed[match.group(1) if match else finding] = (int(match.group(2)) if match else None, reason)
    return allowed


def write_allowed(path, found, allowed):
    with open(path, "w", encoding="utf-8") as file:
        file.write("# Findings of check_house.py that may be there, each with its reason. This list only\n"
                   "# shrinks: check_house.py --write-allowed writes it anew.\n")
        for finding, bound in sorted(found.items()):
            reason = allowed.get(finding, (None, ""))[1] or "not opened yet"
            file.write("%s%s # %s\n" % (finding, "" if bound is None else " %d" % bound, reason))


def compare(found, allowed):
    """What is wrong: findings that are not allowed, and lines that allow what is not there."""
    wrong = []
    for finding, bound in sorted(found.items()):
        if finding not in allowed:
            wrong.append(finding + ("" if bound is None else " %d" % bound))
        elif bound is not None and bound > allowed[finding][0]:
            wrong.append("%s %d: more than the %d allowed" % (finding, bound, allowed[finding][0]))
        elif not allowed[finding][1]:
            wrong.append("%s: allowed.txt does not say why" % finding)
    return wrong + ["%s: not so any more, take it out of allowed.txt" % finding
                    for finding in sorted(set(allowed) - set(found))]


def print_circles(tree):
    for group in tree.circles():
        print("circle of %d files" % len(group))
        for user in group:
            for used in sorted(set(tree.calls[user]) & set(group)):
                print("  %s -> %s: %s" % (user, used, " ".join(sorted(tree.calls[user][used]))))


def print_measures(tree, found):
    circles = tree.circles()
    declared = sum(len(names) for header, names in tree.declared.items() if header != PUBLIC)
    away = sum(1 for f in found if f.startswith("declared "))
    daemon = sorted(len(tree.seen[f]) for f in tree.sources if under(f, "daemon"))
    upward = sum(1 for f in found if f.startswith("upward "))
    listed = subprocess.run(["git", "ls-files"], cwd=tree.root, capture_output=True, text=True,
                            check=True).stdout.splitlines()
    lines = collections.Counter()
    for path in listed:
        top = path.split("/")[0]
        if top in PRODUCT + ("bench",) and os.path.exists(os.path.join(tree.root, path)):
            with open(os.path.join(tree.root, path), "rb") as file:
                lines[top] += file.read().count(b"\n")
    print("circles of files         %d, with %d files" % (len(circles), sum(map(len, circles))))
    print("calls upwards            %d" % upward)
    print("includes upwards         %d" % sum(1 for f in found if f.startswith("include ")))
    print("declared elsewhere       %d of %d, %.0f %%" % (away, declared, 100 * away / max(declared, 1)))
    print("headers a daemon .c sees %d at the median, %d at most" % (daemon[len(daemon) // 2], daemon[-1]))
    print("product lines            %d (%s)" % (sum(lines.values()), ", ".join(
        "%s %d" % top for top in sorted(lines.items()))))
    print("files in git             %d" % len(listed))


def have_ctags():
    try:
        version = subprocess.run(["ctags", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return False
    return version.startswith("Universal")


def main():
    if not have_ctags():
        print("skipped: universal-ctags is not here (scripts/install-deps.sh --dev)")
        return 77
    here = os.path.dirname(os.path.abspath(__file__))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.path.dirname(os.path.dirname(here)))
    for name in ("--write-allowed", "--circles", "--measures"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    house = os.path.join(args.root, "tests", "house")
    tree = Tree(args.root)
    found = findings(tree, Layers(os.path.join(house, "layers.txt")))
    allowed_path = os.path.join(house, "allowed.txt")
    if args.circles:
        print_circles(tree)
        return 0
    if args.measures:
        print_measures(tree, found)
        return 0
    if args.write_allowed:
        write_allowed(allowed_path, found, read_allowed(allowed_path))
        return 0
    wrong = compare(found, read_allowed(allowed_path))
    print("\n".join(wrong) if wrong else "ok: %d findings, all allowed" % len(found))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
