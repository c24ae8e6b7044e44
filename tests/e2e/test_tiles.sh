#!/bin/sh
# shd-gpt in tiles, with the real programs: a worker that may hold less than a quarter of a layer comes
# to the digest of one without a bound, over owners and workers and through kills; the plan says
# which bound is the smallest; files have the whole tensors.
# usage: test_tiles.sh BIN_DIR
set -eu

bin=$(cd "$1" && pwd)
here=$(dirname "$0")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model="--layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --tiles 4 --steps 6 --eval-windows 0 --log-every 3"
layer=$((4 * (12 * 64 * 64 + 13 * 64)))
smallest=$((4 * 64 * (256 + 32) / 4)) # a tile of the embedding; one of a matrix has 3/4 of it
[ $((4 * smallest)) -lt "$layer" ] || exit 1

fail() {
    echo "FAILED: $*"
    exit 1
}

# The last line of a run, which must be the digest of step 6.
digest() {
    last=$(grep -v '^shardctl: not saved' "$work/out" | tail -n 1)
    case $last in
    "digest sha256:"*" step=6") echo "$last" ;;
    *) echo "no digest, but: $last" ;;
    esac
}

# same DAEMONS WORKERS OPTIONS...: comes to $want.
same() {
    d=$1 w=$2
    shift 2
    # shellcheck disable=SC2086 # options are words
    "$bin/shardctl" run --daemons "$d" --workers "$w" -- "$bin/shd-gpt" $model "$@" >"$work/out" 2>&1 || true
    got=$(digest)
    [ "$got" = "$want" ] || fail "daemons=$d workers=$w $*: $got"
    echo "daemons=$d workers=$w $*: same"
}

for precision in fp32 bf16; do
    # shellcheck disable=SC2086
    "$bin/shd-gpt" --standalone $model --precision $precision >"$work/out" 2>&1 || true
    want=$(digest)
    case $want in digest*) ;; *) fail "alone: $want" ;; esac
    bound=$smallest
    [ $precision = fp32 ] || bound=$((smallest / 2))
    same 1 1 --precision $precision --max-live-bytes $bound --path copy
    same 2 2 --precision $precision --max-live-bytes $bound
    same 3 1 --precision $precision --max-live-bytes $bound --prefetch none
    same 1 2 --precision $precision --max-live-bytes $((2 * bound)) --path copy --forward-prefetch 3
    same 2 1 --precision $precision --strategy zero2
done

# The plan: tiles as operations, and the smallest bound.
# shellcheck disable=SC2086
"$bin/shd-gpt" $model --print-spec >"$work/spec.json"
"$bin/shardctl" plan --spec "$work/spec.json" >"$work/plan"
grep -q "The smallest --max-live-bytes is $smallest: unit 0 'embed/0'\." "$work/plan" || fail "the smallest bound: $(cat "$work/plan")"
"$bin/shardctl" plan --spec "$work/spec.json" --max-live-bytes $((smallest - 1)) >"$work/plan" 2>&1 && fail "a bound that is too small"
grep -q "must be at least $smallest: unit 0 'embed/0', without any prefetch" "$work/plan" || fail "refusal: $(cat "$work/plan")"
"$bin/shardctl" plan --spec "$work/spec.json" --max-live-bytes "$smallest" --ops >"$work/ops"
for unit in embed/3 h.1.attn/0 h.1.fc/3 lm_head/2; do
    grep -q "\"$unit\"" "$work/ops" || fail "no unit $unit in the plan's operations"
done

# Files: whole tensors under plain names, which begin a model with other tiles.
# shellcheck disable=SC2086
"$bin/shardctl" run --daemons 2 --workers 1 --checkpoint "$work/saved" -- "$bin/shd-gpt" $model --max-live-bytes "$smallest" \
    >"$work/out" 2>&1 || fail "run with a checkpoint: $(tail -n 3 "$work/out")"
"$bin/shardctl" checkpoint --verify "$work/saved" >"$work/out" 2>&1 || fail "verify: $(cat "$work/out")"
python3 - "$work/saved" <<'PYTHON' || fail "files of the checkpoint"
import json, pathlib, struct, sys
path = next(pathlib.Path(sys.argv[1]).glob('step-*'))
for name in 'model', 'optimizer-m', 'optimizer-v':
    data = (path / f'{name}.safetensors').read_bytes()
    size, = struct.unpack('<Q', data[:8])
    head = json.loads(data[8:8 + size])
    head.pop('__metadata__', None)
    assert head['h.0.mlp.c_fc.weight']['shape'] == [64, 256], head['h.0.mlp.c_fc.weight']
    assert head['wte.weight']['shape'] == head['lm_head.weight']['shape'] == [256, 64]
    assert head['h.1.mlp.c_fc.bias']['shape'] == [256]
    assert not [name for name in head if '/' in name], head
    assert len(head) == 2 + 2 * 12 + 2 + 1
    for name, of in head.items():
        begin, end = (8 + size + at for at in of['data_offsets'])
        assert any(data[begin:end]), name
PYTHON
two=$(echo "$model" | sed 's/--tiles 4/--tiles 2/')
# shellcheck disable=SC2086
"$bin/shd-gpt" $two --print-spec >"$work/two.json"
# shellcheck disable=SC2016,SC2086 # the inner shell's; options are words
"$bin/shardctl" run --daemons 1 --workers 1 -- sh -c '
    set -e
    "$0/shardctl" restore --weights "$1"/step-* --spec "$2"
    shift 2
    "$0/shd-gpt" "$@"' "$bin" "$work/saved" "$work/two.json" $two >"$work/out" 2>&1 || fail "other tiles: $(tail -n 3 "$work/out")"
case $(digest) in digest*) ;; *) fail "other tiles: $(digest)" ;; esac
awk '/^step 3\/6/ { exit !($4 < 5) }' "$work/out" || fail "it did not go on from the weights: $(cat "$work/out")"

# The whole state goes on in other tiles, at its step.
more=$(echo "$two" | sed 's/--steps 6/--steps 8/')
# shellcheck disable=SC2016,SC2086
"$bin/shardctl" run --daemons 2 --workers 1 -- sh -c '
    set -e
    "$0/shardctl" restore "$1" --spec "$2"
    shift 2
    "$0/shd-gpt" "$@"' "$bin" "$work/saved" "$work/two.json" $more >"$work/out" 2>&1 || fail "a state in other tiles: $(tail -n 3 "$work/out")"
grep -q "^step 8/8" "$work/out" || fail "a state in other tiles: $(cat "$work/out")"
grep -q "^step 3/8" "$work/out" && fail "it began anew: $(cat "$work/out")"

# Kills of daemons and workers.
python3 "$here/chaos.py" --bin "$bin" --logs "$work/chaos" --kills "${2:-12}" --seed 1 -- --tiles 4 --max-live-bytes "$smallest" --path copy ||
    fail "kills"
echo "all passed"
