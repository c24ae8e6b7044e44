#!/usr/bin/env python3
"""Every fault that a training run must survive, one after the other; each ends in the undisturbed digest.

Called by scripts/chaos.sh --faults. A fault is a program fault_NAME.py beside this one: it trains,
disturbs, compares; its last line is `fault=NAME ... digest=equal` with exit code 0, or says what is wrong
with 1; 77 is for a machine on which the fault cannot be made. To add one is to add that file, and to
BRIEF what makes it short.
"""
import argparse
import glob
import os
import shlex
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SKIPPED = 77
BRIEF = {  # arguments with which a fault takes seconds; without an entry it does so anyway
    'binary': ['--seconds', '2', '--steps', '30'],
    'disk': ['--steps', '20'],
    'oom': ['--kills', '1'],
    'requeue': ['--kills', '2'],
    'stall': ['--seconds', '3'],
}


def faults():
    """{name: path}, in order."""
    paths = sorted(glob.glob(os.path.join(HERE, 'fault_*.py')))
    return {os.path.basename(path)[len('fault_'):-len('.py')]: path for path in paths}


def parse():
    p = argparse.ArgumentParser(
        prog='chaos.sh --faults', description='Train under one fault after the other; compare digests.',
        epilog='exit codes: 0 each digest is equal, 1 not, 2 wrong usage')
    p.add_argument('--brief', action='store_true', help='seconds instead of minutes each')
    p.add_argument('--only', action='append', metavar='NAME', help='this one; may be given again')
    p.add_argument('--list', action='store_true', help='name the faults, and what each is')
    p.add_argument('--bin', default='build/release/bin', help=argparse.SUPPRESS)
    p.add_argument('--logs', default='build/logs', help=argparse.SUPPRESS)
    o = p.parse_args()
    unknown = set(o.only or []) - set(faults())
    if unknown:
        p.error(f'no fault {", ".join(sorted(unknown))}; there are {", ".join(faults())}')
    return o


def about(path):
    """The first sentence of its text."""
    with open(path, encoding='utf-8') as f:
        text = f.read().split('"""')[1]
    return ' '.join(text.split('\n\n')[0].split()).partition(': ')[2]


def suffer(o, name, path):
    """Its exit code; says what it said."""
    command = [sys.executable, path, '--bin', o.bin, *(BRIEF.get(name, []) if o.brief else [])]
    log = os.path.join(o.logs, f'fault-{name}.log')
    os.makedirs(o.logs, exist_ok=True)
    with open(log, 'wb') as f:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=f, stderr=f, check=False).returncode
    with open(log, errors='replace', encoding='utf-8') as f:
        lines = f.read().splitlines() or ['no word']
    if code not in (0, SKIPPED):
        sys.stderr.write('\n'.join(lines[-30:]) + f'\nchaos.sh: exit code {code} of: {shlex.join(command)}\n')
    print(lines[-1] if code in (0, SKIPPED) else f'fault={name}: FAILED, see {log}', flush=True)
    return code


def main():
    o = parse()
    chosen = {name: path for name, path in faults().items() if o.only is None or name in o.only}
    if o.list:
        for name, path in chosen.items():
            print(f'{name:8} {about(path)}')
        return 0
    start = time.monotonic()
    codes = [suffer(o, name, path) for name, path in chosen.items()]
    skipped = codes.count(SKIPPED)
    bad = len(codes) - skipped - codes.count(0)
    print(f'faults={len(codes)} skipped={skipped} failed={bad} seconds={time.monotonic() - start:.0f} '
          f'digest={"different" if bad else "equal"}', flush=True)
    return 1 if bad else 0


if __name__ == '__main__':
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # the fault is in our process group: it has got it, too
        sys.exit(130)
