#!/usr/bin/env bash
# Workers that join, leave, are killed and are stopped while the run goes on. Every run must end
# with the digest of a static, undisturbed one.
#
#   test_elastic.sh BIN_DIR [STEPS]
#
# Everything is done at a step or after a line of the log, not at a time; --slow makes steps long
# enough for processes to start in the middle of the run. Where a machine has so much else to do that
# the run comes to its end before this script has done its part, all is begun anew with more steps.
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-180}
model="--steps $steps --layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 8 --threads 1
       --sample 0 --eval-windows 2 --log-every 1"
limit_s=$((120 * ${SHD_TEST_PACE:-1})) # in which there must be another step, or what is waited for
work=$(mktemp -d)
run=
outsider=

# Only what was started here; the workers and daemons of a run end with it.
clean_up() {
    [ -z "$outsider" ] || kill -KILL "$outsider" 2>/dev/null || true
    [ -z "$run" ] || kill -KILL "$run" 2>/dev/null || true
    rm -rf "$work"
}
trap clean_up EXIT

fail() {
    echo "  FAILED: $*"
    tail -n 20 "$work/err" | sed 's/^/    /'
    tail -n 3 "$work/out" | sed 's/^/    /'
    exit 1
}

# Nothing is ever written there: to wait for it starts no process, and this script waits all the time.
exec {never}<> <(:)

# until_so WHAT COMMAND...
until_so() {
    local what=$1 end=$((SECONDS + limit_s)) at=0
    shift
    until "$@"; do
        read_output "$work/out"
        [ -z "$digest" ] || "$@" || lengthen
        [ "$step" = "$at" ] || end=$((SECONDS + limit_s))
        at=$step
        [ "$SECONDS" -lt "$end" ] || fail "$what: not within $limit_s s, nor another step"
        read -rt 0.03 -u "$never" _ || true
    done
}

# read_output FILE: sets $step, the last one that it has, or 0, and $digest, its line of that, if any.
read_output() {
    local lines=() i
    step=0 digest=
    [ ! -f "$1" ] || mapfile -t lines <"$1"
    for ((i = ${#lines[@]} - 1; i >= 0; i--)); do
        case ${lines[i]} in
        "digest "*) digest=${lines[i]} ;;
        "step "[0-9]*/*)
            step=${lines[i]#step } step=${step%%/*}
            return
            ;;
        esac
    done
}
is_at() {
    read_output "$1"
    [ "$step" -ge "$2" ]
}
is_over() {
    read_output "$work/out"
    [ -n "$digest" ]
}
said() { # said TEXT TIMES: text as a pattern of bash's
    local lines=() line times=0
    mapfile -t lines <"$work/err"
    for line in "${lines[@]}"; do
        # shellcheck disable=SC2053 # a pattern
        [[ $line != *$1* ]] || times=$((times + 1))
    done
    [ "$times" -ge "$2" ]
}

lengthen() {
    [ "$steps" -lt 10000 ] || fail "the run is too short"
    read_output "$work/out"
    echo "the run is too short: it is at step $step already"
    clean_up
    exec "$0" "$bin" $((3 * steps))
}

# go_on STEPS: so many more steps are made.
go_on() {
    local from
    read_output "$work/out"
    from=$step
    [ $((from + $1)) -lt "$steps" ] || lengthen
    until_so "step $((from + $1))" is_at "$work/out" $((from + $1))
}

# begin WORKERS OPTIONS...
begin() {
    local workers=$1
    shift
    rm -f "$work/out" "$work/err" # a first step that is seen must not be of the run before
    # shellcheck disable=SC2086 # options are words
    "$bin/shardctl" run --daemons 2 --workers "$workers" --elastic --watchdog 0 --threads-per-daemon 1 -- \
        "$bin/shd-gpt" $model --slow 8 "$@" >"$work/out" 2>"$work/err" &
    run=$!
    until_so "a first step" is_at "$work/out" 1
}

# end_same WHAT: the run ends well, with the digest $want.
end_same() {
    local code=0 got
    wait "$run" || code=$?
    run=
    got=$(tail -n 1 "$work/out")
    if [ "$code" != 0 ] || [ "$got" != "$want" ]; then
        fail "$1: code $code, wanted '$want', got '$got'"
    fi
    echo "  $1: same digest"
}

static() {
    # shellcheck disable=SC2086
    "$bin/shardctl" run --daemons 2 --workers 2 -- "$bin/shd-gpt" $model "$@" \
        >"$work/out" 2>"$work/err" || fail "the static run"
    want=$(tail -n 1 "$work/out")
    case $want in
    "digest sha256:"*" step=$steps") echo "static $*: $want" ;;
    *) fail "no digest of step $steps but: $want" ;;
    esac
}

joins=0
leaves=0
joins_one() {
    kill -USR1 "$run"
    joins=$((joins + 1))
    until_so "join $joins" said "worker rank [0-3] joined as pid" "$joins"
    go_on 3
}
leaves_one() {
    kill -USR2 "$run"
    leaves=$((leaves + 1))
    until_so "leave $leaves" said "worker rank [1-3] * exited with code 0: left" "$leaves"
    go_on 3
}

rank_pid() {
    local pid
    for pid in $(pgrep -P "$run"); do
        if grep -qzx "RANK=$1" "/proc/$pid/environ" 2>/dev/null; then
            echo "$pid"
            return
        fi
    done
}
address() {
    tr '\0' '\n' <"/proc/$(rank_pid 0)/environ" | sed -n 's/^SHARDD_ADDRESS=//p'
}

# A worker that nobody but SHARDD_ADDRESS told of the run; killed when it has worked for a while.
outsider_comes_and_dies() {
    rm -f "$work/outsider"
    # shellcheck disable=SC2086
    SHARDD_ADDRESS=$(address) SHARDD_ELASTIC=1 RANK=0 WORLD_SIZE=1 \
        "$bin/shd-gpt" $model --slow 8 "$@" >"$work/outsider" 2>&1 &
    outsider=$!
    until_so "a step of the outsider" is_at "$work/outsider" 1
    go_on 2
    kill -KILL "$outsider"
    wait "$outsider" 2>/dev/null || true
    outsider=
    go_on 3
}

# 1, 2, 4, with a fifth from outside, 1, 3.
come_and_go() {
    static "$@"
    joins=0
    leaves=0
    begin 1..4 "$@"
    joins_one
    joins_one
    joins_one
    outsider_comes_and_dies "$@"
    leaves_one
    leaves_one
    leaves_one
    said "no worker asked to leave" 1 && fail "one too many was asked to leave"
    joins_one
    joins_one
    end_same "workers 1 2 4 1 3 and one from outside ${*:-}"
}

# The others go on without it, and go on with it afterwards.
stop_and_go_on() {
    begin 3
    local pid rank
    for rank in 2 1 2; do
        go_on 5
        pid=$(rank_pid $rank)
        kill -STOP "$pid"
        go_on 20
        kill -CONT "$pid"
    done
    end_same "a worker is stopped for 20 steps, three times"
}

# The others finish; it leaves quietly when it is woken after that.
stop_to_the_end() {
    begin 3
    go_on 5
    local pid
    pid=$(rank_pid 2)
    kill -STOP "$pid"
    until_so "the end without the stopped worker" is_over
    kill -CONT "$pid"
    end_same "a worker is stopped to the end"
    if grep -q "rank 2" "$work/err"; then
        fail "the stopped worker did not leave quietly"
    fi
}

# A rank 0 that has no part in most steps: each has its line and its row, in order.
slow_rank_0_tells_all() {
    # shellcheck disable=SC2086
    "$bin/shardctl" run --daemons 2 --workers 3 --elastic -- "$bin/shd-gpt" ${model/--steps $steps/--steps 40} \
        --slow 60 --slow-rank 0 --json "$work/rows" >"$work/out" 2>"$work/err" || fail "the run with a slow rank 0"
    [ "$(sed -n 's,^step \([0-9]*\)/.*,\1,p' "$work/out")" = "$(seq 40)" ] || fail "a step has no line"
    [ "$(sed -n 's/^{"step":\([0-9]*\),"loss":[0-9].*/\1/p' "$work/rows")" = "$(seq 40)" ] || fail "a step has no row"
    grep -qv wait_ns "$work/rows" || fail "rank 0 was in every step"
    echo "  rank 0 is slow: a line and a row of each step"
}

# Copies are compared beside all that happens to workers: no bit differs, and nobody is named.
verified_with_a_stop() {
    begin 3 --verify-every 2
    local pid
    go_on 5
    pid=$(rank_pid 2)
    kill -STOP "$pid"
    go_on 10
    kill -CONT "$pid"
    go_on 5
    end_same "every second step is verified"
    if grep -q "op=verify" "$work/err"; then
        fail "a worker was named that computes right"
    fi
}

# From step 11 on the worker of rank 1 flips a bit in each micro-batch; steps 15, 20, ... are verified.
wrong_worker_is_named() {
    begin 3 --verify-every 5 --flip-bit 11 --flip-rank 1
    local pid line
    pid=$(rank_pid 1)
    until_so "the wrong worker to be named" said "op=verify*pid $pid?*is wrong" 1
    line=$(grep -m 1 "op=verify" "$work/err")
    echo "  named: $line"
    [[ $line == *" pid=$pid "* || $line == *" other_pid=$pid "* ]] || fail "it is not of rank 1, pid $pid"
    [[ $line == *" unit=head "* && $line == *" step="[0-9]*[49]" "* ]] || fail "unit or step"
    "$bin/shardctl" status --runtime-dir "$(address)" >"$work/status" 2>&1 || true
    grep -q "WRONG GRADIENT: .*(pid $pid).* differ in unit head, micro-batch [0-7] of step" "$work/status" ||
        fail "status: $(cat "$work/status")"
    kill -TERM "$run"
    wait "$run" || true
    run=
    echo "  a worker that computes wrongly is named"
}

come_and_go
slow_rank_0_tells_all
stop_and_go_on
stop_to_the_end
verified_with_a_stop
wrong_worker_is_named
come_and_go --path copy --precision bf16
come_and_go --accumulate local:2
echo "all in $SECONDS s"

