#!/usr/bin/env bash
# wheel-check.sh [WHEEL]: install the wheel (without one: scripts/wheel.sh makes it) in a bare Debian 12 root that has
# nothing but Python and pip, and train there: without daemons, and by two workers with two daemons, one of which
# is killed. Root, a network and some five minutes; for a change of what is linked or of what is in the wheel.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

die() { say "$*"; exit 1; }
[ "$(id -u)" = 0 ] || die "debootstrap and chroot need root"
command -v debootstrap >/dev/null || die "no debootstrap: apt-get install debootstrap"
wheel=${1:-}
if [ -z "$wheel" ]; then
    rm -rf "$root/build/dist"
    "$root/scripts/wheel.sh" "$root/build/dist"
    wheel=$(ls "$root"/build/dist/libshd-*.whl)
fi
dir=$(mktemp -d /var/tmp/shardd-wheel-XXXXXX)
trap 'rm -rf --one-file-system "$dir"' EXIT

make_root() { debootstrap --variant=minbase --include=python3,python3-pip bookworm "$dir"; }
# in_root COMMAND: with mounts and processes that end with it.
in_root() {
    # shellcheck disable=SC2016 # expanded in there
    ROOT=$dir DO=$1 unshare --mount --pid --fork --kill-child bash -euc '
        mount --make-rprivate /
        mount --bind "$ROOT" "$ROOT"
        mount -t proc proc "$ROOT/proc"
        mount --rbind /dev "$ROOT/dev"
        cd "$ROOT"
        exec chroot . env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/root /bin/sh -euc "$DO"'
}
install_wheel() {
    cp "$wheel" "$dir/root/"
    in_root "pip3 install --no-index --no-deps --break-system-packages /root/$(basename "$wheel")"
}
# A model of one tensor that goes to zero; each rank has half of the gradient.
write_script() {
    cat >"$dir/root/train.py" <<'END'
import ctypes, os, signal, sys
import libshd
spec = '''{ "name": "line", "micro_batches": %s, "optimizer": { "kind": "sgd", "momentum": 0 }, "units": [
    { "name": "all", "tensors": [ { "name": "w", "shape": [3], "init": ["const", 8] } ] } ] }'''
rank, world = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
session = libshd.Session(sys.argv[1] if len(sys.argv) > 1 else None)
model = session.open(spec % world)
values = (ctypes.c_float * 3)
for step in range(model.step, 20):
    if (step, rank, len(sys.argv)) == (10, 0, 1):
        os.kill(session.status(0)['pid'], signal.SIGKILL)
    now = list(values.from_address(model.acquire(0)))
    model.release(0)
    values.from_address(model.grad(rank, 0))[:] = now
    model.return_grad(rank, 0)
    model.commit(0.5)
assert list(values.from_address(model.acquire(0))) == [8 * 0.5 ** 20] * 3
print(f'rank {rank} of {world}: 20 steps, libshd {libshd.version()}, digest {model.digest()[0][:12]}')
END
}
train_alone() { in_root "python3 /root/train.py local:"; }
train_beside_daemons() { in_root "shardctl run --daemons 2 --workers 2 -- python3 /root/train.py"; }

step wheel-root make_root
step wheel-install install_wheel
step wheel-script write_script
step wheel-alone train_alone
step wheel-daemons train_beside_daemons
say "$(basename "$wheel") trains in a root that has Python alone"
