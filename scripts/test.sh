#!/usr/bin/env bash
# test.sh [--quick]: everything that must hold before a change lands.
#
# Format, shellcheck, clang-tidy; then build and test: dev (ASan, UBSan), tsan (unit tests with
# threads), release, and five seconds of each fuzz target. --quick: release only, without lint.
# Output of the tests is shown, of builds kept in build/logs. Ends with ctest's closing lines of each
# build, and the seconds that each step took.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

quick=no
for arg in "$@"; do
    case $arg in
    --quick) quick=yes ;;
    *)
        say "unknown argument '$arg'; usage: test.sh [--quick]"
        exit 2
        ;;
    esac
done
jobs=$(nproc)
# Most tests wait more than they compute: for deadlines, and for each other's processes.
export CTEST_PARALLEL_LEVEL=$((3 * jobs))
failed=()
closing=()
seconds=()

sources() {
    find proto kernels daemon client examples bench tests \
        \( -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) "$@" | sort
}
scripts() {
    printf '%s\n' .ci/run
    find scripts bench tests -name '*.sh' | sort
    printf '%s\n' cmake/debian/{postinst,prerm,postrm}
}

check_format() { sources | xargs -r clang-format-14 --dry-run -Werror; }
check_scripts() { scripts | xargs shellcheck -x; }
# Of the files that the release build compiles; all warnings of .clang-tidy are errors.
check_tidy() {
    sources -name '*.c' |
        while read -r file; do
            if grep -qF "\"file\": \"$root/$file\"" build/release/compile_commands.json; then
                echo "$file"
            fi
        done |
        xargs -P "$jobs" -n 4 clang-tidy-14 -p build/release --quiet
}

# timed NAME COMMAND...: note how long it took.
timed() {
    local name=$1 start=$SECONDS
    shift
    "$@"
    seconds+=("$name $((SECONDS - start))")
}
# must NAME COMMAND...: a step without which there is nothing to go on with.
must() { timed "$1" step "$@"; }
# check NAME COMMAND...: a step whose failure is counted, so that one run shows all of them.
count_failed() { (step "$@") || failed+=("$1"); }
check() { timed "$1" count_failed "$@"; }

# run_tests PRESET [ctest arguments]: the prefix, if any, is in $under.
under=()
run_tests() { timed "test-$1" run_ctest "$@"; }
run_ctest() {
    local preset=$1 log=$logs/ctest-$1.log
    shift
    say "testing $preset"
    "${under[@]}" ctest --preset "$preset" "$@" 2>&1 | tee "$log" || failed+=("ctest-$preset")
    closing+=("$(sed -n -e "s/^[0-9]*% tests passed.*/$preset: &/p" \
        -e "s/^Total Test time.*/$preset: &/p" "$log")")
}

cd "$root"
if [ "$quick" = yes ]; then
    must install-deps scripts/install-deps.sh
    must build-release build release
    run_tests release
else
    must install-deps scripts/install-deps.sh --dev
    must build-release build release
    check format check_format
    check shellcheck check_scripts
    check clang-tidy check_tidy
    must build-dev build dev
    run_tests dev
    must build-tsan build tsan test_threads
    # gcc 12's ThreadSanitizer knows no address spaces as random as newer kernels' are.
    under=(setarch "$(uname -m)" -R)
    run_tests tsan -L threads
    under=()
    run_tests release
    check fuzz scripts/fuzz.sh --seconds 5
    closing+=("$(grep ' runs ' "$logs/fuzz.log" || true)")
fi

printf '%s\n' "" "${closing[@]}"
say "seconds: $(printf '%s, ' "${seconds[@]}")all $SECONDS"
if [ ${#failed[@]} -gt 0 ]; then
    say "FAILED: ${failed[*]} (logs in $logs)"
    exit 1
fi
say "all passed"
