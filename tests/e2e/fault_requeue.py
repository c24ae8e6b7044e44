#!/usr/bin/env python3
"""The fault "requeue" of scripts/chaos.sh --faults: a batch system kills all of a job and starts
the same command line again, several times; the digest must be the undisturbed one.

fault_requeue.py --bin BIN [--kills N] [--seed N]: the last line is `fault=requeue ... digest=equal`
(exit 0), or says what is wrong (exit 1). What runs is killed by SIGKILL, the whole session that the
command line was started in, as a batch system's cgroup is. Standard library only.
"""
import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

TRAINING = ('--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --sample 0 '
            '--eval-windows 0 --steps 60').split()
SLOW = ['--slow', '30']  # so that there is time to kill in
LIMIT_S = 120 * int(os.environ.get('SHD_TEST_PACE', '1'))


def processes(session):
    """Live ones of that session: [pid]."""
    found = []
    for name in os.listdir('/proc'):
        try:
            with open(f'/proc/{name}/stat', 'rb') as f:
                fields = f.read().rpartition(b')')[2].split()
        except OSError:
            continue
        if name.isdigit() and int(fields[3]) == session and fields[0] not in b'ZX':
            found.append(int(name))
    return found


def kill_session(session):
    """All of it, also what is started meanwhile; False: something does not end."""
    end = time.monotonic() + LIMIT_S
    while (pids := processes(session)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def last_digest(text):
    lines = [line for line in text.splitlines() if line.startswith('digest sha256:')]
    return lines[-1] if lines else ''


class Job:
    """One submission of the command line."""

    def __init__(self, o, directory, extra):
        self.command = [os.path.join(o.bin, 'shardctl'), 'run', '--daemons', '2', '--workers', '2',
                        '--resume', directory, '--checkpoint-every', '5', '--keep', '2', '--',
                        os.path.join(o.bin, 'shd-gpt'), *TRAINING, *extra]
        self.out = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self.out,
                                        stderr=subprocess.STDOUT, start_new_session=True)

    def text(self):
        self.out.seek(0)
        return self.out.read()

    def kill(self):
        gone = kill_session(self.process.pid)
        self.process.wait()
        return gone


def latest(directory):
    try:
        with open(os.path.join(directory, 'LATEST'), encoding='ascii') as f:
            return f.read().strip()
    except OSError:
        return ''


def wait_for_more(job, directory, was):
    """Until LATEST is another one; what is wrong, '' when nothing is."""
    end = time.monotonic() + LIMIT_S
    while latest(directory) == was:
        if job.process.poll() is not None:
            return f'ended by itself with {job.process.returncode}: {job.text()[-2000:]}'
        if time.monotonic() > end:
            return f'saved nothing within {LIMIT_S} s: {job.text()[-2000:]}'
        time.sleep(0.01)
    return ''


def disturbed(o, rng, directory):
    """Start and kill o.kills times; what is wrong, '' when nothing is."""
    for turn in range(o.kills):
        was = latest(directory)
        job = Job(o, directory, SLOW)
        try:
            # Some are killed before they have done anything, or while they restore.
            if turn % 3 == 2:
                time.sleep(rng.uniform(0, 0.5))
                wrong = ''
            else:
                wrong = wait_for_more(job, directory, was)
                time.sleep(rng.uniform(0, 0.1))
        finally:
            gone = job.kill()
        if wrong or not gone:
            return wrong or f'a process of the killed job lives on after {LIMIT_S} s'
    return ''


def requeue(o):
    """(True, the line that says so) or (False, what is wrong)."""
    rng = random.Random(o.seed)
    start = time.monotonic()
    want = last_digest(subprocess.run([os.path.join(o.bin, 'shd-gpt'), '--standalone', *TRAINING],
                                      capture_output=True, text=True, check=True).stdout)
    directory = tempfile.mkdtemp(prefix='shd-requeue-')
    try:
        wrong = disturbed(o, rng, directory)
        if wrong:
            return False, wrong
        job = Job(o, directory, [])
        try:
            code = job.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            job.kill()
            code = f'none within {LIMIT_S} s'
        got = last_digest(job.text())
        if code != 0 or got != want:
            return False, f'the last one: exit code {code}, {got!r}, not {want!r}: ' + \
                job.text()[-2000:]
        return True, (f'fault=requeue kills={o.kills} seed={o.seed} '
                      f'seconds={time.monotonic() - start:.0f} digest=equal')
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n\n', maxsplit=1)[0])
    p.add_argument('--bin', default='build/release/bin')
    p.add_argument('--kills', type=int, default=6)
    p.add_argument('--seed', type=int, default=1)
    good, text = requeue(p.parse_args())
    print(text if good else f'fault=requeue: {text}', flush=True)
    sys.exit(0 if good else 1)


if __name__ == '__main__':
    main()
