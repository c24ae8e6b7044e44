#!/usr/bin/env python3
"""The checker's own test: in a small tree with one violation of each kind each is found, and no more."""
import os
import subprocess
import sys
import tempfile

import check_house

FIELDS = "".join("    int field%d;\n" % i for i in range(31))
TREE = {
    "tests/house/layers.txt": """
        client
        client/plan only client/shd.h proto pure
        daemon
        daemon/net
        daemon/core only proto pure
        kernels
        proto
        apart client daemon
        """,
    # Public: declared here, defined elsewhere; no finding.
    "client/shd.h": "int shd_open(void);\n",
    "client/open.c": '#include "client/shd.h"\n#include "daemon/net/peer.h"\nint shd_open(void) { return 0; }\n',
    "client/plan/plan.c": '#include <time.h>\n#include "client/shd.h"\n',
    # A circle of two: by an inline function, and by a table of functions.
    "daemon/loop.h": '#include "daemon/turn.h"\nint loop(void);\nstatic inline int loop_twice(void) { return turn(); }\n',
    "daemon/loop.c": '#include "daemon/loop.h"\nint loop(void) { return 1; }\n',
    "daemon/turn.h": "int turn(void);\n",
    "daemon/turn.c": '#include "daemon/loop.h"\nint (*const loops[])(void) = {\n    loop,\n};\nint turn(void) { return 2; }\n',
    # No circle: mentioned in comments, in a string, as a member, as a name of its own.
    "daemon/quiet.h": "int quiet(void);\n",
    "daemon/quiet.c": '#include "daemon/quiet.h"\n#include "daemon/loop.h"\n/* loop() */ // loop\nstruct x { int loop; };\n'
                      'int quiet(void) { struct x y = { .loop = 1 }; return y.loop + *"loop"; }\n',
    "daemon/away.h": "int quiet_too(void);\n",
    "daemon/strange.c": '#include "daemon/away.h"\nint quiet_too(void) { return 0; }\n',
    "daemon/net/peer.h": "int peer(void);\n",
    "daemon/net/peer.c": '#include "daemon/net/peer.h"\n#include "daemon/quiet.h"\nint peer(void) { return quiet(); }\n',
    "daemon/core/step.c": '#include "kernels/kern.h"\n',
    "kernels/kern.h": "struct kern {\n%s};\n" % FIELDS,
    "daemon/many.c": '#include "proto/h0.h"\n',
    "proto/new/x.h": "\n",
}
for i in range(21):
    TREE["proto/h%d.h" % i] = '#include "proto/h%d.h"\n' % (i + 1) if i < 20 else "\n"
EXPECTED = """
circle daemon/loop.c
circle daemon/turn.c
declared daemon/away.h quiet_too daemon/strange.c
fields kernels/kern.h kern 31
folder proto/new is not in layers.txt
headers daemon/many.c 21
include client/open.c daemon/net/peer.h
include client/plan/plan.c <time.h>
include daemon/core/step.c kernels/kern.h
include daemon/net/peer.c daemon/quiet.h
upward daemon/net/peer.c quiet daemon/quiet.c
""".strip().splitlines()


def run(root, *arguments):
    done = subprocess.run([sys.executable, check_house.__file__, "--root", root, *arguments], capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.strip().splitlines()


def expect(what, wanted):
    assert what == wanted, "got\n  %s\nwanted\n  %s" % (what, wanted)


def main():
    if not check_house.have_ctags():
        sys.exit(77)
    with tempfile.TemporaryDirectory() as root:
        for path, text in TREE.items():
            os.makedirs(os.path.dirname(os.path.join(root, path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        expect(run(root), (1, EXPECTED))

        allowed = os.path.join(root, "tests/house/allowed.txt")
        run(root, "--write-allowed")
        expect(run(root), (0, ["ok: %d findings, all allowed" % len(EXPECTED)]))

        # A list that is out of date, a bound that is passed, and a line without a reason.
        with open(allowed, encoding="utf-8") as file:
            text = file.read()
        text = text.replace("circle daemon/loop.c # not opened yet", "circle daemon/loop.c # for good")
        with open(allowed, "w", encoding="utf-8") as file:
            file.write(text.replace(" 21 ", " 20 ").replace("turn.c # not opened yet", "turn.c") +
                       "circle daemon/gone.c # why\n")
        expect(run(root), (1, ["circle daemon/turn.c: allowed.txt does not say why",
                               "headers daemon/many.c 21: more than the 20 allowed",
                               "circle daemon/gone.c: not so any more, take it out of allowed.txt"]))
        run(root, "--write-allowed")
        expect(run(root)[0], 0)
        with open(allowed, encoding="utf-8") as file:
            text = file.read()
        assert "circle daemon/loop.c # for good" in text and "gone" not in text, text
    print("ok")


if __name__ == "__main__":
    main()
