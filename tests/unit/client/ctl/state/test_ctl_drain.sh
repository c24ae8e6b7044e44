#!/bin/sh
# shardctl drain as a user meets it: real training is drained in the middle, saved, ended, restored
# and trained to its end, with the digests of an undisturbed run.
# test_ctl_drain.sh BIN_DIR
set -eu
umask 077
# shellcheck source=tests/lib/wait.sh
. "$(dirname "$0")/../../../../lib/wait.sh"
PATH=$1:$PATH
work=$(mktemp -d "${XDG_RUNTIME_DIR:-$HOME}/shd.XXXXXX") # not /tmp: `up` takes no place that is everybody's
chmod 700 "$work"
workers=
end() {
    for pid in $workers; do kill -9 "$pid" 2>/dev/null || true; done
    shardctl down --yes --runtime-dir "$work/up" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap end EXIT
# A constant learning rate: what a step does is not to depend on --steps.
gpt='--lr 0.005 --min-lr 0.005 --warmup 1 --layers 2 --dim 64 --seq 32 --sample 0 --eval-windows 0 --threads 1'
steps=2000

begin() { # two workers at $SHARDD_ADDRESS, in the background
    workers=
    for rank in 0 1; do
        # shellcheck disable=SC2086
        RANK=$rank WORLD_SIZE=2 SHARDD_ELASTIC=0 shd-gpt --steps $steps $gpt \
            >"$work/out$rank" 2>"$work/err$rank" &
        workers="$workers $!"
    done
}
step() { # of owner 0, from its /status
    shardctl status --json --runtime-dir "$work/up?cpu0" 2>/dev/null | tr -d ' \n' |
        sed -n 's/.*"step":\([0-9]*\),"phase".*/\1/p'
}
is_at() {
    at=$(step)
    [ "${at:-0}" -ge "$1" ]
}
await_step() { soon "no step $1; $(cat "$work"/err*)" is_at "$1"; }
up() {
    line=$(shardctl up --daemons 2 --runtime-dir "$work/up")
    eval "$line"
    export SHARDD_ADDRESS
}

# The daemons' keeper; its log stays.
await_gone() { soon "its keeper has not gone" [ ! -e "$work/up/notify" ]; }

# Taken back: by its own end, after a stopped worker has kept it from the end of its step.
up
begin
await_step 5
# shellcheck disable=SC2086
kill -STOP $workers
code=0
timeout_s=$((2 * ${SHD_TEST_PACE:-1}))
shardctl drain --runtime-dir "$work/up" --timeout "$timeout_s" >"$work/drain" 2>&1 || code=$?
# shellcheck disable=SC2086
kill -CONT $workers
if [ $code -eq 0 ]; then # nothing of a step was in when they were stopped: all are drained
    for pid in $workers; do wait "$pid" || true; done
    await_gone
    up
else
    [ $code -eq 1 ] || fail "exit code $code: $(cat "$work/drain")"
    expect "$work/drain" "in a step still after $timeout_s s.*at work: .*(pid "
    await_step $(($(step) + 5))
    # In the middle, saved; a status that says so; newcomers are refused.
    shardctl drain --checkpoint "$work/saved" >"$work/drain" 2>&1 ||
        fail "drain: $(cat "$work/drain" "$work"/err*)"
    expect "$work/drain" 'saved .*/step-'
    expect "$work/drain" 'drained 2 daemons'
    for pid in $workers; do
        wait "$pid" && fail 'a worker has not noticed'
    done
    expect "$work/err0" 'is draining'
    expect "$work/err1" 'is draining'
    await_gone

    # Exactly one step, and training goes on from it as if nothing had been.
    name=$(cat "$work/saved/LATEST" 2>/dev/null || readlink "$work/saved/LATEST")
    at=$(echo "$name" | sed 's/.*step-0*//')
    if [ "$at" -lt 10 ] || [ "$at" -ge $steps ]; then fail "drained at step $at"; fi
    # shellcheck disable=SC2086
    want=$(shd-gpt --standalone --steps "$at" $gpt | tail -n 1)
    shardctl checkpoint --verify "$work/saved" >"$work/verify"
    expect "$work/verify" "step=$at "
    expect "$work/verify" "$(echo "$want" | cut -d' ' -f2)"
    steps=$((at + 40))
    # shellcheck disable=SC2086
    want=$(shd-gpt --standalone --steps $steps $gpt | tail -n 1)
    up
    shardctl restore "$work/saved" >/dev/null
    begin
    for pid in $workers; do wait "$pid" || fail "after it: $(cat "$work"/err*)"; done
    [ "$(tail -n 1 "$work/out0")" = "$want" ] || fail "after it: $(tail -n 1 "$work/out0"), not $want"
fi

# One of two, without training; then the other.
shardctl drain cpu1 --runtime-dir "$work/up" >"$work/drain"
expect "$work/drain" 'drained 1 daemon$'
[ -e "$work/up/up.log" ] || fail 'the other one is gone, too'
soon 'its keeper says nothing' grep -q drained "$work/up/up.log" # it reaps it, and then says so
expect "$work/up/up.log" 'daemon cpu1 .*: drained'
shardctl drain cpu0 --runtime-dir "$work/up" >"$work/drain"
echo ok
