#!/usr/bin/env python3
"""bench_torch.py: one GPT trained from Python by PyTorch's own tools, DeepSpeed and shardd, paired in one run.

Each tool has 2 processes of one thread (gloo; shardd: 2 daemons of one thread beside them), the same model with a
tied head, the same batches, fused AdamW with clipping. "none" is the same compute without any exchange: each
process trains alone. They all live at the same time and take turns; a round is a few steps of each, in an
order that rotates, of "none" twice.

  torch.SIZE.TOOL.ratio         a step over the step of "none" in the same round
  torch.SIZE.TOOL.cpu_ratio     the same of processor time, daemons' too: says as much where others work
  torch.SIZE.TOOL.step_ms       cpu_ms; tokens_s: of both processes together
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
"""
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from figures import machine, parser

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
WORKER = os.path.join(HERE, 'torch_worker.py')
DEEPSPEED = ('deepspeed==0.19.8', 'einops', 'hjson', 'msgpack', 'ninja', 'packaging', 'psutil', 'py-cpuinfo',
             'pydantic', 'pydantic-core', 'annotated-types', 'typing-inspection', 'tqdm')
TOKENS = {'10m': 4 * 128, '60m': 2 * 128}  # of a step of one process (torch_worker.py)
PEERS = {
    '10m': ['ddp', 'ddp-zero1', 'fsdp2', 'fsdp2-kept', 'deepspeed-1', 'deepspeed-2', 'deepspeed-3', 'shardd-ddp',
            'shardd-zero2', 'shardd-zero3'],
    '60m': ['ddp', 'fsdp2', 'deepspeed-3', 'shardd-zero3'],
}
RECOVERED = ['ddp', 'fsdp2', 'deepspeed-3', 'shardd-zero3']
LIMIT_S = 300
TICK_S = 1 / os.sysconf('SC_CLK_TCK')


def say(text):
    print(f'bench.sh torch: {text}', file=sys.stderr, flush=True)


# -- The machine -----------------------------------------------------------------------------------


def processor():
    with open('/proc/cpuinfo', encoding='utf-8') as f:
        return next((line.partition(':')[2].strip() for line in f if line.startswith('model name')), 'unknown')


def busy_s():
    """Processor time that anybody has had, and what a hypervisor took."""
    with open('/proc/stat', encoding='ascii') as f:
        ticks = [int(word) for word in f.readline().split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) * TICK_S


def used_s(pids):
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f'/proc/{pid}/stat', 'rb') as f:
            words = f.read().rpartition(b')')[2].split()
            total += int(words[11]) + int(words[12])
    return total * TICK_S


def smaps(pid):
    """(mapped file or '', field, kB) of a process's memory."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f'/proc/{pid}/smaps', encoding='utf-8') as f:
        name = ''
        for line in f:
            words = line.split()
            if words[0].endswith(':'):
                yield name, words[0][:-1], int(words[1]) if words[1].isdigit() else 0
            else:
                name = words[5] if len(words) > 5 and words[5].startswith('/') else ''


def memory_files(pid):
    """{inode: bytes} of the memory that it shares by descriptors, mapped or kept in reserve."""
    found = {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for name in os.listdir(f'/proc/{pid}/fd'):
            with contextlib.suppress(FileNotFoundError):
                path = f'/proc/{pid}/fd/{name}'
                if os.readlink(path).startswith('/memfd:'):
                    found[os.stat(path).st_ino] = os.stat(path).st_blocks * 512
    return found


def memory_mb(pids):
    """(PSS of processes as if they were alone: files' pages that several map count once; memory that is taken
    and not mapped by any)."""
    own_kb, shared_kb, files, memory = 0, 0, {}, {}
    for pid in pids:
        memory.update(memory_files(pid))
        clean = {}
        for name, field, kb in smaps(pid):
            if name.startswith('/memfd:'):
                shared_kb += kb if field == 'Pss' else 0
            elif not name or name.startswith('/dev/'):
                own_kb += kb if field == 'Pss' else 0
            elif field.endswith('_Clean'):
                clean[name] = clean.get(name, 0) + kb
            elif field.endswith('_Dirty'):
                own_kb += kb
        for name, kb in clean.items():
            files[name] = max(files.get(name, 0), kb)
    return ((own_kb + shared_kb + sum(files.values())) * 1024 / 1e6,
            max(0, sum(memory.values()) - shared_kb * 1024) / 1e6)


# -- Processes -------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def environment(o, **more):
    env = {key: value for key, value in os.environ.items()
           if key not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'SHARDD_ADDRESS')}
    paths = [os.path.join(o.bin, '../python'), o.deepspeed or '']
    env.update(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1', GLOO_SOCKET_IFNAME='lo',
               DS_ACCELERATOR='cpu', TORCH_CPP_LOG_LEVEL='ERROR', PYTHONPATH=':'.join(filter(None, paths)),
               PYTHONWARNINGS='ignore', **more)
    return env


class Daemons:
    """2 daemons of one thread."""

    def __init__(self, o, folder):
        self.shardctl, self.address = os.path.join(o.bin, 'shardctl'), os.path.join(folder, 'run')
        subprocess.run([self.shardctl, 'up', '--daemons', '2', '--threads-per-daemon', '1', '--runtime-dir',
                        self.address], check=True, stdout=subprocess.DEVNULL)
        o.ends.callback(self.down)
        status = subprocess.run([self.shardctl, 'status', '--json', '--address', self.address], check=True,
                                capture_output=True, text=True)
        self.pids = [daemon['pid'] for daemon in json.loads(status.stdout)]
        with open(f'/proc/{self.pids[0]}/stat', 'rb') as f:  # and their keeper
            self.pids.append(int(f.read().rpartition(b')')[2].split()[1]))

    def down(self):
        subprocess.run([self.shardctl, 'down', '--yes', '--runtime-dir', self.address], check=True,
                       capture_output=True)


class Group:
    """The processes of a tool."""

    def __init__(self, o, folder, variant, world):
        self.o, self.variant, self.world, self.processes = o, variant, world, []
        o.ends.callback(self.quit)
        self.folder = os.path.join(folder, f'{variant}-{world}')
        os.mkdir(self.folder)
        self.daemons = Daemons(o, self.folder) if variant.startswith('shardd') else None
        self.figures = {}  # name: values

    def note(self, **values):
        for name, value in values.items():
            self.figures.setdefault(name, []).append(value)

    def start(self, warm=False):
        """The workers' first step, from nothing but what daemons may have. warm: they have the values, too."""
        more = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port()), 'WORLD_SIZE': str(self.world)}
        if self.daemons:
            more['SHARDD_ADDRESS'] = self.daemons.address
        command = [self.o.python, WORKER, self.variant, '--size', self.o.size] + ['--meta'] * warm
        begin = time.monotonic()
        for rank in range(self.world):
            with open(os.path.join(self.folder, f'stderr.{rank}'), 'wb') as errors:
                self.processes.append(subprocess.Popen(
                    command, env=environment(self.o, RANK=str(rank), LOCAL_RANK=str(rank), **more), text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors))
        ready = self.answers()
        self.params = ready[0]['params']
        done = self.ask('steps 1')
        return {'first_step_s': max(d['end'] for d in done) - begin,
                'import_s': max(r['imported'] for r in ready) - begin}

    def pids(self):
        return [p.pid for p in self.processes] + (self.daemons.pids if self.daemons else [])

    def send(self, line):
        for process in self.processes:
            process.stdin.write(line + '\n')
            process.stdin.flush()

    def answers(self):
        answers = []
        for rank, process in enumerate(self.processes):
            there = select.select([process.stdout], [], [], LIMIT_S)[0]
            line = process.stdout.readline() if there else ''
            if not line:
                with open(os.path.join(self.folder, f'stderr.{rank}'), encoding='utf-8', errors='replace') as f:
                    raise RuntimeError(f'{self.variant}, rank {rank}: {"".join(f.readlines()[-12:])}')
            answers.append(json.loads(line))
        return answers

    def ask(self, line):
        self.send(line)
        return self.answers()

    def steps(self, count):
        """Seconds and processor seconds of a step, after one that does not count: caches were others'."""
        self.ask('steps 1')
        used = used_s(self.pids())
        done = self.ask(f'steps {count}')
        used = used_s(self.pids()) - used
        self.last = done[0]['step'], statistics.mean(d['loss'] for d in done)
        return statistics.mean(d['end'] - d['begin'] for d in done) / count, used / count

    def peak_mb(self):
        """Of samples during two steps; and what is in reserve then."""
        self.send('steps 2')
        samples = [memory_mb(self.pids())]
        while not select.select([self.processes[0].stdout], [], [], 0.05)[0]:
            samples.append(memory_mb(self.pids()))
        self.answers()
        peak, reserve = max(samples)
        return {'memory_mb': peak, 'reserve_mb': reserve} if self.daemons else {'memory_mb': peak}

    def quit(self):
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write('quit\n')
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self.processes = []


# -- Rounds ----------------------------------------------------------------------------------------


def start_all(o, folder, variants, world):
    """Groups that have made their first steps; what cannot be started is said and left out."""
    groups = []
    for variant in variants:
        say(f'{variant}: starting {world} processes')
        group = Group(o, folder, variant, world)
        try:
            if group.daemons:  # so that they have the state
                group.note(**{f'cold_{name}': value for name, value in group.start().items()})
                group.quit()
            group.note(**group.start(warm=bool(group.daemons)))
            group.note(**group.peak_mb())
        except RuntimeError as e:
            say(f'LEFT OUT: {e}')
            group.quit()
            continue
        groups.append(group)
    return groups


def rounds(o, groups, seconds):
    """Rounds of all groups until the time is over; at least three."""
    base = groups[0]
    before, begin = busy_s() - used_s(pid for g in groups for pid in g.pids()), time.monotonic()
    done = 0
    while done < 3 or (time.monotonic() - begin) * (done + 1) / done < seconds:
        rest = groups[1:]
        rest = rest[done % len(rest):] + rest[:done % len(rest)]
        order = [base, *rest[:len(rest) // 2], base, *rest[len(rest) // 2:]] if len(rest) > 2 else [base, *rest]
        took = {}
        for group in order:
            took.setdefault(group, []).append(group.steps(o.steps))
        means = {group: [statistics.mean(of) for of in zip(*times)] for group, times in took.items()}
        for group, (step, used) in means.items():
            group.note(step_ms=step * 1e3, cpu_ms=used * 1e3, tokens_s=group.world * TOKENS[o.size] / step)
            if group is not base:
                group.note(ratio=step / means[base][0], cpu_ratio=used / means[base][1])
        done += 1
        say(f'round {done}, {time.monotonic() - begin:.0f} of {seconds:.0f} s')
    taken = busy_s() - used_s(pid for g in groups for pid in g.pids()) - before
    base.note(others_share=max(0.0, taken) / (time.monotonic() - begin) / os.cpu_count())


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
        env = environment(o, TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1')
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

UNITS = {'ratio': 'ratio', 'cpu_ratio': 'ratio', 'step_ms': 'ms', 'cpu_ms': 'ms', 'tokens_s': 'tokens/s',
         'memory_mb': 'MB', 'reserve_mb': 'MB', 'first_step_s': 's',
         'import_s': 's', 'cold_first_step_s': 's', 'recovery_s': 's', 'caught_up_s': 's', 'lost_steps': 'steps',
         'save_s': 's', 'others_share': 'share', 'loss_spread': 'nats'}


def show(o, name, figures):
    for figure, unit in UNITS.items():
        values = sorted(figures.get(figure, ()))
        if not values:
            continue
        low, high = (values[round(share * (len(values) - 1))] for share in (0.1, 0.9))
        median = statistics.median(values)
        if o.json:
            print(json.dumps({'name': f'torch.{o.size}.{name}.{figure}', 'value': float(f'{median:.6g}'), 'unit': unit,
                              'min': float(f'{values[0]:.6g}'), 'max': float(f'{values[-1]:.6g}'), 'n': len(values),
                              'p10': float(f'{low:.6g}'), 'p90': float(f'{high:.6g}')}), flush=True)
        else:
            print(f'{name + "." + figure:<36} {median:11.3f} {low:11.3f} {high:11.3f} {values[0]:11.3f} '
                  f'{values[-1]:11.3f}  {unit:<8} {len(values)}', flush=True)


def show_head(o, params):
    if not o.json:
        print(f'torch {o.size}: {params / 1e6:.1f} M parameters, {TOKENS[o.size]} tokens a process and step, blocks of '
              f'{o.steps} steps; {processor()}, {machine()}')
        print(f'{"":<36} {"median":>11} {"p10":>11} {"p90":>11} {"min":>11} {"max":>11}  {"unit":<8} n', flush=True)


# -- What is needed --------------------------------------------------------------------------------


def torch_python():
    found = subprocess.run([os.path.join(ROOT, 'scripts', 'torch_env.py')], stdout=subprocess.PIPE, text=True,
                           check=False)
    if found.returncode:
        sys.exit('bench.sh torch: there is no PyTorch (scripts/torch_env.py says why)')
    return found.stdout.strip()


def deepspeed_folder(python):
    """Where DeepSpeed lies for PYTHONPATH, installed once; None: it cannot be had."""
    folder = os.path.join(ROOT, 'build', DEEPSPEED[0].replace('==', '-'))
    if not os.path.exists(os.path.join(folder, 'complete')):
        say(f'installing DeepSpeed into {folder}')
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run([python, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-build-isolation',
                               '--disable-pip-version-check', '--target', folder, *DEEPSPEED], check=False,
                              env={**os.environ, 'DS_ACCELERATOR': 'cpu'}, stdout=sys.stderr)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            return None
        with open(os.path.join(folder, 'complete'), 'w', encoding='ascii'):
            pass
    return folder


def arguments():
    p = parser('torch', __doc__)
    p.add_argument('--size', choices=TOKENS, default='10m', help='parameters: 10.8 M (10m) or 64 M (60m)')
    p.add_argument('--steps', type=int, default=0, help='of a tool in a round (3; 60m: 2)')
    p.add_argument('--seconds', type=int, default=120, help='for the rounds of 2 workers, a third of it for one (120)')
    p.add_argument('--save-every', type=int, default=0, help='steps between two checkpoints of peers (10; 60m: 4)')
    p.add_argument('--tools', help=f'instead of all: a list of {", ".join(PEERS["10m"])}')
    p.add_argument('--parts', default='two,one,recovery', help='any of two, one, recovery (all)')
    o = p.parse_args()
    o.steps = o.steps or (3 if o.size == '10m' else 2)
    o.save_every = o.save_every or (10 if o.size == '10m' else 4)
    o.variants = o.tools.split(',') if o.tools else PEERS[o.size]
    for name in set(o.variants) - set(PEERS['10m']):
        p.error(f'--tools has {name!r}, known: {", ".join(PEERS["10m"])}')
    for name in set(o.parts.split(',')) - {'two', 'one', 'recovery'}:
        p.error(f'--parts has {name!r}, known: two, one, recovery')
    if o.save_every < 2 or o.steps < 1:
        p.error('--save-every must be at least 2, --steps 1')
    return o


def run_rounds(o, folder, prefix, variants, world, seconds):
    with contextlib.ExitStack() as o.ends:
        groups = start_all(o, folder, ['none', *variants], world)
        if len(groups) < 2:
            sys.exit('bench.sh torch: nothing to compare')
        rounds(o, groups, seconds)
        if world > 1:
            compare_losses(groups)
        show_head(o, groups[0].params)
        for group in groups:
            show(o, prefix + group.variant, group.figures)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # in order
    o = arguments()
    o.python = torch_python()
    o.deepspeed = deepspeed_folder(o.python) if any('deepspeed' in v for v in o.variants) else None
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
