#!/usr/bin/env bash
# Two hosts with owners and workers on each, and parameters that travel in codes. Runs must end with the digest of
# a training in one process, with relays and daemons killed, too; what crossed is what `shardctl plan` says, and a
# half or a quarter of what it is without.
#
#   test_hosts_codec.sh BIN_DIR [STEPS]
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-40}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/shd-hosts.XXXXXX")

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/hosts.sh
. "$here/../lib/hosts.sh"
trap hosts_clean_up EXIT

all=cpu0,cpu1,cpu2

relay_a() { relay A --device cpu0,cpu1 --from b:cpu2; }
relay_b() { relay B --device cpu2 --from a:cpu0,cpu1; }

begin() {
    local host
    for host in A B; do
        "$bin/shardctl" down --yes -d "$work/$host" >/dev/null 2>&1 || true
    done
    stop_relays # what they count is of this run
    relay_a
    relay_b
    daemons A cpu0,cpu1
    daemons B cpu2
    for host in A B; do
        soon "the sockets of $all on $host" has_devices "$host" cpu0 cpu1 cpu2
    done
    : >"$work/out"
    : >"$work/err"
}

# run_codec CODEC OPTIONS...
run_codec() {
    local options=(--precision bf16 --codec "$@")
    want=$(in_one_process "${options[@]}")
    begin
    worker "A?$all" 0 2 "${options[@]}"
    worker "B?$all" 1 2 "${options[@]}"
    soon "no step" at_step_or_over 1 # and not at the end, for the plan's session would fill a mirror of its own
    "$bin/shardctl" plan -a "$work/A?$all" --host a:2:1 --host b:1:1 --json >"$work/plan.json" || fail "plan"
    end_same "owners and workers on both, codec $*"
    is_as_planned a b parameters_bytes B a parameters_in 1
    is_as_planned b a parameters_bytes B a parameters_out 1
    is_as_planned a b parameters_bytes A b parameters_out 1
    is_as_planned b a gradients_bytes B a gradients_out 0
    is_as_planned a b gradients_bytes A b gradients_out 0
    crossing[$1]=$(planned a b parameters_bytes)
    grads[${3-none}]=$(planned a b gradients_bytes)
}

# least HUNDREDTHS CODEC: so many of what crosses without, or fewer.
least() {
    [ $((crossing[$2] * 100)) -le $((crossing[none] * $1)) ] ||
        fail "codec $2: ${crossing[$2]} bytes a step, without it are ${crossing[none]}"
}

declare -A crossing=() grads=()
hosts_make
mkdir -m 700 "$work/keys" "$work/A" "$work/B"
"$bin/shardctl" keys new "$work/keys/cluster.json" "a=$address_A" "b=$address_B" >/dev/null
run_codec none
run_codec int8 --grad-codec int8
run_codec int4
least 60 int8
least 40 int4
[ $((grads[int8] * 100)) -le $((grads[none] * 30)) ] ||
    fail "gradients in int8: ${grads[int8]} bytes a step, in fp32 are ${grads[none]}"

want=$(in_one_process --precision bf16 --codec fp8 --grad-codec int8)
begin
worker "A?$all" 0 2 --precision bf16 --codec fp8 --grad-codec int8 --slow 6
worker "B?$all" 1 2 --precision bf16 --codec fp8 --grad-codec int8 --slow 6
go_on 2
kill -KILL "${relays[B]}"
relay_b
go_on 2
for at in A/cpu1 B/cpu2; do
    kill -KILL "$(fuser "$work/$at.lock" 2>/dev/null | awk '{print $1}')"
    go_on 2
done
kill -KILL "${relays[A]}"
relay_a
go_on 2
end_same "codec fp8, gradients in int8, both relays and a daemon on each host killed"
