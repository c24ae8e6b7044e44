#!/usr/bin/env bash
# test_gpu_check.sh BUILD SHIM: a dry run of scripts/gpu-check.sh, with a driver that is none.
#
# A run on hardware is cold and has one attempt: here every item that does not need a GPU's own tools
# goes through, one that fails or hangs is told from the rest, and a cut run leaves its results.
set -euo pipefail
build=$(cd "$1" && pwd)
shim=$(cd "$2" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
command -v python3 >/dev/null || exit 77
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

# The whole of it.
check 0 --json "$work/all.json"
results "$work/all.json"
for name in environment doctor cuda-kern-fill loss-gpu keep queued digest-host digest-gpu chaos bench readonly overlap gpt; do
    grep -qx "$name=passed" <(results "$work/all.json") || fail "$name did not pass"
done
[ "$(grep -c '"name": "cuda\.' "$work/all.json")" -gt 20 ] || fail "figures are missing"
echo "1 passed, 0 failed"
