"""What the faults (fault_*.py) share: one training by `shardctl run`, its words and its digest.

Only processes that this run's own log names are signalled. Standard library only.
"""
import os
import re
import signal
import subprocess
import time

PACE = int(os.environ.get('SHD_TEST_PACE', '1'))
LIMIT_S = 120 * PACE
MODEL = ('--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --sample 0 '
         '--eval-windows 0').split()
SLOW = ['--slow', '30']  # milliseconds a micro-batch, so that there is time for a fault


class Wrong(Exception):
    """What is not as promised."""


def digest_of(text):
    lines = [line for line in text.splitlines() if line.startswith('digest sha256:')]
    return lines[-1] if lines else ''


def undisturbed(bin_dir, steps):
    """The digest of the same training without daemons and without faults."""
    done = subprocess.run([os.path.join(bin_dir, 'shd-gpt'), '--standalone', *MODEL, '--steps', str(steps)],
                          capture_output=True, text=True, check=True)
    return digest_of(done.stdout)


class OneRun:
    """`shardctl run` of 2 daemons and 2 workers; its files are in directory."""

    def __init__(self, bin_dir, directory, steps, flags=(), extra=(), env=None):
        self.bin = bin_dir
        self.out, self.err = os.path.join(directory, 'out'), os.path.join(directory, 'err')
        command = [os.path.join(bin_dir, 'shardctl'), 'run', '--verbose', '--daemons', '2', '--workers', '2',
                   *flags, '--', os.path.join(bin_dir, 'shd-gpt'), *MODEL, '--steps', str(steps), *extra]
        with open(self.out, 'wb') as out, open(self.err, 'wb') as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                            env={**os.environ, **(env or {})})

    def words(self):
        with open(self.err, errors='replace', encoding='utf-8') as f:
            return f.read()

    def digest(self):
        with open(self.out, errors='replace', encoding='utf-8') as f:
            return digest_of(f.read())

    def until(self, what, condition):
        """Wait until condition() is true while the run goes on."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None:
                raise Wrong(f'it ended with {self.process.returncode} before {what}')
            if time.monotonic() > end:
                raise Wrong(f'not within {LIMIT_S} s: {what}')
            time.sleep(0.05)

    def says(self, part):
        self.until(f'it said {part!r}', lambda: part in self.words())

    def kill(self, name, number=signal.SIGKILL):
        """Signal who was started last as "daemon cpu0" or "worker rank 1"."""
        pid = int(re.findall(rf'started {name} pid=(\d+)', self.words())[-1])
        try:
            os.kill(pid, number)
        except ProcessLookupError as gone:
            raise Wrong(f'{name} (pid {pid}) was gone before it was signalled') from gone

    def end(self, code, want):
        """It ends by itself, with that code and that digest."""
        try:
            got = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as late:
            raise Wrong(f'it did not end within {LIMIT_S} s') from late
        if got != code or self.digest() != want:
            raise Wrong(f'exit code {got}, {self.digest()!r}; wanted {code}, {want!r}')

    def close(self):
        """Nothing is left, whatever happened."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def judge(name, fault):
    """Run fault(), which returns words for the line; print that line, return the exit code."""
    start = time.monotonic()
    try:
        words = fault()
    except Wrong as wrong:
        print(f'fault={name}: {wrong}', flush=True)
        return 1
    print(f'fault={name} {words} seconds={time.monotonic() - start:.0f} digest=equal', flush=True)
    return 0
