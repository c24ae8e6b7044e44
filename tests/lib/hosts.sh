# Sourced by tests of several hosts, after wait.sh, by bash: A, B and C with $bin and $work.
#
# The hosts are network namespaces: B and C have a wire to A each, which can be cut, and reach each other through
# it. Where none can be made (that takes root) they are addresses of the loopback, and what needs a wire is left
# out, by name. Their names in the cluster are small: a, b, c. $work/A is A's runtime directory.
# shellcheck shell=bash disable=SC2034,SC2154 # variables of who sources this
on_A=() on_B=() on_C=()
wire=
declare -A relays=() workers=() wires=()
third=$((1 + $$ / 65536 % 200)).$(($$ / 256 % 256)).$(($$ % 256))
address_A=127.$third:7181 address_B=127.$third:7182 address_C=127.$third:7183
steps=${steps:-80}
model_words="--layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 8 --threads 1
             --sample 0 --eval-windows 0 --log-every 1"

last_of() { tail -qn 1 "$@" 2>/dev/null | tail -n 1; }

# What is known of each host and worker is a line that scripts/test.sh shows, too.
fail() {
    local host rank how
    echo "  FAILED: $*"
    for host in "${!relays[@]}"; do
        how=lives
        ! is_gone "${relays[$host]}" || how="is gone"
        echo "  FAILED: relay of $host $how: '$(last_of "$work"/*_"${host,,}.log")'; keeper: '$(last_of "$work/$host/up.log")';" \
            "$(cd "$work/$host" && echo *.sock)"
    done
    for rank in "${!workers[@]}"; do
        is_gone "${workers[$rank]}" || echo "  FAILED: worker $rank waits: '$(last_of "$work/err")'"
    done
    tail -n 5 "$work"/*.log "$work"/out "$work"/err 2>/dev/null | sed 's/^/    /'
    exit 1
}

# Only what was started here.
hosts_clean_up() {
    local pid host
    for pid in "${workers[@]}" "${relays[@]}"; do
        kill -KILL "$pid" 2>/dev/null || true
    done
    for host in A B C; do
        "$bin/shardctl" down --yes -d "$work/$host" >/dev/null 2>&1 || true
        if [ -n "$wire" ]; then
            ip netns del "shd$host$$" 2>/dev/null || true
        fi
    done
    rm -rf "$work"
}

# A wire from A to $1, whose addresses are 10.77.$2.1 and .2
hosts_join() {
    wires[$1]=shdv${1,,}$$
    ip link add "${wires[$1]}" netns "shdA$$" type veth peer name "shdw${1,,}$$" netns "shd$1$$"
    ip -n "shdA$$" addr add "10.77.$2.1/24" dev "${wires[$1]}"
    ip -n "shd$1$$" addr add "10.77.$2.2/24" dev "shdw${1,,}$$"
    ip -n "shdA$$" link set "${wires[$1]}" up
    ip -n "shd$1$$" link set "shdw${1,,}$$" up
    ip -n "shd$1$$" route add default via "10.77.$2.1"
}

hosts_make() {
    local host
    if ! ip netns add "shdA$$" 2>/dev/null; then
        echo "no network namespace can be made here: addresses of the loopback, no wire to cut"
        return
    fi
    wire=yes
    for host in B C; do
        ip netns add "shd$host$$"
    done
    for host in A B C; do
        ip -n "shd$host$$" link set lo up
    done
    hosts_join B 0
    hosts_join C 1
    ip netns exec "shdA$$" sysctl -qw net.ipv4.ip_forward=1
    on_A=(ip netns exec "shdA$$") on_B=(ip netns exec "shdB$$") on_C=(ip netns exec "shdC$$")
    if unshare --time true 2>/dev/null; then # each has run for a time of its own
        on_A+=(unshare --time --monotonic 9000000) on_B+=(unshare --time --monotonic 60000)
    fi
    address_A=10.77.0.1:7100 address_B=10.77.0.2:7100 address_C=10.77.1.2:7100
}

# Addresses of A and B by IPv6, of their wire or of the loopback; false where the host has none.
hosts_by_six() {
    six_A="[::1]:$((10000 + $$ % 10000))" six_B="[::1]:$((20000 + $$ % 10000))"
    if [ -z "$wire" ]; then
        [ -s /proc/net/if_inet6 ]
        return
    fi
    six_A="[fd77::1]:7100" six_B="[fd77::2]:7100"
    ip -n "shdA$$" addr add fd77::1/64 dev "${wires[B]}" nodad 2>/dev/null &&
        ip -n "shdB$$" addr add fd77::2/64 dev "shdwb$$" nodad 2>/dev/null
}

# relay HOST ARGUMENTS...: whose pid is that of `ip netns exec`, which becomes it. One that was killed listens until
# it is gone.
relay() {
    local host=$1
    local -n on=on_$host
    shift
    [ -z "${relays[$host]-}" ] || soon "an end of the relay of $host" is_gone "${relays[$host]}"
    "${on[@]}" "$bin/shardd" --relay --cluster "$work/keys/cluster.json" --host "${host,,}" \
        --runtime-dir "$work/$host" "$@" >>"$work/relay_${host,,}.log" 2>&1 &
    relays[$host]=$!
    disown
}

stop_relays() {
    local host
    for host in "${!relays[@]}"; do
        kill "${relays[$host]}" 2>/dev/null || true
        soon "an end of the relay of $host" is_gone "${relays[$host]}"
    done
    relays=()
}

is_gone() { ! kill -0 "$1" 2>/dev/null; }
logged() { grep -q -- "$2" "$work/$1"; }
# has_devices HOST DEVICE...
has_devices() {
    local host=$1 device
    shift
    for device in "$@"; do
        [ -S "$work/$host/$device.sock" ] && [ -S "$work/$host/$device.zmq" ] || return 1
    done
}

# daemons HOST DEVICES
daemons() {
    local host=$1
    local -n on=on_$host
    "${on[@]}" "$bin/shardctl" up --devices "$2" -t 1 -d "$work/$host" --watchdog 0 >/dev/null 2>>"$work/up.log" ||
        fail "up of $2 on $host"
}

# worker HOST[?DEVICES] RANK OF OPTIONS...
worker() {
    local host=${1%%\?*} at=$1 rank=$2 of=$3
    local -n on=on_$host
    shift 3
    # shellcheck disable=SC2086 # options are words
    SHARDD_ADDRESS=$work/$at RANK=$rank WORLD_SIZE=$of "${on[@]}" "$bin/shd-gpt" --steps "$steps" $model_words "$@" \
        >>"$work/$([ "$rank" = 0 ] && echo out || echo other)" 2>>"$work/err" &
    workers[$rank]=$!
}

# -- What crossed, of the only model, beside what `shardctl plan --host ... --json >plan.json` says -------------------
status_of() { curl -sS --unix-socket "$work/$1/relay.status" http://localhost/status; }
# counted HOST PEER MEMBER: of the only model
counted() { status_of "$1" | python3 -c '
import json, sys
print(sum(m[sys.argv[2]] for p in json.load(sys.stdin)["peers"] if p["host"] == sys.argv[1] for m in p["models"]))
' "$2" "$3"; }
# planned FROM TO MEMBER
planned() { python3 -c '
import json, sys
print(sum(c[sys.argv[4]] for c in json.load(open(sys.argv[1]))["crossing"] if (c["from"], c["to"]) == tuple(sys.argv[2:4])))
' "$work/plan.json" "$1" "$2" "$3"; }

# is_as_planned FROM TO WHAT RELAY PEER MEMBER SLACK: SLACK fills beside a step's each
is_as_planned() {
    local one sum
    one=$(planned "$1" "$2" "$3") sum=$(counted "$4" "$5" "$6")
    [ "$one" -gt 0 ] || fail "$3 from $1 to $2: nothing is planned"
    if [ "$sum" -lt $((one * steps)) ] || [ "$sum" -gt $((one * (steps + $7))) ]; then
        fail "$3 from $1 to $2: $sum bytes in $steps steps, $one a step were planned"
    fi
    echo "    $3 from $1 to $2: $one bytes a step, as planned"
}

# -- A run --------------------------------------------------------------------------------------------------------
# What is seen of a run: rank 0's lines, whichever host it is on.
now_at() { sed -n 's|^step \([0-9]*\)/.*|\1|p' "$work/out" | tail -n 1; }
at_step() { [ "$(now_at)" -ge "$1" ] 2>/dev/null; }
is_over() { grep -q '^digest ' "$work/out"; }
so_or_over() { "$@" || is_over; }
at_step_or_over() { so_or_over at_step "$1"; }

# in_time COMPLAINT COMMAND...: until that is so of a run that goes on. Where the run has come to its end before its
# script has done its part, all is begun anew with more steps.
in_time() {
    local complaint=$1
    shift
    soon "$complaint" so_or_over "$@"
    if is_over; then
        [ "$steps" -lt 5000 ] || fail "the run is too short"
        echo "the run is too short"
        hosts_clean_up
        exec "$0" "$bin" $((3 * steps))
    fi
}

# go_on N: steps further
go_on() {
    local to
    echo "    step $(now_at) ($SECONDS s)"
    to=$(($(now_at) + $1))
    in_time "no step $to" at_step "$to"
}

# end_same WHAT: all workers end well, with the digest $want.
end_same() {
    local code=0 rank
    for rank in "${!workers[@]}"; do
        wait "${workers[$rank]}" || code=$?
    done
    workers=()
    [ "$code" = 0 ] || fail "$1: a worker ended with $code"
    [ "$(tail -n 1 "$work/out")" = "$want" ] || fail "$1: wanted '$want', got '$(tail -n 1 "$work/out")'"
    echo "  $1: same digest ($SECONDS s)"
}

# shellcheck disable=SC2120 # most say nothing more
in_one_process() {
    # shellcheck disable=SC2086
    "$bin/shd-gpt" --standalone --steps "$steps" $model_words "$@" 2>"$work/err" | tail -n 1
}

# -- Of `shardctl host`, whose standard output is $work/HOST.address, by relays[] ------------------

# Who starts one removes HOST.address first: a redirection in the background makes it empty at some time later.
is_ready() { [ -s "$work/$1.address" ]; }
# The address that is printed, without its directory.
pairs() { sed -n "s|^export SHARDD_ADDRESS='$work/$1?\(.*\)'$|\1|p" "$work/$1.address"; }
# In order, all of them.
end_hosts() {
    local host
    for host in "${!relays[@]}"; do
        kill -TERM "${relays[$host]}"
        soon "the end of $host" is_gone "${relays[$host]}"
    done
    relays=()
}
# digest_of HOST?DEVICES
digest_of() {
    local -n on=on_${1%%\?*}
    SHARDD_ADDRESS=$work/$1 "${on[@]}" "$bin/shardctl" digest 2>>"$work/err"
}
