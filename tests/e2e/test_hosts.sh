#!/usr/bin/env bash
# Two hosts: daemons on the first, workers on both, relays between them. Every run must end with the
# digest of a training in one process, whatever is killed on the way.
#
#   test_hosts.sh BIN_DIR [STEPS]
#
# What is done is done at a step or after a line of the log, not at a time. Where the run comes to its end
# before this script has done its part, all is begun anew with more steps.
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-100}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/shd-hosts.XXXXXX")

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/hosts.sh
. "$here/../lib/hosts.sh"
trap hosts_clean_up EXIT

start_a() { relay A; }
start_b() { relay B --from a:cpu0,cpu1; }
is_named() { "$bin/shardctl" status -a "$work/A" --json | grep -q '@b"'; }

begin() {
    "$bin/shardctl" down --yes -d "$work/A" >/dev/null 2>&1 || true
    daemons A cpu0,cpu1
    : >"$work/out"
    : >"$work/err"
}

hosts_make
mkdir -m 700 "$work/keys" "$work/A" "$work/B"
"$bin/shardctl" keys new "$work/keys/cluster.json" a=$address_A b=$address_B >/dev/null
# shellcheck disable=SC2119
want=$(in_one_process)
echo "in one process: $want"
start_a
start_b
soon "the relay's sockets" has_devices B cpu0 cpu1

# All workers on the second host, none beside the daemons.
begin
worker B 0 2
worker B 1 2
end_same "both workers away from the daemons"

begin
worker A 0 2
worker B 1 2
end_same "a worker on each host"

begin
worker B 0 2 --elastic --accumulate local:2 --grad-precision bf16
worker B 1 2 --elastic --accumulate local:2 --grad-precision bf16
ranks=$want
want=$(in_one_process --accumulate local:2 --grad-precision bf16)
end_same "elastic workers, local:2, gradients in bf16"
want=$ranks

if hosts_by_six; then
    stop_relays
    mkdir -m 700 "$work/six"
    mv "$work/keys" "$work/four"
    mv "$work/six" "$work/keys"
    "$bin/shardctl" keys new "$work/keys/cluster.json" "a=$six_A" "b=$six_B" >/dev/null
    start_a
    start_b
    soon "the relay's sockets" has_devices B cpu0 cpu1
    six=${six_A#[}
    soon "a relay at its address" logged relay_a.log "listens=.${six%%]*}"
    begin
    worker A 0 2
    worker B 1 2
    end_same "a worker on each host, by IPv6"
    stop_relays
    mv "$work/keys" "$work/six"
    mv "$work/four" "$work/keys"
    start_a
    start_b
    soon "the relay's sockets" has_devices B cpu0 cpu1
else
    echo "  there is no IPv6 here"
fi

# Everything is killed once, at a step. A worker that waits as it computes is slow for as many times as long: not so
# slow that one stopped relay's 15 s outlast what `soon` waits.
begin
worker A 0 2 --slow 4
worker B 1 2 --slow 4
go_on 1
soon "the worker's host in the daemons' status" is_named
kill -KILL "${relays[B]}"
start_b
go_on 2
kill -KILL "${relays[A]}"
start_a
go_on 2
for device in cpu0 cpu1; do
    kill -KILL "$(fuser "$work/A/$device.lock" 2>/dev/null | awk '{print $1}')"
    go_on 2
done
kill -KILL "${workers[1]}" 2>/dev/null || true # gone, if the run is too short
wait "${workers[1]}" 2>/dev/null || true
worker B 1 2 --slow 4
go_on 2
kill -KILL "${relays[A]}" "${relays[B]}"
start_b
start_a
go_on 2
if [ -n "$wire" ]; then
    ip -n "shdA$$" link set "${wires[B]}" down
    sleep 3 # a cut that lasts: nothing is expected of it
    ip -n "shdA$$" link set "${wires[B]}" up
    go_on 2
fi
kill -STOP "${relays[A]}" # its kernel goes on to answer: who waits for it has a deadline
soon "the silence of a stopped relay" logged relay_b.log 'has said nothing for\|has taken nothing for\|no TLS handshake'
kill -CONT "${relays[A]}"
go_on 1
end_same "killed: both relays, daemons, a worker; a relay stopped${wire:+, the wire cut for 3 s}"

# Who has no key of the cluster, or one that was taken out of it, is refused by name.
kill -KILL "${relays[B]}"
cp -r "$work/keys" "$work/others"
rm "$work/others/b.key"
"$bin/shardctl" keys remove "$work/others/cluster.json" b >/dev/null
"$bin/shardctl" keys add "$work/others/cluster.json" b=$address_B >/dev/null
mv "$work/keys" "$work/right"
mv "$work/others" "$work/keys"
rm -f "$work"/B/*
start_b # with a key that the other host does not know: it reads the file as it was
soon "the relay's sockets" has_devices B cpu0 cpu1
mv "$work/keys" "$work/others"
mv "$work/right" "$work/keys"
SHARDD_ADDRESS=$work/B "${on_B[@]}" "$bin/shardctl" digest >"$work/out" 2>"$work/err" &
workers[0]=$!
soon "a refusal" logged relay_a.log 'its key is no host.s of this cluster'
kill -KILL "${workers[0]}"
wait "${workers[0]}" 2>/dev/null || true
workers=()
echo "  a host without a key of the cluster is refused"
