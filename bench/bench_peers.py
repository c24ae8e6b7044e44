#!/usr/bin/env python3
"""bench_peers.py: one GPT trained by shardd, PyTorch's own tools and DeepSpeed, in turns, in one run.

  none          PyTorch, each process by itself: its compute without any exchange
  ddp           DistributedDataParallel
  zro           the same with ZeroRedundancyOptimizer
  fsdp2         fully_shard of each block and the model, reshard_after_forward=True
  fsdp2_zero2   the same with reshard_after_forward=False
  ds1 ds2 ds3   DeepSpeed, ZeRO stage 1, 2, 3
  shardd        shd-gpt beside 2 daemons of one thread; compared with shd-gpt --standalone (shardd_none)
  shardd_torch  libshd.torch, ZeRO-3, beside 2 such daemons

Each mode has 2 processes of one thread (gloo), the same shapes with a tied head, one micro-batch a process and
step, fp32, fused AdamW (shardd: the daemons'), clipping. Those of a size live at the same time, as far as memory
goes, and take turns: a round has a block of steps of each, and one of what they are compared with before, after
and between them. Processes of shd-gpt are stopped (SIGSTOP) while it is not their turn; others wait for a command.

  peers.SIZE.MODE.ratio          a step over the compute alone, by the blocks before and after it in the round.
                                 none, shardd_none: their last block over their first, which is noise
  peers.SIZE.MODE.ratio_slower   over the compute alone of whichever process is the slower one in each step, for a step
                                 ends for all at once in all modes. An estimate: alone, k-th steps are not of one time.
                                 Beside ratio it says what is not the exchange's but the machine's, which slows one down
  peers.SIZE.MODE.ratio_p10      the 10th percentile of all steps over that of the compute alone
  peers.SIZE.MODE.cpu_ratio      as ratio, of processor time, daemons' too
  peers.SIZE.MODE.ns_per_param   what exchange adds to a step, per parameter
  peers.SIZE.MODE.tokens_per_s   of both processes
  peers.SIZE.MODE.memory_mb      the most during two steps, of all processes, daemons and their keeper: PSS as if
                                 nothing else ran, so what is shared counts once; with what daemons have taken in
                                 shared memory and nobody has mapped or touched, which reserve_mb is alone
  peers.SIZE.MODE.first_step_s   from the start of the first process (shardd: the daemons) to the end of both
                                 ranks' first step of a new model; Python's imports are in it
  peers.SIZE.MODE.recovery_s     rank 1 is killed (SIGKILL) in the middle of a step: until both ranks have ended
                                 the next step. This program sees the death at once and starts ranks again: of
                                 peers all (the other is killed: it hangs in a collective), which load the last
                                 checkpoint; of shardd rank 1, while rank 0 waits. Saving is not in it.
  peers.SIZE.MODE.caught_up_s    likewise, until the step is done in which it was killed; lost_steps are computed again
  peers.SIZE.others_share        of the processors' time during the rounds: what somebody else took

DeepSpeed and PyTorch are of the package registry (scripts/torch_env.py --peers). DeepSpeed runs with DS_ACCELERATOR=cpu
and PyTorch's fused AdamW, not CPUAdam; its shared-memory all-reduce is built by g++ before anything is measured. A mode
that cannot run here is named with the reason, and left out. Without --json a table as in docs/benchmarks.md.
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
    ROOT, SIZES, Failed, Group, TorchGroup, block_of, figure, parameters, processor, rounds, say,
    step_tokens, torch_env, used_s,
)  # fmt: skip

TEXT = [os.path.join(ROOT, 'docs', name) for name in ('design.md', 'protocol.md')]
VARIANTS = {'none': 'none', 'ddp': 'ddp', 'zro': 'ddp-zero1', 'fsdp2': 'fsdp2', 'fsdp2_zero2': 'fsdp2-kept',
            'ds1': 'deepspeed-1', 'ds2': 'deepspeed-2', 'ds3': 'deepspeed-3', 'shardd_torch': 'shardd-zero3'}
MODES = ['shardd', *VARIANTS]
ROWS = {'none': 'none', 'ddp': 'DDP', 'zro': 'DDP + ZeroRedundancyOptimizer', 'fsdp2': 'FSDP2',
        'fsdp2_zero2': 'FSDP2, parameters kept after forward', 'ds1': 'DeepSpeed ZeRO-1', 'ds2': 'DeepSpeed ZeRO-2',
        'ds3': 'DeepSpeed ZeRO-3', 'shardd_torch': '**shardd**, PyTorch', 'shardd_none': 'none, `shd-gpt`',
        'shardd': '**shardd**, `shd-gpt`'}
BASES = {'shardd': 'shardd_none'}  # of the others: none
PRESETS = {  # steps of a block, seconds of all rounds
    'tiny': (3, 5),
    '0.84m': (15, 75),
    '10.8m': (3, 240),
    '60m': (1, 180),
}
UNITS = {'ratio': 'ratio', 'ratio_slower': 'ratio', 'ratio_p10': 'ratio', 'cpu_ratio': 'ratio', 'ns_per_param': 'ns',
         'step_ms': 'ms', 'tokens_per_s': 'tokens/s', 'memory_mb': 'MB', 'reserve_mb': 'MB', 'first_step_s': 's',
         'recovery_s': 's', 'caught_up_s': 's', 'lost_steps': 'steps'}
PLOTS = {'ratio': 'A step over its compute alone', 'tokens_per_s': 'Tokens per second of two processes',
         'memory_mb': 'Memory of all processes', 'first_step_s': 'From the first process to the first step',
         'recovery_s': 'From a killed rank to the next step'}
DEEPSPEED = ('ds1', 'ds2', 'ds3')
ALONE = ('none', 'shardd_none')
LOSS_APART = 1e-3  # nats: more is another model
ROOM_MB = 1000
LOST_STEPS = 2  # between the checkpoint and the step in which rank 1 is killed
KILL_AT = 0.3  # of a step
LOOK_S = 0.005  # between two looks at a log, where the moment counts
REST_S = 0.02  # where it does not, and looking would take time from who is measured


# -- shd-gpt ---------------------------------------------------------------------------------------


class StepLog:
    """The steps that a process writes, as far as they are read."""

    def __init__(self, path):
        self.path, self.steps, self.file = path, [], None

    def count(self):
        if not self.file and os.path.exists(self.path):
            self.file = open(self.path, encoding='ascii')
        while self.file:
            at, line = self.file.tell(), self.file.readline()
            if not line.endswith('\n'):
                self.file.seek(at)
                break
            self.steps.append(json.loads(line))
        return len(self.steps)

    def seconds(self, begin, end):
        return [step['step_ns'] * 1e-9 for step in self.steps[begin:end]]


class GptGroup(Group):
    """Processes of shd-gpt, which train on and on, and are stopped when it is not their turn. alone: each is a
    process of its own."""

    def __init__(self, o, folder, mode, world):
        super().__init__(o, folder, mode, world, needs_daemons=mode == 'shardd')
        self.alone = mode != 'shardd'
        self.logs = []

    def run_rank(self, rank):
        layers, dim, heads, seq, batch = SIZES[self.o.size]
        path = os.path.join(self.folder, f'log.{rank}')
        command = [os.path.join(self.o.bin, 'shd-gpt'), '--steps', '100000000', '--warmup', '1', '--lr', '3e-4',
                   '--eval-every', '0', '--sample', '0', '--log-every', '1000000', '--json', path, '--threads', '1',
                   '--layers', str(layers), '--dim', str(dim), '--heads', str(heads), '--seq', str(seq),
                   '--batch', str(batch), '--clip', '1']
        command += [word for path in TEXT for word in ('--data', path)]
        if self.alone:
            command += ['--standalone', '--micro-batches', '1', '--seed', str(rank + 1)]
            return self.spawn(rank, command, RANK='0', LOCAL_RANK='0', WORLD_SIZE='1')
        return self.spawn(rank, command + ['--micro-batches', str(self.world)])

    def start(self):
        self.processes = [self.run_rank(rank) for rank in range(self.world)]
        self.logs = [StepLog(os.path.join(self.folder, f'log.{rank}'))
                     for rank in range(self.world if self.alone else 1)]  # rank 0's has the steps of all
        self.wait([1] * len(self.logs))
        first_step_s = time.monotonic() - self.begun
        self.stop()
        return {'first_step_s': first_step_s}

    def reached(self, counts, pause_s):
        """Whether every log has so many steps; after a pause if not."""
        if all(log.count() >= count for log, count in zip(self.logs, counts)):
            return True
        for rank, process in enumerate(self.processes):
            if process.poll() is not None:
                raise self.failed(rank)
        time.sleep(pause_s)
        return False

    def wait(self, counts, pause_s=LOOK_S):
        self.until(lambda: self.reached(counts, pause_s))

    def stop(self):
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)

    def go(self):
        """Of each log: the number of steps with the one in which they were stopped."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
        return [log.count() + 1 for log in self.logs]

    def steps(self, count):
        """After one that does not count, as with others, and the one in which they were stopped."""
        used, begin = used_s(self.pids()), time.monotonic()
        first = [at + 1 for at in self.go()]
        self.wait([at + count for at in first], REST_S)
        share = (used_s(self.pids()) - used) / (time.monotonic() - begin)
        self.stop()
        took = [log.seconds(at, at + count) for log, at in zip(self.logs, first)]
        return block_of(took, share * statistics.mean(sum(took, [])))

    def peak_mb(self):
        """During two steps."""
        end = [at + 2 for at in self.go()]
        peak = self.sampled(lambda: self.reached(end, REST_S))
        self.stop()
        return peak

    def recover(self):
        """A step that ends within half of one after the kill had rank 1's part already: the next one counts."""
        at = self.go()[0] + 3
        self.wait([at])
        usual = statistics.median(self.logs[0].seconds(at - 2, at))
        time.sleep(KILL_AT * usual)
        begin = time.monotonic()
        self.kill(self.processes[1:])
        self.processes[1:] = [self.run_rank(1)]
        while True:
            at = self.logs[0].count() + 1
            self.wait([at])
            took = time.monotonic() - begin
            if took > usual / 2:
                break
        self.stop()
        return {'recovery_s': took, 'caught_up_s': took, 'lost_steps': 0}


# -- PyTorch ---------------------------------------------------------------------------------------


class TorchMode(TorchGroup):
    """As in bench_torch.py, and rank 1 can be killed."""

    def __init__(self, o, folder, mode, world):
        super().__init__(o, folder, VARIANTS[mode], world, name=mode)

    def recover(self):
        return self.recover_rank() if self.daemons else self.recover_all()

    def kill_rank(self):
        """In the middle of a step. When, and which step."""
        done = self.ask(f'steps {LOST_STEPS}')
        self.send('steps 1')
        time.sleep(KILL_AT * max(d['end'] - d['begin'] for d in done) / LOST_STEPS)
        begin = time.monotonic()
        self.kill(self.processes[1:])
        return begin, done[0]['step']

    def first_loss(self, saved):
        """Of the step after a checkpoint."""
        done = self.ask('steps 1')
        if done[0]['step'] != saved + 1:
            raise Failed(self, f'it goes on with step {done[0]["step"]}, not {saved + 1}')
        return done, statistics.mean(d['loss'] for d in done)

    def recover_all(self):
        saved = self.ask('save')[0]['step']
        before = self.first_loss(saved)[1]
        begin, killed = self.kill_rank()
        self.kill(self.processes[:1])
        self.start_ranks(range(self.world))
        done, after = self.first_loss(saved)
        caught_up = self.ask(f'steps {killed - saved}')
        if abs(after - before) > LOSS_APART:
            raise Failed(self, f'the step after its checkpoint has another loss, {after} instead of {before}')
        return {'recovery_s': max(d['end'] for d in done) - begin,
                'caught_up_s': max(d['end'] for d in caught_up) - begin, 'lost_steps': killed - saved}

    def recover_rank(self):
        """Rank 0 ends the step without it where rank 1's part was in already: then the next one counts."""
        begin, killed = self.kill_rank()
        step = self.start_ranks([1])[0]['step']
        if step > killed:
            self.answer(0)
            self.send('steps 1', ranks=[0])
        self.send('steps 1', ranks=[1])
        took = max(self.answer(rank)['end'] for rank in range(self.world)) - begin
        return {'recovery_s': took, 'caught_up_s': took, 'lost_steps': killed - min(step, killed)}


# -- A size ----------------------------------------------------------------------------------------


def begin_mode(o, folder, mode):
    """A group that is ready for rounds, or None after it has said why not."""
    say(f'{o.size} {mode}: starting')
    group = None
    try:
        if mode not in VARIANTS:
            group = GptGroup(o, folder, mode, 2)
        elif o.python is None:
            raise RuntimeError('there is no PyTorch (scripts/torch_env.py)')
        elif mode in DEEPSPEED and o.deepspeed is None:
            raise RuntimeError('there is no DeepSpeed (scripts/torch_env.py --peers)')
        else:
            group = TorchMode(o, folder, mode, 2)
        group.note(**group.start())
        group.note(**group.peak_mb())
        for _ in range(o.recoveries if mode not in ALONE else 0):
            group.note(**group.recover())
        return group
    except (RuntimeError, OSError, subprocess.SubprocessError) as e:
        say(f'LEFT OUT: {o.size} {e if isinstance(e, Failed) else f"{mode}: {e}"}')
        if group:
            group.end()
        return None


def available_mb():
    with open('/proc/meminfo', encoding='ascii') as f:
        return next(int(line.split()[1]) for line in f if line.startswith('MemAvailable')) * 1024 / 1e6


def has_room(groups):
    """For one more, which may be half as large again as the largest."""
    return not groups or available_mb() > 1.5 * max(max(g.figures['memory_mb']) for g in groups) + ROOM_MB


class Size:
    """The modes of a size; figures as they come."""

    def __init__(self, o, folder):
        self.o, self.folder, self.bases, self.live, self.lines, self.shares = o, folder, {}, [], [], []

    def base(self, mode):
        name = BASES.get(mode, 'none')
        if name not in self.bases:
            self.bases[name] = begin_mode(self.o, self.folder, name)
        return self.bases[name]

    def take_turns(self):
        """Rounds of those that live, which end with it."""
        groups, self.live = self.live, []
        while groups:
            try:
                self.shares.append(rounds(self.o, groups, self.o.seconds * len(groups) / len(self.o.modes)))
                break
            except Failed as e:
                say(f'LEFT OUT: {self.o.size} {e}')
                groups = [group for group in groups if e.group not in (group, group.base)]
                e.group.end()
        for group in groups:
            self.tell(group)
            group.end()

    def tell(self, group):
        figures = dict(group.figures)
        if 'reserve_mb' in figures:
            figures['memory_mb'] = [sum(of) for of in zip(figures['memory_mb'], figures['reserve_mb'])]
        for name, unit in UNITS.items():
            if name in figures:
                self.line(f'{group.name}.{name}', figures[name], unit)

    def line(self, name, values, unit):
        self.lines.append(figure(f'peers.{self.o.size}.{name}', values, unit))
        if self.o.json:
            print(json.dumps(self.lines[-1]), flush=True)

    def run(self):
        for mode in self.o.modes:
            base = self.base(mode)
            if mode in ALONE:
                continue
            if base is None:
                say(f'LEFT OUT: {self.o.size} {mode}: there is nothing to compare it with')
                continue
            if not has_room(self.live + [b for b in self.bases.values() if b]):
                self.take_turns()
            if group := begin_mode(self.o, self.folder, mode):
                group.base = base
                self.live.append(group)
        self.take_turns()
        for base in self.bases.values():
            if base:
                self.tell(base)
        if self.shares:
            self.line('others_share', self.shares, 'share')
        return self.lines


# -- Figures ---------------------------------------------------------------------------------------


def cell(line, digits, spread=False):
    if line is None:
        return ''
    text = f'{line["value"]:,.{digits}f}'
    return text + (f' ({line["min"]:.{digits}f}–{line["max"]:.{digits}f})' if spread else '')


def table(o, lines):
    """As docs/benchmarks.md has it."""
    found = {line['name'].removeprefix(f'peers.{o.size}.'): line for line in lines}
    rows = [f'{parameters(o.size) / 1e6:.2f} M parameters, {step_tokens(o.size, 2):,} tokens a step; {processor()}, '
            f'{os.cpu_count()} processors, of whose time others took {cell(found.get("others_share"), 3)}; '
            f'{time.strftime("%Y-%m-%d")}', '',
            '| 2 processes | time over compute alone | over the slower one | of 10th percentiles '
            '| processor time, likewise | ns per parameter '
            '| tokens/s | memory | first step | next step after a kill | as far as before |',
            '|' + '---|' * 11]
    for mode, row in ROWS.items():
        at = {name: found.get(f'{mode}.{name}') for name in UNITS}
        if at['tokens_per_s']:
            cells = [row, cell(at['ratio'], 3, True), cell(at['ratio_slower'], 3), cell(at['ratio_p10'], 3),
                     cell(at['cpu_ratio'], 3), cell(at['ns_per_param'], 2), cell(at['tokens_per_s'], 0),
                     cell(at['memory_mb'], 0) + ' MB',
                     cell(at['first_step_s'], 1) + ' s', cell(at['recovery_s'], 1), cell(at['caught_up_s'], 1)]
            rows.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(rows) + '\n'


def save(o, lines):
    """The figures, and an SVG of each kind by plot.py, where docs/ has them."""
    for name in ('plots', 'images'):
        os.makedirs(os.path.join(o.save, name), exist_ok=True)
    with open(os.path.join(o.save, 'plots', f'peers-{o.size}.jsonl'), 'w', encoding='ascii') as f:
        f.writelines(json.dumps(line) + '\n' for line in lines)
    for name, title in PLOTS.items():
        chosen = [json.dumps(line) for line in lines if line['name'].endswith('.' + name)]
        if not chosen:
            continue
        with open(os.path.join(o.save, 'images', f'peers-{o.size}-{name}.svg'), 'w', encoding='utf-8') as f:
            subprocess.run([os.path.join(ROOT, 'scripts', 'plot.py'), '--short', '--title',
                            f'{title}, {parameters(o.size) / 1e6:.2f} M parameters'], check=True, text=True,
                           input='\n'.join(chosen), stdout=f)


# -- The program -----------------------------------------------------------------------------------


def listed(p, option, text, known):
    names = text.split(',')
    for name in names:
        if name not in known:
            p.error(f'{option} has {name!r}, known: {", ".join(known)}')
    return names


def arguments():
    p = parser('peers', __doc__)
    p.add_argument('--sizes', default='0.84m,10.8m,60m', help='a list; 60m: 64 M (0.84m,10.8m,60m)')
    p.add_argument('--modes', default=','.join(MODES), help=f'a list ({",".join(MODES)})')
    p.add_argument('--seconds', type=float, help="of a size's rounds in all, of all modes (75, 240, 180)")
    p.add_argument('--rounds', type=int, default=0, help='so many instead')
    p.add_argument('--steps', type=int, help='of a block (15, 3, 1), after one that does not count')
    p.add_argument('--recoveries', type=int, default=1, help='times that a rank of each is killed (1)')
    p.add_argument('--save', metavar='DIR', help='write the figures to DIR/plots and an SVG of each kind to DIR/images')
    o = p.parse_args()
    o.sizes = listed(p, '--sizes', o.sizes, SIZES)
    o.modes = listed(p, '--modes', o.modes, MODES)
    if set(o.modes) <= set(ALONE):
        p.error('--modes has nothing to compare')
    if (o.steps is not None and o.steps < 1) or o.rounds < 0 or o.recoveries < 0:
        p.error('--steps must be at least 1, --rounds and --recoveries 0')
    return o


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order
    o = arguments()
    wanted = {mode for mode in o.modes if mode in VARIANTS}
    o.python = torch_env() if wanted else None
    o.deepspeed = torch_env('--peers') if o.python and wanted & set(DEEPSPEED) else None
    say(f'{processor()}, {machine()}')
    begin, chosen = time.monotonic(), (o.steps, o.seconds)
    for o.size in o.sizes:
        o.steps, o.seconds = (given or preset for given, preset in zip(chosen, PRESETS[o.size]))
        with tempfile.TemporaryDirectory(prefix='shardd-bench-') as folder, contextlib.ExitStack() as o.ends:
            lines = Size(o, folder).run()
        if not o.json:
            print(table(o, lines), flush=True)
        if o.save and lines:
            save(o, lines)
        say(f'{o.size}: done after {time.monotonic() - begin:.0f} s')


if __name__ == '__main__':
    main()
