#!/bin/sh
# shardctl's checkpoint and restore as a user meets them, with real daemons and training.
# test_checkpoint_ctl.sh BIN_DIR
set -eu
PATH=$1:$PATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gpt='--layers 2 --dim 64 --seq 32 --sample 0 --eval-every 0 --threads 1'

fail() {
    echo "FAILED: $*" >&2
    exit 1
}
expect() { # expect FILE TEXT
    grep -qe "$2" "$1" || fail "no '$2' in: $(cat "$1")"
}
refused() { # refused TEXT WORDS...: exit code 2, or 1 with the text
    text=$1
    shift
    if "$@" >"$work/refused" 2>&1; then fail "not refused: $*"; fi
    expect "$work/refused" "$text"
}

# Undisturbed, with checkpoints, and from one of those on with other daemons and workers: one
# digest. The last state is saved too, although no multiple of 10.
# shellcheck disable=SC2086
want=$(shd-gpt --standalone --steps 47 $gpt | tail -n 1)
# shellcheck disable=SC2086
shardctl run --daemons 2 --workers 2 --checkpoint "$work/run" --checkpoint-every 10 --keep 3 -- \
    shd-gpt --steps 47 $gpt >"$work/out" 2>"$work/err" || fail "run: $(cat "$work/err")"
shardctl checkpoint --list "$work/run" >"$work/list"
expect "$work/list" 'step-000000000047 .* latest'
[ "$(wc -l <"$work/list")" -le 3 ] || fail "more than 3 kept: $(cat "$work/list")"
shardctl checkpoint --verify "$work/run" >"$work/verify"
expect "$work/verify" 'good model=gpt step=47 updates=47'
expect "$work/verify" "$(echo "$want" | cut -d' ' -f2)"
first=$(head -n 1 "$work/list" | cut -d' ' -f1)
[ "$first" != step-000000000047 ] || fail 'nothing was saved on the way'
# shellcheck disable=SC2086
shardctl run --daemons 3 --workers 1 --restore "$work/run/$first" -- shd-gpt --steps 47 $gpt \
    >"$work/out" 2>"$work/err" || fail "run --restore: $(cat "$work/err")"
[ "$(tail -n 1 "$work/out")" = "$want" ] || fail "after a restore: $(tail -n 1 "$work/out"), not $want"
expect "$work/err" "restored model=gpt step=$(echo "$first" | sed 's/step-0*//')"

# Damage: the exit code and the first bad tensor.
cp -a "$work/run/step-000000000047" "$work/bad"
printf 'x' | dd of="$work/bad/model.safetensors" bs=1 seek=5000 conv=notrunc 2>/dev/null
refused "tensor '.*' in 'model.safetensors', elements" shardctl checkpoint --verify "$work/bad"
refused 'the file is damaged' shardctl run --daemons 2 --restore "$work/bad" -- true

# Command lines.
refused 'no directory' shardctl checkpoint
refused 'only look' shardctl checkpoint "$work/run" --list --keep 2
refused 'one at a time' shardctl checkpoint "$work/run" --every 5 --every-minutes 5
refused 'go together' shardctl restore --weights x
refused 'nothing to restore' shardctl restore
refused 'says where' shardctl run --keep 2 -- true
refused 'No such file' shardctl checkpoint --list "$work/nothing"
refused 'No such file' shardctl run --restore "$work/nothing" -- true
echo ok
