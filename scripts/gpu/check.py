#!/usr/bin/env python3
"""The items of scripts/gpu-check.sh run, which explains it. Standard library only."""
import argparse
import glob
import json
import os
import platform
import re
import shutil
import sys
import tempfile

from runner import Failed, NotTried, Runner, answer, last_line

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RELEASE = os.environ.get('SHD_CHECK_BUILD') or os.path.join(ROOT, 'build/release')
BIN = os.path.join(RELEASE, 'bin')
SECONDS = 530  # of all items: 9 minutes with what comes around them
# For the test of this script: a directory with a libcuda.so.1 that runs kernels on the host. Sizes
# are small then, and what only a GPU's tools can do is not tried.
SHIM = os.environ.get('SHD_CHECK_SHIM', '')
MODEL = ('--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --sample 0 '
         f'--eval-every 0 --steps {3 if SHIM else 8}').split()


def program(name):
    return os.path.join(BIN, name)


def sized(real, small):
    return small if SHIM else real


# -- Where things are --------------------------------------------------------------------------------

def data():
    """The text that came along, else the installed one, else our documents."""
    for path in (os.path.join(ROOT, 'data/text'), '/usr/share/games/fortunes', os.path.join(ROOT, 'docs')):
        if os.path.isdir(path):
            return path
    raise Failed('no text to train on')


def runtime_base():
    """Where sockets may go: short, ours, and nobody else writes there (shardctl refuses /tmp)."""
    for path in ('/run', '/var/lib', os.path.expanduser('~'), '/root', '/opt', ROOT):
        if os.path.isdir(path) and os.access(path, os.W_OK):
            st = os.stat(path)
            if st.st_uid == os.getuid() and st.st_mode & 0o022 == 0 and not path.startswith('/tmp'):
                return path
    return None


def library_dirs():
    """Directories with NVIDIA's libraries that the loader does not search by itself."""
    places = [p for base in sys.path if base.endswith('site-packages')
              for p in sorted(glob.glob(os.path.join(base, 'nvidia/*/lib')))]
    places += ['/usr/local/cuda/lib64', '/usr/local/cuda/lib', '/usr/local/nvidia/lib64']
    return [p for p in places if glob.glob(os.path.join(p, 'libcublas.so.*')) or
            glob.glob(os.path.join(p, 'libnccl.so.2')) or glob.glob(os.path.join(p, 'libcuda.so.1'))]


def our_env(runner):
    """What our programs run with: the libraries that came along first."""
    carried = os.path.join(RELEASE, 'carried')
    dirs = [SHIM] if SHIM else []
    if os.path.isdir(carried):
        dirs.append(carried)
    dirs += library_dirs()
    env = dict(os.environ)
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'SHARDD_ADDRESS', 'SHARDD_BIN'):
        env.pop(name, None)
    before = env.get('LD_LIBRARY_PATH', '')
    env['LD_LIBRARY_PATH'] = ':'.join(dirs + ([before] if before else []))
    fallback = os.path.join(carried, 'fallback')
    if os.path.isdir(fallback):
        text = ''.join(runner.run(['ldd', p], env=env)[1] for p in (program('shd-gpt'), program('shardd')))
        if 'not found' in text:
            env['LD_LIBRARY_PATH'] += ':' + fallback
    return env


# -- Items -------------------------------------------------------------------------------------------

def environment(r):
    facts = {'kernel': platform.release(), 'libc': ' '.join(platform.libc_ver()),
             'cpus': os.cpu_count(), 'python': platform.python_version()}
    text = f'{facts["cpus"]} CPUs, Linux {facts["kernel"]}, {facts["libc"]}'
    if shutil.which('nvidia-smi') and not SHIM:
        fields = 'name,driver_version,memory.total,compute_mode,persistence_mode,clocks.sm,pstate,uuid'
        line = last_line(r.must(['nvidia-smi', f'--query-gpu={fields}', '--format=csv,noheader']))
        r.run(['nvidia-smi'])
        facts['gpu'] = line
        text = f'{line}; {text}'
    elif not SHIM:
        text = f'no nvidia-smi; {text}'
    r.document['environment'] = facts
    missing = [m for p in sorted(glob.glob(os.path.join(BIN, '*'))) if os.access(p, os.X_OK)
               for m in r.run(['ldd', p], env=r.env)[1].splitlines() if 'not found' in m]
    if missing:
        raise Failed(f'libraries missing: {" ".join(missing)}')
    return text


def doctor(r):
    report = json.loads(r.must([program('shardctl'), 'doctor', '--json'], env=r.env))
    findings = [f for f in report['findings'] if f['check'] == 'gpu']
    r.document['doctor'] = findings
    bad = [f['found'] for f in findings if f['level'] != 'ok']
    device = [f['found'] for f in findings if f['found'].startswith('gpu0: ')]
    if not device:
        raise Failed('no gpu0: ' + '; '.join(f['found'] for f in findings))
    if not any('sm_90' in f['found'] for f in findings):
        raise Failed('shardd has no code for sm_90')
    return device[0] + (f'; but: {"; ".join(bad)}' if bad else '')


def code(r):
    """The machine code in the binary, by NVIDIA's own tool."""
    if not shutil.which('cuobjdump'):
        raise NotTried('no cuobjdump here')
    text = r.must(['cuobjdump', '-lelf', program('shardd')])
    if 'sm_90' not in text:
        raise Failed(f'no sm_90 in shardd: {last_line(text)}')
    return last_line(text)


def device_test(path):
    def fn(r):
        unbuffered = ['stdbuf', '-oL'] if shutil.which('stdbuf') else []  # a cut run shows how far it came
        text = r.must([*unbuffered, path], env=r.env)
        return last_line(text)  # says how many were skipped: those that need the shim's faults
    return fn


def probe(question, *small):
    def fn(r):
        return answer(r.must([program('gpu_probe'), question, *(small if SHIM else ())], env=r.env))
    return fn


def gpt(r, words, flags):
    """The digest line of a training."""
    command = [program(w) if w in ('shardctl', 'shd-gpt') else w for w in words]
    text = r.must([*command, *MODEL, '--data', data(), *flags], env=r.env)
    line = last_line(text)
    if not line.startswith('digest sha256:'):
        raise Failed(f'no digest but: {line}')
    return line


def daemons(devices, workers):
    return ('shardctl', 'run', '--devices', devices, '--workers', str(workers), '--', 'shd-gpt')


ALONE = ('shd-gpt', '--standalone')
def losses(r):
    """Losses of a GPU worker, step by step, beside a host worker's: other sums, the same training."""
    worst = []
    for precision, bound in (('fp32', 2e-3), ('bf16', 3e-2))[:1 if SHIM else 2]:
        runs = []
        for where in ([], GPU):
            text = r.must([program('shd-gpt'), '--standalone', *MODEL, '--data', data(), '--log-every', '1',
                           '--precision', precision, *where], env=r.env)
            runs.append([float(n) for n in re.findall(r'^step \d+/\d+ loss ([0-9.]+)', text, re.M)])
        if not runs[0] or len(runs[0]) != len(runs[1]):
            raise Failed(f'{precision}: {len(runs[0])} and {len(runs[1])} losses')
        worst.append((precision, max(abs(a - b) for a, b in zip(*runs))))
        if worst[-1][1] > bound:
            raise Failed(f'{precision}: losses differ by {worst[-1][1]:.4f}, at most {bound} expected: {runs}')
    return 'losses differ from the host\'s by at most ' + ', '.join(f'{d:.4f} ({p})' for p, d in worst)


GPU = ['--device', 'cuda:0']
HOST_DAEMONS = (  # state on the GPU or not, workers on the host: one digest, kernels give the same bits
    ([], (('gpu0', 1), ('gpu0', 2), ('cpu0,gpu0', 2))),
    (['--precision', 'bf16', '--grad-precision', 'bf16', '--strategy', 'zero2'], (('gpu0', 2),)),
    (['--optimizer', 'sgd', '--accumulate', 'local:2'], (('gpu0', 2),)),
    (['--optimizer', 'lion', '--precision', 'fp16', '--inject-overflow', '2'], (('gpu0', 1),)),
)
GPU_WORKERS = (  # workers on the GPU: digests of their own, wherever the state is
    ([], (('gpu0', 1), ('gpu0', 2), ('cpu0,cpu1', 2), ('cpu0,gpu0', 1))),
    (['--path', 'copy'], (('gpu0', 1),)),
    (['--precision', 'bf16', '--grad-precision', 'bf16'], (('gpu0', 2), ('cpu0', 1))),
)


def digests(where, sets):
    def fn(r):
        runs = 0
        for flags, pairs in sets:
            alone = [f for f in flags if f not in ('--path', 'copy')]
            want = gpt(r, ALONE, where + alone)
            for devices, workers in pairs if not SHIM else pairs[-1:]:
                got = gpt(r, daemons(devices, workers), where + flags)
                runs += 1
                if got != want:
                    raise Failed(f'--devices {devices} --workers {workers} {" ".join(flags)}: {got}, '
                                 f'alone {want}')
        return f'{runs} ways, each the digest of one process alone'
    return fn


def chaos(r):
    text = r.must([sys.executable, '-B', os.path.join(ROOT, 'tests/chaos.py'), '--bin', BIN, '--logs',
                   os.path.join(r.logs, 'chaos'), '--devices', 'gpu0', '--rate', '1', '--seed', '1',
                   *sized(['--kills', '12', '--steps', '400', '--', *GPU],
                          ['--kills', '3', '--steps', '150', '--workers', '1', '--']),
                   '--data', data()], env=r.env)
    line = last_line(text)
    if 'kills=0' in line:
        raise Failed(f'nobody was killed: {line}')
    return line


def nccl(r):
    if SHIM:
        raise NotTried('the shim has no NCCL')
    return answer(r.must([program('nccl_pair')], env=r.env))


def sanitizer(r):
    tool = shutil.which('compute-sanitizer')
    if SHIM or not tool:
        raise NotTried('no compute-sanitizer here')
    said = []
    for kind, name in (('memcheck', 'test_cuda_kern_update'), ('racecheck', 'test_cuda_kern_sum')):
        path = next(iter(tests(name)), None)
        if path is None:
            raise Failed(f'no {name}')
        status, text = r.run([tool, '--tool', kind, '--error-exitcode', '9', path], env=r.env)
        if 'Device not supported' in text:
            raise NotTried('compute-sanitizer: Device not supported')
        if status != 0:
            raise Failed(f'{kind} ended with {status}: {last_line(text)}')
        said.append(f'{kind}: {last_line(text).lstrip("= ")}')
    return '; '.join(said)


def bench(r):
    r.must([program('bench_cuda'), '--json', *sized((), ('--elems', '65536', '--rounds', '2'))], env=r.env)
    parts = []
    for name, what in (('cuda.copy.rate', 'copy GB/s'), ('cuda.adamw.bf16.of_copy', 'AdamW of it'),
                       ('cuda.adamw.bf16.trail.over_none', 'trail costs'),
                       ('cuda.accumulate.fp32.of_copy', 'accumulate'),
                       ('cuda.offload.in.131072KiB.of_driver', 'host to device of the driver\'s')):
        value = r.figure(name)
        if value is not None:
            parts.append(f'{what} {value:.3g}')
    return ', '.join(parts)


def train(r):
    small = ['--layers', '2', '--dim', '64', '--heads', '2', '--seq', '64', '--batch', '2', '--steps', '3',
             '--warmup', '1', '--rounds', '1', '--torch-device', os.environ.get('SHD_CHECK_TORCH', 'none')]
    return answer(r.must([sys.executable, '-B', os.path.join(ROOT, 'scripts/gpu/gpt.py'), '--bin', BIN,
                          '--data', data(), *sized([], small)], env=r.env))


# What the unit's service section locks that could keep CUDA out.
HARDENING = ('SystemCall', 'Device', 'Private', 'Protect', 'Restrict', 'NoNew', 'Capability', 'Lock',
             'MemoryDeny', 'LimitMEMLOCK', 'LimitNOFILE', 'IPAddress')


def systemd(r):
    """A program that uses CUDA, under the filters of the unit and its GPU drop-in."""
    with open('/proc/1/comm', encoding='utf-8') as f:
        first = f.read().strip()
    if first != 'systemd' or not shutil.which('systemd-run'):
        raise NotTried(f'process 1 is {first}')
    settings = []
    for name in ('shardd@.service', 'gpu.conf'):
        with open(os.path.join(ROOT, 'systemd', name), encoding='utf-8') as f:
            settings += [line.strip() for line in f if line.startswith(HARDENING)]
    home = '/opt/shardd-gpu-check'
    argv = ['systemd-run', '--wait', '--pipe', '--collect', '--quiet', '-p', f'BindReadOnlyPaths={ROOT}:{home}',
            '-p', 'TemporaryFileSystem=/opt', '-p', f'Environment=LD_LIBRARY_PATH={r.env["LD_LIBRARY_PATH"]}'.replace(ROOT, home)]
    for setting in settings:
        argv += ['-p', setting]
    r.must([*argv, f'{home}/build/release/bin/bench_cuda', '--elems', '65536', '--rounds', '1'], env=r.env)
    return f'CUDA works under {len(settings)} settings of the unit and gpu.conf'


def tests(pattern):
    found = {os.path.basename(p): p for p in glob.glob(os.path.join(RELEASE, 'tests/**', pattern), recursive=True)
             if os.access(p, os.X_OK) and os.path.isfile(p)}
    return [found[name] for name in sorted(found)]


def device_tests(*patterns):
    for path in [p for pattern in patterns for p in tests(pattern)]:
        yield os.path.basename(path).replace('test_', '').replace('_', '-'), 60, device_test(path), True


def items():
    """(name, seconds at most, function, may be left out): what matters most first."""
    yield 'environment', 30, environment, False
    yield 'doctor', 40, doctor, False
    yield 'code', 20, code, True
    # ctest runs all of them on the shim: one shows that it is done from here, too.
    yield from device_tests('test_cuda_kern_fill') if SHIM else device_tests('test_cuda*', 'test_gpt_cuda*')
    yield 'keep', 60, probe('keep', '--bytes', '8388608'), False
    yield 'queued', 60, probe('queued', '--bytes', '33554432'), False
    yield 'loss-gpu', 60, losses, False
    yield 'digest-host', 70, digests([], HOST_DAEMONS), False
    yield 'digest-gpu', 90, digests(GPU, GPU_WORKERS), False
    yield 'chaos', 120, chaos, False
    yield from [] if SHIM else device_tests('test_gpu_*')
    yield 'bench', 60, bench, False
    yield 'readonly', 40, probe('readonly', '--bytes', '4194304'), False
    yield 'overlap', 50, probe('overlap', '--bytes', '1048576', '--tenths', '2'), False
    yield 'nccl', 70, nccl, bool(SHIM)
    yield 'gpt', 180, train, False
    yield 'sanitizer', 100, sanitizer, True
    yield 'systemd', 30, systemd, True


def parse():
    p = argparse.ArgumentParser(prog='gpu-check.sh run', description=__doc__)
    p.add_argument('--json', metavar='FILE', help='the results, written after each item')
    p.add_argument('--only', metavar='NAME,...', help='these items alone')
    p.add_argument('--list', action='store_true', help='names and limits of the items')
    p.add_argument('--seconds', type=float, default=SECONDS, help=f'for all of them ({SECONDS})')
    return p.parse_args()


def main():
    o = parse()
    chosen = list(items())
    if o.only is not None:
        names = o.only.split(',')
        unknown = sorted(set(names) - {name for name, *_ in chosen})
        if unknown:
            sys.stderr.write(f'gpu-check.sh: unknown item {", ".join(unknown)}; known: '
                             f'{", ".join(name for name, *_ in chosen)}\n')
            return 2
        chosen = [c for c in chosen if c[0] in names]
    if o.list:
        for name, limit_s, *_ in chosen:
            print(f'{name:24} {limit_s:4} s')
        return 0
    if not os.access(program('shardd'), os.X_OK):
        sys.stderr.write(f'gpu-check.sh: no {program("shardd")}: build first, or run it in a bundle\n')
        return 1
    version = os.path.join(ROOT, 'VERSION')
    head = {'shim': bool(SHIM), 'version': open(version).read().strip() if os.path.isfile(version) else 'tree'}
    r = Runner(os.path.join(ROOT, 'build/logs/gpu-check'), o.json, o.seconds, head)
    with tempfile.TemporaryDirectory(prefix='shd-', dir=runtime_base()) as runtime:  # mode 0700
        r.env = {**our_env(r), 'XDG_RUNTIME_DIR': runtime}
        for name, limit_s, fn, may_skip in chosen:
            r.item(name, limit_s, fn, may_skip)
    return r.close()


if __name__ == '__main__':
    sys.exit(main())
