"""What the GPU machine is like, for check.py: where its libraries are, and what it says of itself."""
import glob
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile

from runner import Failed

DRIVER_DIRS = ('/usr/local/nvidia/lib64', '/usr/local/nvidia/lib', '/usr/lib/x86_64-linux-gnu', '/usr/lib64',
               '/usr/lib', '/usr/lib/wsl/lib', '/run/opengl-driver/lib', '/usr/local/cuda/compat')
TOOL_DIRS = ('/usr/local/nvidia/bin', '/usr/local/cuda/bin', '/usr/bin', '/opt/nvidia/bin')
PREFIXES = ('/opt/*/.venv', '/opt/*/venv', '/opt/*', '/opt/conda/envs/*', '/venv', '/root/.venv', '/root/venv',
            '/root/miniconda3', '/workspace/.venv', '/app/.venv', '/usr/local', '/usr')
# cuInit of a library: prints its result and the number of devices.
TRY_DRIVER = ('import ctypes, sys; c = ctypes.CDLL(sys.argv[1]); r = c.cuInit(0); n = ctypes.c_int(); '
              'c.cuDeviceGetCount(ctypes.byref(n)); print("driver", r, n.value)')
# Libraries that the loader finds, and their versions.
TRY_LIBRARIES = '''
import ctypes, json
found = {}
for name, version in (("libcuda.so.1", "cuDriverGetVersion"), ("libcublasLt.so.13", "cublasLtGetVersion"),
                      ("libcublasLt.so.12", "cublasLtGetVersion"), ("libcublas.so.13", None),
                      ("libcublas.so.12", None), ("libnccl.so.2", "ncclGetVersion")):
    try:
        library = ctypes.CDLL(name)
        number = ctypes.c_int(-1)
        if version == "cublasLtGetVersion":
            library.cublasLtGetVersion.restype = ctypes.c_size_t
            number.value = library.cublasLtGetVersion()
        elif version:
            getattr(library, version)(ctypes.byref(number))
        path = [l.split()[-1] for l in open("/proc/self/maps") if name.split(".so")[0] + ".so" in l]
        found[name] = f"{number.value} {path[0] if path else ''}"
    except OSError as e:
        found[name] = str(e)[:200]
print("libraries " + json.dumps(found))
'''


def raise_limits():
    """Descriptors and locked memory up to what is allowed; no core files."""
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK):
        hard = resource.getrlimit(limit)[1]
        try:
            resource.setrlimit(limit, (hard, hard))
        except (ValueError, OSError):
            pass
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def tool(name):
    """Path of one of NVIDIA's programs, None: there is none."""
    return shutil.which(name) or next((os.path.join(d, name) for d in TOOL_DIRS
                                       if os.access(os.path.join(d, name), os.X_OK)), None)


# -- Libraries ---------------------------------------------------------------------------------------

def prefixes():
    """Where a python with packages may be; the one that runs this first."""
    given = [sys.prefix] + [os.environ[n] for n in ('VIRTUAL_ENV', 'CONDA_PREFIX') if n in os.environ]
    return given + [p for pattern in PREFIXES for p in sorted(glob.glob(pattern))]


def packages(prefix):
    return sorted(glob.glob(os.path.join(prefix, 'lib/python3*/site-packages')) +
                  glob.glob(os.path.join(prefix, 'lib/python3*/dist-packages')))


def torch_python():
    """A python that has PyTorch; None: there is none."""
    if importlib.util.find_spec('torch') is not None:
        return sys.executable
    for prefix in prefixes():
        python = os.path.join(prefix, 'bin/python3')
        if os.access(python, os.X_OK) and any(os.path.isdir(os.path.join(p, 'torch')) for p in packages(prefix)):
            return python
    return None


def library_dirs():
    """Directories of cuBLAS and NCCL: those that PyTorch brings, else the toolkit's."""
    folders = [p for p in sys.path if p.endswith('-packages')] + [p for x in prefixes() for p in packages(x)]
    places = [d for p in folders for d in sorted(glob.glob(os.path.join(p, 'nvidia/*/lib')))]
    places += [os.path.join(p, 'torch/lib') for p in folders]
    roots = [os.environ[n] for n in ('CUDA_HOME', 'CUDA_PATH') if n in os.environ]
    roots += ['/usr/local/cuda'] + sorted(glob.glob('/usr/local/cuda-*'), reverse=True) + ['/opt/cuda']
    places += [os.path.join(root, d) for root in roots for d in ('lib64', 'lib', 'targets/x86_64-linux/lib')]
    places += ['/usr/lib/x86_64-linux-gnu', '/usr/lib64']
    found = []
    for names in (('libcublas.so.13', 'libcublas.so.12'), ('libnccl.so.2',)):
        found += [d for name in names for d in places if os.path.exists(os.path.join(d, name))][:1]
    return list(dict.fromkeys(found))


def try_driver(r, library):
    try:
        code, text = r.run([sys.executable, '-c', TRY_DRIVER, library], seconds=25)
    except Failed:
        return False
    said = re.search(r'^driver (\d+) (\d+)', text, re.M)
    return code == 0 and said is not None and said[1] == '0' and int(said[2]) > 0


def driver_dir(r):
    """[] where the loader finds a driver that works; else the directory of one that does, as a list."""
    if try_driver(r, 'libcuda.so.1'):
        return []
    for folder in DRIVER_DIRS:
        if os.path.exists(os.path.join(folder, 'libcuda.so.1')) and try_driver(r, os.path.join(folder, 'libcuda.so.1')):
            return [folder]
    return [d for d in DRIVER_DIRS[:2] if os.path.isdir(d)]


def libraries(r):
    """Versions and paths of what our programs would load."""
    text = r.run([sys.executable, '-c', TRY_LIBRARIES], env=r.env, seconds=40)[1]
    said = re.search(r'^libraries (.*)$', text, re.M)
    return json.loads(said[1]) if said else text[-500:]


# -- What it says ------------------------------------------------------------------------------------

def quick(argv, seconds=8):
    """Output of a command that may hang for ever: then it is left behind."""
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       start_new_session=True)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
        except OSError as e:
            return f'{argv[0]}: {e.strerror}'
        out.seek(0)
        return out.read().decode(errors='replace')


def kernel_log():
    """The NVIDIA driver's lines of the kernel's log, the last ones."""
    lines = []
    try:
        fd = os.open('/dev/kmsg', os.O_RDONLY | os.O_NONBLOCK)
    except OSError as e:
        return f'/dev/kmsg: {e.strerror}'
    try:
        while len(lines) < 100000:
            lines.append(os.read(fd, 8192).decode(errors='replace').partition(';')[2].strip())
    except OSError:
        pass  # no more
    os.close(fd)
    return '\n'.join([line for line in lines if re.search('NVRM|Xid|nvidia|oom|Out of memory', line)][-30:])


def read(path):
    try:
        with open(path, encoding='utf-8', errors='replace') as f:
            return f.read(4000).strip()
    except OSError as e:
        return e.strerror


def tail(path, characters):
    try:
        with open(path, encoding='utf-8', errors='replace') as f:
            return f.read()[-characters:]
    except OSError:
        return ''


def after_failure(_name):
    smi = tool('nvidia-smi')
    said = kernel_log()
    if smi:
        said += '\n' + quick([smi, '--query-compute-apps=pid,name,used_memory', '--format=csv'])
        said += quick([smi, '--query-gpu=memory.used,clocks.sm,clocks_event_reasons.active,'
                            'ecc.errors.uncorrected.volatile.total', '--format=csv'])
    return said[-4000:]


def monitor(r):
    """nvidia-smi beside the items: it also keeps the driver's state loaded between processes."""
    smi = tool('nvidia-smi')
    fields = 'timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active,' \
             'utilization.gpu,memory.used'
    return r.beside([smi, f'--query-gpu={fields}', '--format=csv,noheader', '-l', '5'], 'monitor.csv') if smi else None


def bars(state):
    """What nvidia-smi -q says that keeps several processes from using the GPU."""
    found = []
    mode = re.search(r'Compute Mode\s*:\s*(\S+)', state)
    if mode and mode[1] != 'Default':
        found.append(f'compute mode is {mode[1]}: one process at a time, so daemons and workers cannot share the '
                     'GPU (its owner can set it back: nvidia-smi -c DEFAULT)')
    mig = re.search(r'MIG Mode\s*\n\s*Current\s*:\s*(\S+)', state)
    if mig and mig[1] == 'Enabled':
        found.append('MIG is on: memory is not shared between its instances')
    return found


def facts(r, shim):
    """Of the machine, for the document; 'gpu' is a line or '', 'bars' what must be told at once."""
    found = {'kernel': platform.release(), 'libc': ' '.join(platform.libc_ver()), 'cpus': os.cpu_count(),
             'python': platform.python_version(), 'gpu': '', 'bars': []}
    if shim:
        return found
    smi = tool('nvidia-smi')
    if smi:
        state = quick([smi, '-q'], 30)
        fields = 'name,driver_version,memory.total,compute_mode,persistence_mode,clocks.sm,pstate,uuid'
        found['gpu'] = (quick([smi, f'--query-gpu={fields}', '--format=csv,noheader'], 20).splitlines() or [''])[0]
        found['nvidia_smi'] = state[:9000]
        found['bars'] = bars(state)
    found['limits'] = {n: resource.getrlimit(getattr(resource, n)) for n in
                       ('RLIMIT_NOFILE', 'RLIMIT_MEMLOCK', 'RLIMIT_AS', 'RLIMIT_NPROC')}
    found['files'] = {p: read(p) for p in
                      ('/proc/driver/nvidia/version', '/proc/driver/nvidia/params', '/etc/os-release', '/proc/1/comm',
                       '/proc/sys/kernel/yama/ptrace_scope', '/proc/self/cgroup', '/sys/fs/cgroup/memory.max',
                       '/proc/sys/vm/overcommit_memory', '/proc/sys/vm/max_map_count')}
    found['status'] = re.findall(r'^(?:Cap\w+|NoNewPrivs|Seccomp):.*', read('/proc/self/status'), re.M)
    found['memory'] = read('/proc/meminfo').splitlines()[:3]
    found['cpu'] = (re.findall(r'model name.*|flags.*', read('/proc/cpuinfo')) or [''])[:2]
    found['space'] = quick(['df', '-h', '/tmp', '/dev/shm', '/run', os.getcwd()])
    found['devices'] = sorted(glob.glob('/dev/nvidia*'))
    found['environment'] = {k: v for k, v in os.environ.items()
                            if k.startswith(('CUDA', 'NVIDIA', 'NCCL', 'LD_', 'CUBLAS', 'PATH', 'TMPDIR'))}
    found['library_path'] = r.env.get('LD_LIBRARY_PATH', '')
    found['torch_python'] = torch_python()
    found['nvcc'] = quick([tool('nvcc'), '--version']).splitlines()[-2:] if tool('nvcc') else []
    found['kernel_log'] = kernel_log()
    return found
