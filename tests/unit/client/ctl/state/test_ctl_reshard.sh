#!/usr/bin/env bash
# A model gets more, fewer and other owners while two workers train it, which go along without a restart: with the
# digest of a run in one process. Whoever moves it may be killed at any point, and moves it again; so may the daemons.
#
#   test_ctl_reshard.sh BIN_DIR [STEPS]
set -euo pipefail
# shellcheck source=tests/lib/wait.sh
. "$(dirname "$0")/../../../../lib/wait.sh"
PATH=$(cd "$1" && pwd):$PATH
steps=${2:-240}
work=$(mktemp -d)
declare -A workers=()
end() {
    for pid in "${workers[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    shardctl down -d "$work/up" --yes >/dev/null 2>&1 || true
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap end EXIT
gpt=(--layers 2 --dim 32 --heads 2 --seq 16 --batch 2 --micro-batches 4 --sample 0 --eval-windows 0 --threads 1)

at() { echo "$work/up?$1"; }
# A step is committed, or all of it is over.
is_at() { grep -q "\"step\":$1," "$work/json" 2>/dev/null || is_over; }
is_over() {
    for pid in "${workers[@]}"; do kill -0 "$pid" 2>/dev/null || return 0; done
    return 1
}
# works RANK ADDRESS STEPS [FLAGS...]
works() {
    local rank=$1 address=$2 to=$3
    shift 3
    [ "$rank" != 0 ] || { rm -f "$work/json" && set -- --json "$work/json" "$@"; }
    SHARDD_ADDRESS=$address RANK=$rank WORLD_SIZE=2 shd-gpt "${gpt[@]}" --steps "$to" "$@" >"$work/out$rank" 2>"$work/err$rank" &
    workers[$rank]=$!
}
# ends: all workers, well, with this digest.
ends() {
    for rank in "${!workers[@]}"; do
        wait "${workers[$rank]}" || fail "worker $rank: $(cat "$work/out$rank" "$work/err$rank")"
        unset "workers[$rank]"
    done
    [ "$(tail -n 1 "$work/out0")" = "$1" ] || fail "got $(tail -n 1 "$work/out0"), want $1"
}
# moves FROM TO [ENVIRONMENT...]
moves() {
    local from=$1 to=$2
    shift 2
    env "$@" shardctl reshard -a "$(at "$from")" --to "$to" --by "$work/by" >"$work/reshard.out" 2>"$work/reshard.err"
}
moves_well() { moves "$@" || fail "$1 to $2: $(cat "$work/reshard.out" "$work/reshard.err")"; }
moves_said() { shardctl reshard -a "$(at "$1")" --to "$2" --by "$work/by"; }
# refused PATTERN COMMAND...
refused() {
    local pattern=$1
    shift
    ! "$@" >"$work/refused" 2>&1 || fail "done: $*"
    expect "$work/refused" "$pattern"
}

# gone COUNT: so often both workers have gone along.
gone() {
    is_over || { [ "$(grep -c 'goes along' "$work/err0")" -ge "$1" ] && [ "$(grep -c 'goes along' "$work/err1")" -ge "$1" ]; }
}
pid_of() { fuser "$work/up/$1.lock" 2>/dev/null | awk '{print $1}'; }
is_stopped() { [ "$(ps -o state= -p "$1")" = T ]; }

want=$(shd-gpt --standalone "${gpt[@]}" --steps "$steps" 2>/dev/null | tail -n 1)
echo "in one process: $want"
mkdir -m 755 "$work/by"
shardctl up --daemons 3 -t 1 -d "$work/up" >/dev/null 2>"$work/up.err" || fail "up: $(cat "$work/up.err")"

# More, fewer, others; and who has the old address is led to where it is.
for flags in "" --elastic; do
    # shellcheck disable=SC2086
    works 0 "$(at cpu0,cpu1)" "$steps" $flags
    # shellcheck disable=SC2086
    works 1 "$(at cpu0,cpu1)" "$steps" $flags
    soon "no step" is_at 3
    moves_well cpu0,cpu1 cpu0,cpu1,cpu2
    expect "$work/reshard.out" '^resharded model=gpt to=cpu0,cpu1,cpu2 step=[0-9]*$'
    soon "not at three" gone 1
    moves_well cpu0,cpu1,cpu2 cpu2
    soon "not at one" gone 2
    expect <(shardctl digest -a "$(at cpu0,cpu1)") 'gpt'
    moves_well cpu2 cpu1,cpu0 >/dev/null
    soon "not at two" gone 3
    ends "$want"
    for rank in 0 1; do
        expect "$work/err$rank" "model 'gpt' has moved to cpu1,cpu0: this worker goes along, from step"
    done
    [ -z "$(ls -A "$work/by")" ] || fail "left: $(ls -A "$work/by")"
    expect <(shardctl digest -a "$(at cpu0,cpu1)") 'gpt'
    refused "has moved to cpu2 at step" shardctl reshard -a "$(at cpu0,cpu1)" --to cpu0 --by "$work/by"
    shardctl drop gpt -a "$(at cpu1,cpu0)" --yes >/dev/null
    shardctl drop gpt -a "$(at cpu2)" --yes >/dev/null # that it was there, too
    echo "2 -> 3 -> 1 -> 2 owners${flags:+ ($flags)}: $want"
done

# What cannot be is refused, by name, and changes nothing.
works 0 "$(at cpu0,cpu1)" "$steps"
works 1 "$(at cpu0,cpu1)" "$steps"
soon "no step" is_at 3
refused "--to DEVICES says who" shardctl reshard --by "$work/by"
refused "there is no daemon 'cpu9'" moves_said cpu0,cpu1 cpu0,cpu9
refused "daemon 'gpu0' has a GPU's memory" moves_said cpu0,cpu1 cpu0,gpu0
refused "model 'gpt' is at cpu0,cpu1 already" moves_said cpu0,cpu1 cpu0,cpu1
refused "device 'cpu2' is in the address twice" moves_said cpu0,cpu1 cpu2,cpu2
refused "the names of the daemons are wanted" moves_said cpu0,cpu1 "cpu0+cpu2"
refused "has replicas" moves_said cpu0+cpu1 cpu2
refused "has no model 'nope'" shardctl reshard nope -a "$(at cpu0,cpu1)" --to cpu2 --by "$work/by"
refused "an absolute path is wanted" shardctl reshard -a "$(at cpu0,cpu1)" --to cpu2 --by here
refused "look at directory '$work/none'" shardctl reshard -a "$(at cpu0,cpu1)" --to cpu2 --by "$work/none"
kill -STOP "$(pid_of cpu2)"
refused 'daemon cpu2 ' moves_said cpu0,cpu1 cpu0,cpu1,cpu2
kill -CONT "$(pid_of cpu2)"
[ "$(grep -c 'goes along' "$work/err0")" = 0 ] || fail "moved: $(cat "$work/err0")"
points=yes
{ SHARDD_FAIL=list moves_said cpu0,cpu1 cpu0,cpu1 2>&1 || true; } | grep -q "fail_point " || points=none
ends "$want"
shardctl drop gpt -a "$(at cpu0,cpu1)" --yes >/dev/null
echo "refused what cannot be"

# Killed at any point, who moves it moves it again. Before it is decided nothing has changed.
if [ "$points" = none ]; then
    echo "no fail points: not killed"
    exit 0
fi
from=cpu0,cpu1
to=cpu1,cpu2
# begin SLOW: workers that are so slow that all of it is in time.
begin() {
    works 0 "$(at "$from")" "$steps" --slow "$1"
    works 1 "$(at "$from")" "$steps" --slow "$1"
    count=0
    soon "no step" is_at 3
}
turn() {
    local before=$from
    from=$to
    to=$before
    count=$((count + 1))
    soon "not gone along: $count" gone "$count"
}
begin 4
for point in saved read told held decided dropped opened; do
    ! moves "$from" "$to" "SHARDD_FAIL=reshard:$point" || fail "not killed at $point"
    moves_well "$from" "$to"
    turn
done
is_over && fail "all steps were done before the end: $(tail -n 2 "$work"/out? "$work"/err?)"
ends "$want"
shardctl drop gpt -a "$(at "$from")" --yes >/dev/null
[ -z "$(ls -A "$work/by")" ] || fail "left: $(ls -A "$work/by")"
echo "killed: who moves it"

# A daemon that is killed while it is moved, before and after it is decided.
for device in cpu0 cpu1 cpu2; do
    begin 16
    for point in read told held decided dropped; do
        SHARDD_FAIL=reshard:$point! shardctl reshard -a "$(at "$from")" --to "$to" --by "$work/by" >"$work/reshard.out" \
            2>"$work/reshard.err" &
        mover=$!
        soon "not at $point" is_stopped "$mover"
        kill -9 "$(pid_of "$device")"
        kill -CONT "$mover"
        [ -z "${TRACE:-}" ] || echo "$device $point $SECONDS"
        wait "$mover" || moves_well "$from" "$to"
        turn
    done
    is_over && fail "all steps were done before the end: $(tail -n 2 "$work"/out? "$work"/err?)"
    ends "$want"
    shardctl drop gpt -a "$(at "$from")" --yes >/dev/null
done
[ -z "$(ls -A "$work/by")" ] || fail "left: $(ls -A "$work/by")"
echo "killed: daemons"
