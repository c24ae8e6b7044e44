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

# build PRESET [TARGET...]: configure and build; warnings are errors.
build() {
    local preset=$1
    shift
    cd "$root" || return
    cmake --preset "$preset" ${werror:+-DSHD_WERROR="$werror"} &&
        cmake --build --preset "$preset" ${1:+--target "$@"}
}

# build_to_use TARGET...: release, for who runs it: a warning of a compiler that we never saw must
# not stop them. A tree that is built with warnings as errors already stays so, not built twice.
build_to_use() {
    local werror
    werror=$(sed -n 's/^SHD_WERROR:[A-Z]*=//p' "$root/build/release/CMakeCache.txt" 2>/dev/null)
    werror=${werror:-OFF} build release "$@"
}
