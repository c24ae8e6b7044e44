#!/usr/bin/env bash
# Two hosts: daemons on the first, workers on both, relays between them. Every run must end with the
# digest of a training in one process, whatever is killed on the way.
#
#   test_hosts.sh BIN_DIR [STEPS [tcp|ucx]]
#
# With ucx parameters and gradients cross by UCX, which has TCP between the namespaces.
#
# What is done is done at a step or after a line of the log, not at a time. Where the run comes to its end
# before this script has done its part, all is begun anew with more steps.
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-100}
export bulk=${3:-${bulk:-tcp}}
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

shared() { find /dev/shm -maxdepth 1 -name 'ucx_*' 2>/dev/null | sort; }
before=$(shared)

# A cluster file: keys_new DIRECTORY HOST...
keys_new() {
    local file=$1/cluster.json
    shift
    "$bin/shardctl" keys new "$file" "$@" >/dev/null
    [ "$bulk" = tcp ] || "$bin/shardctl" keys bulk "$file" "$bulk" --not-encrypted
}

# Connections of A's relay to B's beside those to the relays' own port.
beside() { "${on_A[@]}" ss -Htn state established | grep -F 10.77.0.2 | grep -vc ':7100 '; }
is_beside() { [ "$(beside)" -gt 0 ]; }

begin() {
    "$bin/shardctl" down --yes -d "$work/A" >/dev/null 2>&1 || true
    daemons A cpu0,cpu1
    : >"$work/out"
    : >"$work/err"
}

hosts_make
mkdir -m 700 "$work/keys" "$work/A" "$work/B"
keys_new "$work/keys" a=$address_A b=$address_B
# shellcheck disable=SC2119
want=$(in_one_process)
echo "in one process: $want"
# Relays that begin before their network is up.
[ -z "$wire" ] || ip -n "shdA$$" link set "${wires[B]}" down
start_a
start_b
soon "the relay's sockets" has_devices B cpu0 cpu1
soon "a relay of A that listens" logged relay_a.log 'op=start relay=a'
[ -z "$wire" ] || ip -n "shdA$$" link set "${wires[B]}" up

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
    keys_new "$work/keys" "a=$six_A" "b=$six_B"
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
in_time "the worker's host in the daemons' status" is_named
says="\"bulk\":\"tcp, by TLS 1.3\""
[ "$bulk" = tcp ] || says="\"bulk\":\"ucx, not encrypted\""
curl -s --unix-socket "$work/A/relay.status" http://localhost/status | grep -q "$says" || fail "no $says in /status"
says="relay: answers, bulk tcp, by TLS 1.3"
[ "$bulk" = tcp ] || says="relay: answers, bulk ucx, not encrypted"
"$bin/shardctl" doctor -a "$work/A" >"$work/doctor" 2>&1 || true # whatever else it finds
grep -q "$says" "$work/doctor" || fail "no '$says' by shardctl doctor"
if [ -n "$wire" ] && [ "$bulk" = ucx ]; then
    in_time "a connection of UCX" is_beside
elif [ -n "$wire" ] && is_beside; then
    fail "connections beside those of the relays"
fi
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
in_time "the silence of a stopped relay" logged relay_b.log 'has said nothing for\|has taken nothing for\|no TLS handshake'
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

[ "$bulk" = ucx ] || exit 0

# Hosts that do not agree, a host without the library, and a file that does not say that nothing is encrypted.
stop_relays
start_a
soon "a relay of A, which has read the file" [ -S "$work/A/relay.status" ]
rm -r "$work/others"
cp -r "$work/keys" "$work/others"
"$bin/shardctl" keys bulk "$work/others/cluster.json" tcp
mv "$work/keys" "$work/right"
mv "$work/others" "$work/keys"
start_b
soon "the relay's sockets" has_devices B cpu0 cpu1
SHARDD_ADDRESS=$work/B "${on_B[@]}" "$bin/shardctl" digest >"$work/out" 2>"$work/err" &
workers[0]=$!
soon "a refusal by the host with ucx" logged relay_a.log 'another bulk than this host.s, \\*"ucx'
soon "a refusal by the host with tcp" logged relay_b.log 'another bulk than this host.s, \\*"tcp'
kill -KILL "${workers[0]}"
wait "${workers[0]}" 2>/dev/null || true
workers=()
stop_relays
mv "$work/keys" "$work/others"
mv "$work/right" "$work/keys"
echo "  a host with tcp and one with ucx are told so"

mkdir "$work/lib"
: >"$work/lib/libucp.so.0" # no library: the dynamic linker looks no further
LD_LIBRARY_PATH=$work/lib relay B --from a:cpu0,cpu1
soon "an end for want of libucp" is_gone "${relays[B]}"
logged relay_b.log 'bulk .*ucx.* needs libucp.so.0: install libucx0, or write .*bulk.*tcp' || fail "libucp is missing, and it is not said"
relays=()
echo "  without libucp it is said what to install, and what to write"

# refused FILE WORDS: by these words
refused() {
    "$bin/shardctl" keys list "$1" >/dev/null 2>"$work/err" && fail "$1 is taken"
    grep -q -- "$2" "$work/err" || fail "wanted '$2' for $1"
}
at=$work/others/cluster.json
sed 's/"encrypted": false/"encrypted": true/' "$work/keys/cluster.json" >"$at"
refused "$at" 'does not encrypt parameters and gradients: write "encrypted": false'
sed 's/"bulk": "ucx"/"bulk": "tcp"/' "$work/keys/cluster.json" >"$at"
refused "$at" 'encrypted is false, and bulk is "tcp"'
sed 's/"bulk": "ucx"/"bulk": "rdma"/' "$work/keys/cluster.json" >"$at"
refused "$at" "bulk is 'rdma': \"tcp\" or \"ucx\""
"$bin/shardctl" keys bulk "$work/keys/cluster.json" ucx 2>"$work/err" && fail "ucx is taken without --not-encrypted"
grep -q 'say --not-encrypted as well' "$work/err" || fail "ucx is refused without what to say"
echo "  what does not say that nothing is encrypted is refused"
[ "$(shared)" = "$before" ] || fail "relays left memory that they shared: $(shared)"
