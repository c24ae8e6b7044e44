"""What tests of several nodes share: a virtual environment of their own, waits, namespaces joined by a wire."""
import fcntl
import os
import shutil
import subprocess
import sys
import time

LIMIT_S = 120 * int(os.environ.get('SHD_TEST_PACE', '1'))
SKIPPED = 77


def skip(why):
    print(f'skipped: {why}')
    sys.exit(SKIPPED)


def into_venv(venv, package, modules):
    """Presets' tests run beside each other: one of them makes it, the others wait."""
    python = os.path.join(venv, 'bin', 'python')
    if os.path.realpath(sys.prefix) == os.path.realpath(venv):
        return
    with open(venv + '.lock', 'w', encoding='ascii') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if subprocess.run([python, '-c', f'import {modules}'], stderr=subprocess.DEVNULL, check=False).returncode \
                if os.path.exists(python) else True:
            shutil.rmtree(venv, ignore_errors=True)
            if subprocess.run([sys.executable, '-m', 'venv', venv], stdout=subprocess.DEVNULL, check=False).returncode:
                skip('no python3-venv')
            if subprocess.run([python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', package], check=False).returncode:
                skip(f'{package} cannot be installed here')
    os.execv(python, [python, *sys.argv])


def soon(what, is_so):
    """Until that is so. Rests as soon() of wait.sh does: what it waits for wants the processors, too."""
    now = begin = time.monotonic()
    while not is_so():
        look, now = now, time.monotonic()
        if now - begin > LIMIT_S:
            raise SystemExit(f'  FAILED: {what}: not within {LIMIT_S} s')
        time.sleep(min(0.5, max(0.05, 3 * (now - look), (now - begin) / 20)))
        now = time.monotonic()


def own_time(i):
    """Flags of unshare: node i has run for a time of its own. None where the kernel has no such namespaces."""
    if subprocess.run(['unshare', '--time', 'true'], stderr=subprocess.DEVNULL, check=False).returncode:
        return []
    return ['--time', '--monotonic', str((9000000, 60000, 500000)[i % 3])]


def wire(nodes, ends, network):
    """Two network namespaces of these names, NETWORK.1 and .2."""
    for node in nodes:
        if subprocess.run(['ip', 'netns', 'add', node], stderr=subprocess.DEVNULL, check=False).returncode:
            skip('no network namespace can be made here')
    subprocess.run(['ip', 'link', 'add', ends[0], 'netns', nodes[0], 'type', 'veth', 'peer', 'name', ends[1], 'netns', nodes[1]], check=True)
    for i, node in enumerate(nodes):
        for command in ('link set lo up', f'addr add {network}.{i + 1}/24 dev {ends[i]}', f'link set {ends[i]} up'):
            subprocess.run(['ip', '-n', node, *command.split()], check=True)


def mesh(nodes, network):
    """Network namespaces of these names, NETWORK.1, .2 and so on; each two of them are joined by a wire of their own, which
    ends at interface v<number of the other, from 0 on>."""
    for i, node in enumerate(nodes):
        if subprocess.run(['ip', 'netns', 'add', node], stderr=subprocess.DEVNULL, check=False).returncode:
            skip('no network namespace can be made here')
        for command in ('link set lo up', f'addr add {network}.{i + 1}/32 dev lo'):
            subprocess.run(['ip', '-n', node, *command.split()], check=True)
    for i, node in enumerate(nodes):
        for k in range(i):
            subprocess.run(['ip', 'link', 'add', f'v{k}', 'netns', node, 'type', 'veth', 'peer', 'name', f'v{i}', 'netns', nodes[k]], check=True)
    for i in range(len(nodes)):
        for k in range(len(nodes)):
            if i != k:  # UCX takes interfaces that have an address
                subprocess.run(['ip', '-n', nodes[i], 'addr', 'add', f'{network}.{i + 1}/32', 'dev', f'v{k}'], check=True)
                mesh_join(nodes, network, i, k)


def mesh_join(nodes, network, i, k):
    """Node i's end of its wire to node k is up, and is the way there; as it is once it was down, too."""
    for command in (f'link set v{k} up', f'route replace {network}.{k + 1}/32 dev v{k} src {network}.{i + 1}'):
        subprocess.run(['ip', '-n', nodes[i], *command.split()], check=True)


def unwire(nodes):
    for node in nodes:
        subprocess.run(['ip', 'netns', 'del', node], stderr=subprocess.DEVNULL, check=False)
