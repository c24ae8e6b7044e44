"""Groups of processes that train the same GPT beside each other and take turns: the shared part of bench_torch.py and
bench_peers.py. What they use of the machine is counted here, too.

A group is all processes of one tool: workers (torch_worker.py) and, of shardd, daemons. It lives as long as it
takes part, and computes only while it is asked for steps. A round is a block of steps of each group.
"""
import collections
import contextlib
import json
import os
import random
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
WORKER = os.path.join(HERE, 'torch_worker.py')
SIZES = {  # layers, dim, heads, seq, sequences of a step of one process; by how many parameters that is
    'tiny': (1, 32, 2, 32, 2),  # for tests
    '0.84m': (4, 128, 4, 128, 16),
    '10.8m': (6, 384, 6, 128, 4),
    '60m': (9, 768, 12, 128, 2),
}
LIMIT_S = 300
WITH_BASE = 2  # tools that follow a block of what they are compared with, before the next one
TICK_S = 1 / os.sysconf('SC_CLK_TCK')
NAME = os.path.basename(sys.argv[0]).partition('_')[2].partition('.')[0]


def say(text):
    print(f'bench.sh {NAME}: {text}', file=sys.stderr, flush=True)


def parameters(size):
    layers, dim, _, seq, _ = SIZES[size]
    return (256 + seq + 2) * dim + layers * (12 * dim + 13) * dim


def step_tokens(size, world):
    """Of a step of all processes."""
    seq, batch = SIZES[size][3:]
    return world * seq * batch


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
    """Processor time of processes, by their clocks (clock_getcpuclockid(3))."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime(~pid << 3 | 2)
    return total


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
    """Below those that the kernel gives to whoever connects somewhere meanwhile."""
    with open('/proc/sys/net/ipv4/ip_local_port_range', encoding='ascii') as file:
        first = int(file.read().split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with contextlib.suppress(OSError), socket.socket() as s:
            s.bind(('127.0.0.1', port))
            return port
    raise OSError('no TCP port is free')


def environment(o, **more):
    env = {key: value for key, value in os.environ.items()
           if key not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'SHARDD_ADDRESS')}
    env.update(OMP_NUM_THREADS='1', MKL_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1', GLOO_SOCKET_IFNAME='lo',
               TORCH_CPP_LOG_LEVEL='ERROR', PYTHONWARNINGS='ignore', PYTHONPATH=os.path.join(o.bin, '../python'))
    env.update(more)
    return env


def deepspeed_environment(folder):
    """What processes with DeepSpeed need, and no others have; its one operation is built into the folder."""
    return {'PYTHONPATH': folder, 'DS_ACCELERATOR': 'cpu',
            'TORCH_EXTENSIONS_DIR': os.path.join(folder, 'operations')}


class Daemons:
    """2 daemons of one thread."""

    def __init__(self, o, folder):
        self.shardctl, self.address = os.path.join(o.bin, 'shardctl'), os.path.join(folder, 'run')
        subprocess.run([self.shardctl, 'up', '--daemons', '2', '--threads-per-daemon', '1', '--runtime-dir',
                        self.address], check=True, stdout=subprocess.DEVNULL)
        with contextlib.ExitStack() as undo:
            undo.callback(self.down)
            status = subprocess.run([self.shardctl, 'status', '--json', '--address', self.address], check=True,
                                    capture_output=True, text=True)
            self.pids = [daemon['pid'] for daemon in json.loads(status.stdout)]
            with open(f'/proc/{self.pids[0]}/stat', 'rb') as f:  # and their keeper
                self.pids.append(int(f.read().rpartition(b')')[2].split()[1]))
            undo.pop_all()

    def down(self):
        subprocess.run([self.shardctl, 'down', '--yes', '--runtime-dir', self.address], check=True,
                       capture_output=True)


class Failed(RuntimeError):
    def __init__(self, group, text):
        super().__init__(f'{group.name}: {text}')
        self.group = group


# Of a step: its mean, that of the process which is the slower one in it, processor time; and each step of each process.
Block = collections.namedtuple('Block', 'step_s slower_s cpu_s each_s')


def block_of(took, cpu_s):
    """took: the seconds of each process's steps, as many of each."""
    each = [seconds for of in took for seconds in of]
    return Block(statistics.mean(each), statistics.mean(max(of) for of in zip(*took)), cpu_s, each)


class Group:
    """The processes of a tool; base: the group that it is compared with."""
    base = None

    def __init__(self, o, folder, name, world, needs_daemons):
        self.o, self.name, self.world, self.processes = o, name, world, []
        self.folder = os.path.join(folder, f'{name}-{world}')
        os.mkdir(self.folder)
        self.figures = {}  # name: values
        self.begun = time.monotonic()
        self.daemons = Daemons(o, self.folder) if needs_daemons else None
        o.ends.callback(self.end)

    def note(self, **values):
        for name, value in values.items():
            self.figures.setdefault(name, []).append(value)

    def pids(self):
        return [p.pid for p in self.processes] + (self.daemons.pids if self.daemons else [])

    def spawn(self, rank, command, **more):
        env = environment(self.o, **{'RANK': str(rank), 'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(self.world), **more})
        if self.daemons:
            env['SHARDD_ADDRESS'] = self.daemons.address
        with open(os.path.join(self.folder, f'stderr.{rank}'), 'ab') as errors:
            return subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                    stderr=errors)

    def failed(self, rank):
        with open(os.path.join(self.folder, f'stderr.{rank}'), encoding='utf-8', errors='replace') as f:
            return Failed(self, f'rank {rank}: {"".join(f.readlines()[-12:])}')

    def until(self, done):
        end = time.monotonic() + LIMIT_S
        while not done():
            if time.monotonic() > end:
                raise Failed(self, f'no step within {LIMIT_S} s')

    def sampled(self, done):
        """The most memory of samples that are taken until done()."""
        samples = [memory_mb(self.pids())]
        self.until(lambda: done() or samples.append(memory_mb(self.pids())))
        used, reserve = max(samples, key=sum)
        return {'memory_mb': used, 'reserve_mb': reserve} if self.daemons else {'memory_mb': used}

    def kill(self, processes):
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def quit(self):
        self.kill(self.processes)
        self.processes = []

    def end(self):
        """Also of the daemons; once."""
        self.quit()
        if self.daemons:
            self.daemons.down()
            self.daemons = None
            shutil.rmtree(self.folder, ignore_errors=True)


class TorchGroup(Group):
    """Processes of torch_worker.py, which do what they are told."""

    def __init__(self, o, folder, variant, world, name=None):
        super().__init__(o, folder, name or variant, world, variant.startswith('shardd'))
        self.variant, self.state = variant, os.path.join(self.folder, 'state')

    def start_ranks(self, ranks, flags=()):
        """What they say when they are ready. In this order they replace those that were there before."""
        command = [self.o.python, WORKER, self.variant, '--size', self.o.size, '--state', self.state, *flags]
        if len(ranks) == self.world:
            self.port = str(free_port())
        more = deepspeed_environment(self.o.deepspeed) if self.variant.startswith('deepspeed') else {}
        fresh = [self.spawn(rank, command, MASTER_ADDR='127.0.0.1', MASTER_PORT=self.port, **more) for rank in ranks]
        self.processes = [process for process in self.processes if process.poll() is None]
        for rank, process in zip(ranks, fresh):
            self.processes.insert(rank, process)
        return [self.answer(rank) for rank in ranks]

    def start(self, warm=False):
        """The workers' first step, from nothing but what daemons may have. warm: they have the values, too."""
        begin = time.monotonic() if warm else self.begun
        ready = self.start_ranks(range(self.world), ['--meta'] * warm)
        if ready[0]['params'] != parameters(self.o.size):
            raise Failed(self, f'{ready[0]["params"]} parameters, not {parameters(self.o.size)}')
        done = self.ask('steps 1')
        return {'first_step_s': max(d['end'] for d in done) - begin,
                'import_s': max(r['imported'] for r in ready) - begin}

    def send(self, line, ranks=None):
        for rank, process in enumerate(self.processes):
            if ranks is None or rank in ranks:
                process.stdin.write(line + '\n')
                process.stdin.flush()

    def answered(self, rank, seconds):
        return bool(select.select([self.processes[rank].stdout], [], [], seconds)[0])

    def answer(self, rank):
        line = self.processes[rank].stdout.readline() if self.answered(rank, LIMIT_S) else ''
        if not line:
            raise self.failed(rank)
        return json.loads(line)

    def ask(self, line):
        self.send(line)
        return [self.answer(rank) for rank in range(self.world)]

    def steps(self, count):
        """After one that does not count: caches were others'."""
        self.ask('steps 1')
        used = used_s(self.pids())
        done = self.ask(f'steps {count}')
        used = used_s(self.pids()) - used
        self.last = done[0]['step'], statistics.mean(d['loss'] for d in done)
        return block_of([d['each'] for d in done], used / count)

    def peak_mb(self):
        """During two steps."""
        self.send('steps 2')
        peak = self.sampled(lambda: self.answered(0, 0.05))
        for rank in range(self.world):
            self.answer(rank)
        return peak


# -- Rounds ----------------------------------------------------------------------------------------


def in_turns(groups, done):
    """The order of a round: each base before, after and between what is compared with it, which rotates."""
    order = []
    for base in dict.fromkeys(group.base for group in groups):
        rest = [group for group in groups if group.base is base]
        rest = rest[done % len(rest):] + rest[:done % len(rest)]
        for at in range(0, len(rest), WITH_BASE):
            order += [base, *rest[at:at + WITH_BASE]]
        order.append(base)
    return order


def compared(order, blocks):
    """{group: (its block, what its base took in the blocks before and after it)} of a round."""
    found = {}
    for at, group in enumerate(order):
        if group.base:
            near = [next(i for i in way if order[i] is group.base)
                    for way in (range(at, -1, -1), range(at, len(order)))]
            found[group] = blocks[at], Block(*(statistics.mean(of) for of in zip(*(blocks[i][:3] for i in near))), [])
    return found


def p10(values):
    return sorted(values)[round(0.1 * (len(values) - 1))]


def note_block(group, block, tokens):
    group.note(step_ms=block.step_s * 1e3, cpu_ms=block.cpu_s * 1e3, tokens_per_s=tokens / block.step_s)


def rounds(o, groups, seconds):
    """Rounds of groups and their bases until the time is over; at least three, or o.rounds. The share of the
    machine that others took."""
    everybody = groups + list({group.base for group in groups})
    before, begin = busy_s() - used_s(pid for g in everybody for pid in g.pids()), time.monotonic()
    done, each = 0, {}
    while done < o.rounds or not o.rounds and (done < 3 or (time.monotonic() - begin) * (done + 1) / done < seconds):
        order = in_turns(groups, done)
        blocks = [group.steps(o.steps) for group in order]
        for group, block in zip(order, blocks):
            note_block(group, block, step_tokens(o.size, group.world))
            each.setdefault(group, []).extend(block.each_s)
        for group, (block, base) in compared(order, blocks).items():
            group.note(ratio=block.step_s / base.step_s, ratio_slower=block.step_s / base.slower_s,
                       cpu_ratio=block.cpu_s / base.cpu_s,
                       ns_per_param=(block.step_s - base.step_s) * 1e9 / parameters(o.size))
        for base in {group.base for group in groups}:  # what is left of noise
            of = [block.step_s for group, block in zip(order, blocks) if group is base]
            base.note(ratio=of[-1] / of[0])
        done += 1
        say(f'round {done}, {time.monotonic() - begin:.0f} of {seconds:.0f} s')
    for group in groups:
        group.note(ratio_p10=p10(each[group]) / p10(each[group.base]))
    taken = busy_s() - used_s(pid for g in everybody for pid in g.pids()) - before
    return max(0.0, taken) / (time.monotonic() - begin) / os.cpu_count()


# -- Figures ---------------------------------------------------------------------------------------


def figure(name, values, unit):
    """As bench.sh prints them with --json."""
    six = [float(f'{value:.6g}') for value in sorted(values)]
    at = [six[round(share * (len(six) - 1))] for share in (0, 0.1, 0.9, 1)]
    return {'name': name, 'value': float(f'{statistics.median(values):.6g}'), 'unit': unit, 'min': at[0],
            'max': at[3], 'n': len(six), 'p10': at[1], 'p90': at[2]}


# -- What is needed --------------------------------------------------------------------------------


def torch_env(*flags):
    """What scripts/torch_env.py prints, or None after it has said why there is nothing."""
    found = subprocess.run([os.path.join(ROOT, 'scripts', 'torch_env.py'), *flags], stdout=subprocess.PIPE, text=True,
                           check=False)
    return found.stdout.strip() if found.returncode == 0 else None
