#!/usr/bin/env python3
"""bench_torch.py: one GPT trained from Python by PyTorch's own tools, DeepSpeed and shardd, paired in one run.

Each tool has 2 processes of one thread (gloo; shardd: 2 daemons of one thread beside them), the same model with a
tied head, the same batches, fused AdamW with clipping. "none" is the same compute without any exchange: each
process trains alone. They all live at the same time and take turns; a round is a few steps of each, in an
order that rotates, of "none" before, after and between them.

  torch.SIZE.TOOL.ratio         a step over "none" before and after it in the round; of "none": its last block over its
                                first, which is noise
  torch.SIZE.TOOL.cpu_ratio     the same of processor time, daemons' too: says as much where others work
  torch.SIZE.TOOL.step_ms       cpu_ms; tokens_per_s: of both processes together
  torch.SIZE.TOOL.memory_mb     of all its processes, daemons too, while it steps: their PSS as if nothing else ran;
                                reserve_mb: what daemons have taken and nobody has mapped or touched
  torch.SIZE.TOOL.first_step_s  from the start of the processes to the end of their first step; of those that import
                                PyTorch: import_s. shardd attaches to daemons that have the state, with a module on
                                the meta device; the others begin with a new model, and load no checkpoint.
  torch.SIZE.one.*              one worker: PyTorch alone, and shardd (waits: with overlap=False)
  torch.SIZE.TOOL.recovery_s    rank 1 is killed by SIGKILL half way between two checkpoints: until both ranks
                                have done the next step; caught_up_s: until they are where they had been; lost_steps.
                                Peers: torchrun, torch.save or DCP every few steps. shardd: shardctl run.

Losses of all tools are compared. DeepSpeed is installed into build/ once, or said to be missing. Whether the
machine was quiet is measured: others_share is processor time that somebody else took during the rounds.
bench.sh peers has more sizes, shd-gpt, and tables for docs/benchmarks.md.
"""
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from figures import machine, parser
from groups import (
    LIMIT_S, WORKER, TorchGroup, deepspeed_environment, environment, figure, free_port, parameters, processor, rounds,
    say, step_tokens, torch_env,
)  # fmt: skip

PEERS = {
    '10.8m': ['ddp', 'ddp-zero1', 'fsdp2', 'fsdp2-kept', 'deepspeed-1', 'deepspeed-2', 'deepspeed-3', 'shardd-ddp',
            'shardd-zero2', 'shardd-zero3'],
    '60m': ['ddp', 'fsdp2', 'deepspeed-3', 'shardd-zero3'],
}
RECOVERED = ['ddp', 'fsdp2', 'deepspeed-3', 'shardd-zero3']


# -- Rounds ----------------------------------------------------------------------------------------


def start_all(o, folder, variants, world):
    """Groups that have made their first steps; what cannot be started is said and left out."""
    groups = []
    for variant in variants:
        say(f'{variant}: starting {world} processes')
        group = TorchGroup(o, folder, variant, world)
        try:
            if group.daemons:  # so that they have the state
                group.note(**{f'cold_{name}': value for name, value in group.start().items()})
                group.quit()
            group.note(**group.start(warm=bool(group.daemons)))
            group.note(**group.peak_mb())
        except RuntimeError as e:
            say(f'LEFT OUT: {e}')
            group.end()
            continue
        if groups:
            group.base = groups[0]
        groups.append(group)
    return groups


def compare_losses(groups):
    """All that exchange gradients compute the same: up to rounding, which grows."""
    exchanged = {g.variant: g.last for g in groups[1:]}
    if len({step for step, _ in exchanged.values()}) == 1 and exchanged:
        losses = [loss for _, loss in exchanged.values()]
        groups[0].note(loss_spread=max(losses) - min(losses))


# -- Recovery --------------------------------------------------------------------------------------


def read_log(path):
    found = {}
    for rank in (0, 1):
        with contextlib.suppress(FileNotFoundError), open(f'{path}.{rank}', encoding='ascii') as f:
            found[rank] = [json.loads(line) for line in f if line.endswith('\n')]
    return found


def wait_for(path, process, reached):
    end = time.monotonic() + LIMIT_S
    while not (logs := read_log(path)).keys() >= {0, 1} or not reached(logs):
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError('it ended' if process.poll() is not None else f'not within {LIMIT_S} s')
        time.sleep(0.01)
    return logs


def recover(o, folder, variant):
    """{figure: value} of a run whose rank 1 is killed."""
    folder = os.path.join(folder, f'recover-{variant}')
    os.mkdir(folder)
    log, every = os.path.join(folder, 'log'), o.save_every
    at = every + every // 2 - 1  # the step after which it is killed
    work = [o.python, WORKER, variant, '--size', o.size, '--record', log, '--steps', '1000000', '--save-every',
            str(every)]
    if variant.startswith('shardd'):
        command = [os.path.join(o.bin, 'shardctl'), 'run', '--daemons', '2', '--threads-per-daemon', '1', '--workers',
                   '2', '--', *work]
    else:
        command = [o.python, '-m', 'torch.distributed.run', '--nproc-per-node', '2', '--max-restarts', '3',
                   '--monitor-interval', '0.1', '--rdzv-backend', 'c10d', '--rdzv-endpoint',
                   f'127.0.0.1:{free_port()}', '--local-addr', '127.0.0.1', *work[1:]]
    with open(os.path.join(folder, 'stderr'), 'wb') as errors:
        # Else PyTorch 2.15 finds the addresses of dead workers in its store, and starts them once more or hangs.
        more = deepspeed_environment(o.deepspeed) if variant.startswith('deepspeed') else {}
        env = environment(o, TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1', **more)
        process = subprocess.Popen(command, env=env, stdout=errors, stderr=errors, start_new_session=True)
    try:
        logs = wait_for(log, process, lambda logs: all(logs[r] and logs[r][-1]['step'] >= at for r in (0, 1)))
        time.sleep(0.2 * (logs[1][-1]['done'] - logs[1][-2]['done']))  # into the next one
        killed, before = time.monotonic(), read_log(log)
        os.kill(before[1][-1]['pid'], signal.SIGKILL)
        old = {rank: len(lines) for rank, lines in before.items()}
        last = max(lines[-1]['step'] for lines in before.values())
        # Steps that were under way may still come from the one that lives.
        pid = before[1][-1]['pid']
        after = wait_for(log, process, lambda logs: logs[1][-1]['pid'] != pid and len(logs[0]) > old[0])
        first = next(line for line in after[1][old[1]:] if line['pid'] != pid)
        caught = wait_for(log, process, lambda logs: all(logs[r][-1]['step'] > last for r in (0, 1)))
        until = max(next(line['done'] for line in caught[r][old[r]:] if line['step'] > last) for r in (0, 1))
        saves = [line['save_s'] for line in before[0] if (line['step'] + 1) % every == 0]
        return {'recovery_s': first['done'] - killed, 'caught_up_s': until - killed,
                'lost_steps': max(0, last + 1 - first['step']), 'save_s': statistics.median(saves)}
    except RuntimeError as e:
        with open(os.path.join(folder, 'stderr'), encoding='utf-8', errors='replace') as f:
            raise RuntimeError(f'{variant}: {e}: {"".join(f.readlines()[-12:])}') from e
    finally:
        process.terminate()  # each of them ends its workers
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# -- Figures ---------------------------------------------------------------------------------------

UNITS = {'ratio': 'ratio', 'cpu_ratio': 'ratio', 'step_ms': 'ms', 'cpu_ms': 'ms', 'tokens_per_s': 'tokens/s',
         'memory_mb': 'MB', 'reserve_mb': 'MB', 'first_step_s': 's',
         'import_s': 's', 'cold_first_step_s': 's', 'recovery_s': 's', 'caught_up_s': 's', 'lost_steps': 'steps',
         'save_s': 's', 'others_share': 'share', 'loss_spread': 'nats'}


def show(o, name, figures):
    for what, unit in UNITS.items():
        if what not in figures:
            continue
        f = figure(f'torch.{o.size}.{name}.{what}', figures[what], unit)
        if o.json:
            print(json.dumps(f), flush=True)
        else:
            print(f'{name + "." + what:<36} {f["value"]:11.3f} {f["p10"]:11.3f} {f["p90"]:11.3f} {f["min"]:11.3f} '
                  f'{f["max"]:11.3f}  {unit:<8} {f["n"]}', flush=True)


def show_head(o):
    if not o.json:
        print(f'torch {o.size}: {parameters(o.size) / 1e6:.1f} M parameters, {step_tokens(o.size, 1)} tokens a process and step, blocks of '
              f'{o.steps} steps; {processor()}, {machine()}')
        print(f'{"":<36} {"median":>11} {"p10":>11} {"p90":>11} {"min":>11} {"max":>11}  {"unit":<8} n', flush=True)


# -- What is needed --------------------------------------------------------------------------------


def arguments():
    p = parser('torch', __doc__)
    p.add_argument('--size', choices=PEERS, default='10.8m', help='parameters; 60m: 64 M (10.8m)')
    p.add_argument('--steps', type=int, default=0, help='of a tool in a round (3; 60m: 2)')
    p.add_argument('--seconds', type=int, default=120, help='for the rounds of 2 workers, a third of it for one (120)')
    p.add_argument('--save-every', type=int, default=0, help='steps between two checkpoints of peers (10; 60m: 4)')
    p.add_argument('--tools', help=f'instead of all: a list of {", ".join(PEERS["10.8m"])}')
    p.add_argument('--parts', default='two,one,recovery', help='any of two, one, recovery (all)')
    o = p.parse_args()
    o.steps = o.steps or (3 if o.size == '10.8m' else 2)
    o.save_every = o.save_every or (10 if o.size == '10.8m' else 4)
    o.variants = o.tools.split(',') if o.tools else PEERS[o.size]
    for name in set(o.variants) - set(PEERS['10.8m']):
        p.error(f'--tools has {name!r}, known: {", ".join(PEERS["10.8m"])}')
    for name in set(o.parts.split(',')) - {'two', 'one', 'recovery'}:
        p.error(f'--parts has {name!r}, known: two, one, recovery')
    o.rounds = 0
    if o.save_every < 2 or o.steps < 1:
        p.error('--save-every must be at least 2, --steps 1')
    return o


def run_rounds(o, folder, prefix, variants, world, seconds):
    with contextlib.ExitStack() as o.ends:
        groups = start_all(o, folder, ['none', *variants], world)
        if len(groups) < 2:
            sys.exit('bench.sh torch: nothing to compare')
        groups[0].note(others_share=rounds(o, groups[1:], seconds))
        if world > 1:
            compare_losses(groups)
        show_head(o)
        for group in groups:
            show(o, prefix + group.variant, group.figures)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order
    o = arguments()
    o.python = torch_env() or sys.exit('bench.sh torch: there is no PyTorch (scripts/torch_env.py says why)')
    o.deepspeed = torch_env('--peers') if any('deepspeed' in v for v in o.variants) else None
    if not o.deepspeed and any('deepspeed' in v for v in o.variants):
        say('LEFT OUT: DeepSpeed could not be installed')
        o.variants = [v for v in o.variants if 'deepspeed' not in v]
    say(f'{processor()}, {machine()}')
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix='shardd-bench-') as folder:
        if 'two' in o.parts:
            run_rounds(o, folder, '', o.variants, 2, o.seconds)
        if 'one' in o.parts:
            run_rounds(o, folder, 'one.', ['shardd-zero3', 'shardd-waits'], 1, o.seconds / 3)
        for variant in [v for v in o.variants if v in RECOVERED and 'recovery' in o.parts]:
            say(f'{variant}: a rank is killed')
            try:
                show(o, variant, {name: [value] for name, value in recover(o, folder, variant).items()})
            except RuntimeError as e:
                say(f'LEFT OUT: {e}')
    say(f'done in {time.monotonic() - begin:.0f} s')


if __name__ == '__main__':
    main()
