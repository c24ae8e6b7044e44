#!/usr/bin/env python3
"""The fault "disk" of scripts/chaos.sh --faults: the disk of the checkpoints is full before the last
save, and stays so; nothing is lost, and the digest of what is saved elsewhere is the undisturbed one.

fault_disk.py --bin BIN [--steps N]: the last line is `fault=disk ... digest=equal` (exit 0), or says
what is wrong (exit 1); exit 77 where nobody may mount a small disk. It is mounted where only this
program and its children see it.
"""
import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile

from one_run import LIMIT_S, SLOW, OneRun, Wrong, digest_of, judge, undisturbed

INSIDE = 'SHD_FAULT_DISK'  # set in a mount namespace of our own: a directory
SKIPPED = 77


def mounted(o, directory):
    """True, and this program goes on, in the namespace; else its exit code in one."""
    if INSIDE in os.environ:
        return True
    for flags in (['-m'], ['-r', '-m']):
        words = ['unshare', *flags]
        if subprocess.run([*words, 'mount', '-t', 'tmpfs', 'none', directory], stderr=subprocess.DEVNULL,
                          check=False).returncode == 0:
            return subprocess.run(
                [*words, 'sh', '-c', 'mount -t tmpfs -o size=8m none "$1" && shift && exec "$@"', 'sh',
                 directory, sys.executable, os.path.abspath(__file__), '--bin', o.bin, '--steps',
                 str(o.steps)], env={**os.environ, INSIDE: directory}, check=False).returncode
    print('fault=disk: skipped, a small disk cannot be mounted here', flush=True)
    return SKIPPED


def fill(path):
    """All the room there is."""
    with open(path, 'wb', buffering=0) as f:
        for piece in (1 << 16, 1 << 12, 1):
            try:
                while f.write(bytes(piece)) == piece:
                    pass
            except OSError:
                pass


def keeps(pid, name):
    """Whether that keeper has such a segment."""
    files = f'/proc/{pid}/fd'
    for fd in os.listdir(files):
        with contextlib.suppress(FileNotFoundError):  # closed since
            if name in os.readlink(os.path.join(files, fd)):
                return True
    return False


def shardctl(o, *words):
    done = subprocess.run([os.path.join(o.bin, 'shardctl'), *words], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise Wrong(f'shardctl {" ".join(words)}: {done.returncode}, {done.stderr[-1000:]}')
    return done.stdout


def fault(o, small, directory):
    want = undisturbed(o.bin, o.steps)
    saves, elsewhere = os.path.join(small, 'run'), os.path.join(directory, 'elsewhere')
    run = OneRun(o.bin, directory, o.steps, ['--checkpoint', saves, '--checkpoint-every', '5', '--keep', '1'],
                 SLOW)
    try:
        run.until('a save', lambda: os.path.exists(os.path.join(saves, 'LATEST')))
        fill(os.path.join(small, 'full'))
        # Beside a worker that stands still a daemon has one more segment kept. That ends nothing.
        run.kill('worker rank 0', signal.SIGSTOP)
        run.until('gradients were copied aside', lambda: keeps(run.process.pid, 'shardd-spill'))
        run.kill('worker rank 0', signal.SIGCONT)
        run.says('No space left on device')
        run.says('NOT SAVED: the last save')
        place = re.search(r"shardctl down --runtime-dir '(.*)'", run.words()).group(1)
        saved = shardctl(o, 'checkpoint', '--runtime-dir', place, elsewhere)
        if want.split()[1] not in saved:
            raise Wrong(f'saved elsewhere: {saved!r}; wanted {want!r}')
        shardctl(o, 'down', '--runtime-dir', place)
        run.end(73, want)
        shardctl(o, 'checkpoint', '--verify', saves)  # the one before is whole
        again = shardctl(o, 'run', '--restore', elsewhere, '--', os.path.join(o.bin, 'shardctl'), 'digest')
        if want.split()[1] not in again:
            raise Wrong(f'restored: {digest_of(again)!r}; wanted {want!r}')
    except Wrong as wrong:
        raise Wrong(f'{wrong}: {run.words()[-2000:]}') from wrong
    finally:
        run.close()
    return 'saved=elsewhere'


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n\n', maxsplit=1)[0])
    p.add_argument('--bin', default='build/release/bin')
    p.add_argument('--steps', type=int, default=40, help='of the training (40)')
    o = p.parse_args()
    o.bin = os.path.abspath(o.bin)
    with tempfile.TemporaryDirectory(prefix='shd-disk-') as directory:
        code = mounted(o, directory)
        if code is True:
            code = judge('disk', lambda: fault(o, os.environ[INSIDE], directory))
        sys.exit(code)


if __name__ == '__main__':
    main()
