#!/usr/bin/env bash
# A host with replicas that was lost is started again, and filled while training goes on: workers go along without a
# restart, it holds all slices alone when the other host is lost, and that one is filled in turn; with the digest of a
# run in one process. Whoever fills it may be killed at any point, and fills it again.
#
#   test_hosts_refill.sh BIN_DIR [STEPS]
set -euo pipefail

bin=$(cd "$1" && pwd)
steps=${2:-160}
here=$(cd "$(dirname "$0")" && pwd)
# In memory: who fills a host, and views, wait for no disk then.
work=$(mktemp -d /dev/shm/shd-refill.XXXXXX 2>/dev/null || mktemp -d "${TMPDIR:-/tmp}/shd-refill.XXXXXX")

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/hosts.sh
. "$here/../lib/hosts.sh"
trap hosts_clean_up EXIT
export SHARDD_REPLICA_PATIENCE=2

# host HOST OPTIONS...
host() {
    local host=$1
    local -n on=on_$host
    shift
    rm -f "$work/$host.address"
    "${on[@]}" "$bin/shardctl" host --cluster "$work/keys/cluster.json" --name "${host,,}" -d "$work/$host" -t 1 --files \
        --replicas 2 --arbiter "file:$work/arbiter" "$@" >"$work/$host.address" 2>>"$work/host_${host,,}.log" &
    relays[$host]=$!
    disown
    soon "$host" is_ready "$host"
}

# lose HOST [WORKER]: every process of it, at once, and its worker.
lose() {
    local keeper=${relays[$1]} worker=
    [ $# = 1 ] || worker=${workers[$2]}
    kill -STOP "$keeper"
    # shellcheck disable=SC2046,SC2086
    kill -KILL "$keeper" $worker $(pgrep -P "$keeper")
    [ -z "$worker" ] || wait "$worker" 2>/dev/null || true
    [ -z "$worker" ] || unset "workers[$2]"
    rm -f "$work/err_${1,,}"
    unset "relays[$1]"
    soon "the end of $1" is_gone "$keeper"
    rm -rf "${work:?}/$1" # a host that begins anew has nothing
}
# refill HOST BY [ENVIRONMENT...]: as seen from BY.
refill() {
    local host=$1 by=$2
    local -n on=on_$by
    shift 2
    env "$@" "${on[@]}" "$bin/shardctl" hosts -a "$work/$by" --in "${host,,}" --by "$work/shared" >>"$work/refill.log" 2>&1
}
state_of() { "$bin/shardctl" hosts -a "$work/$2" | awk -v host="${1,,}" '$1 == host { print $2 }'; }
# These end with the run as well: go_on begins anew then, with more steps.
is_out() { is_over || [ "$(state_of "$1" "$2")" = out ]; }
is_in() { is_over || [ "$(state_of "$1" "$2")" = in ]; }
begin() {
    rm -rf "$work/arbiter" "$work/A" "$work/B" "$work/shared"
    mkdir -m 700 "$work/arbiter" "$work/shared"
    : >"$work/out"
    rm -f "$work"/err*
    host A
    host B
    all=$(pairs A)
    [ "$all" = "$(pairs B)" ] || fail "pairs: $(cat "$work"/?.address)"
}

hosts_make
mkdir -m 700 "$work/keys"
"$bin/shardctl" keys new "$work/keys/cluster.json" "a=$address_A/cpu0,cpu1" "b=$address_B/cpu2,cpu3" >/dev/null
# shellcheck disable=SC2119
want=$(in_one_process)
echo "in one process: $want"

# works HOST: an elastic worker there. All of them are seen: each is the first of one.
works() {
    local -n on=on_$1
    # shellcheck disable=SC2086 # options are words
    SHARDD_ADDRESS="$work/$1?$all" RANK=0 WORLD_SIZE=1 "${on[@]}" "$bin/shd-gpt" --steps "$steps" $model_words --elastic \
        --slow 20 >>"$work/out" 2>>"$work/err_${1,,}" &
    workers[$1]=$!
}
# joined HOST TIMES: the worker there has gone along so often.
joined() { is_over || [ "$(grep -c "is in again, as the replica" "$work/err_${1,,}")" -ge $((2 * $2)) ]; }
goes_along() { joined "$1" 1; }
# has_begun TIMES: so many workers have opened the model.
has_begun() { is_over || [ "$(grep -c "^activations" "$work/out")" -ge "$1" ]; }
# filled HOST BY: it is started, and filled, as who works on BY sees.
filled() {
    host "$1"
    refill "$1" "$2" || fail "filling $1: $(cat "$work/refill.log")"
    soon "the worker of $2 goes along" joined "$2" 1
    [ "$(state_of "$1" "$2")" = in ] || fail "$1 is $(state_of "$1" "$2")"
    [ -z "$(ls -A "$work/shared")" ] || fail "left: $(ls "$work/shared")"
    go_on 3
}
# same_bits: both of each pair.
same_bits() {
    local first second
    first=$(digest_of "A?cpu0,cpu3")
    second=$(digest_of "A?cpu2,cpu1")
    if [ -z "$first" ] || [ "$first" != "$second" ]; then
        fail "the pairs differ: $first, $second"
    fi
    echo "  both of each pair have the same bits"
}

# Training goes on without b, which is there again, with nothing.
begin_without_b() {
    begin
    works A
    go_on 3
    lose B
    soon "b is out" is_out B A
    host B
}

begin
works A
works B
go_on 5
refill B A && fail "a host that is in was filled"
grep -q "host 'b' is in, in view 0" "$work/refill.log" || fail "$(cat "$work/refill.log")"
lose B B
soon "b is out" is_out B A
go_on 3
filled B A
works B # who comes later
go_on 3
lose A A
soon "a is out" is_out A B
go_on 3
filled A B
works A
go_on 3
end_same "b filled, a lost, a filled"
same_bits
lose B
rm "$work/out"
works A
end_same "who works with a alone"
end_hosts

# A worker that began without b hears of nothing until b is filled and a is lost: it is the only one left, and takes b in.
begin_without_b
works B
soon "a worker without b" has_begun 2
go_on 3
kill -STOP "${workers[B]}"
refill B A || fail "filling b: $(cat "$work/refill.log")"
soon "the worker of a goes along" goes_along A
go_on 3
lose A A
kill -CONT "${workers[B]}"
soon "the worker of b goes along" joined B 1
go_on 3
end_same "b filled and a lost unseen"
end_hosts

# Of a step that never comes, while who fills b stands still. It stays, also at b, which has another relay.
set_meanwhile() {
    local filler
    lose B
    soon "b is out" is_out B A
    host B
    refill B A 'SHARDD_FAIL=refill:restored!' &
    filler=$!
    soon "who fills b stands still" stands_still
    "${on_A[@]}" "$bin/shardctl" set -a "$work/A?$all" clip_norm=1 --at 9000 >/dev/null || fail "nothing was set"
    kill -CONT "$standing"
    wait "$filler" || fail "filling b: $(cat "$work/refill.log")"
    go_on 2
    set_at "A?cpu0,cpu3"
    set_at "A?cpu2,cpu1"
    echo "  what was set meanwhile stays"
}
stands_still() {
    standing=$(pgrep -f "shardctl hosts -a $work/A --in b") && [ "$(ps -o state= -p "$standing")" = T ]
}
set_at() {
    local got
    got=$("${on_A[@]}" "$bin/shardctl" set -a "$work/$1" --show)
    grep -q "clip_norm=1  waits for step 9000" <<<"$got" || fail "set at $1: $got"
}

# By itself; and a host that is back before it was missed is out first, for it has lost what it had.
begin
works A
go_on 3
lose B
host B --refill "$work/shared"
soon "b is filled" goes_along A
soon "b is in" is_in B A
go_on 3
end_same "b filled by itself"
same_bits
end_hosts

# Killed at each point of it, and done again; where the host is in by then, those who go along wait for it, or go on
# without it. Fail points are in builds for tests alone.
if grep -q refill:claimed "$bin/shardctl"; then
    begin
    works A
    go_on 3
    for point in refill:saved refill:restored refill:claimed refill:gone refill:followed; do
        lose B
        soon "b is out" is_out B A
        host B
        refill B A SHARDD_FAIL=$point && fail "it was not killed at $point"
        case $point in
        refill:saved | refill:restored) [ "$(state_of B A)" = out ] ;;
        *) [ "$(state_of B A)" = filling ] ;;
        esac || fail "killed at $point, b is $(state_of B A)"
        [ $point = refill:gone ] || go_on 1
        refill B A || fail "filling b after $point: $(cat "$work/refill.log")"
        [ "$(state_of B A)" = in ] || fail "b is $(state_of B A)"
        go_on 2
        echo "  killed at $point, and done again"
    done
    set_meanwhile
    end_same "who filled b was killed"
    same_bits
    end_hosts

    # Nobody does it again: who waits for the rewind puts the host out.
    begin_without_b
    refill B A SHARDD_FAIL=refill:gone && fail "it was not killed"
    soon "b is out again" is_out B A
    go_on 3
    end_same "who filled b was killed, and nobody fills it again"
    end_hosts
fi
