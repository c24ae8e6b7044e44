#!/usr/bin/env python3
"""registers.py [BUILD]: what ptxas said of each GPU kernel of a build (build/release), as a table.

Registers a thread, bytes of stack, bytes spilled (stores and loads), bytes of shared memory a block.
Exit code 1 when a kernel spills, or when there is no report: a build without nvcc.
"""
import os
import re
import sys

KERNEL = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads')
USED = re.compile(r'Used (\d+) registers(?:.*?(\d+) bytes smem)?')


def reports(build):
    for folder, _, names in os.walk(build):
        for name in sorted(names):
            if name.endswith('.ptxas.txt'):
                yield os.path.join(folder, name)


def rows(path):
    kernel = stack = None
    with open(path, encoding='utf-8', errors='replace') as f:
        for line in f:
            if (m := KERNEL.search(line)):
                kernel = m.groups()
            elif (m := STACK.search(line)):
                stack = m.groups()
            elif (m := USED.search(line)) and kernel and stack:
                yield (*kernel, int(m.group(1)), *map(int, stack), int(m.group(2) or 0))
                kernel = stack = None


def main():
    build = sys.argv[1] if len(sys.argv) > 1 else 'build/release'
    found = [row for path in reports(build) for row in rows(path)]
    print('| kernel | for | registers | stack | spill stores | spill loads | shared |')
    print('|---|---|---|---|---|---|---|')
    for row in sorted(found):
        print('| ' + ' | '.join(f'`{v}`' if i == 0 else str(v) for i, v in enumerate(row)) + ' |')
    spills = [row[0] for row in found if row[4] or row[5]]
    if spills:
        print(f'spills: {", ".join(spills)}')
    return 1 if spills or not found else 0


if __name__ == '__main__':
    sys.exit(main())
