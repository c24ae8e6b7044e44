#!/usr/bin/env python3
"""The fault "stall" of scripts/chaos.sh --faults: a daemon, then a worker, of a `shardctl run` is
stopped for three minutes; the digest must be the undisturbed one.

fault_stall.py --bin BIN [--seconds N] [--watchdog N]: SIGSTOP, and SIGCONT when so many seconds are
over (180) if the watchdog of `run` (30 s) has not killed it by then. A stop that is shorter, or
--watchdog 0, kills nobody: then all wait. The last line is `fault=stall ... digest=equal` (exit 0), or
says what is wrong (exit 1). Standard library only.
"""
import argparse
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time

MODEL = ('--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --sample 0 '
         '--eval-windows 0').split()
STARTED = r'started {} pid=(\d+)'
PACE = int(os.environ.get('SHD_TEST_PACE', '1'))


def start(bin_dir, steps, out, err, flags=()):
    command = [os.path.join(bin_dir, 'shardctl'), 'run', '--verbose', '--daemons', '2', '--workers', '2',
               *flags, '--', os.path.join(bin_dir, 'shd-gpt'), *MODEL, '--steps', str(steps)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def text(file):
    with open(file.name, errors='replace') as f:
        return f.read()


def digest(out):
    lines = [line for line in text(out).splitlines() if line.startswith('digest sha256:')]
    return lines[-1] if lines else ''


def until(what, limit_s, condition):
    end = time.monotonic() + limit_s * PACE
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f'{what}: not within {limit_s * PACE} s')
        time.sleep(0.1)


def stop_for(child, out, err, name, seconds, watchdog_s):
    """Stop who was started last under that name; it goes on after so long, if it is there still."""
    pid = int(re.findall(STARTED.format(name), text(err))[-1])
    handle = os.pidfd_open(pid)
    begun = len(text(out).splitlines())
    signal.pidfd_send_signal(handle, signal.SIGSTOP)
    end = time.monotonic() + seconds
    alive = True
    while alive and time.monotonic() < end and child.poll() is None:
        alive = not select.select([handle], [], [], 0.1)[0]  # readable: it is gone
    if alive:
        signal.pidfd_send_signal(handle, signal.SIGCONT)
    os.close(handle)
    if child.poll() is not None:
        raise RuntimeError(f'the run ended with {child.returncode} while {name} was stopped')
    if alive and 0 < 2 * watchdog_s < seconds:
        raise RuntimeError(f'{name} was not killed in {seconds} s')
    until(f'training goes on after {name} was stopped', 120,
          lambda: len(text(out).splitlines()) > begun or child.poll() is not None)


def disturb(o, child, out, err):
    until('the first steps', 60, lambda: 'step' in text(out))
    for name in ('daemon cpu1', 'worker rank 1'):
        stop_for(child, out, err, name, o.seconds, o.watchdog)
    until('the end', 600, lambda: child.poll() is not None)


def stall(o):
    """(True, the line that says so) or (False, what is wrong)."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='shd-stall-') as at:
        names = ('undisturbed.out', 'undisturbed.err', 'out', 'err')
        files = [open(os.path.join(at, name), 'wb') for name in names]
        want_out, want_err, out, err = files
        try:
            if start(o.bin, o.steps, want_out, want_err).wait() != 0 or not digest(want_out):
                return False, 'the undisturbed run failed: ' + text(want_err)[-2000:]
            child = start(o.bin, o.steps, out, err, ['--watchdog', str(o.watchdog)])
            try:
                disturb(o, child, out, err)
            except RuntimeError as e:
                child.terminate()
                child.wait()
                return False, f'{e}\n{text(err)[-3000:]}'
            if child.returncode != 0 or digest(out) != digest(want_out):
                return False, (f'ended with {child.returncode}, {digest(out) or "no digest"} instead '
                               f'of {digest(want_out)}\n{text(err)[-3000:]}')
            killed = len(re.findall(r'\(--watchdog\): killing it', text(err)))
            return True, (f'fault=stall stopped=2 killed={killed} stop_s={o.seconds:g} '
                          f'seconds={time.monotonic() - begun:.0f} digest=equal')
        finally:
            for f in files:
                f.close()


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n\n', maxsplit=1)[0])
    p.add_argument('--bin', default='build/release/bin')
    p.add_argument('--seconds', type=float, default=180, help='of each stop (180)')
    p.add_argument('--steps', type=int, default=400, help='of the run (400)')
    p.add_argument('--watchdog', type=int, default=30, help='of `shardctl run` (30)')
    good, line = stall(p.parse_args())
    print(line if good else f'fault=stall: {line}', flush=True)
    sys.exit(0 if good else 1)


if __name__ == '__main__':
    main()
