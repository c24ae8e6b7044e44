#!/usr/bin/env python3
"""The fault "oom" of scripts/chaos.sh --faults: a training run in a small cgroup that another process
fills until the OOM killer takes a daemon; the digest must be the undisturbed one.

fault_oom.py --bin BIN [--kills N]: the last line is `fault=oom ... digest=equal` (exit 0), or says what
is wrong (exit 1); 77: no cgroup with a limit of memory can be made here (needs root). The cgroup is
below this process's own, and gone at the end. The process that fills it asks the OOM killer to take the
daemons first, and ends when one was taken, as a job that has crashed does. Standard library only.
"""
import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

MIB = 1 << 20
ROOM = 96 * MIB  # beyond what the run has taken
TRAINING = ('--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --sample 0 '
            '--eval-windows 0 --steps 120').split()
SLOW = ['--slow', '20']  # so that there is time to fill
DAEMONS = 2
LIMIT_S = 120 * int(os.environ.get('SHD_TEST_PACE', '1'))
SKIPPED = 77

# Fills its cgroup for good: what is taken is touched, and what is refused is asked for again.
FILL = ('import mmap, time\n'
        'held = []\n'
        'while True:\n'
        '    m = mmap.mmap(-1, 1 << 20)\n'
        '    for at in range(0, 1 << 20, 4096):\n'
        '        m[at] = 1\n'
        '    held.append(m)\n')


class Cgroup:
    """One of version 1 or 2 with a limit that can be changed."""

    def __init__(self):
        name = f'shd-oom-{os.getpid()}'
        self.path = None
        for base, self.limit, self.usage in (
                ('/sys/fs/cgroup/memory', 'memory.limit_in_bytes', 'memory.usage_in_bytes'),
                ('/sys/fs/cgroup', 'memory.max', 'memory.current')):
            path = os.path.join(base, name)
            try:
                os.mkdir(path)
            except OSError:
                continue
            if os.access(os.path.join(path, self.limit), os.W_OK):
                self.path = path
                return
            os.rmdir(path)

    def write(self, file, value):
        with open(os.path.join(self.path, file), 'w', encoding='ascii') as f:
            f.write(f'{value}\n')

    def read(self, file):
        with open(os.path.join(self.path, file), encoding='ascii') as f:
            return f.read()

    def enter(self):
        self.write('cgroup.procs', os.getpid())

    def kills(self):
        """How often the OOM killer has struck here."""
        events = 'memory.oom_control' if self.limit.endswith('in_bytes') else 'memory.events'
        found = re.search(r'^oom_kill (\d+)', self.read(events), re.M)
        return int(found.group(1)) if found else 0

    def remove(self):
        for _ in range(500):
            try:
                os.rmdir(self.path)
                return
            except OSError:
                time.sleep(0.01)


class Run:
    """`shardctl run`, perhaps in a cgroup."""

    def __init__(self, o, cgroup, extra):
        command = [os.path.join(o.bin, 'shardctl'), 'run', '--verbose', '--daemons', str(DAEMONS),
                   '--workers', '2', '--', os.path.join(o.bin, 'shd-gpt'), *TRAINING, *extra]
        self.out = tempfile.NamedTemporaryFile()
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.out,
                                        stderr=subprocess.STDOUT,
                                        preexec_fn=cgroup.enter if cgroup else None)

    def text(self):
        with open(self.out.name, encoding='utf-8', errors='replace') as f:
            return f.read()

    def digest(self):
        lines = [line for line in self.text().splitlines() if line.startswith('digest sha256:')]
        return lines[-1] if lines else ''

    def daemons(self):
        """Live ones: [pid]."""
        found = []
        for pid in set(re.findall(r'(?: pid=|again as pid )(\d+)', self.text())):
            try:
                with open(f'/proc/{pid}/comm', encoding='ascii') as f:
                    if f.read().strip() == 'shardd':
                        found.append(int(pid))
            except OSError:
                continue
        return found

    def ended(self):
        return self.process.poll() is not None

    def wait(self):
        end = time.monotonic() + LIMIT_S
        while not self.ended() and time.monotonic() < end:
            time.sleep(0.02)
        return self.ended()


def soon(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def prefer(pids):
    """The OOM killer takes these first."""
    for pid in pids:
        with open(f'/proc/{pid}/oom_score_adj', 'w', encoding='ascii') as f:
            f.write('1000')


def strike(run, cgroup):
    """Fill the cgroup until a daemon is killed; '' or what is wrong."""
    before, pids = cgroup.kills(), run.daemons()
    if len(pids) != DAEMONS:
        return f'{len(pids)} daemons of {DAEMONS} run'
    prefer(pids)
    cgroup.write(cgroup.limit, int(cgroup.read(cgroup.usage)) + ROOM)
    filler = subprocess.Popen([sys.executable, '-c', FILL], preexec_fn=cgroup.enter)
    struck = soon(lambda: run.ended() or set(run.daemons()) != set(pids))
    filler.kill()
    filler.wait()
    if run.ended() or not struck:
        return 'the run ended' if run.ended() else 'no daemon was killed'
    if cgroup.kills() == before:
        return 'a daemon ended, and not by the OOM killer'
    return '' if soon(lambda: run.ended() or len(run.daemons()) == len(pids)) else 'it did not come back'


def disturbed(o, cgroup):
    """The run with its kills: (run, what is wrong)."""
    run = Run(o, cgroup, SLOW)
    wrong = '' if soon(lambda: run.ended() or 'step ' in run.text()) else 'training did not begin'
    for _ in range(o.kills):
        wrong = wrong or strike(run, cgroup)
        time.sleep(0.3)
    cgroup.write(cgroup.limit, 1 << 40)
    if wrong or not run.wait():
        run.process.terminate()
        run.process.wait()
        return run, wrong or 'it did not end'
    return run, '' if run.process.returncode == 0 else f'it ended with {run.process.returncode}'


def main():
    p = argparse.ArgumentParser(prog='fault_oom.py')
    p.add_argument('--bin', default='build/release/bin')
    p.add_argument('--kills', type=int, default=3)
    o = p.parse_args()
    cgroup = Cgroup()
    if cgroup.path is None:
        print('fault=oom skipped: no cgroup with a limit of memory can be made here')
        return SKIPPED
    try:
        want = Run(o, None, [])
        if not want.wait() or not want.digest():
            print(want.text() + 'fault=oom: the undisturbed run failed')
            return 1
        run, wrong = disturbed(o, cgroup)
        kills = cgroup.kills()
    finally:
        cgroup.remove()
    if not wrong and run.digest() != want.digest():
        wrong = f'digest differs: {run.digest()} for {want.digest()}'
    if wrong:
        print(run.text() + f'fault=oom kills={kills}: {wrong}')
        return 1
    print(f'fault=oom kills={kills} digest=equal')
    return 0


if __name__ == '__main__':
    sys.exit(main())
