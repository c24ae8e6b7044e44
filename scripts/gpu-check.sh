#!/usr/bin/env bash
# gpu-check.sh bundle [OUT.tar.gz]    where the project builds (no GPU needed)
# gpu-check.sh run [flags]            on a machine with an NVIDIA GPU, once, cold
#
# bundle: builds release with its GPU kernels (nvcc) and packs programs, tests, the shared libraries
# they need, scripts and a text into one archive of at most 60 MiB: build/gpu-check.tar.gz.
#
# run: everything about the GPU part that only a GPU can tell, in under 9 minutes: each item in its
# own process group with a time limit, the rest goes on after a failure. From the unpacked bundle,
# where there is nothing but a driver, bash and python3, or from a tree that was built. A table at
# the end; --json FILE has the results after each item, so that a run that is cut leaves some, and
# all logs go beside it, to NAME-logs.tar.gz.
#   --first          in 60 s: does it work here at all?
#   --only NAME,...  these items alone      --list  their names and limits
# Exit code: 0 all passed, 1 not all, 2 wrong usage. docs/gpu.md says what the items are.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
# shellcheck source=scripts/common.sh
. "$here/common.sh"

programs="shardd shardctl shd-gpt bench_cuda gpu_probe nccl_pair trail_variants"
size_mib_max=60

usage() { sed -n -e 1d -e '/^set /q' -e 's/^# \{0,1\}//p' "$here/gpu-check.sh"; }

# The tests that run against a device as well as against the shim.
device_tests() { sed -n 's/^build \([^ ]*\/\)*\(test_\(cuda\|gpt_cuda\|gpu_client\|gpu_daemon\)[a-z0-9_]*\): phony.*/\2/p' "$root/build/release/build.ninja" | sort -u; }

build_all() {
    build_to_use shardd
    local tests
    mapfile -t tests < <(device_tests)
    # shellcheck disable=SC2086 # words
    build_to_use $programs "${tests[@]}"
}

# The kernels must be in, or the bundle checks nothing.
check_kernels() {
    "$root/build/release/bin/shardctl" doctor --json 2>/dev/null | grep -o 'shardd has GPU kernels: [^"]*' ||
        { say "shardd has no GPU kernels: is nvcc in PATH or under /usr/local/cuda? (cmake --preset release --fresh)"; return 1; }
}

# libraries FILE...: paths of what they load, without the C library's own.
libraries() {
    ldd "$@" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
        grep -vE '/(ld-linux[^/]*|lib(c|m|dl|rt|pthread|resolv|util|nsl|anl|BrokenLocale))\.so'
}

# stage DIR: the tree of the bundle, where everything lies as in the project's own.
stage() {
    local to=$1/gpu-check release=build/release file tests name
    local bin=$to/$release/bin test_dir=$to/$release/tests carried=$to/$release/carried
    mkdir -p "$bin" "$test_dir" "$carried/fallback" "$to/data/text"
    for name in $programs; do
        strip --strip-debug -o "$bin/$name" "$root/$release/bin/$name"
    done
    mapfile -t tests < <(device_tests)
    for name in "${tests[@]}"; do
        file=$(find "$root/$release/tests" -type f -name "$name" | head -n 1)
        strip --strip-debug -o "$test_dir/$name" "$file"
    done
    # The Python package, with the library beside it.
    mkdir -p "$to/$release/lib" "$to/$release/python/libshd"
    cp -a "$root/$release"/lib/libshd.so* "$to/$release/lib/"
    (cd "$root/$release/python/libshd" && find . -name '*.py' -exec cp --parents -t "$to/$release/python/libshd" {} +)
    ln -s ../../lib ../../bin "$to/$release/python/libshd/"
    # shellcheck disable=SC2046 # no spaces in there
    libraries "$bin"/* "$test_dir"/* $(find "$root/$release/lib" -name 'libshd.so*' -type f) |
        while read -r file; do
            case $file in
            */libstdc++.so* | */libgcc_s.so* | */libgomp.so*) name=$carried/fallback ;;
            *) name=$carried ;;
            esac
            strip --strip-unneeded -o "$name/$(basename "$file")" "$file" 2>/dev/null ||
                cp -L "$file" "$name/$(basename "$file")"
        done
    (cd "$root" && cp --parents scripts/gpu-check.sh scripts/common.sh scripts/gpu/*.py tests/e2e/chaos.py \
        tests/cuda/test_torch_cuda.py tests/unit/client/python/torch_run.py bench/gpt_torch.py systemd/shardd@.service systemd/gpu.conf "$to/")
    ln -s scripts/gpu-check.sh "$to/gpu-check.sh"
    if [ -d /usr/share/games/fortunes ]; then
        find /usr/share/games/fortunes -maxdepth 1 -type f ! -name '*.dat' ! -name '*.u8' -exec cp -t "$to/data/text" {} +
    else
        cp "$root"/docs/*.md "$to/data/text/"
    fi
    git -C "$root" describe --always --dirty 2>/dev/null >"$to/VERSION" || echo unknown >"$to/VERSION"
}

bundle() {
    local out=$1 work bytes
    case $out in /*) ;; *) out=$PWD/$out ;; esac
    command -v python3 >/dev/null || say "no python3 here: 'run' will need one there"
    step build-release build_all
    step gpu-kernels check_kernels
    work=$(mktemp -d)
    # shellcheck disable=SC2064 # now
    trap "rm -rf '$work'" EXIT
    stage "$work"
    mkdir -p "$(dirname "$out")"
    tar -C "$work" --sort=name --owner=0 --group=0 --numeric-owner -cf - gpu-check | gzip -9n >"$out"
    bytes=$(stat -c %s "$out")
    if [ "$bytes" -gt $((size_mib_max << 20)) ]; then
        say "$out has $bytes bytes, more than $size_mib_max MiB: not to be carried"
        return 1
    fi
    say "$out: $((bytes / 1024)) KiB, $(tar -tzf "$out" | grep -c '[^/]$') files"
    say "on the GPU machine: tar xzf $(basename "$out") && gpu-check/gpu-check.sh run --first, then run --json gpu-check.json"
}

case ${1:-} in
bundle)
    [ $# -le 2 ] || { usage >&2; exit 2; }
    bundle "${2:-$root/build/gpu-check.tar.gz}"
    ;;
run)
    shift
    command -v python3 >/dev/null || { say "run needs python3"; exit 1; }
    exec python3 -B "$here/gpu/check.py" "$@"
    ;;
--help | -h) usage ;;
*)
    usage >&2
    exit 2
    ;;
esac
