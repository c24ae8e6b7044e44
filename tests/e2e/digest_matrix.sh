#!/bin/sh
# One digest however the work is split and scheduled: shd-gpt alone in one process, and under
# `shardctl run`, must end with the same bits of parameters and optimizer state.
#
#   tests/e2e/digest_matrix.sh [BIN_DIR] [--set split|policies|sanitized|full] [--daemons LIST] [--workers LIST]
#                          [-- shd-gpt options]
#
#   split     daemons x workers, the default schedule (default: "1 2 3 5" x "1 2 4")
#   policies  strategy x prefetch x path in fp32 and bf16, each once, over daemons {1, 3} and workers
#             {1, 2} in turn; accumulation, bounds, 16-bit gradients, an overflow, adapters,
#             experts without tokens, a worker that leaves early; most of it with --recompute, too,
#             whose memory is measured
#   sanitized policies, but for bf16 just with --recompute, and memory not measured
#   full      policies with every combination of daemons and workers: about 250 runs
set -eu

bin=build/release/bin
what='split'
daemons=
workers=
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then
    bin=$1
    shift
fi
while [ $# -gt 0 ]; do
    case $1 in
    --set) what=$2; shift 2 ;;
    --daemons) daemons=$2; shift 2 ;;
    --workers) workers=$2; shift 2 ;;
    --) shift; break ;;
    *) sed -n '5,15s/^# *//p' "$0" >&2; exit 2 ;;
    esac
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
runs=0
turn=0

# The last line must be the digest of the wanted step, but for those of `shardctl run`, and of a worker that begins
# when the others have ended and has nothing to compute.
digest_of() {
    last=$(grep -v '^shardctl: not saved\|^\[rank [0-9]*\] shd-gpt: rank .* has nothing to compute' "$1" | tail -n 1)
    case $last in
    "digest sha256:"*" step=$steps") echo "$last" ;;
    *) echo "no digest of step $steps but: $last" ;;
    esac
}

# alone OPTIONS...: sets $want to what one process without daemons comes to.
alone() {
    # shellcheck disable=SC2086 # options are words
    "$bin/shd-gpt" --standalone $model "$@" >"$work/out" 2>&1 || true
    want=$(digest_of "$work/out")
    case $want in
    digest*) echo "alone $*: $want" ;;
    *) echo "alone $*: FAILED: $want"; bad=$((bad + 1)); runs=$((runs + 1)) ;;
    esac
}

# same DAEMONS WORKERS OPTIONS...: must come to $want.
same() {
    d=$1 w=$2
    shift 2
    # shellcheck disable=SC2086
    "$bin/shardctl" run --daemons "$d" --workers "$w" -- "$bin/shd-gpt" $model "$@" \
        >"$work/out" 2>&1 || true
    got=$(digest_of "$work/out")
    runs=$((runs + 1))
    if [ "$got" = "$want" ]; then
        echo "  daemons=$d workers=$w $*  same"
    else
        echo "  daemons=$d workers=$w $*  DIFFERS: $got"
        bad=$((bad + 1))
    fi
}

# has TEXT: the last run's output must have it.
has() {
    runs=$((runs + 1))
    grep -q "$1" "$work/out" && return
    echo "  no '$1' in the output of the run above"
    bad=$((bad + 1))
}

# skips STEP: the last run skipped this step and no other.
skips() {
    has "step $1/$steps .*SKIPPED"
    runs=$((runs + 1))
    [ "$(grep -c SKIPPED "$work/out")" = 1 ] && return
    echo "  steps other than $1 were skipped in the run above"
    bad=$((bad + 1))
}

# each OPTIONS...: over daemons and workers, all of them in `full`, else one pair after the other.
each() {
    if [ "$what" = full ]; then
        for each_d in $daemons; do
            for each_w in $workers; do
                same "$each_d" "$each_w" "$@"
            done
        done
        return
    fi
    turn=$((turn + 1))
    case $((turn % 4)) in
    0) same 1 1 "$@" ;;
    1) same 3 2 "$@" ;;
    2) same 1 2 "$@" ;;
    3) same 3 1 "$@" ;;
    esac
}

# peak OPTIONS...: largest resident memory of one process, in bytes, as last seen before its end;
# its output to $work/out.
peak() {
    kib=0
    # shellcheck disable=SC2086
    "$bin/shd-gpt" --standalone $model "$@" >"$work/out" &
    pid=$!
    while now=$(sed -n 's/^VmHWM:[^0-9]*\([0-9]*\) kB/\1/p' "/proc/$pid/status" 2>"$work/err") && [ -n "$now" ]; do
        kib=$now
        sleep 0.01
    done
    wait "$pid" || return 1
    echo $((kib * 1024))
}

# saves OPTIONS...: --recompute saves the activations that shd-gpt says it does (the allocator's and
# sanitizers' share comes on top), and no bit of the digest differs.
saves() {
    runs=$((runs + 1))
    all=$(peak "$@")
    want=$(digest_of "$work/out")
    kept=$(peak --recompute "$@")
    got=$(digest_of "$work/out")
    said=$(sed -n 's/^activations \([0-9.]*\) MB (\([0-9.]*\) MB without .*/\2 \1/p' "$work/out")
    echo "peak $all bytes, $kept with --recompute; activations said to be $said MB"
    [ "$got" = "$want" ] && echo "$said $all $kept" | awk '{
        said = ($1 - $2) * 1e6; saved = $3 - $4
        exit !(NF == 4 && $1 > 4 * $2 && saved > 0.9 * said && saved < 1.2 * said) }' && return
    echo "  and that is not what it should be"
    bad=$((bad + 1))
}

set_split() {
    alone "$@"
    for d in ${daemons:-1 2 3 5}; do
        for w in ${workers:-1 2 4}; do
            same "$d" "$w" "$@"
        done
    done
}

# The four strategies, three prefetches and two paths.
set_schedules() {
    alone "$@"
    for strategy in ddp zero1 zero2 zero3; do
        for prefetch in none pre post; do
            for path in map copy; do
                each --strategy $strategy --prefetch $prefetch --path $path "$@"
            done
        done
    done
}

set_policies() {
    daemons=${daemons:-1 3}
    workers=${workers:-1 2}
    set_schedules "$@"
    each --forward-prefetch 0 "$@"
    each --forward-prefetch 3 --path copy "$@"
    each --max-live-units 2 --prefetch none --forward-prefetch 0 --path copy "$@"
    for strategy in ddp zero1 zero2 zero3; do
        each --recompute --strategy $strategy --path map "$@"
        each --recompute --strategy $strategy --prefetch post --path copy "$@"
    done
    each --recompute --max-live-units 2 --prefetch none --forward-prefetch 0 --path copy "$@"
    each --recompute --elastic "$@"
    if [ "$what" = sanitized ]; then
        alone --precision bf16 "$@"
    else
        set_schedules --precision bf16 "$@"
    fi
    each --recompute --precision bf16 --path copy "$@"

    for a in 2 4; do
        alone --accumulate local:$a "$@"
        each --accumulate local:$a "$@"
        each --accumulate local:$a --strategy ddp --path copy "$@"
        each --accumulate local:$a --recompute "$@"
    done
    alone --grad-precision bf16 "$@"
    each --grad-precision bf16 "$@"
    each --grad-precision bf16 --path copy "$@"
    alone --precision fp16 --inject-overflow 3 "$@"
    each --precision fp16 --inject-overflow 3 "$@"
    skips 3
    each --precision fp16 --inject-overflow 3 --path copy "$@"
    each --precision fp16 --inject-overflow 3 --recompute "$@"
    for optimizer in 'lamb' 'adafactor' 'muon' 'muon --ema 0.9 --experts 4 --precision bf16'; do
        # shellcheck disable=SC2086 # options are words
        alone --optimizer $optimizer "$@"
        for path in map copy; do
            # shellcheck disable=SC2086
            each --optimizer $optimizer --path $path "$@"
        done
    done
    for codec in 'int8 --precision bf16' 'fp8 --optimizer muon' 'int4 --ema 0.9 --adapters 4'; do
        # shellcheck disable=SC2086 # options are words
        alone --codec $codec "$@"
        for strategy in ddp zero3; do
            # shellcheck disable=SC2086
            each --codec $codec --strategy $strategy "$@"
        done
    done
    alone --adapters 4 "$@"
    each --adapters 4 --recompute "$@"
    each --adapters 4 "$@"
    each --adapters 4 --path copy --strategy zero2 "$@"

    # 8 tokens of a micro-batch, 16 experts: at least 8 of them idle.
    alone --experts 16 --seq 8 --batch 1 "$@"
    each --experts 16 --seq 8 --batch 1 "$@"
    each --experts 16 --seq 8 --batch 1 --path copy "$@"
    each --experts 16 --seq 8 --batch 1 --recompute "$@"
    each --experts 16 --seq 8 --batch 1 --recompute --path copy --strategy zero2 "$@"
    each --experts 16 --seq 8 --batch 1 --strategy ddp "$@"
    has "plan misses: [1-9]"
    same 3 3 --experts 16 --seq 8 --batch 1 --stop-rank 1 --stop-at 2 "$@"
    same 1 2 --experts 16 --seq 8 --batch 1 --stop-rank 1 --stop-at 4 --path copy "$@"
    [ "$what" = sanitized ] || saves --layers 12 --seq 128 --batch 16 --micro-batches 1 "$@"
}

case $what in
split)
    steps=20
    model="--layers 2 --dim 64 --heads 2 --seq 64 --batch 4 --micro-batches 4"
    ;;
policies | sanitized | full)
    steps=6
    model="--layers 3 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 4"
    ;;
*) echo "$0: --set $what is not split, policies, sanitized or full" >&2; exit 2 ;;
esac
model="$model --steps $steps --sample 0 --eval-windows 2 --log-every 1"
case $what in
split) set_split "$@" ;;
*) set_policies "$@" ;;
esac
echo "$((runs - bad)) passed, $bad failed"
[ "$bad" -eq 0 ]
