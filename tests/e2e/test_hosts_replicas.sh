#!/usr/bin/env bash
# Replicas: each slice on two hosts. A host is lost with all its processes, the wire between them is cut, for a while and
# for good, the arbiter is away: what is left of the workers goes on, with the digest of a run in one process, and no
# checkpoint is read.
#
#   test_hosts_replicas.sh BIN_DIR [STEPS]
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-100}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/shd-replicas.XXXXXX")

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/hosts.sh
. "$here/../lib/hosts.sh"
trap hosts_clean_up EXIT
export SHARDD_REPLICA_PATIENCE=2

# host HOST
host() {
    local host=$1
    local -n on=on_$host
    rm -f "$work/$host.address"
    "${on[@]}" "$bin/shardctl" host --cluster "$work/keys/cluster.json" --name "${host,,}" -d "$work/$host" -t 1 \
        --replicas 2 --arbiter "file:$work/arbiter" >"$work/$host.address" 2>>"$work/host_${host,,}.log" &
    relays[$host]=$!
    disown
}

# lose HOST: every process of it, at once.
lose() {
    local keeper=${relays[$1]} rank=$2
    kill -STOP "$keeper"
    # shellcheck disable=SC2046
    kill -KILL "$keeper" "${workers[$rank]}" $(pgrep -P "$keeper")
    wait "${workers[$rank]}" 2>/dev/null || true
    unset "workers[$rank]" "relays[$1]"
    soon "the end of $1" is_gone "$keeper"
}
begin() {
    rm -rf "$work/arbiter" "$work/A" "$work/B"
    mkdir -m 700 "$work/arbiter"
    : >"$work/out"
    : >"$work/err"
    host A
    host B
    soon "A" is_ready A
    soon "B" is_ready B
    [ "$(pairs A)" = "$(pairs B)" ] || fail "pairs: $(cat "$work"/?.address)"
}
# both FIRST SECOND SLOW: elastic workers on each host; rank 0 is seen.
both() {
    worker "$1?$(pairs A)" 0 2 --elastic --slow "$3"
    worker "$2?$(pairs A)" 1 2 --elastic --slow "$3"
}
views() { find "$work/arbiter" -type f | wc -l; }
all_in() { [ "$(views)" = 0 ] || fail "somebody is out: $(ls "$work/arbiter")"; }

hosts_make
mkdir -m 700 "$work/keys"
"$bin/shardctl" keys new "$work/keys/cluster.json" "a=$address_A/cpu0,cpu1" "b=$address_B/cpu2,cpu3" >/dev/null
# shellcheck disable=SC2119
want=$(in_one_process)
echo "in one process: $want"

begin
echo "pairs: $(pairs A)"
both A B 2
go_on 2
for device in cpu0 cpu3; do # daemons that come back are no reason to put anybody out
    kill -KILL "$(fuser "$work"/?/$device.lock 2>/dev/null | awk '{print $1}')"
    go_on 3
done
if [ -n "$wire" ]; then
    ip -n "shdA$$" link set "${wires[B]}" down
    sleep 1 # a cut that lasts: nothing is expected of it
    ip -n "shdA$$" link set "${wires[B]}" up
    go_on 2
fi
end_same "a daemon of each host killed${wire:+, the wire cut for 1 s}"
all_in
first=$(digest_of "A?cpu0,cpu3")
second=$(digest_of "A?cpu2,cpu1")
if [ -z "$first" ] || [ "$first" != "$second" ]; then fail "the pairs differ: $first, $second"; fi
echo "  both of each pair have the same bits"
end_hosts

# What crosses is what is planned, twice what it is without replicas.
begin
worker "A?$(pairs A)" 0 2 --slow 2
worker "B?$(pairs B)" 1 2 --slow 2
soon "no step" at_step_or_over 1
"$bin/shardctl" plan -a "$work/A?$(pairs A)" --host a:2:1 --host b:2:1 --replicas 2 --json >"$work/plan.json" || fail "plan"
end_same "undisturbed"
for way in "a b B A" "b a A B"; do
    read -r from to there here <<<"$way"
    is_as_planned "$from" "$to" parameters_bytes "$there" "$from" parameters_in 1
    is_as_planned "$from" "$to" gradients_bytes "$there" "$from" gradients_in 0
    is_as_planned "$from" "$to" gradients_bytes "$here" "$to" gradients_out 0
done
end_hosts

for lost in B A; do
    left=$([ "$lost" = A ] && echo B || echo A)
    begin
    both "$left" "$lost" 2
    go_on 5
    lose "$lost" 1
    soon "$lost is out" grep -q "shd: host ${lost,,} is out (view 1)" "$work/err"
    go_on 3
    end_same "host ${lost,,} lost"
    [ "$(views)" = 1 ] || fail "views: $(ls "$work/arbiter")"
    # Who comes later reads who is out.
    : >"$work/out"
    worker "$left?$(pairs "$left")" 0 1
    end_same "another worker, of the host that is left"
    end_hosts
done

# Without the arbiter nobody is put out, and nobody goes on alone.
begin
both A B 2
go_on 5
mv "$work/arbiter" "$work/away"
lose B 1
soon "a line about the arbiter" grep -q "the arbiter of the replicas cannot be asked" "$work/err"
is_over && fail "it went on"
mv "$work/away" "$work/arbiter"
go_on 3
end_same "host b lost while the arbiter was away"
end_hosts

if [ -n "$wire" ]; then
    begin
    both A B 2
    go_on 5
    ip -n "shdA$$" link set "${wires[B]}" down
    soon "one side is out" grep -q "shd: host . is out (view 1)" "$work/err"
    out=$(sed -n 's/.*shd: host \(.\) is out (view 1).*/\1/p' "$work/err" | sort -u)
    case $out in
    a) winner=1 ;;
    b) winner=0 ;;
    *) fail "out: $out" ;;
    esac
    wait "${workers[$winner]}" || fail "the side that was left ended with $?"
    grep -qxF "$want" "$work/out" "$work/other" 2>/dev/null || [ "$winner" = 1 ] || fail "$(tail -n 1 "$work/out")"
    kill -0 "${workers[$((1 - winner))]}" || fail "the other side did not wait"
    ip -n "shdA$$" link set "${wires[B]}" up
    wait "${workers[$((1 - winner))]}" || fail "the other side ended with $?"
    workers=()
    [ "$(tail -n 1 "$work/out")" = "$want" ] || fail "wanted '$want', got '$(tail -n 1 "$work/out")'"
    [ "$(views)" = 1 ] || fail "views: $(ls "$work/arbiter")"
    echo "  the wire cut: the side of $([ "$out" = a ] && echo b || echo a) went on, the other one when it was mended: same digest"
    end_hosts
fi
