#!/usr/bin/env python3
"""shd-gpt on a GPU with its state in a daemon on the same GPU, beside PyTorch, in rounds; and PyTorch by libshd.torch
with its state in such a daemon, beside PyTorch alone.

One untimed run of ours comes first, while PyTorch starts. Then rounds: ours, PyTorch eager, PyTorch
compiled, and both by libshd.torch, in turn. PyTorch is killed and started again without the compiled one when compiling takes
too long.

Tokens per second, and of the H200's dense bf16 peak (989 TFLOP/s) the share that the model's
arithmetic makes up (MFU):

    FLOP per token = 6 (12 L d^2 + 256 d) + 12 L d T

(L layers, width d, T positions: 2 per multiply-add, twice more in backward; the causal half of
attention counted in full, as is customary). Last line: answer: ...
"""
import argparse
import contextlib
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PEAK = 989e12
GRACE_S = 15    # beyond --seconds, for a round that has begun
ROUNDS_S = 40   # that starting and compiling must leave for rounds
RUN_S = 60       # of one of ours
BEGIN = time.monotonic()


def parse():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--bin', required=True, help='where shardctl and shd-gpt are')
    p.add_argument('--data', required=True)
    p.add_argument('--seconds', type=float, default=140, help='begin no round after so many (140)')
    p.add_argument('--rounds', type=int, default=3)
    p.add_argument('--steps', type=int, default=16)
    p.add_argument('--warmup', type=int, default=4)
    p.add_argument('--precision', default='bf16')
    p.add_argument('--torch-device', default='cuda:0', help='"none": without PyTorch')
    for name, default in (('layers', 12), ('dim', 768), ('heads', 12), ('seq', 1024), ('batch', 16),
                          ('micro-batches', 2)):
        p.add_argument(f'--{name}', type=int, default=default)
    return p.parse_args()


def shape_flags(o):
    names = ('layers', 'dim', 'heads', 'seq', 'batch', 'micro-batches')
    flags = [w for n in names for w in (f'--{n}', str(getattr(o, n.replace('-', '_'))))]
    return flags + ['--data', o.data, '--precision', o.precision]


def figure(name, unit, values):
    print(json.dumps({'name': name, 'value': statistics.median(values), 'unit': unit, 'min': min(values),
                      'max': max(values), 'n': len(values)}), flush=True)


def run(command, output):
    """Exit code of a command; None: it took longer than RUN_S, and was killed with all it started."""
    with open(output, 'wb') as f:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=f, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        try:
            return process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)
            return None


def shd_run(o, words, more):
    """Of a run of its own: tokens per second, its steps, MB of activations it holds."""
    with tempfile.TemporaryDirectory() as work:
        log = os.path.join(work, 'steps')
        command = [os.path.join(o.bin, w) if w in ('shardctl', 'shd-gpt') else w for w in words]
        command += ['--device', 'cuda:0', *shape_flags(o), '--steps', str(o.steps), '--eval-every', '0',
                    '--sample', '0', '--log-every', str(o.steps), '--json', log, *more]
        code = run(command, os.path.join(work, 'output'))
        with open(os.path.join(work, 'output'), encoding='utf-8', errors='replace') as f:
            said = f.read()
        if code != 0:
            print(said[-8000:])
            sys.exit(f'shd-gpt {"took too long" if code is None else f"ended with {code}"}: {" ".join(command)}')
        with open(log, encoding='utf-8') as f:
            steps = [json.loads(line) for line in f][o.warmup:]
    held = re.search('^activations ([0-9.]+) MB', said, re.M)
    return (statistics.median(s['tokens'] / s['step_ns'] * 1e9 for s in steps), steps,
            float(held[1]) if held else 0)


DAEMON = ('shardctl', 'run', '--devices', 'gpu0', '--workers', '1', '--', 'shd-gpt')


class Torch:
    """bench/gpt_torch.py, which keeps its model between rounds. SHD_CHECK_PYTHON: a python that has
    PyTorch; SHD_CHECK_TORCH_LD: what its loader gets, instead of the libraries that came along."""

    def __init__(self, o, address=None):
        """address: of daemons, for the variants of libshd.torch; such a process has our libraries, too."""
        self.o, self.process, self.version, self.variants = o, None, None, []
        env = {k: v for k, v in os.environ.items() if k not in ('LD_LIBRARY_PATH', 'LD_PRELOAD')}
        if address is not None:
            env.update(SHARDD_ADDRESS=address, PYTHONPATH=os.path.join(o.bin, os.pardir, 'python'),
                       LD_LIBRARY_PATH=os.environ.get('LD_LIBRARY_PATH', ''))
        elif os.environ.get('SHD_CHECK_TORCH_LD'):
            env['LD_LIBRARY_PATH'] = os.environ['SHD_CHECK_TORCH_LD']
        if o.torch_device == 'none':
            return
        self.process = subprocess.Popen(
            [os.environ.get('SHD_CHECK_PYTHON') or sys.executable, os.path.join(ROOT, 'bench/gpt_torch.py'),
             '--device', o.torch_device, *shape_flags(o)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, bufsize=0)

    def ready(self, variants):
        """Wait until it is, and have it run these once. self.variants: those that work."""
        head = self.answer(self.o.seconds - ROUNDS_S) if self.process is not None else None
        if head is None:
            return
        self.version = head.get('ready')
        if 'eager' in variants:
            figure('gpt.torch.params', 'parameters', [head['params']])
        for variant in variants:
            start = time.monotonic()
            until = self.o.seconds - (ROUNDS_S if variant.endswith('compiled') else 0)
            if self.run(variant, 2, until) is not None:
                self.variants.append(variant)
                figure(f'gpt.torch.{variant}.first_steps', 's', [time.monotonic() - start])

    def answer(self, until):
        """Its next line of JSON; None when it has ended, or not answered until so many seconds from
        the beginning: then it is ended."""
        fd = self.process.stdout.fileno()
        buffered = b''
        while True:
            left = BEGIN + until - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                self.close()
                return None
            part = os.read(fd, 65536)
            if not part:
                return None
            buffered += part
            *lines, buffered = buffered.split(b'\n')
            for line in lines:
                if line.startswith(b'{'):
                    return json.loads(line)

    def run(self, variant, steps, until):
        """Tokens per second; None when it has ended."""
        try:
            self.process.stdin.write(f'{variant} {steps}\n'.encode())
        except OSError:
            return None
        got = self.answer(until)
        if got is None:
            return None
        o = self.o
        times = got['step_s'][o.warmup:] if len(got['step_s']) > o.warmup else got['step_s']
        return o.batch * o.seq * o.micro_batches / statistics.median(times)

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def start_torch(o, *address):
    """PyTorch, being started."""
    if address == (None,):
        return Torch(argparse.Namespace(**{**vars(o), 'torch_device': 'none'}))
    try:
        return Torch(o, *address)
    except OSError as e:
        print(f'PyTorch does not start: {e}', flush=True)
        return Torch(argparse.Namespace(**{**vars(o), 'torch_device': 'none'}))


@contextlib.contextmanager
def daemon(o):
    """The address of a daemon on the GPU, for as long as it takes; None: it cannot be had, or nobody needs it."""
    if o.torch_device == 'none':
        yield None
        return
    shardctl = os.path.join(o.bin, 'shardctl')
    with tempfile.TemporaryDirectory(prefix='shd-', dir=os.environ.get('XDG_RUNTIME_DIR')) as where:
        address = os.path.join(where, 'run')
        up = subprocess.run([shardctl, 'up', '--devices', 'gpu0', '--runtime-dir', address], stdin=subprocess.DEVNULL,
                            capture_output=True, text=True, check=False)
        if up.returncode:
            print(f'no daemon for libshd.torch: {up.stderr.strip()}', flush=True)
        try:
            yield None if up.returncode else address
        finally:
            subprocess.run([shardctl, 'down', '--yes', '--runtime-dir', address], capture_output=True, check=False)


def sharded_figures(o, theirs, sharded):
    """What libshd.torch makes of PyTorch's steps, round by round: time over time."""
    said = []
    for variant, name in (('shardd', 'eager'), ('shardd_compiled', 'compiled')):
        if sharded.get(variant) and theirs.get(name):
            rate_figures(o, f'gpt.torch.{variant}', sharded[variant])
            ratios = [alone / ours for alone, ours in zip(theirs[name], sharded[variant])]
            figure(f'gpt.torch.{variant}.step_over_{name}', 'ratio', ratios)
            said.append(f'a step by libshd.torch {statistics.median(ratios):.3f} of PyTorch {name}')
    return said


def in_time(o):
    return time.monotonic() - BEGIN < o.seconds


def rounds(o, torch, libshd, ours):
    """Ours and PyTorch's in turn; the ratio of each round. ours: the rates of our rounds, added to.
    Figures also when one fails."""
    theirs = {variant: [] for variant in torch.variants}
    ratios = {variant: [] for variant in torch.variants}
    sharded = {variant: [] for variant in libshd.variants}
    try:
        for number in range(o.rounds):
            if number > 0 and not in_time(o):
                break
            rate, steps, _ = shd_run(o, DAEMON, ['--path', 'map'])
            ours.append(rate)
            for variant in torch.variants:
                got = torch.run(variant, o.steps, o.seconds + GRACE_S)
                if got is not None:
                    theirs[variant].append(got)
                    ratios[variant].append(rate / got)
            for variant in libshd.variants:
                if (got := libshd.run(variant, o.steps, o.seconds + GRACE_S)) is not None:
                    sharded[variant].append(got)
    finally:
        rate_figures(o, 'gpt', ours)
        for variant in [v for v in torch.variants if theirs[v]]:
            rate_figures(o, f'gpt.torch.{variant}', theirs[variant])
            figure(f'gpt.over_torch_{variant}', 'ratio', ratios[variant])
    said = [f'{statistics.median(ratios[v]):.2f} of PyTorch {v}' for v in torch.variants if ratios[v]]
    return steps, (said or ['no PyTorch']) + sharded_figures(o, theirs, sharded)


def rate_figures(o, name, rates):
    if rates:
        figure(f'{name}.tokens', 'tok/s', rates)
        figure(f'{name}.mfu', 'ratio', [t * flop_per_token(o) / PEAK for t in rates])


def ways(o, ours):
    """The same with copies, and without a daemon: what the exchange costs."""
    parts = []
    for name, words, more in (('copy', DAEMON, ['--path', 'copy']),
                              ('slots2', DAEMON, ['--path', 'map', '--slots', '2']),
                              ('standalone', ('shd-gpt', '--standalone'), [])):
        if not in_time(o):
            break
        rate, steps, _ = shd_run(o, words, more)
        figure(f'gpt.{name}.tokens', 'tok/s', [rate])
        figure(f'gpt.{name}.bytes_copied', 'bytes/step', [steps[-1]['bytes_copied']])
        figure(f'gpt.{name}.wait_share', 'ratio', [s['wait_ns'] / s['step_ns'] for s in steps])
        parts.append(f'{name} {rate / statistics.median(ours):.2f}')
    return parts


def flop_per_token(o):
    return 6 * (12 * o.layers * o.dim ** 2 + 256 * o.dim) + 12 * o.layers * o.dim * o.seq


def recompute(o, ours, held):
    """--recompute with all of a step's sequences in one micro-batch. held: MB without, a micro-batch."""
    more = ['--path', 'map', '--recompute', '--batch', str(o.batch * o.micro_batches),
            '--micro-batches', '1']
    rate, _, less = shd_run(o, DAEMON, more)
    figure('gpt.recompute.tokens', 'tok/s', [rate])
    figure('gpt.activations', 'MB', [held])
    figure('gpt.recompute.activations', 'MB', [less])
    return (f'recompute, {o.micro_batches} times the batch, {rate / statistics.median(ours):.2f} with '
            f'{less:.0f} MB of activations for {held:.0f}')


def main():
    o = parse()
    flop = flop_per_token(o)
    ours = []
    with daemon(o) as address:
        torch, libshd = start_torch(o), start_torch(o, address)
        try:
            _, _, held = shd_run(o, DAEMON, ['--path', 'map'])  # libraries and text are read from the disk
            torch.ready(['eager', 'compiled'])
            if torch.variants == ['eager']:  # compiling took it along
                torch.close()
                torch = start_torch(o)
                torch.ready(['eager'])
            libshd.ready([f'shardd{"_compiled" * (variant == "compiled")}' for variant in torch.variants])
            steps, parts = rounds(o, torch, libshd, ours)
            parts += ways(o, ours)
            if in_time(o):
                parts.append(recompute(o, ours, held))
        finally:
            torch.close()
            libshd.close()
    figure('gpt.map.bytes_copied', 'bytes/step', [s['bytes_copied'] for s in steps])
    figure('gpt.map.wait_share', 'ratio', [s['wait_ns'] / s['step_ns'] for s in steps])
    figure('gpt.flop_per_token', 'FLOP', [flop])
    copied = max(s['bytes_copied'] for s in steps)
    rate = statistics.median(ours)
    print(f'answer: {rate:.0f} tok/s, MFU {rate * flop / PEAK:.3f}; {copied} bytes copied a step by '
          f'map; {"; ".join(parts)}')
    sys.exit(0 if copied == 0 else 1)


if __name__ == '__main__':
    main()
