#!/usr/bin/env python3
"""Daemons of shardd on the hosts of a Ray cluster, and workers beside them. In a driver:

    import ray, shardd_ray
    ray.init('auto')
    for rank, host in enumerate(shardd_ray.start(hosts=2)):  # what is there is found again, else started
        there = NodeAffinitySchedulingStrategy(host['node'], soft=True)
        Trainer.options(scheduling_strategy=there, max_restarts=-1, max_task_retries=-1).remote(host['address'], rank)

where a Trainer sets SHARDD_ADDRESS, RANK and WORLD_SIZE in os.environ and trains. Or a program as it is, one to a host:

    shardd_ray.py -- shd-gpt --elastic --steps 500
    shardd_ray.py --stop        # ends the daemons, and what is in no checkpoint with them

With `--hosts 2 --replicas /shared/dir` on three nodes each slice is on two of them, by files in a directory that all nodes have: a node
is lost, training goes on from memory, Ray restarts its actor on a spare node, which takes the lost one's place and is filled.

An actor on each host, detached and spread by a placement group, finds or starts its daemons and relay (`shardctl host`), and
is not what they live by: neither its end nor its raylet's ends them. shardctl has to be in the PATH of every raylet.
"""
import argparse
import glob
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # only drivers need this file

# No child of Ray's, nor in its session. Ray's processes are the kernel's first choice when memory ends, and have niceness
# 15, which root alone takes back: `RAY_worker_niceness=0 ray start` for others.
DETACHED = '{ echo 0 >/proc/self/oom_score_adj; renice -n 0 $$; } >/dev/null 2>&1; setsid "$@" </dev/null >&2 & echo $!'
# A host that was taken for lost ends when it can read that another node has its place.
FENCED = '''cluster=$1 at=$2; shift 2; trap 'kill "$host"' TERM; "$@" & host=$!
            while sleep 2; kill -0 "$host" 2>/dev/null; do
                all=$(shardctl keys list "$cluster" 2>/dev/null) || continue
                case $all in *" $at "*) ;; *) echo "another node has the place of $at" >&2; kill "$host" ;; esac
            done'''
LOST_S = 15  # that a host's relay does not answer
TRIES = 5  # of a worker, with replicas


class Host:
    def __init__(self, directory, cluster, replicas=None):
        self.directory, self.own = directory, directory + '.ray'  # of this: the hosts, this one's private key, a log
        self.cluster, self.ip = cluster or f'{self.own}/cluster.json', ray.util.get_node_ip_address()
        self.at, self.replicas, self.ending = f'[{self.ip}]' if ':' in self.ip else self.ip, replicas, threading.Event()
        self.shared, self.said = f'{replicas}/shardd-ray', ''
        if replicas:
            self.cluster = f'{self.shared}/cluster.json'
            threading.Thread(target=self.keep, daemon=True).start()

    def make(self, replicas, addresses, devices):
        """The cluster file, with keys that all hosts can read: any of them may take another one's place."""
        if replicas != self.replicas:
            raise ValueError(f'replicas={replicas}, and there are actors with {self.replicas}: the same, or stop() them')
        if not os.path.isdir(replicas):
            raise FileNotFoundError(f'host {self.ip}: {replicas}: a directory is wanted that all hosts have at this path')
        if not os.path.exists(self.cluster):
            shutil.rmtree(self.shared, ignore_errors=True)
            for path in (self.shared, f'{self.shared}/arbiter', f'{self.shared}/refill', f'{self.shared}/known'):
                os.mkdir(path, mode=0o700)
            each = len(devices) // len(addresses)
            subprocess.run(['shardctl', 'keys', 'new', self.cluster, *(
                f'host{i}={address}/{",".join(devices[i * each:(i + 1) * each])}' for i, address in enumerate(addresses))], check=True)
        elif len(self.hosts()) != len(addresses):
            raise ValueError(f'{self.cluster} has {len(self.hosts())} hosts, not {len(addresses)}: as many, or stop() them')

    def address(self, port):
        return f'{self.at}:{port}'

    def hosts(self):
        with open(self.cluster, encoding='utf-8') as file:
            return json.load(file)['hosts']

    def here(self):
        """The host of the cluster file that this node is; None: of none, or there is no file yet."""
        try:
            return next((host for host in self.hosts() if host['address'].rpartition(':')[0] == self.at), None)
        except FileNotFoundError:
            return None

    def keep(self):
        """With replicas: this node's host runs. One to which Ray has moved this actor takes the place of a host that is lost."""
        missed, pid = {}, None
        while not self.ending.wait(2):
            try:
                if (this := self.here()) is None:
                    self.take_place(missed)
                elif any(answers(f'{self.directory}/{name}.status') for name in ['relay', *this['devices']]):
                    if not os.path.exists(f'{self.shared}/known/replicas.json'):
                        shutil.copy(f'{self.directory}/replicas.json', f'{self.shared}/known/{this["name"]}')
                        os.rename(f'{self.shared}/known/{this["name"]}', f'{self.shared}/known/replicas.json')
                elif not (pid and os.path.exists(f'/proc/{pid}')) and self.may_begin(this['name']):
                    pid = self.detach('sh', '-c', FENCED, 'sh', self.cluster, this['address'],
                                      'shardctl', 'host', '--cluster', self.cluster, '--name', this['name'],
                                      '--runtime-dir', self.directory, '--files', '--replicas', '2',
                                      '--arbiter', f'file:{self.shared}/arbiter', '--refill', f'{self.shared}/refill')
            except (OSError, ValueError, subprocess.SubprocessError) as e:
                print(f'host {self.ip}:', e, file=sys.stderr, flush=True)

    def may_begin(self, name):
        """Once as it is. Empty, behind a loss, when it is out: where it is the only host that is in, as behind a cut cable, those that
        have the model would wait for it, and it would begin at step 0."""
        try:
            os.close(os.open(f'{self.shared}/known/{name}.begun', os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            return self.put_out(name)

    def put_out(self, name):
        done = subprocess.run(['shardctl', 'hosts', '-a', f'{self.shared}/known', '--out', name], stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, encoding='utf-8', check=False)
        if done.returncode and done.stderr != self.said:
            print(f'host {self.ip}: {name} does not begin again: {done.stderr}', file=sys.stderr, flush=True)
        self.said = done.stderr
        return done.returncode == 0

    def take_place(self, missed):
        """missed: since when each host, at its address, has not answered."""
        for host in self.hosts() if os.path.exists(self.cluster) else ():
            if reachable(host['address']):
                missed.pop((host['name'], host['address']), None)
            elif time.monotonic() - missed.setdefault((host['name'], host['address']), time.monotonic()) > LOST_S \
                    and self.put_out(host['name']):
                claim = f'{self.cluster}.{host["name"]}'  # of several nodes one gets the place
                try:
                    os.mkdir(claim)
                except FileExistsError:
                    if time.time() - os.stat(claim).st_mtime > 60:  # of one that has ended meanwhile
                        os.rmdir(claim)
                    continue
                try:
                    if host in self.hosts():
                        port = host['address'].rpartition(':')[2]
                        subprocess.run(['shardctl', 'keys', 'move', self.cluster, f'{host["name"]}={self.address(port)}'], check=True)
                        print(f'{host["address"]} is lost: {self.ip} takes its place as {host["name"]}', file=sys.stderr, flush=True)
                finally:
                    os.rmdir(claim)
                return

    def await_host(self, timeout):
        """{'node', 'address'} as of start(); None: Ray has moved this actor, and the host that it was at is there."""
        end, said = time.monotonic() + timeout, []
        while time.monotonic() < end:
            if (this := self.here()) and all(answers(f'{self.directory}/{name}.status') for name in ['relay', *this['devices']]):
                with open(f'{self.own}/log', encoding='utf-8', errors='replace') as log:
                    said = re.findall("^export SHARDD_ADDRESS='(.*)'$", log.read(), re.M)
                if said:
                    return {'node': ray.get_runtime_context().get_node_id(), 'address': said[-1]}
            elif not this and all(reachable(host['address']) for host in self.hosts()):
                return None
            time.sleep(0.2)
        raise TimeoutError(f'host {self.ip}: not ready in {timeout} s: {self.own}/log')

    def make_own(self):
        os.makedirs(self.own, mode=0o700, exist_ok=True)
        if os.lstat(self.own).st_uid != os.geteuid():
            raise PermissionError(f'host {self.ip}: {self.own} is of user {os.lstat(self.own).st_uid}, not {os.geteuid()}')

    def entry(self, port, devices):
        """This host's line of the cluster file; None: there is none, and no devices for one. Its private key stays here."""
        if self.replicas:
            raise ValueError(f'there are actors with replicas={self.replicas}: say so, or stop() them')
        file = f'{self.own}/this.json'
        if devices and not os.path.exists(file):
            self.make_own()
            subprocess.run(['shardctl', 'keys', 'new', file, f'{self.ip}={self.address(port)}/{",".join(devices)}'], check=True)
        if os.path.exists(file):
            with open(file, encoding='utf-8') as this:
                return json.load(this)['hosts'][0]
        return None

    def start(self, hosts, flags, timeout):
        """{'node', 'address'} of daemons and a relay that answer. hosts: of the file; None: it is given."""
        if hosts:
            with open(self.cluster + '.new', 'w', encoding='utf-8') as file:
                json.dump({'hosts': hosts}, file, indent=1)
            os.rename(self.cluster + '.new', self.cluster)  # relays read it anew for each connection
        with open(self.cluster, encoding='utf-8') as file:
            hosts = json.load(file)['hosts']
        mine = {self.ip, socket.gethostname(), socket.gethostname().split('.')[0]}
        this = next((host for host in hosts if {host['name'], host['address'].rpartition(':')[0].strip('[]')} & mine), None)
        if this is None:
            raise LookupError(f'{self.cluster} has no host with a name or an address of {sorted(mine)}')
        sockets = [f'{self.directory}/{name}.status' for name in ['relay', *this.get('devices', ())]]
        end, pid = time.monotonic() + timeout, None
        while not all(map(answers, sockets)):
            pid = pid or self.detach('shardctl', 'host', '--cluster', self.cluster, '--name', this['name'],
                                     '--runtime-dir', self.directory, *flags)
            gone = not os.path.exists(f'/proc/{pid}')
            with open(f'{self.own}/log', encoding='utf-8', errors='replace') as log:
                said = ''.join(log.readlines()[-3:])
            if time.monotonic() > end or gone and 'is kept by' not in said:  # by one whose daemons are just coming back
                raise RuntimeError(f'host {this["name"]}: not ready: {self.directory}; {self.own}/log ends: {said}')
            time.sleep(0.1)
        devices = ','.join(name for host in hosts for name in host.get('devices', ()))
        return {'node': ray.get_runtime_context().get_node_id(), 'address': f'{self.directory}?{devices}'}

    def forget(self):
        if self.replicas:
            shutil.rmtree(self.shared, ignore_errors=True)

    def detach(self, *command):
        if not shutil.which(command[0]):
            raise FileNotFoundError(f'host {self.ip}: no {command[0]} in PATH, {os.environ["PATH"]}')
        self.make_own()
        with open(f'{self.own}/log', 'ab') as log:
            return int(subprocess.run(['sh', '-c', DETACHED, 'sh', *command], check=True, stdout=subprocess.PIPE, stderr=log).stdout)

    def stop(self):
        self.ending.set()  # before, lest it is started again
        subprocess.run(['shardctl', 'down', '--yes', '--runtime-dir', self.directory], check=False)
        shutil.rmtree(self.own, ignore_errors=True)
        return ray.util.get_current_placement_group()


class Program:
    """A worker of any language: killed, or its host lost, it is started again by Ray, and goes on where the others are."""

    def __init__(self):
        self.running = False

    @ray.method(max_task_retries=-1, retry_exceptions=True)
    def run(self, command, patient, **environment):
        """patient: until this node has daemons, of which it may be about to take over some; and again where it fails, as it does
        when daemons are lost and their host is filled anew."""
        for left in reversed(range(TRIES if patient else 1)):
            while patient and not all_answer(environment['SHARDD_ADDRESS']):
                time.sleep(1)
            self.running = True
            code = subprocess.run(command, env={**os.environ, **environment}, check=False).returncode
            self.running = False
            if code == -signal.SIGKILL:  # not to be started again here: a raylet that ends kills the program before this actor
                raise InterruptedError(f'{command[0]} was killed')
            if code == 0 or left == 0:
                break
            print(f'{command[0]} ended with {code}: again, at most {left} times', file=sys.stderr, flush=True)
            time.sleep(TRIES - left)
        return code

    def runs(self):
        return self.running


def answers(path, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_UNIX, kind) as one:
        return one.connect_ex(path) == 0


def all_answer(address):
    """The relay, and the sockets of all daemons, here or elsewhere, that it or they themselves have bound."""
    directory = address.partition('?')[0]
    return answers(f'{directory}/relay.status') and all(answers(path, socket.SOCK_SEQPACKET) for path in glob.glob(f'{directory}/*.sock'))


def reachable(address):
    host, _, port = address.rpartition(':')
    try:
        with socket.create_connection((host.strip('[]'), int(port)), timeout=3):
            return True
    except OSError:
        return False


def actors():
    found = []
    while True:
        try:
            found.append(ray.get_actor(f'host{len(found)}', namespace='shardd'))
        except ValueError:
            return found


def answered(calls, timeout):
    late = ray.wait(calls, num_returns=len(calls), timeout=timeout)[1]
    if late:
        raise TimeoutError(f'{len(late)} of {len(calls)} actors have not answered in {timeout} s: is a host of theirs lost?')
    return ray.get(calls)


def start_replicas(there, replicas, port, daemons, timeout):
    addresses = answered([actor.address.remote(port) for actor in there], timeout)
    answered([there[0].make.remote(replicas, addresses, [f'cpu{i}' for i in range(daemons * len(there))])], timeout)
    return [host for host in answered([actor.await_host.remote(timeout) for actor in there], timeout + 10) if host]


def start(hosts=0, daemons=1, *, directory=None, cluster=None, replicas=None, port=7100, cpus=1, flags=(), timeout=120):
    """[{'node', 'address'}], one for each of so many hosts (0: all nodes); of daemons that were there, or are started.

    cluster: a file of `shardctl keys` that is at this path on all of its hosts, each with its own key beside it. Else keys are
    made: the private halves stay on their hosts. directory: where the sockets go, on all of them. flags: of `shardctl host`.
    replicas: a directory that all nodes have at this path, for keys, arbiter and what fills a host; nodes beyond `hosts` are spare."""
    if replicas and (cluster or flags):
        raise ValueError('replicas: the cluster file and flags are made there; give neither of them')
    mine = os.environ.get('XDG_RUNTIME_DIR', '/tmp') + ('/shardd' if 'XDG_RUNTIME_DIR' in os.environ else f'/shardd-{os.geteuid()}')
    directory = directory or ('/run/shardd' if os.geteuid() == 0 else mine)
    if cluster:
        with open(cluster, encoding='utf-8') as file:
            hosts = len(json.load(file)['hosts'])
    there = actors()
    hosts = hosts or len(there) or sum(node['Alive'] for node in ray.nodes())
    if there and len(there) != hosts:
        raise ValueError(f'hosts={hosts}, and there are actors of {len(there)}: as many, or stop() them')
    if not there:
        group = ray.util.placement_group([{'CPU': cpus}] * hosts, strategy='STRICT_SPREAD', lifetime='detached')
        if not group.wait(timeout):
            ray.util.remove_placement_group(group)
            raise TimeoutError(f'no {hosts} hosts with {cpus} free CPUs each in {timeout} s')
        there = [ray.remote(Host).options(
            name=f'host{at}', namespace='shardd', lifetime='detached', max_restarts=-1, max_task_retries=-1, num_cpus=cpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, at)).remote(directory, cluster, replicas) for at in range(hosts)]
    if replicas:
        return start_replicas(there, replicas, port, daemons, timeout)
    entries = None
    if not cluster:
        entries = answered([actor.entry.remote(port, ()) for actor in there], timeout)
        taken = {name for entry in entries if entry for name in entry['devices']}
        free = (name for name in map('cpu{}'.format, itertools.count()) if name not in taken)
        entries = answered([actor.entry.remote(port, [] if entry else list(itertools.islice(free, daemons)))
                            for actor, entry in zip(there, entries)], timeout)
    return answered([actor.start.remote(entries, flags, timeout) for actor in there], timeout + 10)


def stop(timeout=60):
    """End the daemons, with their state, keys and actors."""
    there = actors()
    for group in answered([actor.stop.remote() for actor in there], timeout)[:1]:
        answered([there[0].forget.remote()], timeout)
        ray.util.remove_placement_group(group)
    for actor in there:
        ray.kill(actor)


def results(workers, calls, patient):
    """{rank: what it ended with}. patient: without those that wait for daemons, where nobody else has run for a minute since one
    ended, or for ten: training is over then, or the model is lost."""
    codes, left, idle = {}, calls, 0
    while left and idle < (1 if codes else 10):
        done, left = ray.wait(left, timeout=60 if patient else None)
        codes.update((calls.index(call), ray.get(call)) for call in done)
        asked = [workers[calls.index(call)].runs.remote() for call in left if not done]
        if done or any(map(ray.get, ray.wait(asked, num_returns=len(asked), timeout=60)[0])):
            idle = 0
        else:
            idle += 1
    return codes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog='The cluster is that of RAY_ADDRESS, else the one here.')
    parser.add_argument('--hosts', type=int, default=0, metavar='N', help='with daemons (as many as there are, else all nodes)')
    parser.add_argument('--daemons', type=int, default=1, metavar='N', help='on each host (1)')
    parser.add_argument('--workers', type=int, default=1, metavar='N', help='of COMMAND on each host (1)')
    parser.add_argument('--cluster', metavar='FILE', help='of `shardctl keys`, at this path on all hosts (else keys are made)')
    parser.add_argument('--replicas', metavar='DIR', help='each slice on two hosts, by DIR, at this path on all nodes; others are spare')
    parser.add_argument('--directory', metavar='DIR', help="for sockets (/run/shardd for root, else the user's)")
    parser.add_argument('--stop', action='store_true', help='end the daemons; what is in no checkpoint goes')
    parser.add_argument('command', nargs='*', metavar='COMMAND', help='a worker; none: only the daemons are started')
    options = parser.parse_args()
    ray.init('auto')
    if options.stop:
        return stop()
    hosts = start(options.hosts, options.daemons, directory=options.directory, cluster=options.cluster,
                  replicas=options.replicas)
    for host in hosts:
        print(host['node'], host['address'], flush=True)
    world, workers, ended = options.workers * len(hosts) if options.command else 0, [], []
    for rank in range(world):
        host = hosts[rank % len(hosts)]  # first; where that is lost, another one, which has the same address
        workers.append(ray.remote(Program).options(
            num_cpus=1, max_restarts=-1, max_task_retries=-1, max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(host['node'], soft=True)).remote())
        ended.append(workers[-1].run.remote(
            options.command, bool(options.replicas), SHARDD_ADDRESS=host['address'], RANK=str(rank), WORLD_SIZE=str(world),
            LOCAL_RANK=str(rank // len(hosts)), LOCAL_WORLD_SIZE=str(options.workers)))
    codes = results(workers, ended, options.replicas)
    for rank in range(world):
        if codes.get(rank) != 0 and (rank in codes or 0 not in codes.values()):
            said = f'ended with {codes[rank]}' if rank in codes else 'waits for daemons, and nobody trains'
            print(f'rank {rank}: {options.command[0]} {said}', file=sys.stderr)
    return int(0 not in codes.values() if options.replicas and world else any(codes.values()))


if __name__ == '__main__':
    sys.exit(main())
