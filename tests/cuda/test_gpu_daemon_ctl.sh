#!/bin/bash
# The real programs with daemons of a GPU, on tests/cuda's driver (emulated kernels, no hardware): one
# digest for every mix of devices, checkpoints from one kind of device to the other, a daemon killed
# under `shardctl run` and `shardctl up`.
#   test_gpu_daemon_ctl.sh BIN_DIR
set -euo pipefail
# shellcheck source=tests/lib/wait.sh
. "$(dirname "$0")/../lib/wait.sh"
bin=$(cd "$1" && pwd)
export PATH=$bin:$PATH
base=${XDG_RUNTIME_DIR:-$([ "$(id -u)" = 0 ] && echo /run || echo "$HOME")}
work=$(mktemp -d "$base/shd-gpu-XXXXXX")
trap 'shardctl down --yes --runtime-dir "$work/up" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
unset SHARDD_ADDRESS
# A constant learning rate: what a step does is not to depend on --steps.
model="--lr 0.005 --min-lr 0.005 --warmup 1 --layers 1 --dim 32 --heads 1 --seq 16 --batch 2 --micro-batches 2 --sample 0 --eval-windows 0"

fail()
{
    echo "$*" >&2
    exit 1
}

# train STEPS FLAGS... : the digest that a run comes to
train()
{
    local steps=$1
    shift
    # shellcheck disable=SC2086
    shardctl run "$@" -- shd-gpt $model --steps "$steps" >"$work/out" 2>"$work/err" || {
        cat "$work/out" "$work/err" >&2
        fail "shardctl run $*: failed"
    }
    sed -n 's/^digest \(sha256:[0-9a-f]*\) .*/\1/p' "$work/out"
}

same()
{
    if [ -z "$2" ] || [ "$1" != "$2" ]; then
        fail "$3: digest $2, expected $1"
    fi
    echo "ok $3"
}

want4=$(train 4 --devices cpu0)
want=$(train 8 --devices cpu0)
if [ -z "$want" ] || [ "$want" = "$want4" ]; then fail "no digest on the host"; fi
for devices in gpu0 gpu0,cpu0 cpu1,gpu0,cpu0; do
    same "$want" "$(train 8 --devices $devices)" "devices $devices"
done

# Half of it here, half of it there
for way in gpu0:cpu0,cpu1 cpu0,cpu1:gpu0 gpu0:gpu0,cpu0; do
    rm -rf "$work/saved"
    mkdir "$work/saved"
    same "$want4" "$(train 4 --devices "${way%:*}" --checkpoint "$work/saved")" "saved by ${way%:*}"
    same "$want" "$(train 8 --devices "${way#*:}" --restore "$work/saved")" "$way"
done

# Killed, again and again, below a keeper that stays
eval "$(shardctl up --devices gpu0,cpu0 --runtime-dir "$work/up")"
[ "$SHARDD_ADDRESS" = "$work/up?gpu0,cpu0" ] || fail "up says $SHARDD_ADDRESS"
# shellcheck disable=SC2086
shd-gpt $model --steps 8 >"$work/out" 2>"$work/err" &
worker=$!
kills=0
while kill -0 $worker 2>/dev/null && [ $kills -lt 6 ]; do
    sleep 0.3
    pid=$(sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' <(shardctl status --json) | head -n 1)
    if [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = shardd ]; then
        kill -9 "$pid"
        kills=$((kills + 1))
    fi
done
wait $worker || fail "the worker failed: $(cat "$work/err")"
[ $kills -gt 0 ] || fail "nothing was killed"
same "$want" "$(sed -n 's/^digest \(sha256:[0-9a-f]*\) .*/\1/p' "$work/out")" "killed $kills times"
well() { shardctl status >/dev/null 2>&1; }
soon "status says nothing good" well
shardctl down --yes --runtime-dir "$work/up"
left=$(find "$work/up" -mindepth 1 ! -name up.log ! -name up.lock)
[ -z "$left" ] || fail "left behind: $left"
