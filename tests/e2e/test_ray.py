#!/usr/bin/env python3
"""examples/ray in a real Ray cluster of two nodes: a network, mount and pid namespace each, with a raylet in it. Daemons outlive
the actor that started them and the raylet, and are found again, not started twice; workers whose actor is killed, or whose
raylet, train on to the digest of a training in one process; keys are made, or given. With replicas and a third node one that
has daemons is lost, and a spare one filled in its place. Skipped (77) where Ray cannot be installed, without root, or
without namespaces.

  test_ray.py BIN_DIR SOURCE_DIR VENV_DIR
"""
import glob
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from nodes import LIMIT_S, into_venv, mesh, own_time, skip, soon, unwire

PACKAGE = 'ray==2.60.0'
MODEL = ('--layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 8 --threads 1 --sample 0 --eval-windows 0 '
         '--log-every 1 --steps 150').split()
NETWORK = '10.81.0'
# Where the processors are busy Ray takes what is late for what is dead.
PATIENCE = {'RAY_gcs_server_port_wait_time_s': str(LIMIT_S), 'RAY_gcs_server_request_timeout_seconds': str(LIMIT_S),
            'RAY_agent_register_timeout_ms': str(1000 * LIMIT_S), 'RAY_health_check_timeout_ms': str(1000 * LIMIT_S),
            'RAY_worker_register_timeout_seconds': str(LIMIT_S)}
# A node's first process: ends when the test does, whose pipe it reads, and waits for whatever is left without a parent. The
# example is on the first node alone.
INIT = '''hostname "$1"; mount -t tmpfs -o mode=755 tmpfs /run; mount -t tmpfs -o mode=1777 tmpfs /dev/shm
          mount --bind "$2" "$3"; mount --bind "$4" /etc/hosts; [ "$1" = raya ] || mount -t tmpfs tmpfs "$5"
          echo ready; exec 3<&0; cat <&3 >/dev/null & wait'''


IMPORTED = '''
import ray, shardd_ray
def refused(**options):
    try:
        shardd_ray.start(**options)
    except (TimeoutError, ValueError) as e:
        print('refused:', e)
ray.init('auto')
refused(hosts=3, timeout=1)
print('have', *(host['address'] for host in shardd_ray.start(hosts=2)))
refused(hosts=1)
'''


def fail(why):
    raise SystemExit(f'  FAILED: {why}')


class Node:
    def __init__(self, cluster, i):
        self.name, self.ip, self.files = 'ray' + 'abc'[i], f'{NETWORK}.{i + 1}', f'{cluster.work}/node{i}'
        self.environment, self.own_time = cluster.environment, own_time(i)
        os.mkdir(self.files)
        # pylint: disable-next=consider-using-with
        self.outer = subprocess.Popen(
            ['ip', 'netns', 'exec', cluster.nets[i], 'unshare', *self.own_time, '--mount', '--uts', '--ipc', '--pid', '--fork', '--kill-child',
             '--mount-proc', 'sh', '-ec', INIT, 'sh', self.name, self.files, f'{cluster.work}/ray', f'{cluster.work}/hosts', EXAMPLE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if (line := self.outer.stdout.readline()) != b'ready\n':
            fail(f'no node {self.name}: {line}')
        with open(f'/proc/{self.outer.pid}/task/{self.outer.pid}/children', encoding='ascii') as file:
            self.first = int(file.read())
        self.space = os.readlink(f'/proc/{self.first}/ns/pid')

    def words(self, *command):
        return ['nsenter', '--target', str(self.first), '--root', '--wd', '--net', '--mount', '--uts', '--ipc', '--pid', *self.own_time[:1], 'env', '-i',
                *(f'{name}={value}' for name, value in self.environment.items()), *command]

    def run(self, *command):
        return subprocess.run(self.words(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                              encoding='utf-8', errors='replace', timeout=LIMIT_S, check=False)

    def call(self, *command):
        """What it prints; it has to succeed."""
        done = self.run(*command)
        return done.stdout if done.returncode == 0 else fail(f'{self.name}: {" ".join(command)}: {done.returncode}: {done.stdout}')

    def tried(self, *command):
        """What it says where it fails."""
        done = self.run(*command)
        return '' if done.returncode == 0 else done.stdout or f'ended with {done.returncode}'

    def pids(self, pattern):
        """Processes of the node with this in their command line, by their numbers here."""
        found = []
        for pid in filter(str.isdigit, os.listdir('/proc')):
            try:
                if os.readlink(f'/proc/{pid}/ns/pid') == self.space:
                    with open(f'/proc/{pid}/cmdline', encoding='utf-8', errors='replace') as file:
                        found += [int(pid)] if re.search(pattern, file.read().replace('\0', ' ')) else []
            except OSError:  # gone, or not ours to look at
                pass
        return sorted(found)

    def root(self, path):
        return f'/proc/{self.first}/root{path}'

    def read(self, path):
        try:
            with open(self.root(path), encoding='utf-8', errors='replace') as file:
                return file.read()
        except FileNotFoundError:
            return ''

    def printed(self, kind='out'):
        """By programs of workers, which Ray writes to files."""
        return ''.join(map(self.read, glob.glob(f'{self.files}/session_[0-9]*/logs/worker-*.{kind}')))

    def close(self):
        try:
            os.kill(self.first, signal.SIGKILL)  # the first of its namespace: all that is in it ends, too
        except ProcessLookupError:
            pass
        self.outer.stdin.close()
        self.outer.wait()
        self.outer.stdout.close()


class Cluster:
    def __init__(self, bin_dir, venv, work):
        self.work, self.nodes, self.nets = work, [], [f'shdR{i}-{os.getpid()}' for i in range(3)]
        self.environment = {'PATH': f'{bin_dir}:{venv}/bin:/usr/sbin:/usr/bin:/sbin:/bin', 'HOME': work, 'LANG': 'C.UTF-8',
                            'PYTHONDONTWRITEBYTECODE': '1', 'RAY_USAGE_STATS_ENABLED': '0',
                            'RAY_worker_niceness': '1', 'RAY_ADDRESS': f'{NETWORK}.1:6379', **PATIENCE}
        os.mkdir(f'{work}/ray')
        with open(f'{work}/hosts', 'w', encoding='ascii') as file:
            file.write(f'127.0.0.1 localhost\n{NETWORK}.1 raya\n{NETWORK}.2 rayb\n{NETWORK}.3 rayc\n')

    def start(self):
        for i in (0, 1):
            self.nodes.append(Node(self, i))
        self.start_ray(0, '--head', '--port=6379', '--include-dashboard=false', f'--temp-dir={self.work}/ray')
        self.start_ray(1, f'--address={NETWORK}.1:6379')

    def start_ray(self, i, *more):
        """Again where Ray gives up after half a minute, which is no setting."""
        words = ['ray', 'start', f'--node-ip-address={self.nodes[i].ip}', '--num-cpus=3', '--object-store-memory=80000000',
                 '--disable-usage-stats', *more]
        end = time.monotonic() + LIMIT_S
        while (said := self.nodes[i].tried(*words)) and 'timed out during startup' in said and time.monotonic() < end:
            self.nodes[i].tried('ray', 'stop', '--force')
        if said:
            fail(f'{self.nodes[i].name}: {" ".join(words)}: {said}')

    def driver(self, *words):
        return self.nodes[0].call('python3', f'{EXAMPLE}/shardd_ray.py', *words)

    def addresses(self, *words):
        return re.findall(r'^[0-9a-f]{56} (/.*)$', self.driver(*words), re.M)

    def daemons(self):
        return [{words: node.pids(words) for words in ('shardctl host', 'shardd --runtime-dir')} for node in self.nodes]

    def close(self):
        for node in self.nodes:
            node.close()
        unwire(self.nets)


def step(cluster, node=0):
    """Of the model, by the node's daemons: whichever worker prints it may be elsewhere."""
    said = subprocess.run(cluster.nodes[node].words('shardctl', 'status', '--json', '-d', '/run/shardd'), stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, encoding='utf-8', check=False).stdout
    return max((model['step'] for daemon in json.loads(said or '[]') for model in daemon.get('models', ())), default=0)


def go_on(cluster, steps, node=0):
    end = step(cluster, node) + steps
    soon(f'step {end}', lambda: step(cluster, node) >= end)


def check_started(cluster):
    """Nothing of Ray's, and no private key of another host's."""
    for node, daemons in zip(cluster.nodes, cluster.daemons()):
        if [len(pids) for pids in daemons.values()] != [1, 2]:
            fail(f'{node.name} has {daemons}')
        keeper = daemons['shardctl host'][0]
        with open(f'/proc/{keeper}/stat', encoding='utf-8') as file:
            fields = file.read().rpartition(') ')[2].split()
        if int(fields[1]) != node.first or int(fields[16]) != 0 or os.getsid(keeper) in (0, os.getsid(node.pids('raylet')[0])):
            fail(f'{node.name}: parent {fields[1]}, niceness {fields[16]}, session {os.getsid(keeper)}')
        for pid in sum(daemons.values(), []):
            with open(f'/proc/{pid}/oom_score_adj', encoding='ascii') as file:
                if (score := int(file.read())) > 0:
                    fail(f'{node.name}: oom_score_adj {score} of {pid}')
        own = sorted(os.listdir(node.root('/run/shardd.ray')))
        if own != sorted([f'{node.ip}.key', 'cluster.json', 'log', 'this.json']):
            fail(f'{node.name} has {own}')


def train(cluster, want):
    """Kills a worker, the actor of one, and then the second node's raylet."""
    second, before = cluster.nodes[1], cluster.daemons()
    with open(f'{cluster.work}/driver.out', 'wb') as out:
        # pylint: disable-next=consider-using-with
        driver = subprocess.Popen(cluster.nodes[0].words(
            'python3', f'{EXAMPLE}/shardd_ray.py', '--', 'shd-gpt', '--elastic', *MODEL, '--slow', '20'),
            stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    def is_another(pids):
        return len(now := second.pids('^shd-gpt ')) == 1 and not set(now) & set(pids)

    soon('a worker on the second node', lambda: is_another([]))
    go_on(cluster, 3)
    workers = second.pids('^shd-gpt ')
    os.kill(workers[0], signal.SIGKILL)
    soon('another worker for one that was killed', lambda: is_another(workers))
    go_on(cluster, 3)
    workers, actor = second.pids('^shd-gpt '), second.pids('ray::Program')
    os.kill(actor[0], signal.SIGKILL)
    go_on(cluster, 3)  # by the other one, which then waits: no steps pass in the time that Ray takes
    other = cluster.nodes[0].pids('^shd-gpt ')
    for pid in other:
        os.kill(pid, signal.SIGSTOP)
    soon('another worker, and the first one gone with its actor', lambda: is_another(workers))
    os.kill(second.pids('/raylet/raylet')[0], signal.SIGKILL)
    for pid in other:
        os.kill(pid, signal.SIGCONT)
    soon('the end of the raylet\'s workers', lambda: not second.pids('^shd-gpt ') and not second.pids('ray::(Host|Program)'))
    go_on(cluster, 3)  # by the other one
    if cluster.daemons() != before:
        fail(f'daemons were {before}, and are {cluster.daemons()} after the end of a raylet')
    soon('the end of the workers, one of which Ray has to move', lambda: driver.poll() is not None)
    got = set(re.findall('^digest .*', cluster.nodes[0].printed(), re.M))
    if driver.returncode != 0 or got != {want}:
        fail(f'the driver ended with {driver.returncode}; wanted {want}, got {got}')
    print('  a worker\'s actor and a raylet killed: same digest')


def given(cluster):
    """A cluster file, and daemons of the second node that somebody else has started."""
    os.mkdir(f'{cluster.work}/keys', mode=0o700)
    cluster.nodes[0].call('shardctl', 'keys', 'new', f'{cluster.work}/keys/cluster.json',
                          f'raya={NETWORK}.1:7100/cpu0', f'b={NETWORK}.2:7100/cpu1')
    for node in cluster.nodes:
        shutil.copytree(f'{cluster.work}/keys', node.root('/run/keys'))
    second = cluster.nodes[1]
    second.call('setsid', '--fork', 'sh', '-c',
                'exec shardctl host --cluster /run/keys/cluster.json --name b -d /run/given >/run/host.out 2>&1')
    soon('daemons by hand', lambda: 'export' in second.read('/run/host.out'))
    before = cluster.daemons()
    got = cluster.addresses('--cluster', '/run/keys/cluster.json', '--directory', '/run/given')
    if got != ['/run/given?cpu0,cpu1'] * 2 or cluster.daemons()[1] != before[1] or before[0] == cluster.daemons()[0]:
        fail(f'{got}; daemons were {before}, and are {cluster.daemons()}')
    if os.path.exists(second.root('/run/given.ray')):
        fail('an actor started what was there')
    print('  a cluster file that is given: daemons of another starter are found')


WORKER = '''#!/bin/sh
[ ! -e "${0%/*}/impatient" ] || export SHARDD_REPLICA_PATIENCE=1
[ -e "${0%/*}/fast" ] || set -- "$@" --slow 20
exec shd-gpt "$@"
'''


def hosts_of(cluster):
    return [i for i, node in enumerate(cluster.nodes) if node.pids('^shardctl host ')]


def train_with_replicas(cluster, shared, model):
    with open(f'{cluster.work}/driver.out', 'wb') as out:
        return subprocess.Popen(cluster.nodes[0].words(
            'python3', f'{EXAMPLE}/shardd_ray.py', '--hosts', '2', '--replicas', shared, '--', f'{cluster.work}/worker', '--elastic',
            *model),
            stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def lose_daemons(nodes):
    """With their keepers; and workers there give them up, which they would do in half a minute."""
    soon('a worker on each', lambda: all(node.pids('^shd-gpt ') for node in nodes))
    keepers = [node.pids('^shardctl host ')[0] for node in nodes]
    for pid in keepers:
        os.kill(pid, signal.SIGSTOP)
    for pid in [pid for node in nodes for pid in node.pids('^[^ ]*shardd ')] + keepers:
        os.kill(pid, signal.SIGKILL)
    for pid in [pid for node in nodes for pid in node.pids('^shd-gpt ')]:
        os.kill(pid, signal.SIGHUP)


def lose_all(cluster, shared, model):
    """No copy is left: one host begins empty, and is out; the other does not, and its worker waits. The driver ends all the same."""
    driver = train_with_replicas(cluster, shared, model)
    soon('daemons on two nodes', lambda: len(hosts_of(cluster)) == 2)
    there = hosts_of(cluster)
    soon('a model', lambda: step(cluster, there[0]) >= 3)
    soon('what puts a host out', lambda: os.path.exists(f'{shared}/shardd-ray/known/replicas.json'))
    with open(f'{cluster.work}/impatient', 'w', encoding='ascii'):
        pass
    lose_daemons([cluster.nodes[i] for i in there])
    soon('the end of the driver', lambda: driver.poll() is not None)
    with open(f'{cluster.work}/driver.out', encoding='utf-8', errors='replace') as out:
        said = sorted(re.findall('^rank [01]: .*/worker (ended with|waits for daemons, and nobody trains)', out.read(), re.M))
    if driver.returncode != 1 or said != ['ended with', 'waits for daemons, and nobody trains']:
        fail(f'all daemons lost: the driver ended with {driver.returncode}, and said {said}')
    print('  all daemons of both killed: the run ends with an error')
    cluster.driver('--stop')


def replicas(cluster, bin_dir):
    """Two of three nodes have daemons. One of them is lost whole, then all daemons of the other one are killed."""
    model = [*MODEL, '--steps', '1500']
    want = in_one_process(bin_dir, model)
    os.mkdir(shared := f'{cluster.work}/shared', mode=0o700)
    with open(f'{cluster.work}/worker', 'w', encoding='ascii') as file:
        file.write(WORKER)
    os.chmod(file.name, 0o700)
    cluster.nodes.append(Node(cluster, 2))
    cluster.start_ray(2, f'--address={NETWORK}.1:6379')
    first = cluster.nodes[0]
    for words, why in ((['--replicas', f'{cluster.work}/no'], 'a directory is wanted'),
                       (['--replicas', shared, '--cluster', 'x'], 'give neither')):
        if why not in (said := first.tried('python3', f'{EXAMPLE}/shardd_ray.py', '--hosts', '2', *words)):
            fail(f'no refusal {why}: {said}')
        cluster.driver('--stop')
    driver = train_with_replicas(cluster, shared, model)

    def hosts():
        return hosts_of(cluster)

    def filled(node):
        return 'is in again' in cluster.nodes[node].read('/run/shardd.ray/log')

    soon('daemons on two nodes', lambda: len(hosts()) == 2)
    lost = hosts()[1]  # not the first node: the cluster's own state is there
    other = hosts()[0]
    soon('a model', lambda: step(cluster, other) >= 3)
    spare = ({0, 1, 2} - {lost, other}).pop()
    os.kill(cluster.nodes[lost].first, signal.SIGKILL)
    go_on(cluster, 3, other)
    soon('a spare node in the place of the lost one, and filled', lambda: filled(spare))
    go_on(cluster, 3, spare)
    print(f'  with replicas node {lost} is lost: node {spare} is filled in its place')
    lose_daemons([cluster.nodes[other]])
    soon('a host whose daemons were killed is filled', lambda: filled(other))
    go_on(cluster, 3, spare)
    if driver.poll() is not None:
        fail('the run is too short')
    print('  all daemons of the other one killed: filled by what the spare one was filled with')
    with open(f'{cluster.work}/fast', 'w', encoding='ascii'):
        pass
    for pid in sum((node.pids('^shd-gpt ') for node in cluster.nodes), []):
        os.kill(pid, signal.SIGKILL)
    soon('the end of the workers', lambda: driver.poll() is not None)
    got = set(re.findall('^digest .* step=1500$', ''.join(node.printed() for node in cluster.nodes), re.M))
    with open(f'{cluster.work}/driver.out', encoding='utf-8', errors='replace') as out:
        ended = re.findall('^rank .* ended with .*', out.read(), re.M)
    if driver.returncode != 0 or got != {want} or ended:
        fail(f'the driver ended with {driver.returncode}; wanted {want}, got {got}, and {ended}')
    print('  same digest')
    cluster.driver('--stop')
    left = os.listdir(shared) + [name for i in (other, spare) for name in os.listdir(cluster.nodes[i].root('/run'))
                                 if name.startswith('shardd')]
    if left or hosts():
        fail(f'--stop leaves {left}, hosts on {hosts()}')
    os.remove(f'{cluster.work}/fast')
    lose_all(cluster, shared, model)


def in_one_process(bin_dir, model):
    want = subprocess.run([f'{bin_dir}/shd-gpt', '--standalone', *model], check=True, capture_output=True,
                          text=True).stdout.strip().splitlines()[-1]
    print(f'in one process: {want}')
    return want


def run(cluster, bin_dir):
    want = in_one_process(bin_dir, MODEL)
    cluster.start()
    said = cluster.nodes[0].call('env', f'PYTHONPATH={EXAMPLE}', 'python3', '-c', IMPORTED)
    for words in ('no 3 hosts with 1 free CPUs each in 1 s', 'hosts=1, and there are actors of 2'):
        if f'refused: {words}' not in said:
            fail(f'no refusal {words}: {said}')
    first = re.search('^have (.*)$', said, re.M)[1].split()
    if first != ['/run/shardd?cpu0,cpu1'] * 2:
        fail(f'addresses: {first}')
    check_started(cluster)
    daemons, second = cluster.daemons(), cluster.nodes[1]
    actor = second.pids('ray::Host')
    os.kill(actor[0], signal.SIGKILL)
    soon('another actor', lambda: second.pids('ray::Host') not in ([], actor))
    if cluster.addresses() != first or cluster.daemons() != daemons:
        fail(f'daemons were {daemons}, and are {cluster.daemons()}')
    print('  an actor killed: its successor finds the same daemons')
    train(cluster, want)
    cluster.start_ray(1, f'--address={NETWORK}.1:6379')
    if cluster.addresses() != first or cluster.daemons() != daemons:
        fail(f'daemons were {daemons}, and are {cluster.daemons()}')
    print('  another raylet there: its actor finds the same daemons')
    cluster.driver('--stop')
    left = [name for node in cluster.nodes for name in os.listdir(node.root('/run')) if name.startswith('shardd')]
    if left or any(pids for node in cluster.daemons() for pids in node.values()):
        fail(f'--stop leaves {left}, {cluster.daemons()}')
    soon('the end of the actors', lambda: not any(node.pids('ray::Host') for node in cluster.nodes))
    given(cluster)
    cluster.driver('--stop')
    replicas(cluster, bin_dir)


def main():
    bin_dir, venv = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[3])
    if os.geteuid() != 0:
        skip('not root')
    for program in ('ip', 'unshare', 'nsenter'):
        if shutil.which(program) is None:
            skip(f'no {program}')
    into_venv(venv, PACKAGE, 'ray')
    work = tempfile.mkdtemp(prefix='shd-ray.', dir='/tmp')  # short: sockets
    cluster = Cluster(bin_dir, venv, work)
    try:
        mesh(cluster.nets, NETWORK)
        run(cluster, bin_dir)
    except BaseException:
        for node in cluster.nodes:
            print(f'--- {node.name}, ' + ('there' if node.outer.poll() is None else 'gone'))
            for words in (node.read('/run/shardd.ray/log'), node.printed(), node.printed('err')):
                print(*words.splitlines()[-5:], sep='\n')
        if os.path.exists(f'{work}/driver.out'):
            with open(f'{work}/driver.out', encoding='utf-8', errors='replace') as file:
                print('--- driver\n' + ''.join(line for line in file if ' loss ' not in line))
        raise
    finally:
        cluster.close()
        shutil.rmtree(work)


EXAMPLE = os.path.abspath(sys.argv[2]) + '/examples/ray' if len(sys.argv) == 4 else sys.exit(__doc__)
if __name__ == '__main__':
    main()
