#!/usr/bin/env bash
# A model's owners go from the first of two hosts to both, and to the second alone, while a worker on each trains it:
# they go along without a restart, through relays, to the digest of a run in one process.
#
#   test_hosts_reshard.sh BIN_DIR [STEPS]
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

# host HOST
host() {
    local host=$1
    local -n on=on_$host
    rm -f "$work/$host.address"
    "${on[@]}" "$bin/shardctl" host --cluster "$work/keys/cluster.json" --name "${host,,}" -d "$work/$host" -t 1 --files \
        >"$work/$host.address" 2>>"$work/host_${host,,}.log" &
    relays[$host]=$!
    disown
}
# moves HOST FROM TO: as seen from HOST.
moves() {
    local -n on=on_$1
    "${on[@]}" "$bin/shardctl" reshard -a "$work/$1?$2" --to "$3" --by "$work/shared" >>"$work/reshard.log" 2>&1 ||
        fail "$2 to $3: $(cat "$work/reshard.log")"
}
gone() { is_over || [ "$(grep -c 'goes along' "$work/err")" -ge "$1" ]; }

hosts_make
mkdir -m 700 "$work/keys" "$work/A" "$work/B" "$work/shared"
"$bin/shardctl" keys new "$work/keys/cluster.json" "a=$address_A/cpu0,cpu1" "b=$address_B/cpu2" >/dev/null
# shellcheck disable=SC2119
want=$(in_one_process)
echo "in one process: $want"
host A
host B
soon "all daemons at A" has_devices A cpu0 cpu1 cpu2
soon "all daemons at B" has_devices B cpu0 cpu1 cpu2
: >"$work/out"
: >"$work/err"
worker 'A?cpu0,cpu1' 0 2
worker 'B?cpu0,cpu1' 1 2
soon "a step" at_step_or_over 3
moves A cpu0,cpu1 cpu0,cpu1,cpu2
soon "both at three" gone 2
moves B cpu0,cpu1,cpu2 cpu2
soon "both at one" gone 4
! is_over || fail "all steps were done before the end"
end_same "from one host to two, and to the other"
