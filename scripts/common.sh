# Shared by the scripts beside it: where the tree is, and steps that keep a log.
# shellcheck shell=bash
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
logs=$root/build/logs
me=$(basename "$0")

say() { printf '%s: %s\n' "$me" "$*" >&2; }

# step NAME COMMAND...: run it with its output in build/logs/NAME.log; on failure show the log's
# end, name the step and the log, and exit with the command's code.
step() {
    local name=$1 log=$logs/$1.log start=$SECONDS code=0
    shift
    mkdir -p "$logs"
    say "$name ..."
    "$@" >"$log" 2>&1 </dev/null || code=$?
    if [ "$code" -ne 0 ]; then
        tail -n 40 "$log" >&2
        say "step '$name' failed with code $code: $*"
        say "its whole output: $log"
        exit "$code"
    fi
    say "$name: $((SECONDS - start)) s"
}

# bare_root debian|ubuntu DIR: a Debian 12 or an Ubuntu 24.04 there, by debootstrap, that gets packages as this
# machine does; false where it cannot be made.
bare_root() {
    local dir=$2 suite mirror suites parts options script='' certificates=/etc/ssl/certs/ca-certificates.crt
    case $1 in
    debian)
        suite=bookworm mirror=http://deb.debian.org/debian
        suites="bookworm bookworm-updates" parts=main
        ;;
    ubuntu)
        suite=noble mirror=http://archive.ubuntu.com/ubuntu
        suites="noble noble-updates noble-security" parts="main universe"
        ;;
    *) return 2 ;;
    esac
    options=(--variant=minbase "--components=${parts// /,}")
    # A system that this debootstrap does not know yet, nor its keys.
    if [ ! -e "/usr/share/debootstrap/scripts/$suite" ]; then
        script=/usr/share/debootstrap/scripts/gutsy
        options+=(--no-check-gpg)
    fi
    debootstrap "${options[@]}" "$suite" "$dir" "$mirror" ${script:+"$script"} || return 1
    for suite in $suites; do echo "deb $mirror $suite $parts"; done >"$dir/etc/apt/sources.list" || return 1
    cp /etc/apt/apt.conf.d/* "$dir/etc/apt/apt.conf.d/" 2>/dev/null || true
    cp /etc/pip.conf "$dir/etc/" 2>/dev/null || true
    if [ -e "$certificates" ]; then
        mkdir -p "$dir/usr/local/share/ca-certificates" "$dir/etc/ssl/certs" &&
            cp "$certificates" "$dir/usr/local/share/ca-certificates/this-machine.crt" &&
            cp "$certificates" "$dir/$certificates" || return 1
    fi
    cp -L /etc/resolv.conf /etc/hosts "$dir/etc/" && chroot "$dir" apt-get update
}

# cached PRESET VARIABLE: its value in that build's cache; empty when there is none.
cached() {
    sed -n "s/^$2:[A-Z]*=//p" "$root/build/$1/CMakeCache.txt" 2>/dev/null || true
}

# configure PRESET WERROR [cmake arguments]: unless that is how it is configured already; ninja itself sees changes of
# the CMakeLists. (Configuring again moves pkg-config's flags about, and all would be built anew.)
configure() {
    local preset=$1 werror=$2 cache=$root/build/$1/CMakeCache.txt fresh=
    shift 2
    [ "$(cached "$preset" CMAKE_HOME_DIRECTORY)" = "$root" ] || fresh=--fresh # a tree that was moved
    if [ -z "$fresh" ] && [ -f "$root/build/$preset/build.ninja" ] &&
        [ "$(cached "$preset" SHD_WERROR)" = "$werror" ] && [ "$cache" -nt "$root/CMakePresets.json" ]; then
        return 0
    fi
    cmake --preset "$preset" $fresh -DSHD_WERROR="$werror" "$@"
}

# build PRESET [TARGET...]: all, or these targets; warnings are errors.
build() {
    local preset=$1
    shift
    cd "$root" && configure "$preset" ON &&
        cmake --build --preset "$preset" ${1:+--target "$@"}
}

# build_to_use TARGET...: release, for who runs it: a warning of a compiler that we never saw must
# not stop them. A tree where warnings are errors already stays so, lest it be built twice.
build_to_use() {
    local werror
    werror=$(cached release SHD_WERROR)
    cd "$root" && configure release "${werror:-OFF}" &&
        cmake --build --preset release --target "$@"
}
