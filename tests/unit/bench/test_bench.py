#!/usr/bin/env python3
"""test_bench.py BUILD [TEST...]: what benchmarks count, and those that nothing else runs, as small as can be."""
import json
import mmap
import os
import subprocess
import sys
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
BUILD = os.path.abspath(sys.argv.pop(1))
PACE = int(os.environ.get('SHD_TEST_PACE', '1'))
sys.path.insert(0, os.path.join(ROOT, 'bench'))
import groups  # noqa: E402 what is tested


def read_figures(text):
    return {f['name']: f for f in map(json.loads, text.splitlines())}


class Control(unittest.TestCase):
    def test_a_returns_processor_time_is_the_workers_and_the_daemons(self):
        done = subprocess.run([os.path.join(BUILD, 'bin', 'bench_control'), '--rounds', '1', '--seconds', '0.05',
                               '--json'], capture_output=True, text=True, timeout=60 * PACE, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = read_figures(done.stdout)
        both, worker, daemon = (found[f'control.return.{name}']['value'] for name in ('cpu_us', 'worker_us', 'daemon_us'))
        self.assertGreater(worker, 0.1)
        self.assertGreater(daemon, 0.1)
        self.assertAlmostEqual(both, worker + daemon, delta=both / 1000)
        self.assertEqual(found['control.s64.p99_us']['n'], 1)


class Memory(unittest.TestCase):
    """memory_mb() of two processes that have done what is said."""
    MB = 64

    def measure(self, *works):
        children = []
        for work in works:
            ready, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                kept = work()  # noqa: F841 what it has touched must live
                os.write(write, b'.')
                os.read(os.pipe()[0], 1)  # until it is killed
            os.read(ready, 1)
            os.close(ready), os.close(write)
            children.append(pid)
        try:
            return groups.memory_mb(children)
        finally:
            for pid in children:
                os.kill(pid, 9)
                os.waitpid(pid, 0)

    def shared(self):
        fd = os.memfd_create('bench')
        self.addCleanup(os.close, fd)
        os.ftruncate(fd, self.MB << 20)
        return fd

    def touch(self, fd=-1):
        memory = mmap.mmap(fd, self.MB << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED)
        memory.write(b'x' * (self.MB << 20))
        return memory

    def test_own_memory_counts_for_each_and_shared_memory_once(self):
        none, reserve = self.measure(int, int)
        self.assertEqual(reserve, 0)
        each, _ = self.measure(self.touch, self.touch)
        self.assertAlmostEqual(each - none, 2 * self.MB * 1.048576, delta=6)
        fd = self.shared()
        once, reserve = self.measure(lambda: self.touch(fd), lambda: self.touch(fd))
        self.assertAlmostEqual(once - none, self.MB * 1.048576, delta=6)
        self.assertLess(reserve, 1)

    def test_shared_memory_that_nobody_maps_is_reserve(self):
        fd = self.shared()
        self.touch(fd).close()
        none, reserve = self.measure(int, int)
        self.assertAlmostEqual(reserve, self.MB * 1.048576, delta=1)
        self.assertLess(none, self.MB)


class Turns(unittest.TestCase):
    class Fake:
        def __init__(self, name, base=None):
            self.name, self.base = name, base

    def setUp(self):
        self.one, self.other = self.Fake('one'), self.Fake('other')
        self.groups = [self.Fake(name, self.one) for name in 'abc'] + [self.Fake('d', self.other)]

    def test_each_is_between_two_blocks_of_what_it_is_compared_with(self):
        names = [''.join(g.name[0] for g in groups.in_turns(self.groups, done)) for done in range(3)]
        self.assertEqual(names, ['oabocoodo', 'obcoaoodo', 'ocaoboodo'])

    def test_a_machine_that_slows_down_evenly_does_not_change_ratios(self):
        order = groups.in_turns(self.groups, 0)
        blocks = [groups.Block((100 + at) * (2 if g.name == 'c' else 1), 1.0, []) for at, g in enumerate(order)]
        found = {g.name: (block.step_s, base.step_s) for g, (block, base) in groups.compared(order, blocks).items()}
        self.assertEqual(found, {'a': (101, 101.5), 'b': (102, 101.5), 'c': (208, 104), 'd': (107, 107)})

    def test_figures_have_median_range_and_tenths(self):
        self.assertEqual(groups.figure('x', [3, 1, 2, 10], 's'), {
            'name': 'x', 'value': 2.5, 'unit': 's', 'min': 1, 'max': 10, 'n': 4, 'p10': 1, 'p90': 10})


if __name__ == '__main__':
    unittest.main(verbosity=2)
