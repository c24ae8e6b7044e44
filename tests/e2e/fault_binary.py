#!/usr/bin/env python3
"""The fault "binary" of scripts/chaos.sh --faults: the daemons' program is away for a minute, both
daemons die and a worker; the digest must be the undisturbed one.

fault_binary.py --bin BIN [--seconds N] [--steps N]: the last line is `fault=binary ... digest=equal`
(exit 0), or says what is wrong (exit 1).
"""
import argparse
import os
import shutil
import sys
import tempfile
import time

from one_run import SLOW, OneRun, Wrong, judge, undisturbed


def stay_away(run, seconds):
    """The keeper must live as long as the program is away, and say which daemon it cannot start."""
    run.kill('daemon cpu0')
    run.kill('worker rank 1')
    run.says('daemon cpu0: cannot run ')
    middle = time.monotonic() + seconds / 2
    end = middle + seconds / 2
    killed = False
    while time.monotonic() < end:
        if run.process.poll() is not None:
            raise Wrong(f'it ended with {run.process.returncode} while the program was away')
        if not killed and time.monotonic() > middle:
            run.kill('daemon cpu1')
            killed = True
        time.sleep(0.05)
    if seconds >= 20 and 'its state is kept' not in run.words():
        raise Wrong('it did not say that the state is kept')


def fault(o, directory):
    want = undisturbed(o.bin, o.steps)
    program, away = os.path.join(directory, 'shardd'), os.path.join(directory, 'away')
    shutil.copy2(os.path.join(o.bin, 'shardd'), program)
    run = OneRun(o.bin, directory, o.steps, extra=SLOW, env={'SHARDD_BIN': program})
    try:
        run.until('a step was done', lambda: os.path.getsize(run.out) > 0)
        os.rename(program, away)
        stay_away(run, o.seconds)
        os.rename(away, program)
        run.end(0, want)
    except Wrong as wrong:
        raise Wrong(f'{wrong}: {run.words()[-2000:]}') from wrong
    finally:
        run.close()
    return f'away={o.seconds:g}'


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n\n', maxsplit=1)[0])
    p.add_argument('--bin', default='build/release/bin')
    p.add_argument('--seconds', type=float, default=60, help='how long it is away (60)')
    p.add_argument('--steps', type=int, default=60, help='of the training (60)')
    o = p.parse_args()
    o.bin = os.path.abspath(o.bin)
    with tempfile.TemporaryDirectory(prefix='shd-binary-') as directory:
        sys.exit(judge('binary', lambda: fault(o, directory)))


if __name__ == '__main__':
    main()
