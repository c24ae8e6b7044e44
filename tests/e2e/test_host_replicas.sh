#!/usr/bin/env bash
# `shardctl host --replicas 2` and `shardctl hosts`: two hosts with daemons and one with workers alone, at addresses of
# the loopback, say the same pairs and the same replicas.json; a host that is put out is out for all of them.
#
#   test_host_replicas.sh BIN_DIR
set -euo pipefail

bin=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d "${TMPDIR:-/tmp}/shd-repl.XXXXXX")

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/hosts.sh
. "$here/../lib/hosts.sh"
# In memory, where there is no disk to wait for: what asks an arbiter waits 2 s.
shared=$(mktemp -d /dev/shm/shd-repl.XXXXXX 2>/dev/null || mktemp -d)
trap 'hosts_clean_up; rm -rf "$shared"' EXIT

file=$work/keys/cluster.json
arbiter=$shared/arbiter
# cluster HOST=ADDRESS:PORT/DEVICES...
cluster() {
    rm -rf "$work/keys"
    mkdir -m 700 "$work/keys"
    "$bin/shardctl" keys new "$file" "$@" >/dev/null
}
# host HOST ARGUMENTS...
host() {
    local host=$1
    shift
    rm -f "$work/$host.address"
    "$bin/shardctl" host --cluster "$file" --name "${host,,}" -d "$work/$host" -t 1 -v "$@" \
        >"$work/$host.address" 2>>"$work/host_${host,,}.log" &
    relays[$host]=$!
    disown
}
twice() { host "$1" --replicas 2 --arbiter "file:$arbiter" "${@:2}"; }
# wrong TEXT ARGUMENTS...
wrong() {
    local text=$1
    shift
    if "$bin/shardctl" host --cluster "$file" -d "$work/no" "$@" >"$work/refusal" 2>&1; then
        fail "not refused: $*"
    fi
    grep -qF -- "$text" "$work/refusal" || fail "no '$text' in: $(cat "$work/refusal")"
    [ ! -e "$work/no" ] || fail "it left a directory"
}
# hosts HOST ARGUMENTS...: the verb, to $work/hosts
hosts() { "$bin/shardctl" hosts -a "$work/$1" "${@:2}" >"$work/hosts" 2>&1; }
# refused TEXT HOST ARGUMENTS...
refused() {
    local text=$1
    shift
    if hosts "$@"; then fail "not refused: hosts $*"; fi
    grep -qF -- "$text" "$work/hosts" || fail "no '$text' in: $(cat "$work/hosts")"
}

# -- What cannot be ------------------------------------------------------------------------------
cluster a=$address_A/cpu0,cpu1 b=$address_B c=$address_C
wrong "--replicas 2 needs --arbiter" --name a --replicas 2
wrong "--arbiter is where hosts with replicas agree" --name a --arbiter "file:$arbiter"
wrong "--replicas" --name a --replicas 3 --arbiter "file:$arbiter"
wrong "'a' alone has devices" --name a --replicas 2 --arbiter "file:$arbiter"
cluster a=$address_A/cpu0,cpu1 b=$address_B/cpu2
wrong "host 'a' has 2 of 3 devices" --name a --replicas 2 --arbiter "file:$arbiter"
cluster a=$address_A/cpu0 b=$address_B/cpu1 c=$address_C/cpu2
wrong "3 devices make no pairs" --name a --replicas 2 --arbiter "file:$arbiter"
cluster a=$address_A/cpu1 b=$address_B/cpu2 c=$address_C
wrong "--daemons starts cpu0, which the cluster file does not name" --name c --daemons 1 --replicas 2 --arbiter "file:$arbiter"
cluster a=$address_A/cpu0,cpu1 b=$address_B/cpu3,cpu2 c=$address_C
wrong "arbiter '$arbiter' is neither file:DIR" --name a --replicas 2 --arbiter "$arbiter"
wrong "is not etcd:http://HOST:PORT/PREFIX" --name a --replicas 2 --arbiter etcd:127.0.0.1/x
wrong "no absolute path" --name a --replicas 2 --arbiter file:here
wrong "'$arbiter' is not there: mount it" --name a --replicas 2 --arbiter "file:$arbiter"
wrong "'/proc' is a mount point" --name a --replicas 2 --arbiter file:/proc
echo "  what does not fit is refused by name"

# -- What all hosts say --------------------------------------------------------------------------
mkdir -p "$arbiter"
for at in A B C; do
    twice "$at"
done
for at in A B C; do
    soon "$at" is_ready "$at"
    [ "$(cat "$work/$at.address")" = "export SHARDD_ADDRESS='$work/$at?cpu0+cpu2,cpu3+cpu1'" ] ||
        fail "address: $(cat "$work/$at.address")"
    cmp "$work/A/replicas.json" "$work/$at/replicas.json" || fail "$at tells something else"
    [ "$(stat -c %a "$work/$at/replicas.json")" = 640 ] || fail "mode of $at's replicas.json"
    hosts "$at" || fail "$(cat "$work/hosts")"
    expect "$work/hosts" '^view 0 of cluster [0-9a-f]*, at file:.*: no host was ever out$'
done
python3 - "$work/A/replicas.json" "file:$arbiter" <<'END'
import json, sys
told = json.load(open(sys.argv[1]))
assert told["schema"] == 1 and told["arbiter"] == sys.argv[2], told
assert told["hosts"] == [{"name": "a", "devices": ["cpu0", "cpu1"]}, {"name": "b", "devices": ["cpu3", "cpu2"]}], told
END
echo "  three hosts say the same"

# -- Out -----------------------------------------------------------------------------------------
refused "there is no host 'bb' with devices; did you mean" C --out bb
refused "there is no host 'c' with devices" C --out c
hosts C --out b || fail "$(cat "$work/hosts")"
expect "$work/hosts" '^view 1 of cluster [0-9a-f]*, at file:[^:]*$'
expect "$work/hosts" '^  a  *in  *cpu0,cpu1  *b  *2$'
expect "$work/hosts" '^  b  *out  *cpu3,cpu2  *a  *0$'
hosts A --out b || fail "$(cat "$work/hosts")" # it is so already
hosts B --json || fail "$(cat "$work/hosts")"
python3 - "$work/hosts" <<'END'
import json, sys
shown = json.load(open(sys.argv[1]))
assert shown["view"] == 1 and shown["pairs"] == [["cpu0", "cpu2"], ["cpu3", "cpu1"]], shown
assert [(h["name"], h["out"], h["devices"], h["copies_on"], h["alone"]) for h in shown["hosts"]] == [
    ("a", False, ["cpu0", "cpu1"], ["b"], 2), ("b", True, ["cpu3", "cpu2"], ["a"], 0)], shown
END
refused "host 'a' has the only copy of slice 0 (cpu0+cpu2): 'b' is out already" A --out a
SHARDD_ADDRESS="$work/A?cpu0+cpu2,cpu3+cpu1" "$bin/shardctl" hosts >"$work/hosts" 2>&1 || fail "$(cat "$work/hosts")"
expect "$work/hosts" '^view 1 '
mv "$arbiter" "$arbiter.away"
refused "'$arbiter' is not there: mount it" A
mv "$arbiter.away" "$arbiter"
name=$(sed -n 's/.*"cluster": "\(.*\)",*/\1/p' "$work/A/replicas.json")
printf '{"schema": 1, "cluster": "%s", "view": 2, "out": ["b", "former"]}' "$name" >"$arbiter/$name.2"
hosts A || fail "$(cat "$work/hosts")" # of a host that the cluster file had once
expect "$work/hosts" '^view 2 '
expect "$work/hosts" '^  former  *out  *-  *-  *0$'
hosts A --json || fail "$(cat "$work/hosts")"
expect "$work/hosts" '"name": "former",'
printf '{"schema": 1, "cluster": "%s", "view": 2, "out": [], "behind": [{"host": "b", "view": 2, "filling": true}]}' "$name" \
    >"$arbiter/$name.2" # who filled it is gone
refused "host 'a' has the only copy of slice 0 (cpu0+cpu2): 'b' is being filled, and may lack steps" A --out a
hosts A || fail "$(cat "$work/hosts")"
expect "$work/hosts" '^view 2 '
expect "$work/hosts" '^  a  *in  *cpu0,cpu1  *b  *2$'
expect "$work/hosts" '^  b  *filling  *cpu3,cpu2  *a  *0$'
hosts A --json || fail "$(cat "$work/hosts")"
expect "$work/hosts" '"state": "filling",'
printf '{' >"$arbiter/$name.2"
refused "is no view" A --out a
rm "$arbiter"/*.2
hosts A || fail "$(cat "$work/hosts")"
echo "  a host that is put out is out for all, and the last copy stays"

# -- Ends ----------------------------------------------------------------------------------------
kill -TERM "${relays[B]}"
soon "the end of B" is_gone "${relays[B]}"
[ ! -e "$work/B" ] || fail "left: $(ls -A "$work/B")"
twice B
soon "B" is_ready B
expect "$work/host_b.log" "this host, 'b', is out in view 1 of the arbiter"
# One that is in has the others believe that it has what it had.
if grep -q "begin empty" "$work"/host_*.log; then fail "$(grep -h "begin empty" "$work"/host_*.log)"; fi
kill -TERM "${relays[A]}"
soon "the end of A" is_gone "${relays[A]}"
twice A
soon "A" is_ready A
expect "$work/host_a.log" "this host, 'a', is in by view 1 of the arbiter, and its daemons begin empty: .*\`shardctl hosts --out a\`"
# A keeper that is killed leaves the file, and one without replicas takes it away.
keeper=${relays[C]}
kill -STOP "$keeper"
# shellcheck disable=SC2046
kill -KILL "$keeper" $(pgrep -P "$keeper")
soon "the end of C" is_gone "$keeper"
[ -e "$work/C/replicas.json" ] || fail "C's file is gone"
host C
soon "C" is_ready C
[ ! -e "$work/C/replicas.json" ] || fail "C's file is still there"
[ "$(cat "$work/C.address")" = "export SHARDD_ADDRESS='$work/C?cpu0,cpu1,cpu2,cpu3'" ] ||
    fail "address: $(cat "$work/C.address")"
refused "no replicas here" C
for at in C B A; do
    kill -TERM "${relays[$at]}"
    soon "the end of $at" is_gone "${relays[$at]}"
    [ ! -e "$work/$at" ] || fail "left: $(ls -A "$work/$at")"
done
relays=()
echo "  the file comes and goes with the keeper"
