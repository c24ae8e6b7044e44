#!/usr/bin/env bash
# bare.sh [--keep] debian|ubuntu [COMMAND...]: run a command of this tree, as it is committed, on a bare
# Debian 12 or Ubuntu 24.04, with which scripts/demo.sh (the default) and scripts/test.sh have to work.
#
#   scripts/bare.sh ubuntu                                     # scripts/demo.sh --steps 60, some 5 minutes
#   scripts/bare.sh --keep ubuntu scripts/test.sh              # and again in what that one has left
#   CTEST_PARALLEL_LEVEL=1 scripts/bare.sh debian scripts/test.sh
#
# The machine is a root made by debootstrap below /var/tmp ($BARE_DIR), with processes, mounts and shared
# memory of its own, this machine's kernel, network and certificates, and the tree at /shardd. --keep: it
# stays, and is taken where it is there, with the newest commit. It takes root, debootstrap, a network, and
# 2 GB of disk (demo) to 20.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

die() { say "$*"; exit 2; }

keep=no
[ "${1:-}" != --keep ] || { keep=yes; shift; }
usage="usage: bare.sh [--keep] debian|ubuntu [COMMAND...]"
case ${1:-} in
debian | ubuntu) system=$1 ;;
"") die "$usage" ;;
--help | -h)
    sed -n '2,/^set/ { /^set/d; s/^# \{0,1\}//; p }' "$0"
    exit 0
    ;;
*) die "unknown system '$1'; $usage" ;;
esac
bare=${BARE_DIR:-/var/tmp}/shardd-bare-$system
shift
[ $# -gt 0 ] || set -- scripts/demo.sh --steps 60
[ "$(id -u)" = 0 ] || die "a bare root needs root: sudo scripts/bare.sh ..."
command -v debootstrap >/dev/null || die "no debootstrap here: apt-get install debootstrap"

# In the new namespaces. A root that is a mount, as tests make namespaces in it and mount over it.
# shellcheck disable=SC2016
inside='
set -eu
bare=$1
shift
mount --make-rprivate /
mount --bind "$bare" "$bare"
mount -t proc proc "$bare/proc"
mount --rbind /dev "$bare/dev"
mount --rbind /sys "$bare/sys"
mount -t tmpfs tmpfs "$bare/run"
mount -t tmpfs -o mode=1777 tmpfs "$bare/dev/shm"
cd "$bare"
mkdir -p .outside
pivot_root . .outside
umount -l .outside
rmdir .outside
cd /shardd
export HOME=/root
exec "$@"
'

# Anybody may make a file of that name in /var/tmp: root goes into none but its own.
if [ "$keep" = yes ] && [ ! -L "$bare" ] && [ -O "$bare" ] && [ -d "$bare/shardd" ]; then
    git -C "$bare/shardd" fetch -q "$root" HEAD && git -C "$bare/shardd" checkout -q FETCH_HEAD
else
    rm -rf --one-file-system "$bare"
    mkdir "$bare"
    mkdir -p "$logs"
    say "debootstrap of $system in $bare ..."
    bare_root "$system" "$bare" >"$logs/bare.log" 2>&1 </dev/null ||
        { tail -n 20 "$logs/bare.log" >&2; die "no such root; all of it: $logs/bare.log"; }
    git clone -q "$root" "$bare/shardd"
fi
cp -L /etc/resolv.conf /etc/hosts "$bare/etc/"
say "running in $bare: $*"
code=0
unshare --mount --pid --ipc --fork --kill-child bash -c "$inside" bare "$bare" "$@" || code=$?
[ "$keep" = yes ] || rm -rf --one-file-system "$bare"
say "code $code"
exit "$code"
