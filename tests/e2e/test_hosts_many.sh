#!/usr/bin/env bash
# Three hosts: a model's daemons on one, two or three of them, workers in every arrangement. Each run must end
# with the digest of a training in one process, whatever is killed on the way; what crossed is what
# `shardctl plan` says.
#
#   test_hosts_many.sh BIN_DIR [STEPS]
#
# What is done is done at a step or after a line of the log, not at a time.
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-60}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/shd-hosts.XXXXXX")

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/hosts.sh
. "$here/../lib/hosts.sh"
trap hosts_clean_up EXIT

no_daemons() {
    local host
    for host in A B C; do
        "$bin/shardctl" down --yes -d "$work/$host" >/dev/null 2>&1 || true
    done
}

# begin HOST:DEVICES...: daemons anew, nothing of an earlier run.
begin() {
    local word host
    no_daemons
    for word in "$@"; do
        daemons "${word%%:*}" "${word#*:}"
    done
    for host in "${!relays[@]}"; do # `up` clears sockets that are not its daemons': they come again
        soon "the sockets of $all on $host" has_devices "$host" ${all//,/ }
    done
    : >"$work/out"
    : >"$work/err"
}

# new_cluster HOST...: of `shardctl keys`; nothing runs
new_cluster() {
    stop_relays
    no_daemons
    rm -rf "$work/keys"
    mkdir -m 700 "$work/keys"
    "$bin/shardctl" keys new "$work/keys/cluster.json" "$@" >/dev/null
}

pid_of() { fuser "$work/$1/$2.lock" 2>/dev/null | awk '{print $1}'; }
kill_daemon() { kill -KILL "$(pid_of "$1" "$2")"; }

hosts_make
mkdir -m 700 "$work/A" "$work/B" "$work/C"
new_cluster "a=$address_A" "b=$address_B" "c=$address_C"
# shellcheck disable=SC2119
want=$(in_one_process)
echo "in one process: $want"

# -- Owners on two hosts ------------------------------------------------------------------------------------------
all=cpu0,cpu1,cpu2
relay A --device cpu0,cpu1 --from b:cpu2
relay B --device cpu2 --from a:cpu0,cpu1
relay C --from a:cpu0,cpu1 --from b:cpu2

begin A:cpu0,cpu1 B:cpu2
worker "A?$all" 0 2
worker "B?$all" 1 2
end_same "owners on a and b, workers on a and b"

begin A:cpu0,cpu1 B:cpu2
worker "C?$all" 0 2
worker "C?$all" 1 2
end_same "owners on a and b, workers on c alone"

begin A:cpu0,cpu1 B:cpu2
worker B 0 3
worker A 1 3
worker C 2 3
end_same "owners on a and b, workers on all three, of all that their directories have"

begin A:cpu0,cpu1 B:cpu2
worker "B?$all" 0 1
end_same "owners on a and b, the only worker on b"

# -- Killed -------------------------------------------------------------------------------------------------------
begin A:cpu0,cpu1 B:cpu2
worker "A?$all" 0 2 --slow 6
worker "B?$all" 1 2 --slow 6
go_on 1
for host in A B; do
    kill -KILL "${relays[$host]}"
    if [ "$host" = A ]; then
        relay A --device cpu0,cpu1 --from b:cpu2
    else
        relay B --device cpu2 --from a:cpu0,cpu1
    fi
    go_on 2
done
for at in A:cpu1 B:cpu2; do
    kill_daemon "${at%:*}" "${at#*:}"
    go_on 2
done
kill -KILL "${workers[1]}"
wait "${workers[1]}" 2>/dev/null || true
worker "B?$all" 1 2 --slow 6
go_on 2
if [ -n "$wire" ]; then
    ip -n "shdA$$" link set "${wires[B]}" down
    sleep 3 # a cut that lasts: nothing is expected of it
    ip -n "shdA$$" link set "${wires[B]}" up
    go_on 2
fi
end_same "killed: both relays, a daemon on each host, a worker${wire:+; the wire cut for 3 s}"

# -- As the cluster file says: owners on three hosts --------------------------------------------------------------
new_cluster "a=$address_A/cpu0,cpu2" "b=$address_B/cpu1" "c=$address_C/cpu3"
all=cpu0,cpu1,cpu2,cpu3
relay A
relay B
relay C
begin A:cpu0,cpu2 B:cpu1 C:cpu3
worker "C?$all" 0 3
worker "A?$all" 1 3
worker "B?$all" 2 3
end_same "owners and workers on all three, as the cluster file says"

# -- Saved from a host without daemons, and gone on with -----------------------------------------------------------
all=cpu0,cpu1,cpu2
new_cluster "a=$address_A/cpu0,cpu1" "b=$address_B/cpu2" "c=$address_C"
relay A --files
relay B # not yet
relay C
begin A:cpu0,cpu1 B:cpu2
worker "C?$all" 0 2 --slow 6
worker "B?$all" 1 2 --slow 6
go_on 3
if "${on_C[@]}" "$bin/shardctl" checkpoint -a "$work/C?$all" "$work/saved" >"$work/refusal" 2>&1; then
    fail "host b saved for others"
fi
grep -q 'is to be started with --files' "$work/refusal" || fail "$(cat "$work/refusal")"
kill "${relays[B]}"
soon "the end of a relay" is_gone "${relays[B]}"
relay B --files
go_on 2
"${on_C[@]}" "$bin/shardctl" checkpoint -a "$work/C?$all" "$work/saved" >"$work/saver" 2>&1 || fail "$(cat "$work/saver")"
go_on 1
for rank in 0 1; do
    kill -KILL "${workers[$rank]}"
    wait "${workers[$rank]}" 2>/dev/null || true
done
workers=()
begin A:cpu0,cpu1 B:cpu2
"${on_C[@]}" "$bin/shardctl" restore -a "$work/C?$all" "$work/saved" >"$work/saver" 2>&1 || fail "$(cat "$work/saver")"
worker "C?$all" 0 2
worker "A?$all" 1 2
end_same "saved in the middle from a third host, restored at new daemons"

# -- What crosses -------------------------------------------------------------------------------------------------
stop_relays
# Of one worker on b, and of three: parameters cross as often.
for of in 2 4; do
    relay A
    relay B
    begin A:cpu0,cpu1 B:cpu2
    for rank in $(seq 0 $((of - 1))); do
        worker "$([ "$rank" = 0 ] && echo A || echo B)?$all" "$rank" "$of"
    done
    soon "no step" at_step_or_over 1
    "$bin/shardctl" plan -a "$work/A?$all" --host a:2:1 --host b:1:$((of - 1)) --json >"$work/plan.json" ||
        fail "plan"
    end_same "what crosses, $of workers"
    # The first fill, and what the last step published, if somebody still reads
    is_as_planned a b parameters_bytes B a parameters_in 1
    is_as_planned b a parameters_bytes B a parameters_out 1
    is_as_planned a b parameters_bytes A b parameters_out 1
    is_as_planned b a gradients_bytes B a gradients_out 0
    is_as_planned a b gradients_bytes B a gradients_in 0
    is_as_planned a b gradients_bytes A b gradients_out 0
    planned a b parameters_bytes >>"$work/each_step"
    stop_relays
done
[ "$(sort -u "$work/each_step" | wc -l)" = 1 ] || fail "parameters cross more often for more workers"

# -- Sums of a host ------------------------------------------------------------------------------------------------
# Four micro-batches a group: of one worker on a host, of two, of four, of one here and four there: the same bits,
# and a gradient crosses once for all workers of a host.
plain=$want
# shellcheck disable=SC2119
want=$(in_one_process --accumulate local:4)
[ "$want" != "$plain" ] || fail "micro-batches are summed as if owners did"
# on_each WORKERS_A WORKERS_B: ranks of a first
on_each() {
    local rank here
    relay A
    relay B
    begin A:cpu0,cpu1 B:cpu2
    for rank in $(seq 0 $(($1 + $2 - 1))); do
        here=$([ "$rank" -lt "$1" ] && echo A || echo B)
        LOCAL_WORLD_SIZE=$([ "$here" = A ] && echo "$1" || echo "$2") \
            worker "$here?$all" "$rank" $(($1 + $2)) --accumulate host:4
    done
    soon "no step" at_step_or_over 1
    "$bin/shardctl" plan -a "$work/A?$all" --host "a:2:$1" --host "b:1:$2" --host-sums --json >"$work/plan.json" ||
        fail "plan"
    end_same "$1 workers of a sum together, $2 of b"
    if [ "$2" -gt 0 ]; then
        is_as_planned b a gradients_bytes B a gradients_out 0
        is_as_planned a b gradients_bytes B a gradients_in 0
        planned a b gradients_bytes >>"$work/each_sum"
    fi
    stop_relays
}
on_each 1 1
on_each 2 2
on_each 4 4
on_each 4 0
[ "$(sort -u "$work/each_sum" | wc -l)" = 1 ] || fail "gradients cross more often for more workers"
want=$plain

# -- Hosts that are alike ------------------------------------------------------------------------------------------
# all_bytes in|out: of payload, of the busiest of a and b
all_bytes() {
    local a b
    a=$(($(counted A b "parameters_$1") + $(counted A b "gradients_$1")))
    b=$(($(counted B a "parameters_$1") + $(counted B a "gradients_$1")))
    echo $((a > b ? a : b))
}
# scaled PATH...: a number of the plan
scaled() { python3 -c '
import functools, json, sys
print(functools.reduce(lambda at, key: at[key], sys.argv[2:], json.load(open(sys.argv[1]))["scale"]))
' "$work/plan.json" "$@"; }

on_a=cpu0,cpu1 on_b=cpu2,cpu3
new_cluster "a=$address_A/$on_a" "b=$address_B/$on_b"
relay A
relay B
begin "A:$on_a" "B:$on_b"
for rank in 0 1 2 3; do
    worker "$([ "$rank" -lt 2 ] && echo A || echo B)?$on_a,$on_b" "$rank" 4
done
soon "no step" at_step_or_over 1
"$bin/shardctl" plan -a "$work/A?$on_a,$on_b" --hosts 2 --gpus 2 --json >"$work/plan.json" || fail "plan"
end_same "what crosses, 2 hosts with 2 daemons and workers each"
fill=$(scaled mirror_bytes) # beside the steps' own: a mirror's first fill
for way in in out; do
    one=$(scaled relays "bytes_$way") sum=$(all_bytes "$way")
    if [ "$one" -le 0 ] || [ "$sum" -lt $((one * steps)) ] || [ "$sum" -gt $((one * steps + fill)) ]; then
        fail "$way: $sum bytes in $steps steps, $one a step and $fill once were planned"
    fi
    echo "    $way: $one bytes a step and host, as planned"
done
stop_relays
new_cluster "a=$address_A/cpu0,cpu1" "b=$address_B/cpu2" "c=$address_C"

# -- Refused, by name ---------------------------------------------------------------------------------------------
# refused TEXT HOST ARGUMENTS...
refused() {
    local text=$1 host=$2
    shift 2
    if "$bin/shardd" --relay --cluster "$work/keys/cluster.json" --host "$host" --runtime-dir "$work/C" "$@" \
        >"$work/refusal" 2>&1; then
        fail "not refused: $*"
    fi
    grep -q -- "$text" "$work/refusal" || fail "no '$text' in: $(cat "$work/refusal")"
}
refused "has no host 'x'" c --from x:cpu0
refused "that is this host" c --from c:cpu0
refused "host 'a' has no device 'cpu7' in the cluster file: it has cpu0,cpu1" c --from a:cpu7
refused "host 'c' has no devices\|which devices has it" a --from c
refused "both have a device 'cpu0'" c --from a:cpu0 --device cpu0
no_daemons
relay B --from a:cpu0
soon "its socket" has_devices B cpu0
refused "somebody\|there already\|listens\|another relay" b --from a:cpu0 --runtime-dir "$work/B"
stop_relays
echo "  what does not fit is refused by name"
