#!/usr/bin/env python3
"""Train on hosts with replicas while processes, hosts and the wires between them are lost at random; compare digests.

Called by scripts/chaos.sh --hosts 2|3 --replicas 2, which explains it. The hosts are network namespaces, each two of them joined by a
wire; on each `shardctl host` keeps two daemons and a relay, and an elastic worker trains. A run has kills of workers, daemons and
relays, and cuts of the wire that are short; then one host is lost with all its processes, or the wire is cut for good, in
both directions or in one. A worker that is killed is started again, that of a lost host on the other, as an engine does it.
With --operate tools make snapshots beside it, go back to them, and set what is so already, and are killed in between, too.
Only what was started here is killed. Standard library only.
"""
import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from nodes import mesh, mesh_join, own_time, unwire

MODEL = ('--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --threads 1 --sample 0 --eval-windows 0 '
         '--log-every 1').split()
PACE = int(os.environ.get('SHD_TEST_PACE', '1'))
HANG_S = int(os.environ.get("HANG_S", "300")) * PACE
PATIENCE_S = 5 * PACE
SHORT_S = 1.0           # a cut that nobody is put out for
STEP_S = 0.03  # at least, of all workers together: on a quick machine, too, a run lasts until its kills are made
NETWORK = '10.88.0'
ACTS = (('snapshot',), ('snapshot', '--every', '20', '--keep', '3'), ('rewind',), ('rewind',),
        ('set', 'lr_scale=1', 'clip_norm=1'))  # that change no bit in the end
STEP = re.compile(rb'^step (\d+)/', re.MULTILINE)
CRASH = re.compile(r'.*(?:was killed by signal (?!9 )\d+|exited with code [1-9]).*')


def parse():
    p = argparse.ArgumentParser(
        prog='chaos.sh --hosts 2|3 --replicas 2', description=__doc__.splitlines()[0],
        epilog='exit codes: 0 all digests are equal, 1 not, or a run failed, 2 wrong usage, 77 no namespaces here')
    p.add_argument('--hosts', type=int, choices=[2, 3], default=2, help='of which each has two daemons and, at first, a worker (2)')
    p.add_argument('--replicas', type=int, choices=[2], default=2)
    p.add_argument('--kills', type=int, default=100, help='go on until so many processes were killed (100)')
    p.add_argument('--seed', type=int, default=1, help='of the choice of victims and times (1)')
    p.add_argument('--rate', type=float, default=4, help='kills per second, on average (4)')
    p.add_argument('--per-run', type=int, default=16, help='kills before the end of each run begins (16)')
    p.add_argument('--steps', type=int, default=400, help='of one run (400)')
    p.add_argument('--refill', action='store_true', help='a host is lost and filled again before that')
    p.add_argument('--operate', action='store_true', help='shardctl snapshot, rewind and set beside it, killed in between, too')
    p.add_argument('--bulk', choices=['tcp', 'ucx'], default='tcp', help='by which parameters and gradients cross (tcp)')
    p.add_argument('--verbose', action='store_true', help='say what is done when')
    p.add_argument('--bin', default='build/release/bin', help=argparse.SUPPRESS)
    p.add_argument('--logs', default='build/logs', help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.kills < 1 or o.rate <= 0 or o.per_run < 0 or o.steps < 20:
        p.error('--kills must be at least 1, --rate above 0, --steps at least 20')
    return o


def say(text):
    print(f'chaos.sh: {text}', file=sys.stderr, flush=True)


def children(parent):
    """{name: pid} of a host's daemons and relay."""
    found = {}
    for pid in subprocess.run(['pgrep', '-P', str(parent)], capture_output=True, text=True, check=False).stdout.split():
        try:
            with open(f'/proc/{pid}/cmdline', 'rb') as f:
                argv = f.read().split(b'\0')
        except OSError:
            continue
        if b'--relay' in argv:
            found['relay'] = int(pid)
        elif b'--device' in argv[:-1]:
            found[argv[argv.index(b'--device') + 1].decode()] = int(pid)
    return found


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False


class Run:
    def __init__(self, o, seed):
        self.o, self.seed, self.rng = o, seed, random.Random(seed)
        self.dir = tempfile.mkdtemp(prefix='shd-chaos.')
        self.names = 'abc'[:o.hosts]
        self.nodes = [f'shdx{n}{os.getpid()}' for n in self.names]
        self.own_time = [['unshare', *flags] if (flags := own_time(i)) else [] for i in range(len(self.names))]
        self.hosts, self.workers, self.events, self.out_at = {}, {}, [], 0
        self.tools = []         # (what, process)
        self.kills = 0
        self.stalls = {}        # by kind: the longest time without a step behind one
        self.step, self.step_at = 0, time.monotonic()

    # -- Begin and end ---------------------------------------------------------------------------

    def begin(self):
        mesh(self.nodes, NETWORK)
        os.mkdir(os.path.join(self.dir, 'keys'), 0o700)
        os.mkdir(os.path.join(self.dir, 'arbiter'), 0o700)
        os.mkdir(os.path.join(self.dir, 'shared'), 0o700)
        self.cluster = os.path.join(self.dir, 'keys', 'cluster.json')
        subprocess.run([self.tool('shardctl'), 'keys', 'new', self.cluster,
                        *(f'{n}={NETWORK}.{i + 1}:7100/cpu{2 * i},cpu{2 * i + 1}' for i, n in enumerate(self.names))], stdout=subprocess.DEVNULL, check=True)
        if self.o.bulk == 'ucx':
            subprocess.run([self.tool('shardctl'), 'keys', 'bulk', self.cluster, 'ucx', '--not-encrypted'], stdout=subprocess.DEVNULL, check=True)
        for host in self.names:
            self.start_host(host)
        for host in self.names:
            self.until(f'host {host} is ready', lambda host=host: os.path.getsize(self.path(f'{host}.address')) > 0)
        with open(self.path('a.address'), encoding='ascii') as f:
            self.pairs = f.read().partition('?')[2].rstrip("'\n")
        self.place = dict(enumerate(self.rng.sample(self.names, len(self.names))))
        for rank in self.place:
            self.start_worker(rank)

    def tool(self, name):
        return os.path.join(self.o.bin, name)

    def path(self, name):
        return os.path.join(self.dir, name)

    def on(self, host):
        i = self.names.index(host)
        return ['ip', 'netns', 'exec', self.nodes[i], *self.own_time[i]]

    def start_host(self, host):
        with open(self.path(f'{host}.address'), 'wb') as out, open(self.path(f'host_{host}.log'), 'ab') as err:
            self.hosts[host] = subprocess.Popen(
                [*self.on(host), self.tool('shardctl'), 'host', '--cluster', self.cluster, '--name', host, '-d', self.path(host),
                 '-t', '1', '--replicas', '2', '--arbiter', f'file:{self.path("arbiter")}',
                 *(['--refill', self.path('shared')] if self.o.refill else [])], stdout=out, stderr=err)

    def start_worker(self, rank):
        host = self.place[rank]
        env = dict(os.environ, SHARDD_ADDRESS=f'{self.path(host)}?{self.pairs}', RANK=str(rank), WORLD_SIZE=str(len(self.names)),
                   SHARDD_REPLICA_PATIENCE=str(PATIENCE_S))
        with open(self.path(f'worker_{rank}.out'), 'ab') as out, open(self.path(f'worker_{rank}.err'), 'ab') as err:
            self.workers[rank] = subprocess.Popen(
                [*self.on(host), self.tool('shd-gpt'), *MODEL, '--elastic', '--slow', f'{self.o.slow:.1f}', '--steps', str(self.o.steps)],
                env=env, stdout=out, stderr=err)

    def end(self):
        for host, process in self.hosts.items():
            process.send_signal(signal.SIGSTOP)  # so that it starts nothing again
            for pid in children(process.pid).values():
                kill(pid)
            process.kill()
            process.wait()
            subprocess.run([self.tool('shardctl'), 'down', '--yes', '-d', self.path(host)], capture_output=True, check=False)
        for process in [*self.workers.values(), *(tool for _, tool in self.tools)]:
            process.kill()
            process.wait()
        unwire(self.nodes)

    def fail(self, why):
        keep = os.path.join(self.o.logs, f'chaos-hosts-{self.seed}')
        shutil.rmtree(keep, ignore_errors=True)
        os.makedirs(keep)
        for name in os.listdir(self.dir):
            if name.endswith(('.log', '.out', '.err')):
                shutil.copy(self.path(name), keep)
        say(f'seed {self.seed}: {why}; after {", ".join(kind for _, kind in self.events[-4:]) or "nothing"}; output: {keep}')
        for name in sorted(n for n in os.listdir(keep) if n.endswith(('.log', '.err'))):
            with open(os.path.join(keep, name), encoding='utf-8', errors='replace') as f:
                for line in f.read().splitlines()[-6:]:
                    say(f'{name}: {line}')
        print(f'scripts/chaos.sh --hosts {self.o.hosts} --replicas 2 --kills {max(1, self.kills)} --seed {self.seed} '
              f'--rate {self.o.rate:g} --per-run {self.o.per_run} --steps {self.o.steps}{" --refill" * self.o.refill}'
              f'{" --operate" * self.o.operate} --bulk {self.o.bulk}', flush=True)
        sys.exit(1)

    # -- Looking ---------------------------------------------------------------------------------

    def look(self):
        """What rank 0 prints, and the workers that have ended: those that were killed are started again."""
        with open(self.path('worker_0.out'), 'rb') as f:
            steps = STEP.findall(f.read())
        now = time.monotonic()
        if steps and int(steps[-1]) > self.step:
            before = [kind for at, kind in self.events if at <= now and at >= self.step_at - 0.5]
            if before:
                self.stalls[before[-1]] = max(self.stalls.get(before[-1], 0), now - self.step_at)
            self.step, self.step_at = int(steps[-1]), now
        for rank, process in list(self.workers.items()):
            code = process.poll()
            if code is None or code == 0:
                continue
            if code != -signal.SIGKILL and not self.met_nobody(rank):
                self.fail(f'worker {rank} ended with {code}')
            self.start_worker(rank)

    def met_nobody(self, rank):
        """A worker that begins while a host is away, and nobody has put that out yet, ends: its engine starts it again. So does one
        whose step was begun again, where only a daemon that is lost has recorded that."""
        with open(self.path(f'worker_{rank}.err'), encoding='utf-8', errors='replace') as f:
            last = f.read().splitlines()[-1]
        return 'cannot be reached' in last or 'connect anew' in last

    def until(self, what, is_so):
        end = time.monotonic() + HANG_S
        while not is_so():
            if time.monotonic() > end:
                self.fail(f'{what}: not within {HANG_S} s, at step {self.step}')
            time.sleep(0.02)
            if self.workers:
                self.look()

    def is_over(self):
        return self.workers[0].poll() == 0

    def note(self, kind):
        self.events.append((time.monotonic(), kind))
        if self.o.verbose:
            say(f'seed {self.seed}: step {self.step}: {kind}')

    def latest(self):
        """The arbiter's view; as long as there is none nobody is out."""
        names = [n for n in os.listdir(self.path('arbiter')) if re.fullmatch(r'.*\.\d+', n)]
        if not names:
            return {'out': []}
        with open(os.path.join(self.path('arbiter'), max(names, key=lambda n: int(n.rpartition('.')[2]))), encoding='utf-8') as f:
            return json.load(f)

    def view(self):
        """Hosts that are out."""
        return self.latest()['out']

    def is_filled(self):
        """All are in, and have all that is theirs: one that is being filled is in, and is lost with the other of its pair."""
        view = self.latest()
        return not view['out'] and not any(b['filling'] for b in view.get('behind', []))

    def look_for_crashes(self):
        """Who was not killed here and ended all the same was started again, and the digest is none the worse for it."""
        for host in self.names:
            with open(self.path(f'host_{host}.log'), encoding='utf-8', errors='replace') as f:
                ends = CRASH.findall(f.read())
            if ends:
                self.fail(f'on host {host}: {ends[0]}')

    # -- Faults ----------------------------------------------------------------------------------

    def strike(self):
        kind = self.rng.choice(['worker', 'daemon', 'daemon', 'relay', 'wire'] + ['tool'] * 4 * self.o.operate)
        host = self.rng.choice(self.names)
        if kind == 'worker':
            rank = self.rng.randrange(len(self.names))
            if self.workers[rank].poll() is None:
                self.note('a worker killed')
                self.kills += kill(self.workers[rank].pid)
        elif kind == 'tool':
            self.operate(host)
        elif kind == 'wire':
            i, k = self.two()
            self.note(f'wire cut for {SHORT_S:g} s')
            self.cut(i, k)
            self.pause(SHORT_S)
            for end, other in ((i, k), (k, i)):
                mesh_join(self.nodes, NETWORK, end, other)
        else:
            there = children(self.hosts[host].pid)
            names = [n for n in sorted(there) if (n == 'relay') == (kind == 'relay')]
            if names:
                self.note(f'a {kind} killed')
                self.kills += kill(there[self.rng.choice(names)])

    def operate(self, host):
        """Each third tool is killed, wherever it is."""
        act = self.rng.choice(ACTS)
        with open(self.path('tools.log'), 'ab') as log:
            tool = subprocess.Popen([*self.on(host), self.tool('shardctl'), *act, '-a', f'{self.path(host)}?{self.pairs}'],
                                    stdout=log, stderr=log)
        self.tools.append((f'shardctl {act[0]}', tool))
        self.note(f'shardctl {act[0]}')
        if self.rng.randrange(3) == 0:
            self.pause(self.rng.uniform(0, 0.1))
            if kill(tool.pid):
                self.note(f'shardctl {act[0]} killed')

    def look_at_tools(self):
        """Each has done it, has said why not, or was killed."""
        for what, tool in self.tools:
            self.until(f'the end of {what}', lambda tool=tool: tool.poll() is not None)
            if tool.returncode not in (0, 1, -signal.SIGKILL):
                self.fail(f'{what} ended with {tool.returncode}')

    def two(self):
        return self.rng.sample(range(len(self.names)), 2)

    def cut(self, i, k):
        subprocess.run(['ip', '-n', self.nodes[i], 'link', 'set', f'v{k}', 'down'], check=True)

    def lose_one_way(self, i, k):
        """What host i sends to host k goes to an address of nobody's."""
        subprocess.run(['ip', '-n', self.nodes[i], 'neigh', 'replace', f'{NETWORK}.{k + 1}', 'lladdr', '02:00:00:00:00:01', 'dev',
                        f'v{k}', 'nud', 'permanent'], check=True)

    def pause(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.is_over():
            time.sleep(0.02)
            self.look()

    def lose_for_good(self):
        kind = self.rng.choice(['host', 'wire', 'way'])
        i, k = self.two()
        host, other = self.names[i], self.names[k]
        said = {'host': f'host {host} lost', 'wire': f'wire between {host} and {other} cut for good', 'way': f'one way lost, {host} to {other}'}
        self.note(said[kind])
        if kind == 'host':
            self.lose_host(host)
            return said[kind]
        if kind == 'wire':
            self.cut(i, k)
        else:
            self.lose_one_way(i, k)
        self.until('one side is out', lambda: self.is_over() or self.view())
        return said[kind]

    def have_ended(self):
        """All workers. One on a host that is out waits for as long as that is, and is started on another."""
        out = self.view()
        lost = [rank for rank in self.workers_of(out) if self.workers[rank].poll() is None]
        for rank in lost:
            kill(self.workers[rank].pid)
        self.move(lost, out)
        return all(w.poll() == 0 for w in self.workers.values())

    def workers_of(self, hosts):
        return [rank for rank in self.workers if self.place[rank] in hosts]

    def move(self, lost, out):
        for rank in lost:
            self.workers[rank].wait()
            self.place[rank] = self.rng.choice([n for n in self.names if n not in out])
            self.start_worker(rank)

    def lose_host(self, host):
        process = self.hosts.pop(host)
        process.send_signal(signal.SIGSTOP)
        lost = self.workers_of([host])
        self.kills += sum(kill(pid) for pid in [*children(process.pid).values(), process.pid, *(self.workers[rank].pid for rank in lost)])
        process.wait()
        self.move(lost, [host])

    def lose_and_fill(self, host):
        """A host with empty daemons in its place is filled by what `--refill` of any host does, while training goes on."""
        self.note(f'host {host} lost')
        self.lose_host(host)
        self.until(f'host {host} is out', lambda: self.is_over() or self.view())
        self.start_host(host)
        self.note(f'host {host} comes back, empty')
        self.until(f'host {host} is filled', lambda: self.is_over() or self.is_filled())

    def go(self, kills_max):
        self.begin()
        while self.kills < min(self.o.per_run, kills_max) and not self.is_over():
            self.pause(self.rng.uniform(0, 2 / self.o.rate))
            self.strike()
        if self.o.refill and not self.is_over() and not self.view():
            self.lose_and_fill(self.rng.choice(self.names))
        if self.is_over():
            self.fail('the run is too short: give more --steps')
        if self.view():  # kills and cuts in a row were as long as the patience: to lose another one would be the end
            kind = f'nothing more: {self.view()[0]} is out'
        else:
            kind = self.lose_for_good()
        self.until('the end', self.have_ended)
        self.look()
        self.look_for_crashes()
        self.look_at_tools()
        with open(self.path('worker_0.out'), encoding='utf-8', errors='replace') as f:
            digests = [line for line in f.read().splitlines() if line.startswith('digest ')]
        self.end()
        return kind, digests[-1] if digests else ''


def undisturbed(o):
    """Its digest, and o.slow by the time it takes."""
    start = time.monotonic()
    run = subprocess.run([os.path.join(o.bin, 'shd-gpt'), *MODEL, '--standalone', '--steps', str(o.steps)], capture_output=True,
                         text=True, check=False)
    if run.returncode:
        sys.stderr.write(run.stderr[-4000:])
        say(f'the undisturbed run ended with {run.returncode}')
        sys.exit(1)
    o.slow = min(max(STEP_S * o.hosts * o.steps / (time.monotonic() - start), 2), 1000)
    return run.stdout.splitlines()[-1]


def main():
    o = parse()
    start = time.monotonic()
    want = undisturbed(o)
    say(f'undisturbed: {want}')
    kills = runs = 0
    stalls = {}
    while kills < o.kills:
        run = Run(o, o.seed + runs)
        try:
            kind, digest = run.go(o.kills - kills)
            if digest != want:
                run.fail(f'wanted {want}, got {digest or "no digest"}')
        finally:
            run.end()
            shutil.rmtree(run.dir, ignore_errors=True)
        say(f'seed {run.seed}: {run.kills} kills, {len(run.events)} events, then {kind}: digest is equal')
        for what, seconds in run.stalls.items():
            stalls[what] = max(stalls.get(what, 0), seconds)
        kills, runs = kills + run.kills, runs + 1
    for what, seconds in sorted(stalls.items(), key=lambda s: s[1]):
        print(f'longest time without a step, {what}: {seconds:.1f} s')
    print(f'kills={kills} runs={runs} steps={o.steps} patience_s={PATIENCE_S} seconds={time.monotonic() - start:.0f} digest=equal', flush=True)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
