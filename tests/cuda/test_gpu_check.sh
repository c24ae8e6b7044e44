#!/usr/bin/env bash
# test_gpu_check.sh BUILD SHIM nvcc|none: a dry run of scripts/gpu-check.sh, with a driver that is none.
# none: the build has no GPU kernels, and what needs them would fail.
#
# A run on hardware is cold and has one attempt: here every item that does not need a GPU's own tools
# goes through, one that fails or hangs is told from the rest, and a cut run leaves its results.
set -euo pipefail
build=$(cd "$1" && pwd)
shim=$(cd "$2" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
command -v python3 >/dev/null || exit 77
if [ "$3" = none ]; then
    echo "skipped: this build has no GPU kernels, for there was no nvcc"
    exit 77
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export SHD_CHECK_BUILD=$build SHD_CHECK_SHIM=$shim

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# check CODE ARGUMENTS...: `gpu-check.sh run` must end with that code. Its output: $work/out.
check() {
    local want=$1 code=0
    shift
    "$root/scripts/gpu-check.sh" run "$@" >"$work/out" 2>&1 || code=$?
    [ "$code" -eq "$want" ] || { cat "$work/out"; fail "run $*: exit code $code, expected $want"; }
}

# results FILE: "NAME=RESULT" a line.
results() {
    python3 -c 'import json, sys
d = json.load(open(sys.argv[1]))
assert d["schema"] == 1 and d["shim"] is True
print("\n".join(i["name"] + "=" + i["result"].replace(" ", "_") for i in d["items"]))' "$1"
}

check 2 --only keep,nonsense
check 2 --nonsense
check 0 --list

# One that fails does not stop the rest, and counts.
SHIM_CUDA_DEVICES=0 check 1 --only doctor,environment,keep --json "$work/none.json"
[ "$(results "$work/none.json" | tr '\n' ' ')" = "environment=passed doctor=failed keep=failed " ] ||
    fail "without a device: $(results "$work/none.json")"

# One that hangs is ended with all it started, and the rest is said to be out of time.
SHIM_CUDA_DELAY_US=100000000 check 1 --seconds 6 --only keep,queued,environment --json "$work/slow.json"
grep -q '^keep=failed' <(results "$work/slow.json") || fail "a hang is not seen"
[ "$(results "$work/slow.json" | wc -l)" = 3 ] || fail "results are missing after a hang"
! pgrep -f "^$build/bin/gpu_probe" >/dev/null || fail "a process was left behind"

# What cannot be started, and what leaves its group, does not take the rest along.
python3 -B - "$root/scripts/gpu" "$work" "$shim" <<'EOF'
import os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from runner import Runner, children
r = Runner(os.path.join(sys.argv[2], 'logs'), os.path.join(sys.argv[2], 'r', 'r.json'), 300, {})  # no such folder
beside = r.beside(['sleep', '100'], 'beside.log')
r.item('none', 5, lambda r: r.must(['/nonexistent']), False)
r.item('orphan', 60, lambda r: r.must(['sh', '-c', 'setsid sleep 99 & exit 0']), False)
r.item('passes', 60, lambda r: r.must(['echo', '{"name": "x", "value": 0.5}']), False)
assert [i['result'] for i in r.document['items']] == ['failed', 'passed', 'passed'], r.document
assert children(os.getpid()) == [beside.pid], children(os.getpid())
assert r.end_beside(beside) is None and beside.poll() is not None

# What a machine says of itself, by an nvidia-smi that is none; and where a driver is that the loader does not know.
import machine
tools = os.path.join(sys.argv[2], 'tools')
os.makedirs(tools)
with open(os.path.join(tools, 'nvidia-smi'), 'w') as f:
    f.write('#!/bin/sh\ncase $1 in -q) echo "    MIG Mode\n        Current : Enabled\n    Compute Mode : $MODE";; '
            '*) echo "a GPU, 580";; esac\n')
os.chmod(os.path.join(tools, 'nvidia-smi'), 0o755)
os.environ.update(PATH=tools + ':' + os.environ['PATH'], MODE='Exclusive_Process')
r.env = dict(os.environ)
facts = machine.facts(r, False)
assert facts['gpu'] == 'a GPU, 580' and len(facts['bars']) == 2, facts
assert 'Exclusive_Process' in facts['bars'][0] and 'MIG' in facts['bars'][1], facts
assert machine.bars('MIG Mode\n  Current : Disabled\nCompute Mode : Default') == []
assert 'a GPU' in machine.after_failure('none')
assert machine.quick(['sh', '-c', 'echo said; exec sleep 9999'], 5) == 'said\n'  # and ended
os.environ['LD_LIBRARY_PATH'] = ''
machine.DRIVER_DIRS = ('/nonexistent', '/usr', sys.argv[3])
r.deadline = time.monotonic() + 60
here = machine.try_driver(r, 'libcuda.so.1')  # a machine with a GPU
assert machine.driver_dir(r) == ([] if here else [sys.argv[3]]), machine.driver_dir(r)
assert r.close((('x', 0.9, 'of x'), ('y', 0.9, 'of y'))) == 1
assert r.document['targets'] == [{'name': 'x', 'at_least': 0.9, 'value': 0.5}]
EOF

# A PyTorch that is none: its model cannot be compiled, so the rest is measured without.
cat >"$work/python" <<'EOF'
#!/usr/bin/env python3
import json, sys
print('{"ready": "0", "params": 1}', flush=True)
for line in sys.stdin:
    variant, steps = line.split()
    if variant == 'compiled':
        sys.exit('no compiler')
    print(json.dumps({'variant': variant, 'step_s': [0.1] * int(steps), 'loss': 1}), flush=True)
EOF
chmod +x "$work/python"

# The whole of it.
SHD_CHECK_PYTHON=$work/python SHD_CHECK_TORCH=cuda:0 check 0 --json "$work/all.json"
results "$work/all.json"
for name in environment doctor cuda-kern-fill loss-gpu keep queued digest-host digest-gpu chaos bench readonly overlap gpt; do
    grep -qx "$name=passed" <(results "$work/all.json") || fail "$name did not pass"
done
[ "$(grep -c '"name": "gpt.over_torch_eager"' "$work/all.json")" = 2 ] || fail "nothing beside PyTorch" # and as a target
[ -s "$work/all-logs.tar.gz" ] || fail "no logs"
[ "$(grep -c '"name": "cuda\.' "$work/all.json")" -gt 20 ] || fail "figures are missing"
echo "1 passed, 0 failed"
