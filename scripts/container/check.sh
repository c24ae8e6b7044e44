#!/usr/bin/env bash
# check.sh [--dir DIR] [--keep]: carry out scripts/container/Dockerfile without a container engine, each
# stage in a bare Debian 12 root made by debootstrap, and train with what comes of it: daemons as the image
# starts them, a worker in the other image's root that shares only /run/shardd.
#
# Root, a network and some 15 minutes; for a change of the recipe, of what is installed, or of what is
# linked. It knows FROM, COPY, RUN, ENV, WORKDIR, USER, VOLUME, HEALTHCHECK, ENTRYPOINT and CMD, and ends
# at anything else. --dir: where the roots go (a new directory below /var/tmp); --keep: they stay.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/../common.sh"
cd "$root"
recipe=scripts/container/Dockerfile
dir=
keep=no

die() { say "$*"; exit 1; }

while [ $# -gt 0 ]; do
    case $1 in
    --dir) dir=${2:?--dir needs a directory}; shift ;;
    --keep) keep=yes ;;
    *) say "unknown argument '$1'; usage: check.sh [--dir DIR] [--keep]"; exit 2 ;;
    esac
    shift
done
[ "$(id -u)" = 0 ] || die "debootstrap and chroot need root"
command -v debootstrap >/dev/null || die "no debootstrap: apt-get install debootstrap"
[ -n "$dir" ] && mkdir -p "$dir" || dir=$(mktemp -d /var/tmp/shardd-container-XXXXXX)
daemons=
# The first process of the daemons' process namespace, below the shell and unshare.
first_process() {
    local pid=$daemons
    while [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" != shardctl ]; do
        pid=$(pgrep -P "$pid" | head -n 1)
    done
    echo "$pid"
}
finish() {
    local pid=
    [ -z "$daemons" ] || pid=$(first_process)
    [ -z "$pid" ] || kill -KILL "$pid" 2>/dev/null || true
    [ -z "$daemons" ] || wait "$daemons" 2>/dev/null || true
    if [ "$keep" = no ]; then rm -rf --one-file-system "$dir"; else say "roots are in $dir"; fi
}
trap finish EXIT

# in_root STAGE USER DIR COMMAND: by its /bin/sh, with the stage's environment, and mounts that end with it.
in_root() {
    local root=$dir/$1 user=$2 where=$3 command=$4
    # shellcheck disable=SC2016 # expanded in there
    ROOT=$root AS=$user AT=$where DO=$command ENVS=$dir/$1.env SHARED=${SHARED:-} \
        unshare --mount --pid --fork --kill-child bash -euc '
        mount --make-rprivate /
        mount --bind "$ROOT" "$ROOT"
        mount -t proc proc "$ROOT/proc"
        mount --rbind /dev "$ROOT/dev"
        [ -z "$SHARED" ] || mount --bind "$SHARED" "$ROOT/run/shardd"
        mapfile -t envs <"$ENVS"
        [ "$AS" = root ] || user=(--reuid "$AS" --regid "$AS" --clear-groups)
        cd "$ROOT"
        exec env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
            http_proxy="${http_proxy:-}" https_proxy="${https_proxy:-}" "${envs[@]}" \
            chroot . ${user:+setpriv "${user[@]}"} /bin/sh -c "cd $AT && $DO"'
}

new_root() { # new_root FROM STAGE
    if [ -d "$dir/$1" ]; then
        cp -a "$dir/$1" "$dir/$2"
        cp "$dir/$1.env" "$dir/$2.env"
        return
    fi
    [ "$1" = debian:12-slim ] || die "FROM $1: neither debian:12-slim nor a stage"
    if [ ! -d "$dir/debian" ]; then
        say "debootstrap bookworm"
        bare_root debian "$dir/debian" >"$dir/debootstrap.log" 2>&1 </dev/null ||
            die "see $(tail -n 5 "$dir/debootstrap.log")"
    fi
    cp -a "$dir/debian" "$dir/$2"
    : >"$dir/$2.env"
}

copy() { # copy STAGE [--from=OTHER] SOURCE TARGET
    local stage=$1 from=
    shift
    case $1 in --from=*) from=${1#--from=}; shift ;; esac
    mkdir -p "$dir/$stage$2"
    if [ -n "$from" ]; then
        cp -a "$dir/$from$1/." "$dir/$stage$2/"
    else
        [ "$1" = . ] || die "COPY $1: the recipe copies the whole tree"
        git ls-files -z | tar -c --null -T - | tar -x -C "$dir/$stage$2"
    fi
}

stage=
user=root
where=/
entry=
words=
# A line a step: continued lines joined, comments left out.
steps=$(sed -e '/^[[:space:]]*#/d' -e '/^[[:space:]]*$/d' "$recipe" | sed -e ':a' -e '/\\$/{N;s/\\\n[[:space:]]*//;ba' -e '}')
while IFS= read -r line; do
    rest=${line#* }
    say "${stage:+$stage: }$line"
    case ${line%% *} in
    FROM)
        read -r from _ stage <<<"$rest"
        user=root where=/
        new_root "$from" "$stage"
        ;;
    RUN) in_root "$stage" "$user" "$where" "$rest" >>"$dir/$stage.log" 2>&1 </dev/null ||
        { tail -n 20 "$dir/$stage.log" >&2; die "failed: $line"; } ;;
    COPY)
        read -ra parts <<<"$rest"
        copy "$stage" "${parts[@]}"
        ;;
    ENV) echo "$rest" >>"$dir/$stage.env" ;;
    WORKDIR) where=$rest; mkdir -p "$dir/$stage$where" ;;
    USER) user=$rest ;;
    ENTRYPOINT) entry=$rest ;;
    CMD) words=$rest ;;
    VOLUME | HEALTHCHECK) ;;
    *) die "it does not know: $line" ;;
    esac
done <<<"$steps"

plain() { sed -e 's/^\[//' -e 's/\]$//' -e 's/", "/ /g' -e 's/"//g' <<<"$1"; }
say "daemons: $(plain "$entry") $(plain "$words")"
id=$(awk -F: '$1 == "shardd" { print $3 }' "$dir/daemons/etc/passwd")
if [ "$user" != shardd ] || [ "$id" = 0 ]; then die "the daemons would run as '$user'"; fi
SHARED=$dir/volume
cp -a "$dir/daemons/run/shardd" "$SHARED"
in_root daemons "$id" "$where" "exec $(plain "$entry") $(plain "$words")" >"$dir/daemons.out" 2>&1 </dev/null &
daemons=$!
for ((i = 0; i < 600; i++)); do
    [ -S "$SHARED/cpu0.sock" ] && break
    kill -0 "$daemons" 2>/dev/null || { cat "$dir/daemons.out" >&2; die "the daemons did not start"; }
    sleep 0.2
done
[ -S "$SHARED/cpu0.sock" ] || die "no daemon after two minutes"
model="--steps 5 --layers 2 --dim 64 --seq 32 --sample 0 --eval-every 0 --threads 1"
got=$(in_root worker "$id" / "exec /usr/bin/shd-gpt $model" 2>"$dir/worker.err" | tail -n 1) ||
    { cat "$dir/worker.err" >&2; die "the worker failed"; }
want=$(in_root worker "$id" / "exec /usr/bin/shd-gpt --standalone $model" | tail -n 1)
say "worker:     $got"
say "standalone: $want"
if [ -z "$want" ] || [ "$got" != "$want" ]; then die "the digests differ"; fi
in_root daemons "$id" "$where" '/usr/bin/shardctl status' || die "the health check's command failed"
# What a container engine does to end it: SIGTERM to its first process.
kill -TERM "$(first_process)"
code=0
wait "$daemons" || code=$?
daemons=
[ ! -S "$SHARED/cpu0.sock" ] || die "sockets are left behind"
say "ended with $code after SIGTERM; the recipe is good"
[ "$code" -eq 0 ]
