#!/usr/bin/env bash
# test_systemd.sh BIN [UNITS]: the units under a real systemd. BIN: where shardd, shardctl and shd-gpt
# are. UNITS: a folder of units, if not ../systemd.
#
# Two instances, two workers in training; then what the units promise to survive: kill -9 of either
# and of both daemons, `systemctl restart`, a replaced binary, one that does not start for a while,
# an adoption that takes longer than a start may.
# Parameters and optimizer state at the end are those of an undisturbed `shardctl run`, bit by bit.
# `systemctl stop` is the one thing that ends the state. Skipped (77) where there is no root, no
# systemd, or no namespaces.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/e2e/systemd_box.sh
. "$here/systemd_box.sh"

bin=$(cd "${1:?usage: test_systemd.sh BIN [UNITS]}" && pwd)
units=${2:-$here/../../systemd}
pace=${SHD_TEST_PACE:-1}
model=(--layers 2 --dim 32 --seq 32 --batch 2 --heads 2 --seed 7 --eval-every 0 --sample 0)
steps=${SHARDD_TEST_STEPS:-800}
results=$(mktemp -d /tmp/shardd-systemd.XXXXXX)

fail() {
    echo "FAILED: $*" >&2
    if [ -n "$box_pid" ]; then
        box systemctl --no-pager status shardd@cpu0 shardd@cpu1 || true
        box tail -n 30 /dev/console || true
        tail -n 20 "$box_dir"/log "$box_root"/opt/shardd/*.log || true
    fi >&2
    exit 1
}
finish() {
    box_stop
    rm -rf "$results"
}
trap finish EXIT
trap 'exit 130' INT TERM

# -- In the box ------------------------------------------------------------------------------------

as_user() {
    box setpriv --reuid=shardd --regid=shardd --clear-groups --no-new-privs \
        env LD_LIBRARY_PATH=/opt/shardd LC_ALL=C SHARDD_ADDRESS=/run/shardd "$@"
}

install_files() {
    local at=$box_root/opt/shardd unit
    mkdir -p "$at"
    cp "$bin"/shardd "$bin"/shardctl "$bin"/shd-gpt "$bin"/../lib/libshd.so.* \
        "$bin"/../tests/libslow_adopt.so "$at"
    chmod -R a+rX "$at"
    chmod 1777 "$at" # logs
    getent -s files passwd shardd >/dev/null ||
        echo 'shardd:x:64990:64990::/:/usr/sbin/nologin' >>"$box_root/etc/passwd"
    getent -s files group shardd >/dev/null || echo 'shardd:x:64990:' >>"$box_root/etc/group"
    for unit in "$units"/*.service "$units"/*.target; do
        sed -e 's|@SHD_BINDIR@|/opt/shardd|g' -e 's|@SHD_SYSCONFDIR@|/etc|g' "$unit" \
            >"$box_root/etc/systemd/system/${unit##*/}"
    done
    # Only what a box must have different: its own place, and none of what boots a machine.
    for unit in 'shardd@.service' shardd.target shardd-relay.service; do
        mkdir "$box_root/etc/systemd/system/$unit.d"
        printf '[Unit]\nDefaultDependencies=no\n' >"$box_root/etc/systemd/system/$unit.d/box.conf"
    done
    cat >>"$box_root/etc/systemd/system/shardd@.service.d/box.conf" <<'END'
[Service]
ExecStart=
ExecStart=/opt/shardd/shardd --device %i --threads 1
StandardOutput=append:/opt/shardd/%i.log
StandardError=inherit
END
    # One of them has its state on files, in the only place that its unit can write to.
    mkdir "$box_root/etc/systemd/system/shardd@cpu1.service.d"
    cat >"$box_root/etc/systemd/system/shardd@cpu1.service.d/state.conf" <<'END'
[Service]
ExecStart=
ExecStart=/opt/shardd/shardd --device %i --threads 1 --state file:/var/lib/shardd --publish file:/var/lib/shardd --snapshots file:/var/lib/shardd
END
    printf '[Service]\nEnvironment=SHARDD_HOST=a\n' >>"$box_root/etc/systemd/system/shardd-relay.service.d/box.conf"
    systemctl --root="$box_root" --quiet enable shardd@cpu0 shardd@cpu1
}

relay_pid() { box systemctl show --value --property MainPID shardd-relay; }
relay_is_back() {
    [ "$(box systemctl show --value --property ActiveState shardd-relay)" = active ] && [ "$(relay_pid)" != "$1" ]
}
# Workers of a host b, which is another relay here, see the same state, through a killed relay and a restarted one.
try_relay() {
    local keys=$box_root/etc/shardd other=$box_root/opt/shardd/keys far pid
    mkdir -p "$keys" "$other"
    "$bin/shardctl" keys new "$keys/cluster.json" a=127.$((1 + $$ / 65536 % 200)).$(($$ / 256 % 256)).$(($$ % 256)):7194 \
        b=127.0.0.1:1 >/dev/null
    cp "$keys/cluster.json" "$other"
    mv "$keys/b.key" "$other"
    box chown -R shardd:shardd /etc/shardd /opt/shardd/keys
    box systemctl start shardd-relay || fail "shardd-relay does not start"
    as_user /opt/shardd/shardd --relay --cluster /opt/shardd/keys/cluster.json --host b --from a:cpu0,cpu1 \
        --runtime-dir /opt/shardd/far >"$box_root/opt/shardd/far.log" 2>&1 </dev/null &
    far=$!
    box_wait_for 60 test -S "$box_root/opt/shardd/far/cpu1.sock" || fail "no relay of host b"
    for what in "kill --signal=KILL" restart; do
        [ "$(as_user env SHARDD_ADDRESS=/opt/shardd/far /opt/shardd/shardctl digest)" = "$before" ] ||
            fail "another digest through the relay"
        pid=$(relay_pid)
        # shellcheck disable=SC2086 # words
        box systemctl $what shardd-relay
        box_wait_for 60 relay_is_back "$pid" || fail "shardd-relay did not come back after $what"
    done
    [ "$(as_user env SHARDD_ADDRESS=/opt/shardd/far /opt/shardd/shardctl digest)" = "$before" ] ||
        fail "another digest through the relay after that"
    kill "$far"
    wait "$far" || true
    box systemctl stop shardd-relay
    echo "ok      another host's workers, through shardd-relay, killed and restarted"
}

show() { box systemctl show --value --property "$2" "shardd@$1"; }

adoptions() { grep -c 'op=adopt model=' "$box_root/opt/shardd/$1.log" || true; }

# Wait until a daemon is back as another process than $2; it must have adopted the model once more.
# Both in one look: a unit may seem active until its manager has heard of the death.
is_back() {
    local seen
    seen=$(box systemctl show --property=MainPID --property=ActiveState "shardd@$1")
    [[ $seen == *ActiveState=active* && $seen != *MainPID=0* && ! $seen =~ MainPID=$2([^0-9]|$) ]]
}
expect_back() {
    box_wait_for 120 is_back "$1" "$2" || fail "shardd@$1 did not come back after $3"
    [ "$(show "$1" NFileDescriptorStore)" -ge 2 ] ||
        fail "shardd@$1 has $(show "$1" NFileDescriptorStore) descriptors stored after $3"
    [ "$(adoptions "$1")" -eq $((${adopted[$1]} + 1)) ] || fail "shardd@$1 adopted nothing after $3"
    adopted[$1]=$(adoptions "$1")
    echo "ok      $3 of $1 at step $(step_now)"
}

# The last step that rank 0 has printed.
step_now() {
    sed -n 's/^ *step *\([0-9]*\).*/\1/p' "$box_root/opt/shardd/worker0.log" | tail -n 1 | grep . || echo 0
}
step_reached() { [ "$(step_now)" -ge "$1" ]; }
wait_for_step() {
    box_wait_for 600 step_reached "$1" || fail "training did not reach step $1, it is at $(step_now)"
}

start_workers() {
    local rank
    for rank in 0 1; do
        as_user env RANK="$rank" LOCAL_RANK="$rank" WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 \
            OMP_NUM_THREADS=1 NO_COLOR=1 /opt/shardd/shd-gpt "${model[@]}" --steps "$steps" --slow 8 \
            --log-every 5 >"$box_root/opt/shardd/worker$rank.log" 2>&1 </dev/null &
        workers[rank]=$!
    done
}

kill_daemons() { # at once
    local device pids=()
    for device in "$@"; do
        pids+=("$(show "$device" MainPID)")
    done
    box systemctl kill --signal=KILL --kill-whom=main "${@/#/shardd@}"
    for device in "$@"; do
        expect_back "$device" "${pids[0]}" "kill -9"
        pids=("${pids[@]:1}")
    done
}

restart_daemon() {
    local pid
    pid=$(show "$1" MainPID)
    box systemctl restart "shardd@$1"
    expect_back "$1" "$pid" "$2"
}

tried_often() { [ "$(show "$1" NRestarts)" -ge "$2" ]; }

# A program that cannot run must not cost the state either: somebody will put it right.
break_daemon() {
    local pid at=$box_root/opt/shardd
    pid=$(show "$1" MainPID)
    mv "$at/shardd" "$at/shardd.good"
    printf '#!/bin/sh\nexit 1\n' >"$at/shardd"
    chmod 755 "$at/shardd"
    box systemctl kill --signal=KILL --kill-whom=main "shardd@$1"
    box_wait_for 120 tried_often "$1" $(($(show "$1" NRestarts) + 12)) ||
        fail "shardd@$1 is not tried any more: $(show "$1" Result)"
    mv "$at/shardd.good" "$at/shardd"
    expect_back "$1" "$pid" "12 failed starts"
}

# slow_start SETTING...: a start of cpu1 may take 2 s, and a successor's adoption takes longer
slow_start() {
    box mkdir -p /run/systemd/system/shardd@cpu1.service.d
    printf '%s\n' '[Service]' "TimeoutStartSec=$((2 * pace))s" \
        "Environment=LD_PRELOAD=/opt/shardd/libslow_adopt.so SLOW_ADOPT_MS=$((1000 * pace))" \
        'Environment=ASAN_OPTIONS=verify_asan_link_order=0' "$@" |
        box tee /run/systemd/system/shardd@cpu1.service.d/slow.conf >/dev/null
    box systemctl daemon-reload
}

# A start is ended after TimeoutStartSec, unless the daemon asks for more time as it goes on. One that
# does not ask is here only to show that the limit holds; it costs no state either.
adopt_slowly() {
    local pid starts from=$EPOCHREALTIME
    pid=$(show cpu1 MainPID)
    starts=$(show cpu1 NRestarts)
    slow_start
    box systemctl kill --signal=KILL --kill-whom=main shardd@cpu1
    expect_back cpu1 "$pid" "kill -9 and a slow adoption"
    [ "$(show cpu1 NRestarts)" -eq $((starts + 1)) ] || fail "a slow adoption was ended"
    [ $(((${EPOCHREALTIME/[.,]/} - ${from/[.,]/}) / 1000)) -gt $((2500 * pace)) ] || fail "it was not slow"
    pid=$(show cpu1 MainPID)
    slow_start Environment=SLOW_ADOPT_SILENT=1
    box systemctl kill --signal=KILL --kill-whom=main shardd@cpu1
    box_wait_for 120 tried_often cpu1 $((starts + 3)) || fail "the limit for a start does not hold"
    box rm -r /run/systemd/system/shardd@cpu1.service.d
    box systemctl daemon-reload
    box systemctl kill --signal=KILL --kill-whom=main shardd@cpu1
    box_wait_for 120 is_back cpu1 "$pid" || fail "shardd@cpu1 did not come back after a slow start"
}

# Another build: the same program with another version in it.
upgrade() {
    local at=$box_root/opt/shardd old new
    old=$(as_user /opt/shardd/shardd --version)
    old=${old#shardd }
    # Not its last digit: linkers let a string like ".0" be the end of a longer one.
    new=$(((${old:0:1} + 1) % 10))${old:1}
    LC_ALL=C sed "s/${old//./\\.}/$new/g" "$at/shardd" >"$at/shardd.new"
    chmod 755 "$at/shardd.new"
    mv "$at/shardd.new" "$at/shardd"
    [ "$(as_user /opt/shardd/shardd --version)" = "shardd $new" ] || fail "no other version was made"
    restart_daemon cpu1 upgrade
    restart_daemon cpu0 upgrade
}

# -- The test --------------------------------------------------------------------------------------

box_try
box_new
install_files
if command -v systemd-analyze >/dev/null; then
    systemd-analyze --root="$box_root" --man=no verify shardd@cpu0.service shardd-relay.service shardd.target ||
        fail "systemd-analyze verify"
fi

"$bin/shardctl" run --daemons 2 --workers 2 --threads-per-daemon 1 -- "$bin/shd-gpt" "${model[@]}" \
    --steps "$steps" --log-every "$steps" >"$results/reference" || fail "the undisturbed run"
wanted=$(tail -n 1 "$results/reference")
echo "undisturbed: $wanted"

box_start shardd.target
for device in cpu0 cpu1; do
    box_wait_for 120 is_back "$device" 0 || fail "shardd@$device does not start"
done
workers=()
declare -A adopted=([cpu0]=0 [cpu1]=0)
start_workers
wait_for_step $((steps / 10))
kill_daemons cpu0
wait_for_step $((steps * 2 / 10))
kill_daemons cpu1
wait_for_step $((steps * 3 / 10))
kill_daemons cpu0 cpu1
wait_for_step $((steps * 4 / 10))
restart_daemon cpu0 restart
wait_for_step $((steps * 5 / 10))
upgrade
for rank in 0 1; do
    wait "${workers[rank]}" || fail "worker $rank: $(tail -n 5 "$box_root/opt/shardd/worker$rank.log")"
done
got=$(tail -n 1 "$box_root/opt/shardd/worker0.log")
[ "$got" = "$wanted" ] || fail "the result differs: $got"
echo "ok      disturbed: $got"

# After training too; and the end of it.
before=$(as_user /opt/shardd/shardctl digest)
try_relay
kill_daemons cpu0 cpu1
break_daemon cpu1
adopt_slowly
[ "$(as_user /opt/shardd/shardctl digest)" = "$before" ] || fail "another digest after that"
stored=$(show cpu1 NFileDescriptorStore)
holds() { # holds MIN MAX
    local count
    count=$(show cpu1 NFileDescriptorStore)
    [ "$count" -ge "$1" ] && [ "$count" -le "$2" ]
}
as_user /opt/shardd/shardctl fork gpt twin || fail "no fork"
box_wait_for 20 holds $((stored + 2)) 100 || fail "a fork's descriptors are not stored"
as_user /opt/shardd/shardctl drop --yes twin || fail "not dropped"
box_wait_for 20 holds "$stored" "$stored" || fail "descriptors of a dropped model are kept"
[ "$(as_user /opt/shardd/shardctl digest)" = "$before" ] || fail "another digest after a drop"
echo "ok      a dropped model's descriptors go"
box systemctl stop shardd@cpu0
[ "$(show cpu0 NFileDescriptorStore)" = 0 ] || fail "stop keeps descriptors"
box test -S /run/shardd/cpu1.sock ||
    fail "stop of one instance took the other's socket"
box systemctl start shardd@cpu0
if as_user /opt/shardd/shardctl digest >"$results/gone" 2>&1; then
    fail "stop kept the state: $(cat "$results/gone")"
fi
[ "$(show cpu1 NFileDescriptorStore)" -ge 2 ] || fail "stop of one instance touched the other"
echo "ok      stop ends the state of one instance only"
as_user /opt/shardd/shardctl drop --yes gpt || fail "the half that is left is not dropped"
box_wait_for 20 holds 0 0 || fail "descriptors of a dropped half are kept"
echo "ok      what one instance has left is dropped"
