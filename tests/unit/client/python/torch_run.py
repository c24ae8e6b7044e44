"""What the tests with PyTorch share: daemons, workers that are forked, small models, and how far rounding goes.

PyTorch takes seconds to import, so it is imported once. Each worker is a fork of this process, which itself
computes nothing and has no session.
"""
import contextlib
import gc
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest

PACE = int(os.environ.get('SHD_TEST_PACE', '1'))
LIMIT_S = max(600, 120 * PACE)  # of a hang alone: a cold compiler takes minutes where all is busy
ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 4))
SKIPPED = 77
sys.path.insert(0, os.path.join(ROOT, 'bench'))
from groups import free_port  # noqa: E402, F401 for those that use this


def environment(*flags):
    """What scripts/torch_env.py has; without it: skipped."""
    found = subprocess.run([os.path.join(ROOT, 'scripts', 'torch_env.py'), '--print', *flags], capture_output=True,
                           text=True, check=False)
    if found.returncode:
        print(found.stderr.strip())
        sys.exit(SKIPPED)
    return found.stdout.strip()


def start(build, trainers=False):
    """Go on in the Python that has PyTorch, and trainers, with the package that was built; without: skipped."""
    if 'SHD_TEST_TORCH' not in os.environ:
        python, places = environment(), [os.path.join(os.path.abspath(build), 'python')]
        if trainers:
            places.append(environment('--trainers'))
        os.environ.update(SHD_TEST_TORCH='1', OMP_NUM_THREADS='1', PYTHONPATH=os.pathsep.join(places))
        os.execv(python, [python, *sys.argv])


class Daemons:
    """`shardctl up` in a directory of their own."""

    def __init__(self, build, count=2, devices=None):
        self.shardctl = os.path.join(build, 'bin', 'shardctl')
        self.directory = tempfile.mkdtemp(prefix='shd-torch-')
        self.runtime = os.path.join(self.directory, 'run')
        pairs = os.environ.get('SHD_TEST_PAIRS') == '1' and not devices
        which = ['--devices', devices] if devices else ['--daemons', str(2 * count if pairs else count)]
        subprocess.run([self.shardctl, 'up', *which, '--threads-per-daemon', '1', '--runtime-dir', self.runtime],
                       check=True, stdout=subprocess.DEVNULL)
        self.relays = []
        if os.environ.get('SHD_TEST_RELAYS') == '1':
            self._relay(build, count)
        self.address = os.path.join(self.directory, 'far') if self.relays else self._pair(count) if pairs else self.runtime
        os.environ['SHARDD_ADDRESS'] = self.address

    def _pair(self, count):
        """Each daemon has a replica on another host, as tests/lib/fixture.h has it. Returns the address."""
        arbiter, first, second = (os.path.join(self.directory, 'arbiter'), ['cpu%d' % i for i in range(count)],
                                  ['cpu%d' % (i + count) for i in range(count)])
        os.mkdir(arbiter, 0o700)
        with open(os.path.join(self.runtime, 'replicas.json'), 'w') as f:
            json.dump({'schema': 1, 'cluster': 'c0', 'arbiter': 'file:' + arbiter,
                       'hosts': [{'name': 'a', 'devices': first}, {'name': 'b', 'devices': second}]}, f)
        return self.runtime + '?' + ','.join(map('+'.join, zip(first, second)))

    def _relay(self, build, count):
        """Workers attach through two relays, as if they were on another host."""
        shardd, cluster = os.path.join(build, 'bin', 'shardd'), os.path.join(self.directory, 'cluster.json')
        pid = os.getpid()  # an address of this process alone
        subprocess.run([self.shardctl, 'keys', 'new', cluster, 'b=127.0.0.1:1',
                        'a=127.%d.%d.%d:7190' % (1 + (pid >> 16 & 127), pid >> 8 & 255, pid & 255)], check=True)
        for host, more in ('a', []), ('b', ['--from', 'a:' + ','.join('cpu%d' % i for i in range(count))]):
            directory = self.runtime if host == 'a' else os.path.join(self.directory, 'far')
            self.relays.append(subprocess.Popen(
                [shardd, '--relay', '--cluster', cluster, '--host', host, '--runtime-dir', directory, *more,
                 '--log-level', 'error']))
        while not os.path.exists(os.path.join(self.directory, 'far', 'cpu%d.sock' % (count - 1))):
            time.sleep(0.01)

    def down(self):
        for relay in self.relays:
            relay.terminate()
            relay.wait()
        subprocess.run([self.shardctl, 'down', '--yes', '--runtime-dir', self.runtime], check=True,
                       capture_output=True)
        shutil.rmtree(self.directory)


def kill_here():
    """kill -9 of this worker; run() starts another one in its place."""
    os.kill(os.getpid(), signal.SIGKILL)


def first(daemons, name):
    """Whether nobody has come here yet, in any process."""
    try:
        os.close(os.open(os.path.join(daemons.directory, name), os.O_CREAT | os.O_EXCL))
        return True
    except FileExistsError:
        return False


class Fork:
    """A worker: function() in a fork, and what it returned."""

    def __init__(self, function, rank, world):
        self.rank = rank
        self.read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._work(function, write, world)
        os.close(write)
        self.status, self.got, self.end = None, b'', time.monotonic() + LIMIT_S

    def _work(self, function, write, world):
        code = 1
        try:
            os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(world))
            answer = (True, function())
            code = 0
        except BaseException:  # to be shown by the parent
            answer = (False, traceback.format_exc())
        with os.fdopen(write, 'wb') as file:
            pickle.dump(answer, file)
        os._exit(code)

    def done(self):
        """Whether it has ended; by itself or by a signal: answer()."""
        os.set_blocking(self.read, False)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self.read, 1 << 20):
                self.got += piece
        if not pid:
            if time.monotonic() > self.end:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f'rank {self.rank} did not end in {LIMIT_S} s')
            return False
        os.close(self.read)
        self.status = status
        return True

    def answer(self):
        """(whether it ended by itself, what it returned)."""
        if os.WIFSIGNALED(self.status):
            return False, os.WTERMSIG(self.status)
        good, answer = pickle.loads(self.got)
        if not good:
            raise AssertionError(f'rank {self.rank}: {answer}')
        return True, answer


def run(function, world=1):
    """What each rank's function() returned. A worker that was killed by SIGKILL is started again."""
    forks = {rank: Fork(function, rank, world) for rank in range(world)}
    answers = [None] * world
    try:
        while forks:
            for rank, fork in list(forks.items()):
                if not fork.done():
                    continue
                del forks[rank]
                by_itself, answers[rank] = fork.answer()
                if not by_itself and answers[rank] == signal.SIGKILL:
                    forks[rank] = Fork(function, rank, world)
                elif not by_itself:
                    raise AssertionError(f'rank {rank} was ended by signal {answers[rank]}')
            time.sleep(0.005)
    finally:  # those that wait for one that has failed
        for fork in forks.values():
            os.kill(fork.pid, signal.SIGKILL)
            os.waitpid(fork.pid, 0)
    return answers


def main(daemons):
    """The tests of the program that was started, beside these daemons."""
    import torch  # of the Python that start() goes on in
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports half of PyTorch, which each fork would do anew
    gc.collect()
    gc.freeze()  # else each fork's collector looks at all of PyTorch, and writes in it: pages of its own
    try:
        passed = unittest.main(exit=False, verbosity=2).result.wasSuccessful()
    finally:
        daemons.down()
    sys.exit(not passed)
