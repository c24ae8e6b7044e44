#!/usr/bin/env python3
"""examples/kubernetes: its objects have Kubernetes' schema, and their containers, started by the words that are there as two
nodes would start them, train through kills and the loss of a pod to the digest of a training in one process; with the
patches of kustomization.yaml, by replicas, through the loss of one pod and, when that is filled, of the other.

A node is a network and a mount namespace. What a kubelet does for these files is done here: volumes (a claim's is a directory
that both nodes have), a secret's files, users, capabilities, host names, environments, starting again what failed. Not a kubelet's part, and not tried: scheduling, probes' consequences,
images. Skipped (77) where packages cannot be installed, without root, or without namespaces.

  test_kubernetes.py BIN_DIR SOURCE_DIR VENV_DIR
"""
import contextlib
import copy
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from nodes import into_venv, own_time, skip, soon, unwire, wire

PACKAGE = 'kubernetes-validate==1.37.0'
MODEL = ('--layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 8 --threads 1 --sample 0 --eval-windows 0 '
         '--log-every 1 --steps 250').split()


class Cluster:
    def __init__(self, bin_dir, work):
        self.bin, self.work, self.started = bin_dir, work, []
        self.nodes = [f'shdK{i}-{os.getpid()}' for i in (0, 1)]
        os.mkdir(f'{work}/bin')
        for program in ('shardctl', 'shardd', 'shd-gpt'):
            shutil.copy(f'{bin_dir}/{program}', f'{work}/bin/{program}')
        shutil.copy(f'{bin_dir}/../lib/libshd.so.0', f'{work}/bin/libshd.so.0')
        with open(f'{work}/hosts', 'w', encoding='ascii') as file:  # what the headless service's names are to DNS
            file.write('127.0.0.1 localhost\n10.79.0.1 shardd-0.shardd\n10.79.0.2 shardd-1.shardd\n')
        for i in (0, 1):
            os.mkdir(f'{work}/node{i}')

    def source(self, node, pod, volume, group):
        """Where a volume's files are on the node, which makes them as a kubelet does; group: fsGroup, of all but a hostPath."""
        if 'persistentVolumeClaim' in volume:
            path = f'{self.work}/{volume["persistentVolumeClaim"]["claimName"]}'
            if not os.path.exists(path):
                os.mkdir(path)
                os.chown(path, -1, group)
                os.chmod(path, 0o2775)
            return path
        if 'hostPath' in volume:
            path, kind = f'{self.work}/node{node}{volume["hostPath"]["path"]}', volume['hostPath']['type']
            if kind == 'DirectoryOrCreate':
                os.makedirs(path, mode=0o755, exist_ok=True)
            elif not os.path.isdir(path):
                raise SystemExit(f'  FAILED: {pod}: no {path}, and its type is {kind}')
            return path
        path = f'{self.work}/node{node}/{pod}-{volume["name"]}'
        if not os.path.exists(path):
            os.mkdir(path)
            if 'emptyDir' in volume:
                os.chown(path, -1, group)
                os.chmod(path, 0o2777)
            else:  # a secret: links to files of root's
                os.mkdir(f'{path}/..data', mode=0o755)
                for name in os.listdir(f'{self.work}/keys'):
                    shutil.copy(f'{self.work}/keys/{name}', f'{path}/..data/{name}')
                    os.chown(f'{path}/..data/{name}', -1, group)
                    os.chmod(f'{path}/..data/{name}', volume['secret']['defaultMode'] | 0o040)
                    os.symlink(f'..data/{name}', f'{path}/{name}')
        return path

    def start(self, node, pod, spec, container, fields, more=()):
        """A container's process, as in a pod of that name; its output is in work/POD.CONTAINER."""
        environment = {'PATH': f'{self.work}/bin:/usr/bin:/bin', 'LD_LIBRARY_PATH': f'{self.work}/bin'}
        for variable in container.get('env', ()):
            value = variable.get('value')
            environment[variable['name']] = value if value is not None else fields[variable['valueFrom']['fieldRef']['fieldPath']]
        words = [re.sub(r'\$\((\w+)\)', lambda m: environment[m[1]], word)
                 for word in [*container['command'], *container.get('args', ()), *more]]
        context = {**spec.get('securityContext', {}), **container['securityContext']}
        sources = {volume['name']: self.source(node, pod, volume, context.get('fsGroup', -1)) for volume in spec['volumes']}
        mounts = ''.join(f'mkdir -p {m["mountPath"]} && mount --bind {sources[m["name"]]} {m["mountPath"]} && '
                         + (f'mount -o remount,bind,ro {m["mountPath"]} && ' if m.get('readOnly') else '')
                         for m in container['volumeMounts'])
        user, group = context['runAsUser'], context.get('runAsGroup', 0)
        kept = context['capabilities'].get('add', [])
        capabilities = ','.join(['-all', *('+' + name.lower() for name in kept)])
        assert context['capabilities']['drop'] == ['ALL'] and context['allowPrivilegeEscalation'] is False
        command = ['ip', 'netns', 'exec', self.nodes[node], 'unshare', *own_time(node), '--mount', '--uts', '--pid', '--fork', '--kill-child', '--mount-proc',
                   'sh', '-ec',
                   f'hostname {pod} && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /mnt && {mounts} mount --bind {self.work}/hosts /etc/hosts && '
                   f'exec setpriv --reuid {user} --regid {group} --clear-groups --bounding-set={capabilities} '
                   f'--inh-caps={capabilities} --no-new-privs -- "$@"', 'sh', *words]
        with open(f'{self.work}/{pod}.{container["name"]}', 'ab') as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.started.append(process)
        return process

    def start_pod(self, i, spec):
        with contextlib.suppress(FileNotFoundError):
            os.remove(f'{self.work}/shardd-{i}.daemons')
        fields = {'metadata.name': f'shardd-{i}'}
        if self.start(i, f'shardd-{i}', spec, spec['initContainers'][0], fields).wait():
            raise SystemExit(f'  FAILED: shardd-{i}: {self.text(f"shardd-{i}.prepare")}')
        pod = self.start(i, f'shardd-{i}', spec, spec['containers'][0], fields)
        soon(f'shardd-{i}', lambda: 'export SHARDD_ADDRESS' in self.text(f'shardd-{i}.daemons'))
        return pod

    def text(self, name):
        try:
            with open(f'{self.work}/{name}', encoding='utf-8', errors='replace') as file:
                return file.read()
        except FileNotFoundError:
            return ''

    def inner(self, process):
        """The container's own process, the one below unshare; None: there is none."""
        with open(f'/proc/{process.pid}/task/{process.pid}/children', encoding='ascii') as file:
            children = file.read().split()
        return int(children[0]) if children else None

    def daemon(self, pod, name):
        """The daemon's number here, where nobody's namespace counts; the relay has other words."""
        with open(f'/proc/{self.inner(pod)}/task/{self.inner(pod)}/children', encoding='ascii') as file:
            children = file.read().split()
        for pid in children:
            with open(f'/proc/{pid}/cmdline', encoding='utf-8') as file:
                words = file.read().split('\0')
            if name in words and '--relay' not in words:
                return int(pid)
        raise SystemExit(f'  FAILED: no daemon {name} among {children}')

    def close(self):
        for process in self.started:
            # By hand: a signal for the parent's death (--kill-child) is forgotten by who changes its user. It is the first of its
            # namespace, so what is in that ends, too, before unshare has.
            inner = self.inner(process) if process.poll() is None else None
            if inner is not None:
                os.kill(inner, signal.SIGKILL)
            else:
                process.kill()
            process.wait()
            assert inner is None or not os.path.exists(f'/proc/{inner}'), f'{process.args}: process {inner} is left'
        unwire(self.nodes)


def patched(objects, source):
    """As by kustomize: patches of RFC 6902 that replace what is there, or add to a list."""
    import kubernetes_validate  # pylint: disable=import-outside-toplevel
    import yaml  # pylint: disable=import-outside-toplevel
    with open(f'{source}/examples/kubernetes/kustomization.yaml', encoding='utf-8') as file:
        how = yaml.safe_load(file)
    assert how['kind'] == 'Kustomization' and how['resources'] == ['shardd.yaml', 'workers.yaml'], how
    objects = copy.deepcopy(objects)
    for patch in how['patches']:
        one = objects[patch['target']['kind']]
        assert one['metadata']['name'] == patch['target']['name'], patch
        for change in yaml.safe_load(patch['patch']):
            *path, last = [int(key) if key.isdigit() else key for key in change['path'].split('/')[1:]]
            at = one
            for key in path:
                at = at[key]
            if last == '-':
                assert change['op'] == 'add', change
                at.append(change['value'])
            else:
                assert change['op'] == 'replace' and type(at[last]) is type(change['value']), change
                at[last] = change['value']
        kubernetes_validate.validate(one, '1.37', strict=True)
    return objects


def load(source):
    import kubernetes_validate  # pylint: disable=import-outside-toplevel
    import yaml  # pylint: disable=import-outside-toplevel
    objects = {}
    for name in ('shardd.yaml', 'workers.yaml'):
        with open(f'{source}/examples/kubernetes/{name}', encoding='utf-8') as file:
            for one in yaml.safe_load_all(file):
                kubernetes_validate.validate(one, '1.37', strict=True)
                objects[one['kind']] = one
    wrong = {**objects['Job'], 'spec': {**objects['Job']['spec'], 'completionmode': 'Indexed'}}
    try:
        kubernetes_validate.validate(wrong, '1.37', strict=True)
    except kubernetes_validate.ValidationError:
        print(f'  {len(objects)} objects have the schema of Kubernetes 1.37')
        return objects
    raise SystemExit('  FAILED: a misspelt field has the schema, too')


def check(objects, cluster):
    state, job = objects['StatefulSet'], objects['Job']
    daemons, workers = state['spec']['template']['spec'], job['spec']['template']['spec']
    host = daemons['containers'][0]['command']
    if '--replicas' not in host:
        every = host.index('--checkpoint-every') + 1
        assert host[every] == '100', host
        host[every] = '10'  # a short run
    labels = state['spec']['template']['metadata']['labels']
    for selector in (objects['Service']['spec']['selector'], objects['PodDisruptionBudget']['spec']['selector']['matchLabels'],
                     state['spec']['selector']['matchLabels']):
        assert selector == labels, selector
    assert job['spec']['completions'] == state['spec']['replicas'] == 2
    assert workers['containers'][0]['env'][-1] == {'name': 'WORLD_SIZE', 'value': '2'}
    with open(f'{SOURCE}/examples/kubernetes/shardd.yaml', encoding='utf-8') as file:  # the command that its head tells of
        words = re.search(r'# +(shardctl keys new .*)', file.read())[1].split()
    os.mkdir(f'{cluster.work}/keys', mode=0o700)
    subprocess.run([f'{cluster.bin}/{words[0]}', *words[1:]], cwd=cluster.work, check=True)
    return daemons, workers


class TooShort(Exception):
    """The workers have ended before the test has done its part."""


def in_one_process(cluster, model):
    want = subprocess.run([f'{cluster.bin}/shd-gpt', '--standalone', *model], check=True, capture_output=True,
                          text=True).stdout.strip().splitlines()[-1]
    print(f'in one process: {want}')
    return want


def work(cluster, workers, i, more):
    fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(i)}
    return cluster.start(i, f'shd-gpt-{i}', workers, workers['containers'][0], fields, more)


def go_on(cluster, steps):
    def step():
        found = re.findall(r'^step (\d+)/', cluster.text('shd-gpt-0.worker') + cluster.text('shd-gpt-1.worker'), re.M)
        return max(map(int, found), default=0)

    end = step() + steps
    soon(f'step {end}', lambda: step() >= end)


def check_digest(cluster, want):
    got = set(re.findall('^digest .*', cluster.text('shd-gpt-0.worker') + cluster.text('shd-gpt-1.worker'), re.M))
    if got != {want}:
        raise SystemExit(f'  FAILED: wanted {want}, got {got}')


def lose(cluster, pods, i):
    """A pod, with what its daemon had. Its successor's volumes are empty ones, but for the claim's."""
    os.kill(cluster.inner(pods[i]), signal.SIGKILL)
    soon('the end of a pod', lambda: pods[i].poll() is not None)
    shutil.rmtree(f'{cluster.work}/node{i}/shardd-{i}-keys')


def run_replicas(objects, cluster, steps):
    daemons, workers = check(objects, cluster)
    model = [*MODEL, '--steps', str(steps)]
    want = in_one_process(cluster, model)
    pods = [cluster.start_pod(i, daemons) for i in (0, 1)]
    said = re.search(r"export SHARDD_ADDRESS='(.*)'", cluster.text('shardd-0.daemons'))[1]
    assert workers['containers'][0]['env'][0] == {'name': 'SHARDD_ADDRESS', 'value': said}, said
    jobs = [work(cluster, workers, i, [*model, '--slow', '20']) for i in (0, 1)]

    def until(what, pattern, name):
        soon(what, lambda: re.search(pattern, cluster.text(name), re.M) or any(job.poll() is not None for job in jobs))
        if not re.search(pattern, cluster.text(name), re.M):
            if max(job.poll() or 0 for job in jobs) > 0:
                raise SystemExit(f'  FAILED: {what}: workers ended with {[job.poll() for job in jobs]}')
            raise TooShort

    until('a step', '^step 3/', 'shd-gpt-0.worker')
    for i in (1, 0):
        lose(cluster, pods, i)
        until('the other one alone', f'host shardd-{i} is out', f'shd-gpt-{1 - i}.worker')
        pods[i] = cluster.start_pod(i, daemons)
        until('a pod that is filled', f"host 'shardd-{i}' is in again", f'shardd-{i}.daemons')
    for i in (0, 1):
        soon(f'the end of worker {i}', lambda i=i: jobs[i].poll() is not None)
    assert [job.returncode for job in jobs] == [0, 0], jobs  # none was started again
    check_digest(cluster, want)
    print('  with replicas one pod lost, and filled, then the other one: same digest')


def run(objects, cluster):
    job, (daemons, workers) = objects['Job'], check(objects, cluster)
    want, slowly = in_one_process(cluster, MODEL), [*MODEL, '--slow', '8']
    pods = []
    for i in (0, 1):
        pods.append(cluster.start_pod(i, daemons))
    keys = os.listdir(f'{cluster.work}/node0/shardd-0-keys')
    assert sorted(keys) == ['cluster.json', 'shardd-0.key'], keys
    probe = daemons['containers'][0]
    probe = {**probe, 'name': 'probe', 'command': probe['readinessProbe']['exec']['command']}
    if cluster.start(0, 'shardd-0', daemons, probe, {'metadata.name': 'shardd-0'}).wait():
        raise SystemExit(f'  FAILED: not ready: {cluster.text("shardd-0.probe")}')

    jobs = [work(cluster, workers, i, slowly) for i in (0, 1)]
    go_on(cluster, 3)
    os.kill(cluster.inner(jobs[1]), signal.SIGKILL)
    soon('the end of a worker', lambda: jobs[1].poll() is not None)
    go_on(cluster, 3)  # by the other one
    jobs[1] = work(cluster, workers, 1, slowly)
    go_on(cluster, 3)
    for i, name in ((0, 'cpu0'), (1, 'cpu1')):
        os.kill(cluster.daemon(pods[i], name), signal.SIGKILL)
        soon(f'another {name}', lambda i=i: 'started again' in cluster.text(f'shardd-{i}.daemons'))
        go_on(cluster, 3)
    latest = f'{cluster.work}/shardd-checkpoints/run1/LATEST'
    soon('a checkpoint', lambda: os.path.exists(latest))
    lose(cluster, pods, 1)
    pods[1] = cluster.start_pod(1, daemons)
    soon('going back', lambda: re.search(r'restored /mnt/checkpoints/run1/step-0*[1-9]', cluster.text('shardd-0.daemons')))
    failed = [0, 0]

    def ended(i):
        """Job i has; one that failed is started again, as of restartPolicy OnFailure."""
        if jobs[i].poll() is None or jobs[i].returncode == 0:
            return jobs[i].returncode == 0
        failed[i] += 1
        assert failed[i] <= job['spec']['backoffLimit'] and workers['restartPolicy'] == 'OnFailure'
        time.sleep(min(2 ** failed[i], 10))
        jobs[i] = work(cluster, workers, i, slowly)
        return False

    for i in (0, 1):
        soon(f'the end of worker {i}', lambda i=i: ended(i))
    assert min(failed) > 0, f'a worker went on without the state of a pod: {failed}'
    check_digest(cluster, want)
    print('  a worker and both daemons killed, a pod lost: same digest')
    for i, pod in enumerate(pods):
        os.kill(cluster.inner(pod), signal.SIGTERM)
        soon(f'the end of shardd-{i}', lambda pod=pod: pod.poll() is not None)
        left = [name for name in os.listdir(f'{cluster.work}/node{i}/run/shardd') if name != 'keeper' and not name.endswith('.lock')]
        assert pod.returncode == 0 and not left, (pod.returncode, left)
    cluster.start_pod(0, daemons)
    print('  SIGTERM ends them, and another pod finds the node fit for it')


def in_cluster(bin_dir, part, objects, *more):
    work_dir = tempfile.mkdtemp(prefix='shd-k8s.', dir='/tmp')  # short: sockets
    os.chmod(work_dir, 0o755)
    cluster = Cluster(bin_dir, work_dir)
    try:
        wire(cluster.nodes, [f'shdk{i}-{os.getpid()}' for i in (0, 1)], '10.79.0')
        part(objects, cluster, *more)
    except TooShort:
        raise
    except BaseException:
        for name in sorted(os.listdir(work_dir)):
            if os.path.isfile(f'{work_dir}/{name}'):
                print(f'--- {name}\n' + '\n'.join(cluster.text(name).splitlines()[-5:]))
        raise
    finally:
        cluster.close()
        shutil.rmtree(work_dir)


def main():
    bin_dir, venv = os.path.abspath(sys.argv[1]), os.path.abspath(sys.argv[3])
    into_venv(venv, PACKAGE, 'kubernetes_validate, yaml')
    objects, steps = load(SOURCE), 1000
    with_replicas = patched(objects, SOURCE)
    if os.geteuid() != 0:
        skip('not root')
    for program in ('ip', 'unshare', 'setpriv'):
        if shutil.which(program) is None:
            skip(f'no {program}')
    in_cluster(bin_dir, run, objects)
    while True:
        try:
            in_cluster(bin_dir, run_replicas, with_replicas, steps)
            break
        except TooShort:
            print(f'  {steps} steps are too few')
            steps *= 3


SOURCE = os.path.abspath(sys.argv[2]) if len(sys.argv) == 4 else sys.exit(__doc__)
if __name__ == '__main__':
    main()
