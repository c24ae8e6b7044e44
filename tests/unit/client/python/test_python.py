#!/usr/bin/env python3
"""test_python.py BUILD_DIR [--sanitized]: what libshd.py says of the C side is so, and a few calls through it.

With --sanitized the library is not loaded: Python itself would have to be built so.
"""
import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import unittest

BUILD = sys.argv.pop(1)
SANITIZED = sys.argv[-1] == '--sanitized' and bool(sys.argv.pop())
PACKAGE = os.path.join(BUILD, 'python')
sys.path.insert(0, PACKAGE)
SPEC = '''{ "name": "line", "micro_batches": 1, "optimizer": { "kind": "sgd", "momentum": 0 }, "units": [
    { "name": "all", "tensors": [ { "name": "w", "shape": [3], "init": ["const", 2] } ] } ] }'''


def module(name):
    """One file of the package, without the library that the package loads."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(PACKAGE, 'libshd', name + '.py'))
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class Layout(unittest.TestCase):
    """Structs as the compiler has them, a class for each result."""

    def test_every_field_is_where_the_compiler_has_it(self):
        c, here = module('_c'), []
        for struct in c.STRUCTS:
            here.append(f'{struct.__name__} {ctypes.sizeof(struct)}')
            here += [f'{struct.__name__}.{name} {getattr(struct, name).offset} {getattr(struct, name).size}'
                     for name, _ in struct._fields_]
        there = subprocess.run([os.path.join(BUILD, 'tests', 'python_layout')], capture_output=True, text=True,
                               check=True).stdout.splitlines()
        self.assertEqual(here, there)
        self.assertGreater(len(here), 60)

    def test_every_result_has_an_exception_of_its_own(self):
        c, errors = module('_c'), module('errors')
        results = {name for name, value in vars(c).items() if name.startswith('SHD_E') and value < 0}
        self.assertEqual(results - set(errors.BY_NAME), set())
        self.assertEqual(len(set(errors.BY_NAME.values())), len(errors.BY_NAME))


@unittest.skipIf(SANITIZED, 'the library is sanitized')
class Calls(unittest.TestCase):
    """A step without daemons, and what goes wrong."""

    def setUp(self):
        import libshd
        self.shd = libshd
        self.session = libshd.Session('local:')

    def tearDown(self):
        self.session.close()

    def test_a_step_updates_the_parameters(self):
        model = self.session.open(SPEC)
        values = (ctypes.c_float * 3).from_address(model.acquire(0))
        self.assertEqual(list(values), [2, 2, 2])
        model.release(0)
        (ctypes.c_float * 3).from_address(model.grad(0, 0))[:] = [1, 2, 3]
        model.report(0, [7.5])
        model.return_grad(0, 0)
        result = model.commit(0.5)
        self.assertEqual((result.step, result.skipped, result.metrics[0]), (0, False, 7.5))
        self.assertAlmostEqual(result.grad_norm, 14 ** 0.5, places=6)
        self.assertEqual(list((ctypes.c_float * 3).from_address(model.acquire(0))), [1.5, 1, 0.5])
        self.assertEqual(model.tensors(), [('w', 0, 0, 3)])
        self.assertEqual((model.step, model.unit_names(), self.session.owners), (1, ['all'], 1))

    def test_what_a_tensor_comes_to(self):
        model = self.session.open(SPEC.replace('"momentum": 0', '"momentum": 0.5'))
        (ctypes.c_float * 3).from_address(model.grad(0, 0))[:] = [1, -2, 0]
        model.return_grad(0, 0)
        grad = model.stats('w', 'grad')
        self.assertEqual((grad.of_step, grad.micro_batches, grad.min, grad.max, grad.zeros), (0, 1, -2, 1, 1))
        self.assertEqual(grad.histogram, {1.0: (0, 1), 2.0: (1, 0)})
        model.commit(0.5)
        self.assertEqual(model.values('w', 1, 2), [3, 2])
        stats = model.stats('w')
        self.assertEqual((stats.step, stats.elems, stats.min, stats.max), (1, 3, 1.5, 3))
        self.assertAlmostEqual(stats.mean, 6.5 / 3)
        self.assertAlmostEqual(model.stats('w', 'update').update_ratio, 1.25 ** 0.5 / (1.5 ** 2 + 3 ** 2 + 2 ** 2) ** 0.5)
        self.assertTrue(stats.min <= stats.quantiles[0.5] <= stats.max)
        with self.assertRaisesRegex(self.shd.Misuse, "no array 'weight'"):
            model.stats('w', 'weight')
        with self.assertRaises(self.shd.NotFound):
            model.stats('v')

    def test_settings_are_those_of_the_coming_step(self):
        model = self.session.open(SPEC)
        self.assertEqual(model.settings, {'now': {}, 'next': None})
        self.assertEqual((model.set('lr_scale=0.5'), model.set('{"momentum": 0.25}', at=3)), (0, 3))
        self.assertEqual(model.settings, {'now': {'lr_scale.default': {'value': 0.5, 'from': 0}},
                                          'next': {'from': 3, 'settings': {'momentum.default': 0.25}}})
        (ctypes.c_float * 3).from_address(model.grad(0, 0))[:] = [1, 2, 3]
        model.return_grad(0, 0)
        model.commit(1)
        self.assertEqual(list((ctypes.c_float * 3).from_address(model.acquire(0))), [1.5, 1, 0.5])
        with self.assertRaisesRegex(self.shd.InvalidArgument, 'lr_scale multiplies it'):
            model.set('lr=1')
        self.assertEqual((model.set({'clip_norm': 2}, at=5), model.set({'micro_batches': 1}), model.micro_batches_max),
                         (5, 2, 1))
        self.assertEqual([row['from'] for row in model.settings['later']], [3, 5])
        model.set('clip_norm=now momentum=now micro_batches=now')
        self.assertIsNone(model.settings['next'])

    def test_an_error_is_an_exception_with_the_librarys_words(self):
        with self.assertRaisesRegex(self.shd.InvalidArgument, 'micro_batches') as raised:
            self.session.open(SPEC.replace('micro_batches', 'micro'))
        self.assertEqual(raised.exception.code, -1)
        self.assertIsInstance(raised.exception, ValueError)
        self.session.open(SPEC)
        with self.assertRaises(self.shd.AlreadyExists):
            self.session.open(SPEC)
        with self.assertRaises(self.shd.NotFound):
            self.session.attach('other')

    def test_what_is_closed_says_so(self):
        model = self.session.open(SPEC)
        self.session.close()
        for use in (lambda: model.step, lambda: self.session.status(0), lambda: self.session.open(SPEC)):
            with self.assertRaisesRegex(self.shd.Misuse, 'is closed'):
                use()

    def test_start_values_and_what_their_function_raises(self):
        def fill(unit, address):
            (ctypes.c_float * 3).from_address(address)[:] = [unit, 5, 6]

        def fail(unit, address):
            raise KeyError('weights')
        with self.assertRaises(KeyError):
            self.session.open(SPEC, fail)
        model = self.session.open(SPEC, fill)
        self.assertEqual(list((ctypes.c_float * 3).from_address(model.acquire(0))), [0, 5, 6])

    def test_the_version_is_the_headers(self):
        self.assertRegex(self.shd.version(), r'^\d+\.\d+\.\d+$')


@unittest.skipIf(SANITIZED, 'the library is sanitized')
class Daemon(unittest.TestCase):
    """What needs one."""

    def setUp(self):
        import libshd
        self.shd = libshd
        directory = tempfile.TemporaryDirectory(prefix='shd-python-')
        self.addCleanup(directory.cleanup)
        run = os.path.join(directory.name, 'run')
        self.daemon = subprocess.Popen([os.path.join(BUILD, 'bin', 'shardd'), '--device', 'cpu0', '--runtime-dir', run,
                                        '--threads', '1', '--log-level', 'error'])
        self.addCleanup(self.daemon.wait)
        self.addCleanup(self.daemon.terminate)
        end = time.monotonic() + 120 * int(os.environ.get('SHD_TEST_PACE', '1'))
        while not os.path.exists(os.path.join(run, 'cpu0.sock')):
            self.assertTrue(self.daemon.poll() is None and time.monotonic() < end, 'the daemon is not up')
            time.sleep(0.01)
        self.session = libshd.Session(run)
        self.addCleanup(self.session.close)

    def values(self, model):
        found = list((ctypes.c_float * 3).from_address(model.acquire(0)))
        model.release(0)
        return found

    def train(self, model):
        (ctypes.c_float * 3).from_address(model.grad(0, 0))[:] = [1, 2, 3]
        model.return_grad(0, 0)
        model.commit(0.5)

    def test_what_units_came_to(self):
        model = self.session.open(SPEC)
        with self.assertRaises(self.shd.NotFound):
            model.unit_stats()
        for step in range(2):
            self.train(model)
            self.values(model)  # it is applied
            (unit,) = model.unit_stats()
            self.assertEqual((unit.step, unit.measured_step, unit.skipped, unit.guard), (step, 0, False, ''))
            self.assertAlmostEqual(unit.grad_norm, 14 ** 0.5)
            self.assertAlmostEqual(unit.weight_norm, 3.5 ** 0.5)
            self.assertAlmostEqual(unit.update_ratio, 1)
        self.assertEqual(model.unit_stats(0, 1, step=0)[0].step, 0)
        with self.assertRaises(self.shd.OutOfRange):
            model.unit_stats(1, 1)

    def test_a_kept_step_is_forked_with_what_is_other_and_dropped(self):
        model = self.session.open(SPEC)
        self.train(model)
        self.assertEqual(model.snapshot(), 1)
        self.train(model)
        with self.assertRaises(self.shd.Error) as raised:
            model.fork('twin', step=0)
        self.assertIn('it has snapshots of steps 1', str(raised.exception))
        self.assertEqual(model.fork('twin', step=1, set='lr_scale=2 micro_batches=2'), 1)
        self.assertEqual(model.fork('third'), 2)
        twin = self.session.attach('twin')
        self.assertEqual((twin.step, twin.micro_batches, self.values(twin)), (1, 2, [1.5, 1, 0.5]))
        self.assertEqual(twin.settings['now']['lr_scale.default']['value'], 2)
        twin.drop()
        with self.assertRaises(self.shd.Error):
            self.session.attach('twin')
        self.assertEqual(self.values(model), [1, 0, -1])


if __name__ == '__main__':
    unittest.main()
