#!/usr/bin/env python3
"""The items of scripts/gpu-check.sh run, which explains it. Standard library only."""
import argparse
import glob
import json
import os
import re
import shutil
import sys
import tempfile
import time

import machine
from runner import Failed, NotTried, Runner, answer, last_line

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RELEASE = os.environ.get('SHD_CHECK_BUILD') or os.path.join(ROOT, 'build/release')
BIN = os.path.join(RELEASE, 'bin')
SECONDS = 530  # of all items: 9 minutes with what comes around them
FIRST_SECONDS = 60
# For the test of this script: a directory with a libcuda.so.1 that runs kernels on the host. Sizes
# are small then, and what only a GPU's tools can do is not tried.
SHIM = os.environ.get('SHD_CHECK_SHIM', '')
MODEL = (('--layers 1 --dim 32 --steps 3 ' if SHIM else '--layers 2 --dim 64 --steps 8 ') +
         '--heads 2 --seq 32 --batch 2 --micro-batches 4 --sample 0 --eval-every 0').split()


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


def runtime_dir():
    """Where sockets may go: short, ours, and not where shardctl refuses to have them."""
    for base in ('/run', '/var/lib', os.path.expanduser('~'), '/root', '/opt', '/var', '/mnt', '/', ROOT, os.getcwd()):
        real = os.path.realpath(base) + '/'
        if not real.startswith(('/tmp/', '/var/tmp/', '/dev/shm/')) and os.path.isdir(base):
            try:
                return tempfile.TemporaryDirectory(prefix='shd-', dir=base)  # mode 0700
            except OSError:
                pass
    print('gpu-check: no place for sockets outside /tmp: what runs daemons will fail', flush=True)
    return tempfile.TemporaryDirectory(prefix='shd-')


def log_dir():
    for base in (os.path.join(ROOT, 'build/logs'), os.path.join(tempfile.gettempdir(), 'shd-logs')):
        try:
            path = os.path.join(base, 'gpu-check')
            os.makedirs(path, exist_ok=True)
            with open(os.path.join(path, 'setup.log'), 'wb'):
                return path
        except OSError:
            pass
    return tempfile.mkdtemp(prefix='shd-logs-')


def our_env(r):
    """What our programs run with: the libraries that came along first, then the driver's, cuBLAS and
    NCCL from wherever they are. Only what is missing otherwise comes from fallback/."""
    carried = os.path.join(RELEASE, 'carried')
    env = dict(os.environ)
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'SHARDD_ADDRESS', 'SHARDD_BIN'):
        env.pop(name, None)
    before = env.get('LD_LIBRARY_PATH', '')
    driver = [] if SHIM else machine.driver_dir(r)
    r.torch_path = ':'.join(driver + ([before] if before else []))
    dirs = ([SHIM] if SHIM else []) + ([carried] if os.path.isdir(carried) else []) + driver
    dirs += [d for d in machine.library_dirs() if d not in dirs]
    env['LD_LIBRARY_PATH'] = ':'.join(dirs + ([before] if before else []))
    fallback = os.path.join(carried, 'fallback')
    if os.path.isdir(fallback) and any(missing(r, program(p), env) for p in ('shd-gpt', 'shardd')):
        env['LD_LIBRARY_PATH'] += ':' + fallback
    return env


def missing(r, path, env):
    """Libraries that the loader does not find for it: what ldd does, without ldd."""
    text = r.run([path], env={**env, 'LD_TRACE_LOADED_OBJECTS': '1'})[1]
    return [line.strip() for line in text.splitlines() if 'not found' in line]


# A script whose programs need our libraries, while its python must not get them.
SCRIPT = ('import os, runpy, sys; os.environ["LD_LIBRARY_PATH"] = os.environ.pop("SHD_CHECK_LD"); '
          'del sys.argv[0]; sys.path.insert(0, os.path.dirname(sys.argv[0])); '
          'runpy.run_path(sys.argv[0], run_name="__main__")')


def script(r, path, *arguments, **more):
    """The output of a script of ours."""
    env = {**r.env, 'SHD_CHECK_LD': r.env['LD_LIBRARY_PATH'], 'LD_LIBRARY_PATH': r.torch_path,
           'SHD_CHECK_TORCH_LD': r.torch_path, **more}
    return r.must([sys.executable, '-B', '-c', SCRIPT, os.path.join(ROOT, path), *arguments], env=env)


# -- Items -------------------------------------------------------------------------------------------

def environment(r):
    facts = r.document['environment'] = machine.facts(r, SHIM)
    text = f'{facts["cpus"]} CPUs, Linux {facts["kernel"]}, {facts["libc"]}'
    if not SHIM:
        text = f'{facts["gpu"] or "no nvidia-smi"}; {text}'
        facts['libraries'] = machine.libraries(r)
    lost = [m for p in sorted(glob.glob(os.path.join(BIN, '*'))) if os.access(p, os.X_OK)
            for m in missing(r, p, r.env)]
    if lost:
        raise Failed(f'libraries missing: {" ".join(lost)}')
    if facts['bars']:
        raise Failed(f'{"; ".join(facts["bars"])}; {text}')
    return text


def doctor(r):
    report = json.loads(r.must([program('shardctl'), 'doctor', '--json'], env=r.env))
    findings = [f for f in report['findings'] if f['check'] == 'gpu']
    r.document['doctor'] = findings
    bad = [f['found'] for f in findings if f['level'] != 'ok']
    if not findings:
        raise Failed('doctor says nothing about GPUs')
    device = [f['found'] for f in findings if f['found'].startswith('gpu0: ')]
    if not device:
        raise Failed('no gpu0: ' + '; '.join(f['found'] for f in findings))
    if not any('sm_90' in f['found'] for f in findings):
        raise Failed('shardd has no code for sm_90')
    return device[0] + (f'; but: {"; ".join(bad)}' if bad else '')


def code(r):
    """The machine code in the binary, by NVIDIA's own tool."""
    tool = machine.tool('cuobjdump')
    if not tool:
        raise NotTried('no cuobjdump here')
    text = r.must([tool, '-lelf', program('shardd')])
    if 'sm_90' not in text:
        raise Failed(f'no sm_90 in shardd: {last_line(text)}')
    return last_line(text)


def device_test(path):
    def fn(r):
        unbuffered = ['stdbuf', '-oL'] if shutil.which('stdbuf') else []  # a cut run shows how far it came
        text = r.must([*unbuffered, path], env=r.env)
        return last_line(text)  # says how many were skipped: those that need the shim's faults
    return fn


def probe(question, *flags):
    def fn(r):
        return answer(r.must([program('gpu_probe'), question, *flags], env=r.env))
    return fn


def gpt(r, words, flags):
    """The digest line of a training."""
    command = [program(w) if w in ('shardctl', 'shd-gpt') else w for w in words]
    text = r.must([*command, *MODEL, '--data', data(), *flags], env=r.env)
    digests = [line for line in text.splitlines() if line.startswith('digest sha256:')]
    if not digests:
        raise Failed(f'no digest but: {last_line(text)}')
    return digests[-1]  # behind it `run` says what ends with it


def daemons(devices, workers):
    return ('shardctl', 'run', '--devices', devices, '--workers', str(workers), '--', 'shd-gpt')


ALONE = ('shd-gpt', '--standalone')
def losses(r):
    """Losses of a GPU worker, step by step, beside a host worker's: other sums, the same training."""
    said, wrong = [], []
    for precision, bound in (('fp32', 2e-3), ('bf16', 3e-2), ('fp16', 5e-3))[:1 if SHIM else 3]:
        runs = []
        for where in ([], GPU):
            text = r.must([program('shd-gpt'), '--standalone', *MODEL, '--data', data(), '--log-every', '1',
                           '--precision', precision, *where], env=r.env)
            runs.append([float(n) for n in re.findall(r'^step \d+/\d+ loss ([0-9.]+)', text, re.M)])
        if not runs[0] or len(runs[0]) != len(runs[1]):
            raise Failed(f'{precision}: {len(runs[0])} and {len(runs[1])} losses')
        worst = max(abs(a - b) for a, b in zip(*runs))
        said.append(f'{worst:.4f} ({precision})')
        if worst > bound:
            wrong.append(f'{precision}: losses differ by {worst:.4f}, at most {bound} expected: {runs}')
    if wrong:
        raise Failed('; '.join(wrong))
    return f'losses differ from the host\'s by at most {", ".join(said)}'


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
) + (() if SHIM else (  # emulated, these take too long; test_gpt_cuda.sh has smaller ones
    (['--precision', 'fp16', '--inject-overflow', '2'], (('gpu0', 1),)),
    (['--experts', '16', '--precision', 'bf16'], (('cpu0', 1), ('gpu0', 2))),
))


def digests(where, sets):
    def fn(r):
        runs, wrong = 0, []  # all that is wrong: which ways agree says where to look

        def digest(words, flags, label):
            nonlocal runs
            runs += 1
            try:
                return gpt(r, words, where + flags)
            except Failed as e:
                wrong.append(f'{label}: {e}')
                return None

        for flags, pairs in sets:
            name = ' '.join(flags)
            alone = [f for f in flags if f not in ('--path', 'copy')]
            want = digest(ALONE, alone, f'alone {name}')
            for devices, workers in pairs if not SHIM else pairs[-1:]:
                label = f'--devices {devices} --workers {workers} {name}'
                got = digest(daemons(devices, workers), flags, label)
                if None not in (got, want) and got != want:
                    wrong.append(f'{label}: {got}, alone {want}')
        if wrong:
            raise Failed(f'{len(wrong)} of {runs} runs: {"; ".join(wrong)}')
        return f'{runs} ways, each the digest of one process alone'
    return fn


def chaos(r):
    text = script(r, 'tests/e2e/chaos.py', '--bin', BIN, '--logs', os.path.join(r.logs, 'chaos'), '--devices',
                  'gpu0', '--rate', '1', '--seed', '1',
                  *sized(['--kills', '10', '--steps', '300', '--', *GPU],
                         ['--kills', '3', '--steps', '150', '--workers', '1', '--']), '--data', data())
    line = last_line(text)
    if 'kills=0' in line:
        raise Failed(f'nobody was killed: {line}')
    return line


def nccl(r):
    if SHIM:
        raise NotTried('the shim has no NCCL')
    return answer(r.must([program('nccl_pair')], env={**r.env, 'NCCL_DEBUG': 'INFO'}))


def sanitizer(r):
    tool = machine.tool('compute-sanitizer')
    if SHIM or not tool:
        raise NotTried('no compute-sanitizer here')
    said = []
    for kind, name in (('memcheck', 'test_cuda_kern_update'), ('racecheck', 'test_cuda_kern_sum')):
        path = next(iter(tests(name)), None)
        if path is None:
            raise Failed(f'no {name}')
        status, text = r.run([tool, '--tool', kind, '--error-exitcode', '9', '--report-api-errors', 'no', path], env=r.env)
        if 'Device not supported' in text:
            raise NotTried('compute-sanitizer: Device not supported')
        if status != 0:
            raise Failed(f'{kind} ended with {status}: {last_line(text)}')
        said.append(f'{kind}: {last_line(text).lstrip("= ")}')
    return '; '.join(said)


# Figures as (name, at least or None, what it is), for the end of the output.
TARGETS = (
    ('cuda.copy.rate', None, 'device copy, both directions, GB/s'),
    ('cuda.adamw.bf16.of_copy', 0.9, 'AdamW without a trail, of the copy'),
    ('cuda.adamw.bf16.trail.of_copy', 0.9, 'AdamW with its trail, of the copy'),
    ('cuda.accumulate.fp32.of_copy', 0.9, 'accumulate without a trail, of the copy'),
    ('cuda.accumulate.fp32.trail.of_copy', 0.9, 'accumulate with its trail, of the copy'),
    ('cuda.fetch.copy.131072KiB.of_driver', 0.9, 'copy path within the GPU, of the driver\'s'),
    ('cuda.offload.in.131072KiB.of_driver', 0.85, 'pinned segment to GPU, of the driver\'s'),
    ('cuda.offload.out.131072KiB.of_driver', 0.85, 'GPU to pinned segment, of the driver\'s'),
    ('gpt.tokens', None, 'shd-gpt at GPT-2\'s shape, tok/s'),
    ('gpt.mfu', None, 'its MFU'),
    ('gpt.over_torch_compiled', None, 'over PyTorch compiled'),
    ('gpt.over_torch_eager', None, 'over PyTorch eager'),
    ('gpt.torch.shardd.step_over_eager', None, 'a step by libshd.torch, of PyTorch\'s eager'),
    ('gpt.torch.shardd_compiled.step_over_compiled', None, 'and of its compiled'),
)


def bench(r):
    if not SHIM:
        r.must([program('trail_variants')], env=r.env)
    r.must([program('bench_cuda'), '--json', *sized((), ('--elems', '65536', '--rounds', '2'))], env=r.env)
    return ', '.join(f'{what} {r.figure(name):.3g}' for name, _, what in TARGETS[:5]
                     if r.figure(name) is not None)


def torch(r):
    """libshd.torch with parameters on the GPU. Its processes have our libraries and PyTorch's."""
    python = os.environ.get('SHD_CHECK_PYTHON') or machine.torch_python()
    if SHIM or not python:
        raise NotTried('the shim is ctest -R torch_cuda' if SHIM else 'no python with PyTorch')
    env = {**r.env, 'SHD_TEST_TORCH': '1', 'PYTHONPATH': os.path.join(RELEASE, 'python'), 'OMP_NUM_THREADS': '1'}
    text = r.must([python, '-B', os.path.join(ROOT, 'tests/cuda/test_torch_cuda.py'), RELEASE, 'gpu'], env=env)
    return ' '.join(line for line in text.splitlines() if line.startswith(('Ran ', 'OK')))


def torch_env(r):
    return {'SHD_CHECK_PYTHON': os.environ.get('SHD_CHECK_PYTHON') or machine.torch_python() or '',
            'TORCHINDUCTOR_FX_GRAPH_CACHE': '1',
            'TORCHINDUCTOR_CACHE_DIR': os.path.join(os.path.dirname(r.logs), 'torch-cache')}


def warm(r):
    """Compile PyTorch's model beside the next items, into a cache: the measured run loads it from there."""
    python = machine.torch_python()
    if SHIM or python is None:
        return
    env = {k: v for k, v in r.env.items() if k != 'LD_LIBRARY_PATH'}
    if r.torch_path:
        env['LD_LIBRARY_PATH'] = r.torch_path
    r.warming = r.beside([python, os.path.join(ROOT, 'bench/gpt_torch.py'), '--data', data()], 'torch-warm.log',
                         {**env, **torch_env(r)}, 'compiled 1\n')


def quiet(r):
    """What is measured next has the GPU for itself."""
    if r.warming is not None:
        code = r.end_beside(r.warming, max(0, min(60, r.end - time.monotonic() - 240)))
        print(f'   (PyTorch compiled into its cache: {"cut" if code is None else f"code {code}"})', flush=True)
        r.warming = None


def train(r):
    small = ['--layers', '1', '--dim', '32', '--heads', '2', '--seq', '32', '--batch', '2', '--steps', '3',
             '--warmup', '1', '--rounds', '1', '--torch-device', os.environ.get('SHD_CHECK_TORCH', 'none')]
    seconds = max(10, r.deadline - time.monotonic() - 25)
    return answer(script(r, 'scripts/gpu/gpt.py', '--bin', BIN, '--data', data(), '--seconds', f'{seconds:.0f}',
                         *sized([], small), **torch_env(r)))


# Locks of the unit's service section that could keep CUDA out, by the start of their names.
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


FIRST = ('environment', 'doctor', 'cuda-kern', 'cuda-kern-update', 'keep', 'loss-gpu')


def items():
    """(name, seconds at most, function, may be left out): what matters most for its time first, and
    what is measured when nothing else runs. None: PyTorch may compile beside the next; or not."""
    yield 'environment', 60, environment, False
    yield 'doctor', 40, doctor, False
    # ctest runs all of them on the shim: one shows that it is done from here, too.
    yield from device_tests('test_cuda_kern_fill') if SHIM else device_tests('test_cuda*', 'test_gpt_cuda*')
    yield 'keep', 60, probe('keep', '--bytes', '8388608' if SHIM else str(1 << 30)), False
    yield 'queued', 60, probe('queued', *sized((), ('--bytes', '33554432'))), False
    yield None, 0, warm, True
    yield 'loss-gpu', 60, losses, False
    yield 'digest-gpu', 90, digests(GPU, GPU_WORKERS), False
    yield 'chaos', 100, chaos, False
    yield None, 0, quiet, True
    yield 'bench', 60, bench, False
    yield 'torch', 160, torch, bool(SHIM)
    yield 'gpt', 170, train, False
    yield 'digest-host', 70, digests([], HOST_DAEMONS), False
    yield 'nccl', 60, nccl, bool(SHIM)
    yield 'readonly', 40, probe('readonly', *sized((), ('--bytes', '4194304'))), False
    yield 'overlap', 50, probe('overlap', *sized((), ('--bytes', '1048576', '--tenths', '2'))), False
    yield from [] if SHIM else device_tests('test_gpu_*')
    yield 'code', 20, code, True
    yield 'sanitizer', 100, sanitizer, True
    yield 'systemd', 30, systemd, True


def parse():
    p = argparse.ArgumentParser(prog='gpu-check.sh run', description=__doc__)
    p.add_argument('--json', metavar='FILE', help='the results, written after each item; logs go beside it')
    p.add_argument('--only', metavar='NAME,...', help='these items alone')
    p.add_argument('--first', action='store_true',
                   help=f'those that tell whether it works here at all, in {FIRST_SECONDS} s')
    p.add_argument('--list', action='store_true', help='names and limits of the items')
    p.add_argument('--seconds', type=float, help=f'for all of them ({SECONDS})')
    return p.parse_args()


def run(o, chosen):
    version = os.path.join(ROOT, 'VERSION')
    head = {'shim': bool(SHIM), 'version': open(version).read().strip() if os.path.isfile(version) else 'tree'}
    seconds = o.seconds or (FIRST_SECONDS if o.first else SECONDS) * sized(1, 20)
    r = Runner(log_dir(), o.json, seconds, head)
    r.warming, r.torch_path = None, os.environ.get('LD_LIBRARY_PATH', '')
    machine.raise_limits()
    with runtime_dir() as runtime:
        r.env = {**os.environ, 'LD_LIBRARY_PATH': r.torch_path, 'XDG_RUNTIME_DIR': runtime}
        r.deadline = time.monotonic() + min(60, seconds)
        try:
            r.env = {**our_env(r), 'XDG_RUNTIME_DIR': runtime}
        except Failed as e:
            print(f'gpu-check: setting up: {e}', flush=True)
        monitor = None if SHIM else machine.monitor(r)
        r.watch = None if SHIM else machine.after_failure
        for name, limit_s, fn, may_skip in chosen:
            if name is None:
                fn(r)
            else:
                r.item(name, limit_s * sized(1, 20), fn, may_skip)  # emulated, on any machine
        r.end_beside(r.warming)
        r.end_beside(monitor)
        r.document['monitor'] = machine.tail(os.path.join(r.logs, 'monitor.csv'), 12000)
    return r.close(TARGETS)


def main():
    o = parse()
    chosen = list(items())
    if o.only is not None or o.first:
        names = list(FIRST) if o.first else o.only.split(',')
        unknown = sorted(set(names) - {name for name, *_ in chosen if name}) if not o.first else []
        if unknown:
            sys.stderr.write(f'gpu-check.sh: unknown item {", ".join(unknown)}; known: '
                             f'{", ".join(name for name, *_ in chosen if name)}\n')
            return 2
        chosen = [c for c in chosen if c[0] in names]
    if o.list:
        for name, limit_s, *_ in chosen:
            if name:
                print(f'{name:24} {limit_s:4} s')
        return 0
    if not os.access(program('shardd'), os.X_OK):
        sys.stderr.write(f'gpu-check.sh: no {program("shardd")}: build first, or run it in a bundle\n')
        return 1
    return run(o, chosen)


if __name__ == '__main__':
    sys.exit(main())
