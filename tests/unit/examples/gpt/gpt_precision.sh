#!/bin/sh
# shd-gpt's precisions and refusals, with the real program.
#
#   tests/unit/examples/gpt/gpt_precision.sh [BIN_DIR] [-- shd-gpt options of the loss comparison]
#
# Held-out loss in bf16 (native where the CPU can, and emulated) and in fp16 (dynamic loss scale, one
# overflow injected) is within 1 % of fp32's. The overflow skips its step and no other, and halves
# the scale. --batch auto trains as the batch that it comes to. Schedules and options that cannot be had end with code 2 and the reason.
#
# The figures of docs/numerics.md: tests/unit/examples/gpt/gpt_precision.sh build/release/bin -- --steps 200
set -eu

bin=build/release/bin
if [ $# -gt 0 ] && [ "$1" != -- ]; then
    bin=$1
    shift
fi
[ $# -gt 0 ] && shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
passed=0
[ $# -gt 0 ] || set -- --layers 2 --dim 64 --heads 2 --seq 64 --batch 4 --steps 100 --lr 0.002

check() { # check WHAT COMMAND...
    what=$1
    shift
    if "$@"; then
        passed=$((passed + 1))
        echo "ok      $what"
    else
        bad=$((bad + 1))
        echo "FAILED  $what"
    fi
}

loss_of() { # the held-out loss at the end of a run with these options
    "$bin/shd-gpt" --standalone --eval-every 0 --sample 0 --log-every 1 "$@" >"$work/out" 2>&1
    sed -n 's/^eval .* held-out loss \([0-9.]*\) .*/\1/p' "$work/out"
}

near() { # near LOSS: within 1 % of $full
    echo "        held-out loss $1, fp32 $full"
    awk -v a="$1" -v b="$full" 'BEGIN { exit !(a > 0 && b > 0 && a < 1.01 * b && a > 0.99 * b) }'
}

full=$(loss_of "$@")
bf16=$(loss_of --precision bf16 "$@")
grep "bf16 GEMM" "$work/out"
check "bf16 is within 1 % of fp32" near "$bf16"
bf16=$(loss_of --precision bf16 --bf16-gemm emulated --grad-precision bf16 "$@")
grep "bf16 GEMM" "$work/out"
check "emulated bf16 with bf16 gradients is within 1 % of fp32" near "$bf16"

fp16=$(loss_of --precision fp16 --inject-overflow 20 "$@")
check "fp16 with an overflow is within 1 % of fp32" near "$fp16"
one_skipped() { [ "$(grep -c SKIPPED "$work/out")" = 1 ]; }
check "the overflow's step is skipped" grep -q "^step 20/.* scale 65536 SKIPPED" "$work/out"
check "no other step is" one_skipped
check "the scale is halved" grep -q "^step 21/.* scale 32768$" "$work/out"

refused() { # refused TEXT OPTIONS...
    text=$1
    shift
    code=0
    "$bin/shd-gpt" --standalone --layers 2 --dim 16 --heads 2 --seq 16 --batch 1 --steps 1 "$@" \
        >"$work/out" 2>&1 || code=$?
    [ "$code" = 2 ] && grep -q -e "$text" "$work/out" && return
    echo "        code $code: $(tail -n 1 "$work/out")"
    return 1
}
check "hybrid is refused" refused "replica groups" --strategy hybrid
check "ddp under a bound is refused" refused "holds all 4 units" --strategy ddp --max-live-units 2
check "a bound no plan can meet is refused" refused "max_live_units" --max-live-units 1
check "a loss scale without fp16 is refused" refused "do not underflow" --loss-scale 8
check "a group that does not divide is refused" refused "must divide" --accumulate local:3

digest_of() { # digest_of COMMAND...: of a short run
    "$@" --layers 2 --dim 16 --heads 2 --seq 16 --steps 3 --eval-every 0 --sample 0 2>/dev/null |
        sed -n 's/^digest //p'
}
alone=$(digest_of "$bin/shd-gpt" --standalone --batch auto:8)
shared=$(digest_of "$bin/shardctl" run --daemons 2 --workers 2 -- "$bin/shd-gpt" --batch auto:8)
same() { # same DIGEST OPTIONS...
    digest=$1
    shift
    [ -n "$digest" ] && [ "$(digest_of "$bin/shd-gpt" --standalone "$@")" = "$digest" ]
}
check "a batch that fits is one micro-batch" same "$alone" --batch 8 --micro-batches 1
check "and one for each worker" same "$shared" --batch 4 --micro-batches 2

check "the spec is one that shardctl plans" \
    sh -c "'$bin/shd-gpt' --print-spec --experts 4 >'$work/spec' && \
           '$bin/shardctl' plan --spec '$work/spec' --json >'$work/out'"
echo "$passed passed, $bad failed"
[ "$bad" -eq 0 ]
