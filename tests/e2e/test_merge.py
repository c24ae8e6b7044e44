#!/usr/bin/env python3
"""test_merge.py BIN_DIR: two groups of shd-gpt that merge now and then end with the digests of an undisturbed training,
of both groups and of the outer model, whoever is killed with SIGKILL: a worker at each point of a merge (where fail
points are built in), daemons of both kinds, and every process of a group, which comes back. One group has workers with
fixed shares, of which rank 0 merges, the other elastic ones, which all do.

Only processes that this test has started, or that daemons in its own directories name, are signalled.
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PACE = int(os.environ.get('SHD_TEST_PACE', '1'))
LIMIT_S = 120 * PACE
SEED = int(os.environ.get('SHD_TEST_SEED', str(time.time_ns() % 10000)))
EVERY, STEPS = 2, 12
MODEL = ('--layers 1 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 2 --sample 0 --eval-windows 0 --log-every 1 '
         f'--local-steps {EVERY} --steps {STEPS} --threads 1').split()
BIN = os.path.abspath(sys.argv[1])
# Of rank 0's starts in each group, one after the other.
POINTS = (['merge:begun', 'merge:returned', 'merge:outer', 'merge:put', 'put:full', 'merge:returned@2'],
          ['merge:put', 'merge:outer', 'put:all_committed', 'merge:returned', 'merge:begun'])


def tool(*words):
    return subprocess.run([os.path.join(BIN, 'shardctl'), *words], capture_output=True, text=True, check=False)


class Training:
    """Daemons of an outer model and of two groups, whose workers are started again when they are killed."""

    def __init__(self, points=((), ()), slow=(), groups=(0, 1)):
        self.directory = tempfile.mkdtemp(prefix='shd-merge-')
        self.slow = slow
        self.points = [list(of_group) for of_group in points]
        self.killed, self.workers, self.codes = 0, {}, {}
        for place in ('outer', 'g0', 'g1'):
            up = tool('up', '--daemons', '1' if place == 'g1' else '2', '--threads-per-daemon', '1', '--runtime-dir',
                      self.path(place))
            assert up.returncode == 0, up.stderr
        for group in groups:
            for rank in (0, 1):
                self.start(group, rank)

    def path(self, name):
        return os.path.join(self.directory, name)

    def worker(self, place, *flags):
        """One of a group that is one worker, on the daemons of `place`."""
        return subprocess.Popen(
            [os.path.join(BIN, 'shd-gpt'), *MODEL, '--address', self.path(place), '--outer', self.path('outer'), *flags],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={key: value for key, value in os.environ.items() if not key.startswith(('RANK', 'WORLD', 'SHARDD'))})

    def start(self, group, rank):
        env = {**os.environ, 'RANK': str(rank), 'WORLD_SIZE': '2', 'SHARDD_ADDRESS': self.path(f'g{group}'),
               'SHARDD_ELASTIC': str(group), 'SHARDD_FAIL': ''}
        if rank == 0 and self.points[group]:
            env['SHARDD_FAIL'] = self.points[group].pop(0)
        with open(self.path(f'g{group}.{rank}'), 'ab') as out:
            self.workers[group, rank] = subprocess.Popen(
                [os.path.join(BIN, 'shd-gpt'), *MODEL, *self.slow, '--group', f'{group}/2', '--outer', self.path('outer')],
                env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def said(self, group, rank=0):
        with open(self.path(f'g{group}.{rank}'), encoding='utf-8', errors='replace') as file:
            return file.read()

    def step(self, group):
        """The last one that was told."""
        steps = [line.split()[1].split('/')[0] for line in self.said(group).splitlines() if line.startswith('step ')]
        return int(steps[-1]) if steps else 0

    def kill_daemons(self, place):
        try:
            status = json.loads(tool('status', '--json', '--runtime-dir', self.path(place)).stdout)
        except ValueError:
            return  # they are on their way
        for daemon in status:
            if isinstance(daemon.get('pid'), int):
                os.kill(daemon['pid'], signal.SIGKILL)
                self.killed += 1

    def kill_workers(self, group):
        for rank in (0, 1):
            if (group, rank) in self.workers and self.workers[group, rank].poll() is None:
                self.workers[group, rank].kill()

    def look(self):
        """Start again who was killed. Whether all have ended by themselves."""
        for (group, rank), worker in list(self.workers.items()):
            if worker.poll() is None:
                continue
            del self.workers[group, rank]
            if worker.returncode == -signal.SIGKILL:
                self.killed += 1
                self.start(group, rank)
            elif worker.returncode != 0:
                raise AssertionError(f'group {group}, rank {rank} ended with {worker.returncode}:\n'
                                     f'{self.said(group, rank)}')
        return not self.workers

    def run(self, disturb=lambda training: None):
        """The digests of both groups and of the outer model."""
        end = time.monotonic() + LIMIT_S
        while not self.look():
            if time.monotonic() > end:
                raise AssertionError('not done in %d s:\n%s' % (LIMIT_S, '\n'.join(
                    self.said(group, rank) for group in (0, 1) for rank in (0, 1))))
            disturb(self)
            time.sleep(0.01)
        outer = tool('digest', '--runtime-dir', self.path('outer'))
        groups = [tool('digest', '--runtime-dir', self.path(f'g{group}')) for group in (0, 1)]
        return [done.stdout.strip() or done.stderr for done in (outer, *groups)]

    def end(self):
        for worker in self.workers.values():
            worker.kill()
            worker.wait()
        for place in ('outer', 'g0', 'g1'):
            tool('down', '--yes', '--runtime-dir', self.path(place))
        shutil.rmtree(self.directory)


def trained(name, points=((), ()), disturb=lambda training: None, slow=()):
    training = Training(points, slow)
    try:
        digests = training.run(disturb)
        left = training.points[0]
    finally:
        training.end()
    print(f'{name}: {training.killed} killed', flush=True)
    assert not left, f'nobody was killed at {left}'
    return digests


def at_random(seed):
    """Something is killed each time a group has told of some more steps; all of group 1 once."""
    draw, next_at, whole = random.Random(seed), [1], [True]

    def disturb(training):
        if training.step(0) + training.step(1) < next_at[0]:
            return
        next_at[0] += draw.randint(2, 6)
        if whole[0] and training.step(1) >= STEPS // 3:
            whole[0] = False
            training.kill_workers(1)
            training.kill_daemons('g1')
            return
        what = draw.choice(['outer', 'outer', 'g0', 'g1', 'workers 0', 'workers 1'])
        if what.startswith('workers'):
            training.kill_workers(int(what[-1]))
        else:
            training.kill_daemons(what)
    return disturb


def joins():
    """A second group comes to an outer model that had one, and goes again, both between two merges."""
    training = Training(groups=())
    try:
        told = []
        for flags in (('--steps', str(3 * EVERY), '--group', '0/1'),), (
                ('--steps', str(7 * EVERY), '--group', '0/1'), ('--steps', str(2 * EVERY), '--group', '1/1', '--joined', '4')):
            workers = [training.worker(f'g{index}', *words) for index, words in enumerate(flags)]
            told += [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
            assert not any(worker.returncode for worker in workers), told
            for micro_batches, at in ((2, 4), (1, 6)) if len(told) == 1 else ():
                done = tool('set', '--runtime-dir', training.path('outer'), 'gpt.outer', f'micro_batches={micro_batches}',
                            '--at', str(at))
                assert done.returncode == 0, done.stderr
        outer = tool('digest', '--runtime-dir', training.path('outer')).stdout
        assert 'step=7 ' in outer, (outer, told)
        late = training.worker('g1', '--steps', str(4 * EVERY), '--group', '1/1', '--joined', '4')
        words = late.communicate(timeout=LIMIT_S)[0]
        assert late.returncode == 1 and 'is of 1 groups, and this is group 1' in words, words
    finally:
        training.end()


def main():
    print(f'seed {SEED}')
    joins()
    whole = trained('undisturbed')
    assert all(digest.startswith('digest sha256:') for digest in whole), whole
    assert len({digest.split()[1] for digest in whole}) == 3, whole
    runs = {'random': ((), at_random(SEED))}
    if b'merge:returned' in open(os.path.join(BIN, 'shd-gpt'), 'rb').read() + open(
            os.path.join(BIN, os.pardir, 'lib', 'libshd.so'), 'rb').read():
        runs['points'] = (POINTS, None)
    for name, (points, disturb) in runs.items():
        slow = () if points else ('--slow', '30')
        found = trained(name, points or ((), ()), disturb or (lambda training: None), slow)
        assert found == whole, f'{name}, seed {SEED}: {found}, undisturbed {whole}'
    print('digests are equal')


main()
