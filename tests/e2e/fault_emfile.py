#!/usr/bin/env python3
"""The fault "emfile" of scripts/chaos.sh --faults: daemons with few descriptors, to whose sockets
thousands connect and say nothing; the digest must be the undisturbed one.

fault_emfile.py --bin BIN [--limit N] [--connections N] [--steps N]: a `shardctl run` under
RLIMIT_NOFILE N (128). While it trains, connections without a word, each held as long as it is let, go to every
socket of both daemons, N in all (6,000). No daemon may end. The last line is
`fault=emfile ... digest=equal` (exit 0), or says what is wrong (exit 1). Standard library only.
"""
import argparse
import collections
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time

MODEL = ('--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --sample 0 '
         '--eval-windows 0').split()
KINDS = {'zmq': socket.SOCK_STREAM, 'sock': socket.SOCK_SEQPACKET, 'status': socket.SOCK_STREAM}
HELD = 2000  # at a time
PACE = int(os.environ.get('SHD_TEST_PACE', '1'))


def start(o, out, err, limit=None):
    def few():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    command = [os.path.join(o.bin, 'shardctl'), 'run', '--verbose', '--daemons', '2', '--workers', '2',
               '--', os.path.join(o.bin, 'shd-gpt'), *MODEL,
               '--steps', str(o.steps)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=few)


def text(file):
    with open(file.name, errors='replace', encoding='utf-8') as f:
        return f.read()


def what_matters(said):
    """All lines but those of connections that were turned away as they should be."""
    return '\n'.join(line for line in said.splitlines() if 'said no Hello' not in line)[-4000:]


def digest(out):
    lines = [line for line in text(out).splitlines() if line.startswith('digest sha256:')]
    return lines[-1] if lines else ''


def runtime_dir(child):
    """Where its daemons' sockets are, when there is one."""
    while child.poll() is None:
        with open(f'/proc/{child.pid}/task/{child.pid}/children', encoding='ascii') as f:
            children = f.read().split()
        for pid in children:
            try:
                with open(f'/proc/{pid}/cmdline', 'rb') as f:
                    words = f.read().decode(errors='replace').split('\0')
            except OSError:
                continue
            if '--runtime-dir' in words:
                return words[words.index('--runtime-dir') + 1]
        time.sleep(0.01)
    return '/'


def flood(o, child):
    """Connect as long as the run lasts; how many did."""
    held, made = collections.deque(), 0
    directory = runtime_dir(child)
    paths = [(os.path.join(directory, f'cpu{i}.{kind}'), type_) for kind, type_ in KINDS.items()
             for i in range(2)]
    while child.poll() is None and made < o.connections:
        for path, type_ in paths:
            s = socket.socket(socket.AF_UNIX, type_)
            s.setblocking(False)
            try:
                s.connect(path)
            except OSError:  # the backlog is full, or nobody is there yet
                s.close()
                time.sleep(0.001)
                continue
            held.append(s)
            made += 1
            if len(held) > HELD:
                held.popleft().close()
    child.wait(timeout=600 * PACE)
    for s in held:
        s.close()
    return made


def run(o, base, name, limit=None):
    """(digest, connections, what it said)."""
    path = os.path.join(base, name)
    with open(f'{path}.out', 'wb') as out, open(f'{path}.err', 'wb') as err:
        child = start(o, out, err, limit)
        try:
            made = flood(o, child) if limit is not None else 0
            code = child.wait(timeout=600 * PACE)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    said = text(err)
    if code != 0 or not digest(out):
        raise RuntimeError(f'the run {name} ended with {code}: {what_matters(said)}')
    return digest(out), made, said


def emfile(o):
    """(True, the line that says so) or (False, what is wrong)."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='shd-emfile-') as base:
        want, _, _ = run(o, base, 'quiet')
        got, made, said = run(o, base, 'flooded', o.limit)
    again = len(re.findall(r'daemon \S+ .*(?:killed by signal|started again)', said))
    if got != want:
        return False, f'fault=emfile: digest {got}, undisturbed {want}'
    if again > 0:
        return False, f'fault=emfile: daemons ended {again} times: {said[-2000:]}'
    if made < o.connections:
        return False, f'fault=emfile: only {made} of {o.connections} connections were made: add --steps'
    return True, (f'fault=emfile limit={o.limit} connections={made} '
                  f'seconds={time.monotonic() - begun:.0f} digest=equal')


def main():
    p = argparse.ArgumentParser(description='Connect without end while it trains; compare digests.')
    p.add_argument('--bin', default='build/release/bin')
    p.add_argument('--limit', type=int, default=128)
    p.add_argument('--connections', type=int, default=6000)
    p.add_argument('--steps', type=int, default=400)
    o = p.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < HELD + 64:
        print(f'fault=emfile: skipped, RLIMIT_NOFILE is {hard}')
        return 77
    if soft < HELD + 64:
        resource.setrlimit(resource.RLIMIT_NOFILE, (HELD + 64, hard))
    equal, line = emfile(o)
    print(line)
    return 0 if equal else 1


if __name__ == '__main__':
    sys.exit(main())
