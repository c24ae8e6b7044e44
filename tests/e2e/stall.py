#!/usr/bin/env python3
"""Stop a daemon, then a worker, of a `shardctl run` for minutes; the digest is that of an undisturbed run.

stall.py [--seconds N] [--bin DIR]: SIGSTOP and no SIGCONT before N seconds (180) are over. The watchdog
of `run` is left as it is, so the stop outlasts it and every time-out of a client. What must be seen: who
is stopped is killed and started again, nobody else dies, training ends by itself, digests are equal.
A stop that is shorter than the watchdog (30 s), or --watchdog 0, kills nobody: then all wait. Standard library only.
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
         '--eval-every 0').split()
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


def stall(bin_dir, seconds, steps=400, watchdog_s=30, say=print):
    """The fault, whole: raises RuntimeError with what is wrong."""
    with tempfile.TemporaryDirectory(prefix='shd-stall-') as at:
        files = [open(os.path.join(at, name), 'wb') for name in ('out0', 'err0', 'out1', 'err1')]
        want_child = start(bin_dir, steps, files[0], files[1])
        if want_child.wait() != 0 or not digest(files[0]):
            raise RuntimeError('the undisturbed run failed: ' + text(files[1])[-2000:])
        flags = [] if watchdog_s == 30 else ['--watchdog', str(watchdog_s)]
        child = start(bin_dir, steps, files[2], files[3], flags)
        try:
            until('the first steps', 60, lambda: 'step' in text(files[2]))
            stop_for(child, files[2], files[3], 'daemon cpu1', seconds, watchdog_s)
            stop_for(child, files[2], files[3], 'worker rank 1', seconds, watchdog_s)
            until('the end', 600, lambda: child.poll() is not None)
        except RuntimeError as e:
            child.terminate()
            child.wait()
            raise RuntimeError(f'{e}\n{text(files[3])[-3000:]}') from e
        if child.returncode != 0 or digest(files[2]) != digest(files[0]):
            raise RuntimeError(f'ended with {child.returncode}, {digest(files[2]) or "no digest"} instead of '
                               f'{digest(files[0])}\n{text(files[3])[-3000:]}')
        killed = len(re.findall(r'\(--watchdog\): killing it', text(files[3])))
        for f in files:
            f.close()
        say(f'stall: a daemon and a worker stopped for {seconds:g} s each, {killed} killed by the watchdog: '
            f'{digest(files[0])}, digest=equal')


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--seconds', type=float, default=180, help='of each stop (180)')
    p.add_argument('--steps', type=int, default=400, help='of the run (400)')
    p.add_argument('--watchdog', type=int, default=30, help='of `shardctl run` (30)')
    p.add_argument('--bin', default='build/release/bin')
    o = p.parse_args()
    try:
        stall(o.bin, o.seconds, o.steps, o.watchdog)
    except RuntimeError as e:
        sys.exit(f'stall: {e}')


if __name__ == '__main__':
    main()
