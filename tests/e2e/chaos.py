#!/usr/bin/env python3
"""Train under `shardctl run` while its daemons and workers are killed at random; compare digests.

Called by scripts/chaos.sh, which explains it. Only children of the shardctl that this program
started are killed, each by a pidfd taken while it was one, so a reused pid is never hit. Standard
library only.
"""
import argparse
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time

MODEL = ('--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --sample 0 '
         '--eval-windows 0').split()
PROBE_STEPS = 50        # to find how many steps make a run of RUN_S
RUN_S = 5.0
HANG_S = 600 * int(os.environ.get('SHD_TEST_PACE', '1'))
DOUBLE_SHARE = 0.25     # of the events: two processes within DOUBLE_S_MAX
DOUBLE_S_MAX = 0.005
ELASTIC_JOIN = 0.3      # chance at each event that a worker is added, or asked to leave
ELASTIC_LEAVE = 0.1
AGAIN = re.compile(r': started again as pid \d+')
LATE = 'was killed by signal 9 (SIGKILL) while stopping'


def parse():
    p = argparse.ArgumentParser(
        prog='chaos.sh', usage='%(prog)s [flags] [-- shd-gpt arguments]',
        description='Train while daemons and workers are killed at random; compare digests.',
        epilog='exit codes: 0 all digests are equal, 1 not, or a run failed, 2 wrong usage')
    p.add_argument('--kills', type=int, help='go on until so many are made (100)')
    p.add_argument('--seconds', type=float, help='or for about so long (no limit)')
    p.add_argument('--seed', type=int, default=1, help='of the choice of victims and times (1)')
    p.add_argument('--daemons', type=int, default=2)
    p.add_argument('--devices', help='the daemons\' devices instead, as gpu0,cpu0')
    p.add_argument('--workers', type=int, default=2)
    p.add_argument('--state', metavar='WHERE', default='memory',
                   help='the daemons\' state: memory or file:DIR (the undisturbed one\'s: memory)')
    p.add_argument('--publish', metavar='WHERE', default='memory', help='likewise what workers read')
    p.add_argument('--rate', type=float, default=5, help='kills per second, on average (5)')
    p.add_argument('--elastic', action='store_true', help='workers also join and leave')
    p.add_argument('--steps', type=int, help='of one run (about 5 s worth)')
    p.add_argument('--verbose', action='store_true', help='say who is killed when')
    p.add_argument('--bin', default='build/release/bin', help=argparse.SUPPRESS)
    p.add_argument('--logs', default='build/logs', help=argparse.SUPPRESS)
    words = sys.argv[1:]
    cut = words.index('--') if '--' in words else len(words)
    o = p.parse_args(words[:cut])
    o.extra = words[cut + 1:]
    if o.kills is None:
        o.kills = 100 if o.seconds is None else sys.maxsize
    if o.kills < 0 or o.daemons < 1 or o.workers < 1 or o.rate <= 0:
        p.error('--kills must be at least 0, --daemons and --workers 1, --rate above 0')
    return o


def say(text):
    print(f'chaos.sh: {text}', file=sys.stderr, flush=True)


# -- The processes of a run ------------------------------------------------------------------------

def read(path):
    try:
        with open(path, 'rb') as f:
            return f.read()
    except OSError:
        return b''


def parent_and_state(pid):
    fields = read(f'/proc/{pid}/stat').rpartition(b')')[2].split()
    return (int(fields[1]), fields[0]) if len(fields) > 1 else (0, b'X')


def role(pid):
    """'cpu0' or 'rank 1'; '' when it is neither, or has not begun to be."""
    for var in read(f'/proc/{pid}/environ').split(b'\0'):
        if var.startswith(b'RANK='):
            return 'rank ' + var[5:].decode()
    argv = read(f'/proc/{pid}/cmdline').split(b'\0')  # a worker may have a --device, too
    if b'--device' in argv[:-1]:
        return argv[argv.index(b'--device') + 1].decode()
    return ''


def children(parent):
    """Live daemons and workers of that shardctl: {role: pid}."""
    found = {}
    for name in os.listdir('/proc'):
        if not name.isdigit():
            continue
        pid = int(name)
        ppid, state = parent_and_state(pid)
        # Between fork and exec it still looks like shardctl, whose environment has no RANK.
        if ppid == parent and state not in b'ZX':
            found[role(pid)] = pid
    found.pop('', None)
    return found


class Victim:
    def __init__(self, parent, name, pid):
        self.name, self.pid, self.fd = name, pid, -1
        try:
            self.fd = os.pidfd_open(pid)
            if parent_and_state(pid)[0] != parent:  # the fd is of who has the pid now: check again
                self.close()
        except OSError:
            pass

    def kill(self):
        """True when it was alive and is not any more."""
        if self.fd < 0:
            return False
        try:
            if parent_and_state(self.pid)[1] in b'ZX':
                return False
            signal.pidfd_send_signal(self.fd, signal.SIGKILL)
            return True
        except OSError:
            return False
        finally:
            self.close()

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


# -- One run ---------------------------------------------------------------------------------------

class Run:
    def __init__(self, o, name, steps):
        os.makedirs(o.logs, exist_ok=True)
        self.o, self.steps = o, steps
        self.log = os.path.join(o.logs, f'chaos-{name}.log')
        self.out_path = os.path.join(o.logs, f'chaos-{name}.out')
        workers = f'1..{o.workers}' if o.elastic and name != 'undisturbed' else f'{o.workers}'
        daemons = ['--devices', o.devices] if o.devices else ['--daemons', str(o.daemons)]
        on_files = name != 'undisturbed'  # whose bits it must have
        homes = ['--state', o.state if on_files else 'memory', '--publish', o.publish if on_files else 'memory']
        self.command = [os.path.join(o.bin, 'shardctl'), 'run', *daemons, *homes, '--workers', workers]
        if o.elastic:
            self.command += ['--elastic']
        self.command += ['--', os.path.join(o.bin, 'shd-gpt'), *MODEL, *o.extra,
                         '--steps', str(steps)]
        self.kills = self.doubles = 0
        self.start = time.monotonic()
        with open(self.log, 'wb') as err, open(self.out_path, 'wb') as out:
            self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=out,
                                            stderr=err)

    def strike(self, rng):
        """Kill one process, or two at once. The draws do not depend on who is there."""
        count = 2 if rng.random() < DOUBLE_SHARE else 1
        draws = [rng.random() for _ in range(2)]
        gap = rng.uniform(0, DOUBLE_S_MAX)
        there = children(self.process.pid)
        if not any(name.startswith('rank ') for name in there):
            return  # before the first worker, or after the last: a daemon's end then is another test
        victims = []
        for draw in draws[:count]:
            names = sorted(set(there) - {v.name for v in victims})
            if names:
                name = names[int(draw * len(names))]
                victims.append(Victim(self.process.pid, name, there[name]))
        made = []
        for i, victim in enumerate(victims):
            if i > 0:
                time.sleep(gap)
            if victim.kill():
                made.append(f'{victim.name} ({victim.pid})')
        self.kills += len(made)
        self.doubles += len(made) == 2
        if self.o.verbose and made:
            say(f'{time.monotonic() - self.start:7.3f} s: killed {", ".join(made)}')

    def join_or_leave(self, rng):
        draw = rng.random()
        if not self.o.elastic or self.process.poll() is not None:
            return
        if draw < ELASTIC_JOIN:
            self.process.send_signal(signal.SIGUSR1)
        elif draw < ELASTIC_JOIN + ELASTIC_LEAVE:
            self.process.send_signal(signal.SIGUSR2)

    def disturb(self, rng, kills_max, until):
        """Events at a mean distance that makes --rate kills a second, until the run has ended."""
        mean = (1 + DOUBLE_SHARE) / self.o.rate
        while self.kills < kills_max and time.monotonic() < until:
            try:
                self.process.wait(rng.uniform(0, 2 * mean))
                return
            except subprocess.TimeoutExpired:
                pass
            self.strike(rng)
            self.join_or_leave(rng)

    def end(self, limit_s):
        """Wait for the end; returns what is wrong, '' when nothing is."""
        try:
            code = self.process.wait(max(1.0, self.start + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            return f'did not end within {limit_s:.0f} s'
        # The last worker may have left between our look and our strike: that daemon is named.
        if code == 1 and LATE in self.errors() and self.digest():
            return ''
        return '' if code == 0 else f'ended with code {code}'

    def errors(self):
        return read(self.log).decode(errors='replace')

    def digest(self):
        """The last digest line of the wanted step; a killed rank 0 may have printed one before."""
        lines = [line for line in read(self.out_path).decode(errors='replace').splitlines()
                 if line.startswith('digest sha256:') and line.endswith(f' step={self.steps}')]
        return lines[-1] if lines else ''


def undisturbed(o, steps):
    run = Run(o, 'undisturbed', steps)
    wrong = run.end(HANG_S)
    seconds = time.monotonic() - run.start
    if wrong or not run.digest():
        sys.stderr.write(run.errors()[-4000:])
        say(f'the undisturbed run {wrong or "printed no digest"}: {shlex.join(run.command)}')
        sys.exit(1)
    return run.digest(), seconds


def reproduce(o, run, seed):
    flags = ['--kills', str(run.kills), '--seed', str(seed), '--daemons', str(o.daemons),
             '--workers', str(o.workers), '--rate', f'{o.rate:g}', '--steps', str(run.steps)]
    if o.devices:
        flags += ['--devices', o.devices]
    if o.elastic:
        flags += ['--elastic']
    if o.extra:
        flags += ['--', *o.extra]
    return f'scripts/chaos.sh {shlex.join(flags)}'


def fail(o, run, seed, wrong, want):
    lines = run.errors().splitlines()
    sys.stderr.write('\n'.join(lines[-30:]) + '\n')
    say(f'seed {seed}, {run.kills} kills: {wrong}')
    say(f'wanted {want}')
    say(f'got    {run.digest() or "no digest"}; output: {run.log}, {run.out_path}')
    print(reproduce(o, run, seed), flush=True)
    sys.exit(1)


def main():
    o = parse()
    start = time.monotonic()
    until = start + o.seconds if o.seconds is not None else float('inf')
    steps = o.steps
    if steps is None:
        seconds = undisturbed(o, PROBE_STEPS)[1]
        steps = max(PROBE_STEPS, int(PROBE_STEPS * RUN_S / seconds) // 10 * 10)
    want, seconds = undisturbed(o, steps)
    limit_s = HANG_S + 20 * seconds
    say(f'undisturbed: {want} in {seconds:.1f} s')
    kills = doubles = runs = again = 0
    while runs == 0 or (kills < o.kills and time.monotonic() < until):
        seed = o.seed + runs
        rng = random.Random(seed)
        run = Run(o, f'seed-{seed}', steps)
        run.disturb(rng, o.kills - kills, until)
        wrong = run.end(limit_s)
        if wrong or run.digest() != want:
            fail(o, run, seed, wrong or 'another digest', want)
        restarts = len(AGAIN.findall(run.errors()))
        say(f'seed {seed}: {run.kills} kills, {run.doubles} double, {restarts} restarts, '
            f'{time.monotonic() - run.start:.1f} s: digest is equal')
        if o.kills > 0 and run.kills == 0 and time.monotonic() < until:
            fail(o, run, seed, 'the run is too short to kill in: give more --steps', want)
        os.remove(run.log)
        os.remove(run.out_path)
        kills, doubles, again = kills + run.kills, doubles + run.doubles, again + restarts
        runs += 1
    print(f'kills={kills} double={doubles} restarts={again} runs={runs} steps={steps} '
          f'seconds={time.monotonic() - start:.0f} digest=equal', flush=True)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:  # shardctl is in our process group: it has got it, too
        sys.exit(130)
