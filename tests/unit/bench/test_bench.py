#!/usr/bin/env python3
"""test_bench.py BUILD [TEST...]: what benchmarks count, and that those which nothing else runs still run, as small as can be.

`Peers` trains by PyTorch, and is skipped where scripts/torch_env.py has made none.
"""
import json
import mmap
import os
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import xml.etree.ElementTree as ET

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
BUILD = os.path.abspath(sys.argv.pop(1))
PACE = int(os.environ.get('SHD_TEST_PACE', '1'))
sys.path.insert(0, os.path.join(ROOT, 'bench'))
import bench_peers  # noqa: E402 what is tested
import groups  # noqa: E402


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


class Bulk(unittest.TestCase):
    def test_each_way_moves_its_bytes_and_has_its_processor_time(self):
        done = subprocess.run([os.path.join(BUILD, 'bin', 'bench_bulk'), '--rounds', '1', '--mib', '8', '--frame-kib', '256',
                               '--ring-mib', '1', '--json'], capture_output=True, text=True, timeout=60 * PACE, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = read_figures(done.stdout)
        others = ['relay_ucx', 'curve', 'ucx', 'iperf3']
        ways = ['tls', 'plain', 'zmq'] + [way for way in others if f'bulk.{way}: left out' not in done.stderr]
        for way in ways:
            self.assertGreater(found[f'bulk.{way}.rate']['value'], 0)
            self.assertGreater(found[f'bulk.{way}.cpu']['value'], 0)
        for way in others:
            self.assertEqual(f'bulk.{way}.rate' in found, way in ways)

    def test_frames_that_do_not_fill_the_ring_are_refused(self):
        done = subprocess.run([os.path.join(BUILD, 'bin', 'bench_bulk'), '--frame-kib', '3000', '--ring-mib', '1'],
                              capture_output=True, text=True, timeout=60 * PACE, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn('no multiple of 3000 KiB', done.stderr)


class Scale(unittest.TestCase):
    """What the code of a step sends is what `shardctl plan` says of it, also where some owners have no part of a unit."""

    def scale(self, hosts, gpus, **more):
        more = {'hosts': hosts, 'gpus': gpus, 'rounds': 1, 'sessions': 0, **more}
        words = [f'--{name}={value}' for name, value in more.items()]
        return subprocess.run([os.path.join(BUILD, 'bin', 'bench_scale'), '--json', *words], capture_output=True, text=True,
                              timeout=60 * PACE, check=False)

    def test_what_is_counted_is_what_is_planned(self):
        for hosts, gpus, micros, units, elems in ((2, 1, 1, 3, 1 << 16), (2, 2, 2, 5, 32), (3, 2, 1, 4, 5 * 2048), (8, 8, 1, 34, 1 << 20)):
            with self.subTest(hosts=hosts, gpus=gpus, micros=micros, units=units, elems=elems):
                done = self.scale(hosts, gpus, units=units, elems=elems, **{'micro-batches-per-worker': micros})
                self.assertEqual(done.returncode, 0, done.stderr)
                found = {name.split('.', 2)[2]: f['value'] for name, f in read_figures(done.stdout).items()}
                owners, each = hosts * gpus, units * micros + 2  # Prepare and Commit
                self.assertEqual(found['daemon.requests'], owners * each)
                self.assertEqual(found['daemon.replies'], owners * each)
                self.assertEqual(found['worker.requests'], owners * each)
                self.assertEqual(found['relay.replies'], 2 * gpus * (owners - gpus) * each)
                for what in ('in', 'out', 'connections'):
                    self.assertEqual(found[f'relay.{what}'], found[f'planned.{what}'], what)

    def test_workers_at_relays_that_run_are_answered(self):
        done = self.scale(2, 1, sessions=5, steps=3, units=7)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = read_figures(done.stdout)
        self.assertEqual(found['scale.real.requests']['value'], 5 * 3 * (7 + 2))
        for who in ('near', 'far', 'daemon'):
            self.assertGreater(found[f'scale.real.{who}_us']['value'], 0)

    def test_more_daemons_than_a_model_has_are_refused(self):
        done = self.scale(1024, 8)
        self.assertEqual(done.returncode, 1)
        self.assertIn('--hosts 1024 --gpus 8: a model has at most 1024 daemons', done.stderr)


class Arrangements(unittest.TestCase):
    def test_memory_and_bytes_are_as_planned(self):
        rows = 'one,shared,zero3,bound,bf16,int8,file,tiles,codec,accumulate'
        done = subprocess.run([sys.executable, os.path.join(ROOT, 'bench', 'bench_memory.py'), '--bin', os.path.join(BUILD, 'bin'),
                               '--json', '--rounds', '1', '--steps', '240', '--rows', rows, '--', '--layers', '2', '--dim', '64',
                               '--heads', '2', '--seq', '32'], capture_output=True, text=True, timeout=300 * PACE, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = read_figures(done.stdout)
        for row in rows.split(','):
            for what in ('worker', 'owner', 'files', 'fetched', 'returned'):
                planned = found[f'memory.{row}.{what}_plan']['value']
                self.assertAlmostEqual(found[f'memory.{row}.{what}']['value'], planned, delta=0.005 * max(planned, 1))
        self.assertLess(found['memory.zero3.worker']['value'], found['memory.shared.worker']['value'])
        self.assertLess(found['memory.bound.worker']['value'], found['memory.zero3.worker']['value'])
        self.assertGreater(found['memory.file.files']['value'], 1)


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
        blocks = [groups.block_of([[(100 + at) * (2 if g.name == 'c' else 1)]], 1.0) for at, g in enumerate(order)]
        found = {g.name: (block.step_s, base.step_s) for g, (block, base) in groups.compared(order, blocks).items()}
        self.assertEqual(found, {'a': (101, 101.5), 'b': (102, 101.5), 'c': (208, 104), 'd': (107, 107)})

    def test_the_slower_of_two_processes_is_another_one_in_each_step(self):
        block = groups.block_of([[1, 2, 3], [3, 2, 2]], 0.5)
        self.assertEqual((block.step_s, block.slower_s, block.cpu_s), (13 / 6, 8 / 3, 0.5))
        self.assertEqual(block.each_s, [1, 2, 3, 3, 2, 2])
        found = groups.compared([self.one, self.groups[0], self.one], [block, groups.block_of([[5]], 1.0), block])
        self.assertEqual(found[self.groups[0]][1].slower_s, 8 / 3)

    def test_figures_have_median_range_and_tenths(self):
        self.assertEqual(groups.figure('x', [3, 1, 2, 10], 's'), {
            'name': 'x', 'value': 2.5, 'unit': 's', 'min': 1, 'max': 10, 'n': 4, 'p10': 1, 'p90': 10})


class Gpt(bench_peers.GptGroup):
    """Processes that are through with all their steps before anybody looks, and then have had 6 s each."""

    def __init__(self):
        self.logs, self.used = [self, self], 0

    def pids(self):
        return []

    def count(self):
        return 100

    def seconds(self, begin, end):
        return [2.0] * (end - begin)

    def go(self):
        self.used = 12
        return [10, 20]

    def stop(self):
        pass


class Blocks(unittest.TestCase):
    def test_steps_that_end_between_two_looks_have_their_processor_time(self):
        group = Gpt()
        with unittest.mock.patch.object(bench_peers, 'used_s', lambda pids: group.used):
            block = group.steps(3)
        self.assertEqual((block.step_s, len(block.each_s)), (2, 6))
        self.assertGreater(block.cpu_s, 0)


def torch_is_there():
    return subprocess.run([os.path.join(ROOT, 'scripts', 'torch_env.py'), '--print'], capture_output=True,
                          check=False).returncode == 0


@unittest.skipUnless(torch_is_there(), 'no PyTorch; scripts/torch_env.py gets it')
class Peers(unittest.TestCase):
    """ds1 cannot run: its DeepSpeed is an empty folder."""
    MODES = {'none': False, 'shardd_none': False, 'ddp': True, 'shardd': True, 'shardd_torch': True}  # have a recovery

    def test_each_mode_has_its_figures_and_one_that_fails_is_left_out_by_name(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, 'complete'), 'w', encoding='ascii'):
                pass
            done = subprocess.run(
                [sys.executable, os.path.join(ROOT, 'bench', 'bench_peers.py'), '--bin', os.path.join(BUILD, 'bin'),
                 '--sizes', 'tiny', '--modes', 'ds1,ddp,shardd,shardd_torch', '--rounds', '1', '--json', '--save', folder],
                capture_output=True, text=True, timeout=300 * PACE, check=False,
                env={**os.environ, 'SHD_PEERS_ENV': folder})
            self.assertEqual(done.returncode, 0, done.stderr)
            images = os.path.join(folder, 'images')
            plots = {name: ET.parse(os.path.join(images, name)) for name in os.listdir(images)}
            with open(os.path.join(folder, 'plots', 'peers-tiny.jsonl'), encoding='ascii') as f:
                self.assertEqual(read_figures(f.read()), read_figures(done.stdout))
        found = read_figures(done.stdout)
        self.assertRegex(done.stderr, "LEFT OUT: tiny ds1: rank 0: (?s:.*)No module named 'deepspeed'")
        self.assertEqual({name.split('.')[2] for name in found}, {*self.MODES, 'others_share'}, done.stderr)
        for mode, recovers in self.MODES.items():
            with self.subTest(mode):
                self.check_mode(mode, recovers, {name.split('.')[3]: f['value'] for name, f in found.items()
                                                 if name.split('.')[2] == mode})
        self.assertEqual(sorted(plots), [f'peers-tiny-{name}.svg' for name in (
            'first_step_s', 'memory_mb', 'ratio', 'recovery_s', 'tokens_per_s')])
        for plot in plots.values():
            self.assertIn('shardd_torch', [text.text for text in plot.iter('{http://www.w3.org/2000/svg}text')])

    def check_mode(self, mode, recovers, figures):
        self.assertEqual('ratio_slower' in figures, mode not in ('none', 'shardd_none'))
        for name in ('ratio', 'tokens_per_s', 'memory_mb', 'first_step_s'):
            self.assertGreater(figures[name], 0, name)
        if mode in ('none', 'ddp', 'shardd_torch'):  # each imports PyTorch
            self.assertGreater(figures['memory_mb'], 150)
        self.assertEqual('reserve_mb' in figures, mode in ('shardd', 'shardd_torch'))
        self.assertEqual('recovery_s' in figures, recovers)
        if recovers:
            self.assertGreater(figures['recovery_s'], 0)
            self.assertGreaterEqual(figures['caught_up_s'], figures['recovery_s'])
            self.assertEqual(figures['lost_steps'], 3 if mode == 'ddp' else 0)


if __name__ == '__main__':
    unittest.main(verbosity=2)
