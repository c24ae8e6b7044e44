#!/usr/bin/env bash
# test_package.sh BUILD [--bare]: the Debian packages of a build tree, from cpack to purge.
#
# Made, looked over by lintian, installed under a real systemd (tests/e2e/systemd_box.sh: an overlay of
# this machine, gone afterwards), used (programs, manual pages, completion, a program against libshd
# by pkg-config and by CMake, a hardened instance with its settings), upgraded while it runs (the
# state must survive); two instances and two workers in training (status read, a worker stopped, an
# instance restarted, another stuck, both drained, started and restored: the digest is that of an
# undisturbed run); removed without a trace, but for checkpoints. --bare: also installed into a fresh
# Debian, where nothing but what the packages ask for is there; fetches about 100 MB, so not part of
# ctest. Every wait has an end, and says what it was for.
# Skipped (77) without root, namespaces, systemd, or the tools to make packages.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/e2e/systemd_box.sh
. "$here/systemd_box.sh"

build=$(cd "${1:?usage: test_package.sh BUILD [--bare]}" && pwd)
exposure_max=1.0 # of `systemd-analyze security`; 10 is the worst
results=$(mktemp -d /tmp/shardd-package.XXXXXX)

fail() {
    echo "FAILED: $*" >&2
    exit 1
}
finish() {
    box_stop
    rm -rf "$results"
}
trap finish EXIT
trap 'exit 130' INT TERM

# run NAME COMMAND...: quiet unless it fails. As a job, because in a condition a function would not
# end at its first failure.
run() {
    local name=$1
    shift
    "$@" >"$results/log" 2>&1 </dev/null &
    wait $! || {
        tail -n 30 "$results/log" >&2
        fail "$name"
    }
    echo "ok      $name ($SECONDS s)"
}

# -- Making and looking ----------------------------------------------------------------------------

check_tools() {
    local program
    for program in cpack dpkg-deb dpkg-shlibdeps python3 curl; do
        command -v "$program" >/dev/null || box_skip "no $program here"
    done
    [ -x "$build/bin/shd-gpt" ] || fail "$build is not built"
}

make_packages() {
    run "cpack" cpack --config "$build/CPackConfig.cmake" -G DEB -B "$results/made"
    mv "$results"/made/*.deb "$results"
    rm -rf "$results/made"
    debs=("$results"/*.deb)
    [ ${#debs[@]} -eq 4 ] || fail "4 packages expected: ${debs[*]}"
}

check_lintian() {
    if ! command -v lintian >/dev/null; then
        echo "skipped lintian: it is not installed"
        return
    fi
    run "lintian: no errors, no warnings" lintian --fail-on error,warning "${debs[@]}"
}

# -- Installed -------------------------------------------------------------------------------------

# Everything a package could leave behind; what dpkg and its triggers write of themselves apart.
list_files() {
    { box find /etc /usr /var /run/shardd -xdev -path /var/lib/dpkg -prune -o -path /var/cache \
        -prune -o -path /var/tmp -prune -o -path /var/log -prune -o -print 2>/dev/null || true; } |
        grep -vE -e '^/etc/((passwd|group|shadow|gshadow|subuid|subgid)-|ld.so.cache|\.pwd\.lock)|^/var/lib/systemd' \
            -e '^/(etc|var)/\.updated$' | # by systemd, where /usr is newer than what it has seen
        sort
}

# What is there now and was not, or is no more. The box sees this machine's files, to which other programs add; its own
# are in the upper layer, as is a mark for each that it took away.
left_behind() {
    local path
    list_files >"$results/after"
    { diff "$results/before" "$results/after" || true; } | sed -n 's/^[<>] //p' | while IFS= read -r path; do
        [[ $path != /var/run/* && ! -e $box_dir/upper$path && ! -L $box_dir/upper$path ]] || printf '%s\n' "$path"
    done
}

new_box() {
    local unit
    box_new
    for unit in box.target 'shardd@.service' shardd.target; do # nothing of what boots a machine
        mkdir "$box_root/etc/systemd/system/$unit.d"
        printf '[Unit]\nDefaultDependencies=no\n' >"$box_root/etc/systemd/system/$unit.d/box.conf"
    done
    printf '[Unit]\nDescription=box\n' >"$box_root/etc/systemd/system/box.target"
    mkdir -p "$box_root/etc/systemd/system/multi-user.target.wants" # where units are enabled
    # Of containers: no service may be touched, no document installed.
    rm -f "$box_root/usr/sbin/policy-rc.d" "$box_root"/etc/dpkg/dpkg.cfg.d/*
    # man finds a page without its index of all that this machine has, which each dpkg would make anew.
    rm -f "$box_root/var/lib/man-db/auto-update"
    mkdir "$box_root/opt/test"
    cp "${debs[@]}" "$box_root/opt/test"
    box_start box.target
}

install_packages() { box sh -c 'dpkg -i /opt/test/*.deb'; }

check_programs() {
    local program
    for program in shardd shardctl shd-gpt; do
        [ "$(box "$program" --version)" = "$program $version" ]
    done
    box bash -c '. /usr/share/bash-completion/completions/shardctl && complete -p shardctl'
}

# What is installed, stripped as it is
check_hardened() {
    box sh -c 'command -v readelf' >/dev/null || return 0
    cp "$here/test_hardening.sh" "$box_root/opt/test"
    box /opt/test/test_hardening.sh /usr/bin/{shardd,shardctl,shd-gpt} /usr/lib/"$(uname -m)"-linux-gnu/libshd.so
}

check_manual() {
    local page
    for page in '8 shardd' '1 shardctl' '1 shd-gpt' '3 libshd'; do
        box test -f "/usr/share/man/man${page/ //}.${page%% *}.gz"
        command -v man >/dev/null || continue
        # shellcheck disable=SC2086
        box man -w $page
        # shellcheck disable=SC2086
        [ -z "$(box env LC_ALL=C.UTF-8 MANROFFSEQ='' man --warnings -E UTF-8 -Tutf8 $page 2>&1 >/dev/null)" ]
        if command -v mandoc >/dev/null; then
            # shellcheck disable=SC2086
            box mandoc -T lint -W warning "$(box man -w $page)"
        fi
    done
}

check_doctor() {
    box shardctl doctor --json >"$results/doctor.json"
    python3 - "$results/doctor.json" <<'END'
import json, sys
report = json.load(open(sys.argv[1]))
assert report["fail"] == 0 and report["schema"] == 1
assert {f["check"] for f in report["findings"]} >= {"kernel", "systemd", "runtime", "daemons"}
END
}

program_text='#include <shd.h>
#include <stdio.h>

int main(void)
{
    struct shd_options o = { .size = sizeof o, .address = "local:" };
    struct shd_err e;
    shd_session *s;
    if (shd_connect(&o, &s, &e) != SHD_OK)
        return fprintf(stderr, "%s\n", e.text), 1;
    printf("%u owner\n", shd_owners(s));
    shd_close(s);
    return 0;
}
'

# shellcheck disable=SC2016
check_library() {
    mkdir "$box_root/opt/test/program"
    printf '%s' "$program_text" >"$box_root/opt/test/program/main.c"
    cat >"$box_root/opt/test/program/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.16)
project(program C)
find_package(shardd 0.1 REQUIRED)
add_executable(program main.c)
target_link_libraries(program PRIVATE shardd::shd)
END
    box sh -ec 'cd /opt/test/program
        cc -Wall -Werror main.c $(pkg-config --cflags --libs libshd) -o by-pkg-config
        cmake -S . -B build && cmake --build build
        [ "$(./by-pkg-config)" = "1 owner" ] && [ "$(build/program)" = "1 owner" ]'
}

check_unit() {
    local exposure unit units=/usr/lib/systemd/system
    local gpu=$box_root/etc/systemd/system/shardd@gpu0.service.d
    box systemd-analyze --man=no verify $units/shardd{@cpu0.service,-exporter.service,-relay.service,.target}
    mkdir "$gpu"
    cp "$box_root"/usr/share/doc/shardd/examples/{gpu,checkpoints}.conf "$gpu"
    [ -z "$(box systemd-analyze --man=no verify $units/shardd@gpu0.service 2>&1)" ]
    rm -r "$gpu"
    for unit in shardd-exporter shardd@cpu0; do
        exposure=$(systemd-analyze --root="$box_root" --offline=true --no-pager security $unit.service |
            sed -n 's/.*exposure level for [^:]*: \([0-9.]*\).*/\1/p')
        echo "$exposure" >"$results/exposure"
        awk -v is="$exposure" -v max="$exposure_max" 'BEGIN { exit !(is != "" && is + 0 <= max + 0) }'
    done
}

# Nothing runs after installation; then a hardened instance with settings of its own.
check_instance() {
    [ -z "$(box systemctl list-units --plain --no-legend 'shardd*.service')" ]
    [ "$(box stat -c '%U:%G %a' /run/shardd)" = "shardd:shardd 750" ]
    echo 'SHARDD_THREADS=1' >"$box_root/etc/shardd/cpu0.conf"
    box systemctl start shardd@cpu0
    grep -q '"threads": 1' <<<"$(box shardctl status --json)"
    box runuser -u nobody -g shardd -- shd-gpt --steps 3 --layers 1 --dim 32 --heads 2 --seq 32 \
        --batch 2 --sample 0 --eval-every 0 --threads 1 --data /usr/include/shd.h
}

# The same version once more is an upgrade to dpkg: the daemon is replaced, its state is not.
check_upgrade() {
    local before pid
    before=$(box shardctl digest)
    pid=$(box systemctl show --value --property MainPID shardd@cpu0)
    install_packages
    [ "$(box systemctl show --value --property MainPID shardd@cpu0)" != "$pid" ]
    [ "$(box shardctl digest)" = "$before" ]
}

# -- Two instances, two workers --------------------------------------------------------------------

gpt=(--layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --sample 0 --eval-every 0 --threads 1)
# A constant learning rate: what a step does is not to depend on --steps.
gpt+=(--lr 0.005 --min-lr 0.005 --warmup 1)

# As a member of the daemons' group.
watch() {
    box setpriv --reuid=nobody --regid=shardd --clear-groups --no-new-privs \
        env -i PATH=/usr/bin:/bin LC_ALL=C.UTF-8 SHD_TEST_PACE="${SHD_TEST_PACE:-1}" python3 /opt/test/package_watch.py "$@"
}

unit_show() { box systemctl show --value --property "$2" "$1"; }
show() { unit_show "shardd@$1" "$2"; }

# within SECONDS WHAT COMMAND...
within() {
    local limit_s=$1 what=$2
    shift 2
    box_wait_for "$limit_s" "$@" || {
        box systemctl --no-pager --full status 'shardd@*' 'shd-worker*' || true
        tail -n 5 "$box_root"/opt/test/worker*.log || true
        echo "not within $limit_s s: $what"
        return 1
    }
}

are_active() {
    local unit
    for unit in shardd.target shardd@cpu0 shardd@cpu1; do # of several, one is enough for systemctl
        [ "$(unit_show "$unit" ActiveState)" = active ] || return 1
    done
}

# Services of the box's systemd and nobody's children out here: what waits for a child that is
# stopped (nsenter, for one) would stop as well.
start_workers() {
    local rank
    for rank in 0 1; do
        rm -f "$box_root/opt/test/worker$rank.log"
        box systemd-run --quiet --unit="shd-worker$rank" --remain-after-exit --uid=nobody --gid=shardd \
            -p DefaultDependencies=no -p "StandardOutput=append:/opt/test/worker$rank.log" \
            -p "StandardError=append:/opt/test/worker$rank.log" \
            env RANK="$rank" LOCAL_RANK="$rank" WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 NO_COLOR=1 \
            shd-gpt "${gpt[@]}" --slow 8 --steps "$1" --log-every 100 --data /usr/include/shd.h
    done
}

worker_pid() { unit_show "shd-worker$1" MainPID; }

are_over() {
    local rank
    for rank in 0 1; do
        [ "$(worker_pid "$rank")" = 0 ] || return 1
    done
}

forget_workers() {
    box systemctl stop shd-worker0 shd-worker1
    box systemctl reset-failed
}

check_target() {
    cp "$here/package_watch.py" "$box_root/opt/test/"
    box systemctl stop shardd@cpu0 # and its model
    echo 'SHARDD_THREADS=1' >"$box_root/etc/shardd/cpu1.conf"
    box systemctl enable shardd@cpu0 shardd@cpu1
    box systemctl start shardd.target
    within 120 "shardd.target and both instances active" are_active
    start_workers 10000000
    watch attached "$(worker_pid 0)" "$(worker_pid 1)"
}

check_status_text() {
    show cpu0 StatusText >"$results/text"
    cat "$results/text"
    grep -qE ': step [0-9]+, (OPEN|SEALED|APPLYING)$' "$results/text"
    box systemctl --no-pager status shardd@cpu1 | grep -E 'Status: ".*: step [0-9]+, [A-Z]+"'
}

# Of a user of its own: both instances are up, and one that is stopped is missed. (Not by a pipe: grep -q
# hangs up at its match, and who has more to say has failed.)
exported() { grep -qx "shardd_up{device=\"$1\"} $2" <<<"$(box curl -sf http://127.0.0.1:9464/metrics)"; }
check_exporter() {
    box systemctl enable --now shardd-exporter
    within 60 "the exporter has cpu0" exported cpu0 1
    within 60 "the exporter has cpu1" exported cpu1 1
    grep -q '^shardd_step{device="cpu1",model=' <<<"$(box curl -sf http://127.0.0.1:9464/metrics)"
    [ "$(box stat -c %U "/proc/$(unit_show shardd-exporter MainPID)")" != root ]
    box kill -STOP "$(show cpu1 MainPID)"
    within 60 "the exporter misses cpu1" exported cpu1 0
    box kill -CONT "$(show cpu1 MainPID)"
    within 60 "the exporter has cpu1 again" exported cpu1 1
}

check_stopped() { watch stop "$(worker_pid 1)" >"$results/named"; }

check_restart() {
    local pid
    pid=$(show cpu1 MainPID)
    box systemctl restart shardd@cpu1
    [ "$(show cpu1 MainPID)" != "$pid" ]
    watch adopted cpu1
}

have_ended() { [ "$(show cpu0 ActiveState) $(show cpu1 ActiveState)" = "inactive inactive" ]; }
is_restarted() { [ "$(show cpu1 NRestarts)" -gt "$1" ] && are_active; }

# The unit's own watchdog, in less time: one that is well is left alone, one that is stuck is not.
check_watchdog() {
    local drop_in=$box_root/etc/systemd/system/shardd@cpu1.service.d restarts pid
    local watchdog_s=$((2 * ${SHD_TEST_PACE:-1}))
    [ "$(show cpu0 WatchdogUSec)" = 30s ]
    mkdir "$drop_in"
    # shellcheck disable=SC2016
    printf '[Service]\nWatchdogSec=%u\nExecStopPost=%s\n' "$watchdog_s" \
        '/bin/sh -c "echo $SERVICE_RESULT $EXIT_STATUS >/run/shardd/ended"' >"$drop_in/watchdog.conf"
    box systemctl daemon-reload
    box systemctl restart shardd@cpu1
    restarts=$(show cpu1 NRestarts)
    pid=$(show cpu1 MainPID)
    sleep $((2 * watchdog_s))
    [ "$(show cpu1 MainPID)" = "$pid" ]
    box kill -STOP "$pid"
    within 60 "the watchdog ends and restarts a stopped shardd@cpu1" is_restarted "$restarts"
    # What systemd says of the end: "Watchdog timeout (limit ...)!" in its own log.
    [ "$(box cat /run/shardd/ended)" = "watchdog ABRT" ]
    watch adopted cpu1
    rm -r "$drop_in"
    box rm /run/shardd/ended
    box systemctl daemon-reload
}

# What nobody has shown of the training above is whether its bits are right: that is at the end.
check_still_trained() {
    local rank
    for rank in 0 1; do
        [ "$(unit_show "shd-worker$rank" NRestarts)" = 0 ]
        [ "$(unit_show "shd-worker$rank" SubState)" = running ]
    done
}

# Drained with a worker stopped in the middle of a step: all that a drain promises can be seen.
check_drain() {
    local device drain code=0 pid
    pid=$(worker_pid 1)
    watch hold "$pid"
    timeout "$((300 * ${SHD_TEST_PACE:-1}))" nsenter --target "$box_pid" --mount --uts --ipc --pid --cgroup --root --wd=/ -- \
        runuser -u shardd -- shardctl drain --checkpoint /var/lib/shardd/run1 \
        >"$results/drain" 2>&1 &
    drain=$!
    watch draining
    show cpu0 StatusText | grep Draining
    if box timeout 120 shardctl digest >"$results/refused" 2>&1; then
        echo "a drained daemon has let somebody in"
        return 1
    fi
    grep 'is draining' "$results/refused"
    box kill -CONT "$pid"
    wait $drain || code=$?
    cat "$results/drain"
    [ $code -eq 0 ]
    grep 'saved .*/step-' "$results/drain"
    grep 'drained 2 daemons' "$results/drain"
    within 120 "the workers of drained daemons end" are_over
    grep 'is draining' "$box_root/opt/test/worker0.log"
    within 60 "drained daemons have ended" have_ended
    sleep 1 # RestartSec is 0.2
    for device in cpu0 cpu1; do
        box systemctl show -p ActiveState -p Result -p ExecMainStatus -p NFileDescriptorStore \
            "shardd@$device" | sort >"$results/unit"
        diff - "$results/unit" <<'END'
ActiveState=inactive
ExecMainStatus=10
NFileDescriptorStore=0
Result=success
END
        box test ! -e "/run/shardd/$device.sock"
    done
    forget_workers
}

check_restore() {
    local at want
    box systemctl start shardd@cpu0 shardd@cpu1
    within 120 "both instances active again" are_active
    box shardctl restore /var/lib/shardd/run1
    at=$(box readlink /var/lib/shardd/run1/LATEST || box cat /var/lib/shardd/run1/LATEST)
    at=$((10#${at##*step-} + 100))
    start_workers "$at"
    within 300 "training to step $at" are_over
    [ "$(unit_show shd-worker0 Result)" = success ]
    [ "$(unit_show shd-worker1 Result)" = success ]
    want=$("$build/bin/shd-gpt" --standalone "${gpt[@]}" --steps "$at" \
        --data "$box_root/usr/include/shd.h" | tail -n 1)
    tail -n 1 "$box_root/opt/test/worker0.log" >"$results/digest"
    [ "$(cat "$results/digest")" = "$want" ] || {
        echo "digest $(cat "$results/digest"), undisturbed $want"
        return 1
    }
    forget_workers
}

is_told() { grep -q "systemctl stop shardd@$1" "$results/drain"; }

# Who may attach may drain, but not stop: somebody else does.
check_drain_by_member() {
    local drain
    timeout "$((300 * ${SHD_TEST_PACE:-1}))" nsenter --target "$box_pid" --mount --uts --ipc --pid --cgroup --root --wd=/ -- \
        setpriv --reuid=nobody --regid=shardd --clear-groups shardctl drain >"$results/drain" 2>&1 &
    drain=$!
    within 120 "drain says what to stop" is_told cpu1
    is_told cpu0
    are_active
    box systemctl stop shardd@cpu0 shardd@cpu1
    wait $drain
    grep 'drained 2 daemons' "$results/drain"
    box systemctl start shardd@cpu0 shardd@cpu1
}

# -- Gone ------------------------------------------------------------------------------------------

purge() { box dpkg --purge shd-gpt libshd-dev libshd0 shardd; }

# shellcheck disable=SC2016
nothing_runs() {
    [ -z "$(box systemctl list-units --all --plain --no-legend 'shardd*')" ]
    box sh -c 'for at in /proc/[0-9]*/comm; do ! grep -lxE "shardd|shardctl|shd-gpt" "$at" || exit 1; done'
    box test ! -e /run/shardd
    [ -z "$(box ls /dev/shm)" ]
}

# Both daemons run. Checkpoints are the user's, and what is somebody's must have an owner.
check_purge_keeps() {
    are_active
    purge
    nothing_runs
    box shardctl --version && return 1
    box test -e /var/lib/shardd/run1/LATEST
    box getent passwd shardd
}

check_purge() {
    local left
    install_packages
    box rm -r /var/lib/shardd/run1
    box systemctl start shardd@cpu0
    purge
    nothing_runs
    [ "$(box getent passwd shardd | wc -l)" -eq 0 ]
    box touch /etc/left # which is found, and nothing else
    left=$(left_behind)
    echo "$left"
    [ "$left" = /etc/left ]
}

# -- In a fresh Debian -----------------------------------------------------------------------------

# shellcheck disable=SC2016
bare_init='
set -eu
root=$1
mount --make-rprivate /
mount -t tmpfs -o mode=0755 tmpfs "$root"
mkdir "$root/debian"
. /etc/os-release
debootstrap --variant=minbase "$VERSION_CODENAME" "$root/debian"
root=$root/debian
cp -r /etc/apt/apt.conf.d/. "$root/etc/apt/apt.conf.d/"
cp /etc/resolv.conf "$root/etc/"
mkdir "$root/debs"
cp "$2"/*.deb "$root/debs"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
export DEBIAN_FRONTEND=noninteractive
chroot "$root" sh -ec "
    apt-get -q update
    apt-get -q -y install --no-install-recommends /debs/shardd_*.deb /debs/libshd0_*.deb /debs/shd-gpt_*.deb
    shardd --version
    shardctl doctor || exit 1
    shardctl run --daemons 2 --workers 2 -- shd-gpt --steps 3 --layers 1 --dim 32 --heads 2 --seq 32 \
        --batch 2 --sample 0 --eval-every 0 --data /usr/share/common-licenses
    apt-get -q -y purge shardd libshd0 shd-gpt
    ! getent passwd shardd"
'

check_bare() {
    command -v debootstrap >/dev/null || fail "no debootstrap here"
    mkdir "$results/bare"
    run "a fresh Debian: installed, trained, purged" \
        unshare --mount --pid --fork --kill-child bash -c "$bare_init" bare "$results/bare" "$results"
}

# -- The test --------------------------------------------------------------------------------------

check_tools
box_try
version=$("$build/bin/shardd" --version)
version=${version#shardd }
make_packages
check_lintian
new_box
list_files >"$results/before"
run "dpkg -i" install_packages
run "programs, completion" check_programs
run "compiled as Debian's hardening asks" check_hardened
run "manual pages" check_manual
run "doctor" check_doctor
run "a program by pkg-config and by find_package" check_library
run "units verified" check_unit
echo "        exposure $(cat "$results/exposure") of 10, at most $exposure_max"
run "a hardened instance, a worker of its group" check_instance
run "upgrade keeps the state" check_upgrade
run "shardd.target: two instances, two workers, curl" check_target
run "systemctl shows step and phase" check_status_text
if box unshare --user true 2>/dev/null; then # for PrivateUsers=; the kernel refuses it below a chroot
    run "the exporter has both, and misses one that is stopped" check_exporter
else
    echo "skipped the exporter's unit: no user namespaces here, as below a chroot"
fi
run "a stopped worker is named by those who wait for it" check_stopped
echo "        after $(cat "$results/named") s"
run "restart of one instance, training goes on" check_restart
run "the watchdog starts a stuck instance anew, its state stays" check_watchdog
run "the workers are the same" check_still_trained
run "drained: refused, saved, inactive and not started again" check_drain
run "started, restored: the digest of an undisturbed run" check_restore
echo "        $(cat "$results/digest")"
run "drained by a member, stopped by root" check_drain_by_member
run "purge ends both, keeps a checkpoint" check_purge_keeps
run "purge leaves nothing" check_purge
if [ "${2:-}" = --bare ]; then
    check_bare
fi
echo "all ok in $SECONDS s"
