#!/usr/bin/env bash
# `shardctl host`: a host with daemons and one with workers alone, as the cluster file says, at two addresses of the
# loopback. Whatever of them is killed, training ends with the digest of one in one process; SIGTERM ends all in order.
#
#   test_host.sh BIN_DIR [STEPS]
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-100}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/shd-host.XXXXXX")

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/hosts.sh
. "$here/../lib/hosts.sh"
trap hosts_clean_up EXIT

# host HOST ARGUMENTS...
host() {
    local host=$1
    shift
    rm -f "$work/$host.address"
    "$bin/shardctl" host --cluster "$work/keys/cluster.json" -d "$work/$host" -t 1 -v "$@" \
        >"$work/$host.address" 2>>"$work/host_${host,,}.log" &
    relays[$host]=$!
    disown
}
# wrong TEXT ARGUMENTS...
wrong() {
    local text=$1
    shift
    if "$bin/shardctl" host "$@" -d "$work/no" >"$work/refusal" 2>&1; then
        fail "not refused: $*"
    fi
    grep -q -- "$text" "$work/refusal" || fail "no '$text' in: $(cat "$work/refusal")"
    [ ! -e "$work/no" ] || fail "it made a directory"
}
pid_in_log() { sed -n "s/.*$2 pid=\([0-9]*\).*/\1/p" "$work/host_$1.log" | tail -n 1; }
relay_pid() { curl -sS --unix-socket "$work/$1/relay.status" http://localhost/status | sed 's/.*"pid":\([0-9]*\).*/\1/'; }
is_another() { [ -n "$(relay_pid "$1" 2>/dev/null)" ] && [ "$(relay_pid "$1")" != "$2" ]; }

mkdir -m 700 "$work/keys"
file=$work/keys/cluster.json
"$bin/shardctl" keys new "$file" a=$address_A b=$address_B >/dev/null
wrong "which cluster" --name a
wrong "no/such.json" --cluster no/such.json --name a
wrong "has no host 'x' (--name)" --cluster "$file" --name x
SLURMD_NODENAME=y wrong "has no host 'y' (\$SLURMD_NODENAME)" --cluster "$file"
wrong "names no devices" --cluster "$file" --name a
rm -r "$work/keys"
mkdir -m 700 "$work/keys"
"$bin/shardctl" keys new "$file" a=$address_A/cpu0,cpu10 b=$address_B c=$address_C >/dev/null
wrong "names 2 devices of host 'a': cpu0,cpu10" --cluster "$file" --name a --daemons 3
wrong "--state 'disk' is neither memory nor file:DIR" --cluster "$file" --name a --state disk
wrong "the directory is not an absolute" --cluster "$file" --name a --snapshots file:here
wrong "starts cpu0, which host 'a' has" --cluster "$file" --name b --daemons 1
if "$bin/shardctl" keys add "$file" d=127.0.0.1:1/cpu0 2>"$work/refusal"; then fail "a device of two hosts"; fi
grep -q "hosts 'a' and 'd' both have a device 'cpu0'" "$work/refusal" || fail "$(cat "$work/refusal")"
[ ! -e "$work/keys/d.key" ] || fail "a key of a host that was refused"
"$bin/shardctl" keys list "$file" >"$work/list"
expect "$work/list" '^a .*\.\.\.  cpu0,cpu10  its private key is here$'
expect "$work/list" '^b .*\.\.\.  -  its private key is here$'
# moved REFUSAL HOST...
moved() {
    if "$bin/shardctl" keys move "$file" "${@:2}" 2>"$work/refusal"; then fail "moved: ${*:2}"; fi
    grep -qF -- "$1" "$work/refusal" || fail "no '$1' in: $(cat "$work/refusal")"
}
moved "there is no host 'd'" b=127.0.0.9:1 d=127.0.0.9:1
moved "address '127.0.0.9' is not HOST:PORT" a=127.0.0.9
moved "keeps its devices" a=127.0.0.9:1/cpu1
moved "no host: NAME=ADDRESS:PORT"
"$bin/shardctl" keys list "$file" | cmp - "$work/list" || fail "a refusal has changed the file"
"$bin/shardctl" keys move "$file" a=127.0.0.9:1
sed -E 's/^(a +)[^ ]+ +/\1127.0.0.9:1 /' "$work/list" | tr -s ' ' >"$work/want"
"$bin/shardctl" keys list "$file" | tr -s ' ' | cmp - "$work/want" || fail "moved: $("$bin/shardctl" keys list "$file")"
"$bin/shardctl" keys move "$file" a=$address_A
"$bin/shardctl" keys list "$file" | cmp - "$work/list" || fail "moved back: $("$bin/shardctl" keys list "$file")"
echo "  what does not fit is refused by name"

# shellcheck disable=SC2119
want=$(in_one_process)
echo "in one process: $want"
# READY=1, as a service manager hears it
python3 -c '
import socket, sys
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind(sys.argv[1])
print("bound", flush=True)
print(s.recv(100).decode(), flush=True)
' "$work/manager" >"$work/heard" &
workers[9]=$!
soon "a service manager" grep -q bound "$work/heard"
SLURMD_NODENAME=a NOTIFY_SOCKET=$work/manager host A
host B --name b
soon "A" is_ready A
soon "B" is_ready B
soon "READY=1" grep -q '^READY=1$' "$work/heard"
wait "${workers[9]}"
unset 'workers[9]'
for host in A B; do
    [ "$(cat "$work/$host.address")" = "export SHARDD_ADDRESS='$work/$host?cpu0,cpu10'" ] ||
        fail "address: $(cat "$work/$host.address")"
done
: >"$work/out"
: >"$work/err"
worker "B?cpu0,cpu10" 0 2 --slow 6
worker "A?cpu0,cpu10" 1 2 --slow 6
go_on 1
for at in A B; do
    pid=$(relay_pid "$at")
    kill -KILL "$pid"
    soon "another relay of $at" is_another "$at" "$pid"
    go_on 2
done
kill -KILL "$(pid_in_log a 'started daemon cpu10')"
soon "its successor" grep -q 'daemon cpu10 .*started again' "$work/host_a.log"
go_on 2
end_same "killed: both relays, a daemon"

# In order, with what goes with them.
for at in B A; do
    kill -TERM "${relays[$at]}"
    soon "the end of $at" is_gone "${relays[$at]}"
done
relays=()
if [ -e "$work/A" ] || [ -e "$work/B" ]; then
    fail "left: $(ls "$work/A" "$work/B")"
fi
sed -n 's/.*daemon \([a-z0-9]*\) (pid [0-9]*) exited with code 0$/\1/p' "$work/host_a.log" >"$work/order"
[ "$(head -n 1 "$work/order")" = relay ] || fail "order: $(cat "$work/order")"
[ "$(wc -l <"$work/order")" = 3 ] || fail "order: $(cat "$work/order")"
echo "  SIGTERM ends the relay, then the daemons"

# Drained: what is saved goes, and so does the relay that has nobody left. On a disk, as they may be.
host A --name a --state file:/var/tmp --publish file:/var/tmp --snapshots file:/var/tmp
soon "A" is_ready A
for device in cpu0 cpu10; do
    curl -sS --unix-socket "$work/A/$device.status" http://localhost/status >"$work/status"
    expect "$work/status" '"state": *"file:/var/tmp"'
    expect "$work/status" '"publish": *"file:/var/tmp"'
    expect "$work/status" '"snapshots": *"file:/var/tmp"'
done
: >"$work/out"
worker "A?cpu0,cpu10" 0 1
end_same "a worker beside the daemons"
"$bin/shardctl" drain -a "$work/A?cpu0,cpu10" --checkpoint "$work/saved" >"$work/drained" 2>&1 || fail "$(cat "$work/drained")"
soon "the end of A" is_gone "${relays[A]}"
relays=()
echo "  drained, the relay ends with the last daemon"

# A host is lost, with all that its processes had: when it is back all go back to the last checkpoint, whose steps are
# computed again. Workers are started again, as an engine does. Once it is the host that saves, once another.
rm -r "$work/keys"
mkdir -m 700 "$work/keys"
"$bin/shardctl" keys new "$file" a=$address_A/cpu2,cpu0 b=$address_B/cpu1 >/dev/null
lose() {
    local keeper=${relays[$1]}
    kill -STOP "$keeper"
    # shellcheck disable=SC2046
    kill -KILL "$keeper" $(pgrep -P "$keeper")
    soon "the end of $1" is_gone "$keeper"
    rm -r "${work:?}/$1"
}
saving() { host "$1" --name "${1,,}" --resume "$work/lost" --checkpoint-every 5 --keep 3; }
restored() { [ "$(grep -c "restored $work/lost/step-0*[1-9]" "$work/host_a.log")" -ge "$1" ]; }
# begin_both SLOW: slow ones are not at their end before they are to lose a host
begin_both() {
    worker "B?cpu0,cpu1,cpu2" 0 2 --elastic --slow "$1"
    worker "A?cpu0,cpu1,cpu2" 1 2 --elastic --slow "$1"
}
saving A
saving B
soon "A" is_ready A
soon "B" is_ready B
: >"$work/out"
begin_both 60
soon "a checkpoint" [ -e "$work/lost/LATEST" ]
for at in A B; do
    lose "$at"
    saving "$at"
    soon "a restore after the loss of $at" restored "$([ "$at" = A ] && echo 1 || echo 2)"
    for pid in "${workers[@]}"; do
        ! wait "$pid" || fail "a worker went on without the state of $at"
    done
    expect "$work/err" "daemon cpu. .*lost"
    begin_both "$([ "$at" = A ] && echo 60 || echo 3)"
    go_on 6
done
end_same "lost and back: the host that saves, and another"
for at in B A; do
    kill -TERM "${relays[$at]}"
    soon "the end of $at" is_gone "${relays[$at]}"
done
relays=()
