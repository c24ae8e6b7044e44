#!/usr/bin/env bash
# Two hosts: daemons on the first, workers on both, relays between them. Every run must end with the
# digest of a training in one process, whatever is killed on the way.
#
#   test_hosts.sh BIN_DIR [STEPS]
#
# The hosts are two network namespaces with a wire between them, which can be cut; where none can be made
# (that takes root) they are two addresses of the loopback, and what needs a wire is left out, by name.
# What is done is done at a step or after a line of the log, not at a time. Where the run comes to its end
# before this script has done its part, all is begun anew with more steps.
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-80}
here=$(cd "$(dirname "$0")" && pwd)
model="--steps $steps --layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 8 --threads 1
       --sample 0 --eval-every 0 --log-every 1"
work=$(mktemp -d "${TMPDIR:-/tmp}/shd-hosts.XXXXXX")
on_a=() on_b=() wire=
address_a=127.$((1 + $$ / 65536 % 200)).$(($$ / 256 % 256)).$(($$ % 256)):7181 address_b=127.0.0.1:7182
relay_a='' relay_b=''
worker_a='' worker_b=''

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"

fail() {
    echo "  FAILED: $*"
    tail -n 5 "$work"/*.log "$work"/out "$work"/err 2>/dev/null | sed 's/^/    /'
    exit 1
}

# Only what was started here.
clean_up() {
    local pid
    for pid in $worker_a $worker_b $relay_a $relay_b; do
        kill -KILL "$pid" 2>/dev/null || true
    done
    "$bin/shardctl" down --yes -d "$work/A" >/dev/null 2>&1 || true
    if [ -n "$wire" ]; then
        ip netns del "shdA$$" || true
        ip netns del "shdB$$" || true
    fi
    rm -rf "$work"
}
trap clean_up EXIT

make_hosts() {
    if ! ip netns add "shdA$$" 2>/dev/null; then
        echo "no network namespace can be made here: two addresses of the loopback, no wire to cut"
        return
    fi
    wire=shdva$$
    ip netns add "shdB$$"
    ip link add "$wire" netns "shdA$$" type veth peer name "shdvb$$" netns "shdB$$"
    ip -n "shdA$$" addr add 10.77.0.1/24 dev "$wire"
    ip -n "shdB$$" addr add 10.77.0.2/24 dev "shdvb$$"
    ip -n "shdA$$" link set lo up
    ip -n "shdB$$" link set lo up
    ip -n "shdA$$" link set "$wire" up
    ip -n "shdB$$" link set "shdvb$$" up
    on_a=(ip netns exec "shdA$$")
    on_b=(ip netns exec "shdB$$")
    address_a=10.77.0.1:7100 address_b=10.77.0.2:7100
}

# The pids are those of the relays: `ip netns exec` becomes them.
start_a() {
    "${on_a[@]}" "$bin/shardd" --relay --cluster "$work/keys/cluster.json" --host a --runtime-dir "$work/A" \
        >>"$work/relay_a.log" 2>&1 &
    relay_a=$!
    disown
}
start_b() {
    "${on_b[@]}" "$bin/shardd" --relay --cluster "$work/keys/cluster.json" --host b --from a \
        --device cpu0,cpu1 --runtime-dir "$work/B" >>"$work/relay_b.log" 2>&1 &
    relay_b=$!
    disown
}
has_sockets() { [ -S "$work/B/cpu0.sock" ] && [ -S "$work/B/cpu1.sock" ]; }
is_gone() { ! kill -0 "$1" 2>/dev/null; }
is_named() { "$bin/shardctl" status -a "$work/A" --json | grep -q '@b"'; }
logged() { grep -q -- "$2" "$work/$1"; }

# What is seen of a run: rank 0's lines, whichever host it is on.
at_step() { [ "$(sed -n 's|^step \([0-9]*\)/.*|\1|p' "$work/out" | tail -n 1)" -ge "$1" ] 2>/dev/null; }
now_at() { sed -n 's|^step \([0-9]*\)/.*|\1|p' "$work/out" | tail -n 1; }
is_over() { grep -q '^digest ' "$work/out"; }
at_step_or_over() { at_step "$1" || is_over; }

go_on() {
    local to
    echo "    step $(now_at) ($SECONDS s)"
    to=$(($(now_at) + $1))
    soon "no step $to" at_step_or_over "$to"
    if is_over; then
        [ "$steps" -lt 5000 ] || fail "the run is too short"
        echo "the run is too short"
        clean_up
        exec "$0" "$bin" $((3 * steps))
    fi
}

# worker HOST RANK OPTIONS...
worker() {
    local host=$1 rank=$2 on=()
    shift 2
    if [ "$host" = A ]; then on=("${on_a[@]}"); else on=("${on_b[@]}"); fi
    # shellcheck disable=SC2086 # options are words
    SHARDD_ADDRESS=$work/$host RANK=$rank WORLD_SIZE=2 "${on[@]}" "$bin/shd-gpt" $model "$@" \
        >>"$work/$([ "$rank" = 0 ] && echo out || echo other)" 2>>"$work/err" &
}

begin() {
    "$bin/shardctl" down --yes -d "$work/A" >/dev/null 2>&1 || true
    "${on_a[@]}" "$bin/shardctl" up -n 2 -t 1 -d "$work/A" --watchdog 0 >/dev/null 2>>"$work/up.log" || fail "up"
    : >"$work/out"
    : >"$work/err"
}

# end_same WHAT: both workers end well, with the digest $want.
end_same() {
    local code=0
    wait "$worker_a" || code=$?
    wait "$worker_b" || code=$?
    worker_a='' worker_b=''
    [ "$code" = 0 ] || fail "$1: a worker ended with $code"
    [ "$(tail -n 1 "$work/out")" = "$want" ] || fail "$1: wanted '$want', got '$(tail -n 1 "$work/out")'"
    echo "  $1: same digest ($SECONDS s)"
}

make_hosts
mkdir -m 700 "$work/keys" "$work/A" "$work/B"
"$bin/shardctl" keys new "$work/keys/cluster.json" a=$address_a b=$address_b >/dev/null
# shellcheck disable=SC2086
"$bin/shd-gpt" --standalone $model >"$work/out" 2>"$work/err" || fail "the run in one process"
want=$(tail -n 1 "$work/out")
echo "in one process: $want"
start_a
start_b
soon "the relay's sockets" has_sockets

# All workers on the second host, none beside the daemons.
begin
worker B 0 && worker_a=$!
worker B 1 && worker_b=$!
end_same "both workers away from the daemons"

begin
worker A 0 && worker_a=$!
worker B 1 && worker_b=$!
end_same "a worker on each host"

begin
worker B 0 --elastic --accumulate local:2 --grad-precision bf16 && worker_a=$!
worker B 1 --elastic --accumulate local:2 --grad-precision bf16 && worker_b=$!
wait "$worker_a" "$worker_b" || fail "elastic workers"
far=$(tail -n 1 "$work/out")
# shellcheck disable=SC2086
"$bin/shd-gpt" --standalone $model --accumulate local:2 --grad-precision bf16 >"$work/out" 2>"$work/err"
[ "$far" = "$(tail -n 1 "$work/out")" ] || fail "elastic, local:2, bf16: '$far', not '$(tail -n 1 "$work/out")'"
echo "  elastic workers, local:2, gradients in bf16: same digest"

# Everything is killed once, at a step.
begin
worker A 0 --slow 12 && worker_a=$!
worker B 1 --slow 12 && worker_b=$!
go_on 1
soon "the worker's host in the daemons' status" is_named
kill -KILL "$relay_b"
start_b
go_on 2
kill -KILL "$relay_a"
start_a
go_on 2
for device in cpu0 cpu1; do
    kill -KILL "$(fuser "$work/A/$device.lock" 2>/dev/null | awk '{print $1}')"
    go_on 2
done
kill -KILL "$worker_b" 2>/dev/null || true # gone, if the run is too short
wait "$worker_b" 2>/dev/null || true
worker B 1 --slow 12 && worker_b=$!
go_on 2
kill -KILL "$relay_a" "$relay_b"
start_b
start_a
go_on 2
if [ -n "$wire" ]; then
    ip -n "shdA$$" link set "$wire" down
    sleep 3 # a cut that lasts: nothing is expected of it
    ip -n "shdA$$" link set "$wire" up
    go_on 2
fi
kill -STOP "$relay_a" # its kernel goes on to answer: who waits for it has a deadline
soon "the silence of a stopped relay" logged relay_b.log 'has said nothing for\|has taken nothing for\|no TLS handshake'
kill -CONT "$relay_a"
go_on 1
end_same "killed: both relays, daemons, a worker; a relay stopped${wire:+, the wire cut for 3 s}"

# Who has no key of the cluster, or one that was taken out of it, is refused by name.
kill -KILL "$relay_b"
cp -r "$work/keys" "$work/others"
rm "$work/others/b.key"
"$bin/shardctl" keys remove "$work/others/cluster.json" b >/dev/null
"$bin/shardctl" keys add "$work/others/cluster.json" b=$address_b >/dev/null
mv "$work/keys" "$work/right"
mv "$work/others" "$work/keys"
rm -f "$work"/B/*
start_b # with a key that the other host does not know: it reads the file as it was
soon "the relay's sockets" has_sockets
mv "$work/keys" "$work/others"
mv "$work/right" "$work/keys"
SHARDD_ADDRESS=$work/B "${on_b[@]}" "$bin/shardctl" digest >"$work/out" 2>"$work/err" &
worker_a=$!
soon "a refusal" logged relay_a.log 'its key is no host.s of this cluster'
kill -KILL "$worker_a"
wait "$worker_a" 2>/dev/null || true
worker_a=''
echo "  a host without a key of the cluster is refused"
