#!/usr/bin/env bash
# test_package.sh BUILD [--bare]: the Debian packages of a build tree, from cpack to purge.
#
# Made, looked over by lintian, installed under a real systemd (tests/systemd_box.sh: an overlay of
# this machine, gone afterwards), used (programs, manual pages, completion, a program against libshd
# by pkg-config and by CMake, a hardened instance with its settings), upgraded while it runs (the
# state must survive), removed without a trace. --bare: also installed into a fresh Debian, where
# nothing but what the packages ask for is there; fetches about 100 MB, so not part of ctest.
# Skipped (77) without root, namespaces, systemd, or the tools to make packages.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tests/systemd_box.sh
. "$here/systemd_box.sh"

build=$(cd "${1:?usage: test_package.sh BUILD [--bare]}" && pwd)
exposure_max=2.0 # of `systemd-analyze security`; 10 is the worst
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
    for program in cpack dpkg-deb dpkg-shlibdeps python3; do
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
        -prune -o -path /var/log -prune -o -print 2>/dev/null || true; } |
        grep -vE '^/etc/((passwd|group|shadow|gshadow|subuid|subgid)-|ld.so.cache|\.pwd\.lock)|^/var/lib/systemd' |
        sort
}

new_box() {
    local unit
    box_check_host
    box_new
    for unit in box.target 'shardd@.service' shardd.target; do # nothing of what boots a machine
        mkdir "$box_root/etc/systemd/system/$unit.d"
        printf '[Unit]\nDefaultDependencies=no\n' >"$box_root/etc/systemd/system/$unit.d/box.conf"
    done
    printf '[Unit]\nDescription=box\n' >"$box_root/etc/systemd/system/box.target"
    # Of containers: no service may be touched, no document installed.
    rm -f "$box_root/usr/sbin/policy-rc.d" "$box_root"/etc/dpkg/dpkg.cfg.d/*
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

check_manual() {
    local page
    for page in '8 shardd' '1 shardctl' '1 shd-gpt' '3 libshd'; do
        box test -f "/usr/share/man/man${page/ //}.${page%% *}.gz"
        command -v man >/dev/null || continue
        # shellcheck disable=SC2086
        box man -w $page
        # shellcheck disable=SC2086
        [ -z "$(box env LC_ALL=C.UTF-8 MANROFFSEQ='' man --warnings -E UTF-8 -T utf8 $page 2>&1 >/dev/null)" ]
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
    local exposure units=/usr/lib/systemd/system
    local gpu=$box_root/etc/systemd/system/shardd@gpu0.service.d
    box systemd-analyze --man=no verify $units/shardd{@cpu0.service,.target}
    mkdir "$gpu"
    cp "$box_root"/usr/share/doc/shardd/examples/{gpu,checkpoints}.conf "$gpu"
    [ -z "$(box systemd-analyze --man=no verify $units/shardd@gpu0.service 2>&1)" ]
    rm -r "$gpu"
    exposure=$(systemd-analyze --root="$box_root" --offline=true --no-pager security shardd@cpu0.service |
        sed -n 's/.*exposure level for [^:]*: \([0-9.]*\).*/\1/p')
    echo "$exposure" >"$results/exposure"
    awk -v is="$exposure" -v max="$exposure_max" 'BEGIN { exit !(is != "" && is + 0 <= max + 0) }'
}

# Nothing runs after installation; then a hardened instance with settings of its own.
check_instance() {
    [ -z "$(box systemctl list-units --plain --no-legend 'shardd*.service')" ]
    [ "$(box stat -c '%U:%G %a' /run/shardd)" = "shardd:shardd 750" ]
    echo 'SHARDD_THREADS=1' >"$box_root/etc/shardd/cpu0.conf"
    box systemctl start shardd@cpu0
    box shardctl status --json | grep -q '"threads": 1'
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

check_purge() {
    box dpkg --purge shd-gpt libshd-dev libshd0 shardd
    [ -z "$(box systemctl list-units --plain --no-legend 'shardd*')" ]
    [ "$(box getent passwd shardd | wc -l)" -eq 0 ]
    box test ! -e /run/shardd
    list_files >"$results/after"
    diff "$results/before" "$results/after"
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

box_check_host
check_tools
version=$("$build/bin/shardd" --version)
version=${version#shardd }
make_packages
check_lintian
new_box
list_files >"$results/before"
run "dpkg -i" install_packages
run "programs, completion" check_programs
run "manual pages" check_manual
run "doctor" check_doctor
run "a program by pkg-config and by find_package" check_library
run "units verified" check_unit
echo "        exposure $(cat "$results/exposure") of 10, at most $exposure_max"
run "a hardened instance, a worker of its group" check_instance
run "upgrade keeps the state" check_upgrade
run "purge leaves nothing" check_purge
if [ "${2:-}" = --bare ]; then
    check_bare
fi
echo "all ok in $SECONDS s"
