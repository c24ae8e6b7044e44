#!/bin/sh
# shd-gpt --device cuda:0 with the real programs, on the stand-ins for the driver and for cuBLAS.
#
#   tests/cuda/test_gpt_cuda.sh BIN_DIR SHIM_DIR all|once
#
# once: each way is gone once, for sanitizers; all: in all its combinations.
# Every step's loss is the host's within 0.0005 in fp32 and fp16 and 0.005 in TF32 and bf16. Run to run, and
# however the work is split over daemons of hosts and GPUs, workers and schedules, the digest is the
# same. Experts without tokens are left out. What cannot be had ends with the reason.
set -eu

bin=$(cd "$1" && pwd)
shim=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # programs of a build tree look for libraries in the current folder, too
all=no
[ "$3" = once ] || all=yes
bad=0
passed=0
model="--layers 2 --dim 32 --heads 2 --seq 24 --batch 2 --micro-batches 4 --steps 4 --eval-windows 4
       --log-every 1 --sample 0"

check() { # check WHAT COMMAND...
    what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
        echo "ok      $what"
    else
        bad=$((bad + 1))
        echo "FAILED  $what"
        tail -n 3 "$work/out"
    fi
}

gpt() { # gpt OPTIONS...: in one process
    # shellcheck disable=SC2086 # options are words
    LD_LIBRARY_PATH=$shim "$bin/shd-gpt" --standalone $model "$@" >"$work/out" 2>&1
}

run() { # run DEVICES WORKERS OPTIONS...: under shardctl
    d=$1 w=$2
    shift 2
    # shellcheck disable=SC2086
    LD_LIBRARY_PATH=$shim "$bin/shardctl" run --devices "$d" --workers "$w" -- "$bin/shd-gpt" \
        $model --device cuda:0 "$@" >"$work/out" 2>&1
}

digest() {
    sed -n 's/^digest //p' "$work/out" | tail -n 1 # then `run` says what ends with it
}

losses() {
    sed -n 's/^step [^ ]* loss \([^ ]*\) .*/\1/p; s/^eval .* held-out loss \([^ ]*\) .*/\1/p' "$work/out"
}

near() { # near BOUND: $work/host and $work/gpu have as many losses, close to each other
    paste "$work/host" "$work/gpu" | awk -v bound="$1" '
        NF != 2 || $1 - $2 > bound || $2 - $1 > bound { bad = 1 }
        END { exit bad || NR != 5 }'
}

same() { # same DEVICES WORKERS OPTIONS...: to $want
    run "$@" && [ "$(digest)" = "$want" ]
}

refused() { # refused CODE TEXT OPTIONS...
    code=$1 text=$2
    shift 2
    got=0
    gpt "$@" || got=$?
    [ "$got" = "$code" ] && grep -q -- "$text" "$work/out"
}

gpt --device cuda:0 || {
    cat "$work/out"
    grep -q "find kernel\|no GPU kernels" "$work/out" && exit 77
    exit 1
}

for kind in "fp32 0.0005" "tf32 0.005 --math tf32" "bf16 0.005 --precision bf16" \
    "fp16 0.0005 --precision fp16" "adapters 0.0005 --adapters 8" "experts 0.0005 --experts 5"; do
    # shellcheck disable=SC2086
    set -- $kind
    name=$1 bound=$2
    shift 2
    case $name in tf32) gpt ;; *) gpt "$@" ;; esac
    losses >"$work/host"
    gpt --device cuda:0 "$@"
    losses >"$work/gpu"
    check "the held-out loss in $name is of so many windows as asked for" grep -q "^eval step 4 .*, 4 windows)" "$work/out"
    check "losses in $name are the host's within $bound" near "$bound"
    [ $all = yes ] || continue
    want=$(digest)
    gpt --device cuda:0 "$@"
    check "two runs in $name have one digest" [ "$(digest)" = "$want" ]
    check "and so has a run with daemons" same cpu0,cpu1 2 "$@"
done

every_devices="gpu0 gpu0,cpu0" every_workers=2
[ $all = no ] || every_devices="cpu0 cpu0,cpu1 $every_devices" every_workers="1 2"
gpt --device cuda:0 --sample 10
check "a sample of what was trained there" grep -q "^--- sample of 10 bytes ---" "$work/out"
want=$(digest)
for devices in $every_devices; do
    for workers in $every_workers; do
        check "$devices, $workers workers: the same digest" same "$devices" "$workers"
        path=copy
        [ "$devices" = gpu0 ] && path=map # one owner on the worker's own GPU
        check "    by path $path" grep -q "^schedule .* path $path;" "$work/out"
    done
done
if [ $all = yes ]; then
    check "ddp: the same digest" same cpu0,cpu1 2 --strategy ddp
    check "zero2, post, nothing ahead: the same digest" same cpu0 2 --strategy zero2 \
        --prefetch post --forward-prefetch 0
fi
check "elastic: the same digest" same gpu0,cpu0 2 --elastic
check "the worker says where it computes" grep -q "computed on GPU 0 (.*), cuBLAS .* fp32" "$work/out"

for kind in fp32 "fp32 --math tf32" bf16 fp16 "fp32 --adapters 8" "bf16 --experts 4"; do
    [ $all = yes ] || [ "$kind" = fp16 ] || [ "$kind" = "bf16 --experts 4" ] || continue
    # shellcheck disable=SC2086 # options are words
    set -- --layers 3 --device cuda:0 --precision $kind
    gpt "$@"
    want=$(digest)
    gpt "$@" --recompute
    check "recomputing in $kind: the same digest" [ "$(digest)" = "$want" ]
    shift 4
    check "and with daemons, too" same gpu0,cpu0 2 --layers 3 "$@" --recompute
done

# Activations of 20 layers are 9.2 MB and want more than this device has beside cuBLAS's 34 MB; those
# of one at a time fit.
SHIM_CUDA_BYTES=40000000
export SHIM_CUDA_BYTES
tall="--layers 20 --batch 8 --micro-batches 1 --steps 1 --sample 0 --device cuda:0"
# shellcheck disable=SC2086
check "no room for all layers' activations: the error says what helps" \
    refused 1 "activations: lower --batch or --seq: .*; or add --recompute" $tall
# shellcheck disable=SC2086
check "and it does" gpt $tall --recompute
check "the worker says what is held" \
    grep -q "^activations [0-9.]* MB ([0-9.]* MB without --recompute)" "$work/out"
unset SHIM_CUDA_BYTES

gpt --device cuda:0 --inject-overflow 2
want=$(digest)
check "an overflow's step is skipped" grep -q "^step 2/4 .*SKIPPED" "$work/out"
check "with daemons, too" same cpu0 2 --inject-overflow 2

# fp16: the same steps are skipped as on the host, and the scale moves as there.
scales() {
    sed -n 's/^\(step [^ ]*\) .*\( scale .*\)/\1\2/p' "$work/out"
}
for scale in dynamic static; do
    options="--precision fp16 --loss-scale $scale --inject-overflow 2 --grad-precision fp16"
    # shellcheck disable=SC2086
    set -- $options
    gpt "$@"
    scales >"$work/host"
    gpt --device cuda:0 "$@"
    scales | tee "$work/gpu" >"$work/$scale"
    want=$(digest)
    check "fp16, $scale scale: skips as the host does" cmp "$work/host" "$work/gpu"
    check "    and does skip" grep -q "^step 2/4 scale [0-9]* SKIPPED" "$work/gpu"
    check "    cpu0,cpu1: the same digest" same cpu0,cpu1 2 "$@"
done
gpt --device cuda:0 --precision fp16
want=$(digest)
check "fp16, gpu0: the same digest" same gpu0 2 --precision fp16
if [ $all = yes ]; then
    check "fp16, cpu0: the same digest" same cpu0 2 --precision fp16
    check "    copy: the same digest" same gpu0 1 --path copy --precision fp16
    check "    ddp: the same digest" same gpu0,cpu0 2 --strategy ddp --precision fp16
fi
check "the dynamic scale is halved" grep -q "^step 3/4 scale 32768$" "$work/dynamic"

# Experts: 8 tokens of a micro-batch, 16 experts, so at least 8 idle ones, which are neither fetched
# nor computed: the same units as on the host.
sparse="--experts 16 --seq 8 --batch 1"
# shellcheck disable=SC2086
set -- $sparse
units() { # units: per step, bytes fetched, and which units' forward ran
    sed 's/.*"bytes_fetched":\([0-9]*\).*"forward_ns":\[\([^]]*\)\].*/\1 \2/; s/[1-9][0-9]*/x/2g' "$work/json"
}
alone() { # alone OPTIONS...: one worker that fetches just what it asks for
    run cpu0 1 --path copy --forward-prefetch 0 --prefetch none --json "$work/json" "$@"
}
gpt --device cuda:0 "$@"
want=$(digest)
for devices in $every_devices; do
    for workers in $every_workers; do
        check "experts, $devices, $workers workers: the same digest" same "$devices" "$workers" "$@"
    done
done
for strategy in ddp zero1 zero2; do
    [ $all = yes ] || break
    check "    $strategy: the same digest" same gpu0,cpu0 2 --strategy $strategy "$@"
done
check "    copy: the same digest" same gpu0 2 --path copy "$@"
check "    elastic: the same digest" same gpu0,cpu0 2 --elastic "$@"
check "    without prefetch" alone "$@"
check "    the same digest" [ "$(digest)" = "$want" ]
units >"$work/gpu"
alone --device host "$@"
units >"$work/host"
check "    fetches and runs the host's units" cmp "$work/host" "$work/gpu"
idle() { # in each of the 4 steps some unit did not run
    [ "$(grep -c ' .*,0,' "$work/gpu")" = 4 ]
}
check "    and not all of them" idle
for precision in bf16 fp16; do
    gpt --device cuda:0 --precision $precision "$@"
    want=$(digest)
    check "experts in $precision: the same digest" same gpu0 2 --precision $precision "$@"
done

check "no such GPU" refused 1 "cuda:7: the driver shows 1 GPU" --device cuda:7
real=$shim
shim=$work/driver
mkdir "$shim"
if [ ! -e /dev/nvidiactl ]; then # else there is one besides ours
    check "no driver" refused 1 "no NVIDIA driver here" --device cuda:0
    ln -s "$real/libcuda.so.1" "$shim/"
    check "no cuBLAS, or one that is none of that driver's" \
        refused 1 "no cuBLAS here (libcublas.so.13 or .12)\|start cuBLAS: " --device cuda:0
fi

echo "$passed passed, $bad failed"
[ "$bad" = 0 ]
