#!/usr/bin/env python3
"""test_bench.py BUILD [TEST...]: benchmarks that nothing else runs, as small as can be."""
import json
import os
import subprocess
import sys
import unittest

BUILD = os.path.abspath(sys.argv.pop(1))
PACE = int(os.environ.get('SHD_TEST_PACE', '1'))


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


if __name__ == '__main__':
    unittest.main(verbosity=2)
