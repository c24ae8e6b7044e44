#!/usr/bin/env bash
# fuzz.sh [--seconds S] [--keep] [TARGET...]: libFuzzer on tests/fuzz, each target S seconds (30).
#
# Builds preset fuzz (clang-14; install-deps.sh --dev has it), then fuzzes from
# tests/fuzz/corpus/*.tar, as many targets at a time as there are processors. A line each: runs, runs
# per second, coverage. On a crash: exit 1 with its end and the path of the input that did it;
# build/fuzz/fuzz/fuzz_replay TARGET runs that again. What is found stays in build/fuzz/found. --keep:
# minimise it into tests/fuzz/corpus/TARGET.tar, whose bytes depend on the inputs alone.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

seconds=30
keep=no
targets=()
while [ $# -gt 0 ]; do
    case $1 in
    --seconds)
        seconds=${2:-}
        shift
        ;;
    --keep) keep=yes ;;
    -*)
        say "unknown argument '$1'; usage: fuzz.sh [--seconds S] [--keep] [TARGET...]"
        exit 2
        ;;
    *) targets+=("$1") ;;
    esac
    shift
done
[[ $seconds =~ ^[1-9][0-9]*$ ]] || {
    say "--seconds takes a whole number from 1, got '$seconds'"
    exit 2
}
command -v clang-14 >/dev/null || {
    say "there is no clang-14; scripts/install-deps.sh --dev installs it"
    exit 1
}
known=$(cd "$root/tests/fuzz/corpus" && printf '%s\n' *.tar | sed 's/\.tar$//')
[ ${#targets[@]} -gt 0 ] || read -ra targets <<<"${known//$'\n'/ }"
for target in "${targets[@]}"; do
    grep -qx "$target" <<<"$known" || {
        say "unknown target '$target'; known: ${known//$'\n'/ }"
        exit 2
    }
done

bin=$root/build/fuzz/fuzz
found=$root/build/fuzz/found
corpus=$bin/corpus # unpacked by the build
archives=$root/tests/fuzz/corpus

# options TARGET: of libFuzzer, one a line.
options() {
    local dict=
    printf '%s\n' -timeout=20 -rss_limit_mb=4096 -use_value_profile=1 -print_final_stats=1
    case $1 in
    spec | safetensors | planfile | replicas) dict=$root/tests/fuzz/json.dict ;;
    text | keeper) dict=$root/tests/fuzz/text.dict ;;
    esac
    case $1 in
    ledger | trail | plan | zmtp | ring | relay) echo -max_len=400 ;; # each byte is an event or an edit
    planfile) echo -max_len=6000 ;;
    *) echo -max_len=4096 ;;
    esac
    [ -z "$dict" ] || echo "-dict=$dict"
}

# stat LOG NAME: of libFuzzer's closing figures.
stat_of() { sed -n "s/^stat::$2: *//p" "$1"; }

# Fuzz one target; its line, or its crash.
fuzz_one() {
    local target=$1 log=$logs/fuzz-$1.log new=$found/$1 args code=0
    mapfile -t args < <(options "$target")
    mkdir -p "$new" "$corpus/$target" "$logs"
    "$bin/fuzz_replay" "$target" --seeds "$new"
    (cd "$found" && FUZZ_TARGET=$target "$bin/fuzz" "${args[@]}" "-max_total_time=$seconds" \
        "-artifact_prefix=$found/crash-$target-" "$new" "$corpus/$target") >"$log" 2>&1 || code=$?
    if [ "$code" -ne 0 ]; then
        tail -n 50 "$log" >&2
        say "$target: failed with code $code; run it again:"
        say "  $bin/fuzz_replay $target $(sed -n 's/.*Test unit written to //p' "$log" | tail -n 1)"
        return 1
    fi
    printf '%-12s %9s runs %7s/s  %s\n' "$target" "$(stat_of "$log" number_of_executed_units)" \
        "$(stat_of "$log" average_exec_per_sec)" \
        "$(sed -n 's/.*DONE *\(cov: [0-9]* ft: [0-9]* corp: [^ ]*\).*/\1/p' "$log")"
}

# pack DIR ARCHIVE: the same inputs make the same bytes.
pack() {
    find "$1" -type f -printf '%f\n' | LC_ALL=C sort |
        tar -C "$1" --format=ustar --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=0644 \
            --no-recursion --files-from=- -cf "$2"
}

# The least set of inputs with the same coverage becomes the corpus.
keep_one() {
    local target=$1 new=$corpus/$1.new args
    mapfile -t args < <(options "$target")
    rm -rf "$new"
    mkdir -p "$new"
    FUZZ_TARGET=$target "$bin/fuzz" "${args[@]}" -use_value_profile=0 -set_cover_merge=1 "$new" "$corpus/$target" \
        "$found/$target" >"$logs/fuzz-merge-$target.log" 2>&1
    pack "$new" "$archives/$target.tar"
    rm -rf "${corpus:?}/$target"
    mv "$new" "$corpus/$target"
}

step build-fuzz build fuzz
failed=()
running=()
for target in "${targets[@]}"; do
    fuzz_one "$target" &
    running+=("$target:$!")
    if [ ${#running[@]} -ge "$(nproc)" ]; then
        wait "${running[0]#*:}" || failed+=("${running[0]%:*}")
        running=("${running[@]:1}")
    fi
done
for job in "${running[@]}"; do
    wait "${job#*:}" || failed+=("${job%:*}")
done
if [ ${#failed[@]} -gt 0 ]; then
    say "FAILED: ${failed[*]} (logs: $logs/fuzz-TARGET.log)"
    exit 1
fi
if [ "$keep" = yes ]; then
    for target in "${targets[@]}"; do
        keep_one "$target"
    done
    du -sh --apparent-size "$archives"
fi
