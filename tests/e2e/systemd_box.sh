# A real systemd as PID 1 of namespaces of its own, for tests: sourced, not run.
# shellcheck shell=bash
#
#   box_try            skip the test at once where there can be no box
#   box_start TARGET   make the box and start TARGET in it; box_root must have its units by then
#   box COMMAND...     run a command in the box, as root
#   box_stop           end everything in it and remove it; safe at any time, any number of times
#
# The box sees this machine's files (an overlay: what it writes is gone with it) with its own /tmp,
# /run, /dev, process numbers and cgroups; the network is shared. (Never start a systemd without its
# own /tmp: systemd-tmpfiles empties the one it sees.)

box_dir=     # a directory of ours; box_dir/root is the box's /
box_unshare= # the process whose child is the box's PID 1
box_pid=     # PID 1 of the box, as we see it
box_target=  # what box_start was asked to start
box_cgroups=()

# Exit code 77 is what ctest takes for a skipped test.
box_skip() {
    echo "skipped: $*" >&2
    exit 77
}

box_check_host() {
    local program
    [ "$(id -u)" -eq 0 ] || box_skip "needs root"
    for program in systemd unshare nsenter chroot pivot_root; do
        [ -n "$(box_find "$program")" ] || box_skip "no $program here"
    done
}

box_find() {
    PATH=$PATH:/usr/lib/systemd:/lib/systemd:/usr/sbin:/sbin command -v "$1" || true
}

# The mount point of a cgroup hierarchy: name=systemd, memory, ...; "" for version 2.
box_cgroup_mount() {
    if [ -z "$1" ]; then
        awk '{ for (i = 7; i < NF; i++) if ($i == "-" && $(i + 1) == "cgroup2") { print $5; exit } }' \
            /proc/self/mountinfo
    else
        awk -v want="$1" '{ for (i = 7; i < NF; i++) if ($i == "-" && $(i + 1) == "cgroup") {
            n = split($NF, o, ","); m = want; split(m, w, ",")
            for (k = 1; k <= n; k++) if (o[k] == w[1]) { print $5; exit } } }' /proc/self/mountinfo
    fi
}

# A cgroup of our own in every hierarchy, so that the box's systemd makes its there.
box_make_cgroups() {
    local name at mount
    while IFS=: read -r _ name at; do
        mount=$(box_cgroup_mount "$name")
        [ -n "$mount" ] || continue
        [ "$at" = / ] && at=
        mkdir "$mount$at/shardd-box-$$" 2>/dev/null || continue
        box_cgroups+=("$mount$at/shardd-box-$$")
        if [ "$name" = cpuset ]; then # empty ones take no process
            cat "$mount$at/cpuset.cpus" >"$mount$at/shardd-box-$$/cpuset.cpus" 2>/dev/null || true
            cat "$mount$at/cpuset.mems" >"$mount$at/shardd-box-$$/cpuset.mems" 2>/dev/null || true
        fi
    done </proc/self/cgroup
}

# Make box_dir/root: after this units can be written into it.
box_new() {
    box_dir=$(mktemp -d /tmp/shardd-box.XXXXXX)
    mount -t tmpfs -o mode=0755 shardd-box "$box_dir" || box_skip "cannot mount a tmpfs"
    mkdir "$box_dir"/{upper,work,root}
    mount -t overlay -o "lowerdir=/,upperdir=$box_dir/upper,workdir=$box_dir/work" \
        shardd-box "$box_dir/root" || box_skip "cannot mount an overlay"
    box_root=$box_dir/root
    # Nothing of this machine's own units runs in the box.
    rm -rf "$box_root"/etc/systemd/system "$box_root"/etc/systemd/system.conf.d
    mkdir -p "$box_root"/etc/systemd/system
    : >"$box_root"/etc/fstab
    rm -f "$box_root"/etc/machine-id
    echo 0123456789abcdef0123456789abcdef >"$box_root"/etc/machine-id
}

# In the new namespaces: mounts, then systemd in our place. Arguments: root, target.
# shellcheck disable=SC2016
box_init='
set -eu
root=$1 target=$2 systemd=$3
mount --make-rprivate /
mount -t tmpfs -o mode=0755 run "$root/run"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys" 2>/dev/null || mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=0755 dev "$root/dev"
for node in null zero full random urandom tty; do
    : >"$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
: >"$root/dev/console"
ln -s pts/ptmx "$root/dev/ptmx"
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
# What is set there is the whole machine: systemd raises limits when it starts.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,ro,bind "$root/proc/sys"
if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
    mount -t tmpfs -o mode=0755 cgroup "$root/sys/fs/cgroup"
    mkdir "$root/sys/fs/cgroup/unified" "$root/sys/fs/cgroup/systemd"
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup/unified"
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
fi
# Services with mount namespaces of their own need a real root, not a chroot.
cd "$root"
mkdir -p .outside
pivot_root . .outside
exec chroot . /bin/sh -c "umount -l /.outside; rmdir /.outside
    exec env -i container=shardd-box PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C \
    $systemd --system --unit=$target --log-target=console --log-level=info --show-status=no"
'

box_start() {
    local group systemd
    systemd=$(box_find systemd)
    box_target=$1
    box_make_cgroups
    (
        for group in "${box_cgroups[@]}"; do
            echo "$BASHPID" >"$group/cgroup.procs"
        done
        exec unshare --pid --fork --kill-child --mount --uts --ipc --cgroup \
            bash -c "$box_init" box "$box_root" "$1" "$systemd" >"$box_dir/log" 2>&1 </dev/null
    ) &
    box_unshare=$!
    box_wait_for 60 box_is_settled || true
    box_is_up || {
        cat "$box_dir/log" >&2
        box_skip "systemd does not come up in a box here"
    }
}

# What a test would need its box for at its end is known at its beginning: a box with nothing in it.
box_try() {
    box_check_host
    box_new
    printf '[Unit]\nDescription=box\nDefaultDependencies=no\n' >"$box_root/etc/systemd/system/box.target"
    box_start box.target
    box_stop
}

# box_wait_for SECONDS COMMAND...: as many times longer as SHD_TEST_PACE says.
box_wait_for() {
    local end=$((SECONDS + $1 * ${SHD_TEST_PACE:-1}))
    shift
    until "$@" 2>/dev/null; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.05
    done
}

box_find_pid() {
    box_pid=$(cat "/proc/$box_unshare/task/$box_unshare/children" 2>/dev/null)
    box_pid=${box_pid%% *}
    [ -n "$box_pid" ]
}

# It is up, or will never be.
box_is_settled() { box_is_up || ! kill -0 "$box_unshare"; }

box_is_up() {
    [ -n "$box_pid" ] || box_find_pid || return 1
    [ "$(cat "/proc/$box_pid/comm")" = systemd ] && box systemctl is-active --quiet "$box_target"
}

box() {
    nsenter --target "$box_pid" --mount --uts --ipc --pid --cgroup --root --wd=/ -- "$@"
}

box_stop() {
    local group
    if [ -n "$box_pid" ]; then
        kill -KILL "$box_pid" 2>/dev/null || true # all in its namespace go with it
        box_pid=
    fi
    if [ -n "$box_unshare" ]; then
        wait "$box_unshare" 2>/dev/null || true
        box_unshare=
    fi
    for group in "${box_cgroups[@]}"; do
        box_wait_for 2 box_drop_cgroup "$group" || echo "left behind: $group" >&2
    done
    box_cgroups=()
    if [ -n "$box_dir" ]; then
        umount "$box_dir/root" 2>/dev/null || umount -l "$box_dir/root" 2>/dev/null || true
        umount "$box_dir" 2>/dev/null || umount -l "$box_dir" 2>/dev/null || true
        rmdir "$box_dir" || true
        box_dir=
    fi
}

box_drop_cgroup() {
    find "$1" -depth -type d -exec rmdir {} \; 2>/dev/null
    [ ! -d "$1" ]
}
