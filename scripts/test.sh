#!/usr/bin/env bash
# test.sh [--quick]: everything that must hold before a change lands.
#
# Two halves side by side, as half of what tests do is wait: dev (ASan, UBSan); and format, shellcheck,
# clang-tidy, tsan (unit tests with threads), release but for what dev has held, and three seconds of
# each fuzz target. --quick: release only, all of its tests, without lint.
# On a terminal the output of the tests is shown, elsewhere which of them failed; all of it, and that of
# builds, is kept in build/logs. Ends with ctest's closing lines of each build, what was skipped, the
# seconds that each step took (in brackets: those of the processors), and the tests of all builds that
# failed, each with the lines that say why. CTEST_PARALLEL_LEVEL: so many tests at a time, of both halves
# (five a processor); 1: one half after the other. SHD_TEST_LIMIT_S: tests that run so many seconds after
# the start are ended, and are failures, as is each that takes 25 minutes.
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
# Most tests wait more than they compute; those that compute say so (PROCESSORS).
level=${CTEST_PARALLEL_LEVEL:-$((5 * jobs))}
export CTEST_PARALLEL_LEVEL=$level
export PATH=$root/build/tools/usr/bin:$PATH
notes=$logs/test.notes # a line each: failed|closing|seconds TEXT
mkdir -p "$logs"
: >"$notes"
note() { printf '%s\n' "$*" >>"$notes"; }
noted() { sed -n "s/^$1 //p" "$notes"; }

sources() {
    find proto kernels daemon client examples bench tests \
        \( -name '*.[ch]' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) | sort
}
scripts() {
    printf '%s\n' .ci/run
    find scripts bench tests -name '*.sh' | sort
    printf '%s\n' cmake/debian/{postinst,prerm,postrm}
}

check_format() { sources | xargs -r clang-format-14 --dry-run -Werror; }
check_scripts() { scripts | xargs shellcheck -x; }

# How many times as long as on a quick and idle machine this takes here and now, with what else the
# machine does: tests' times are so many times as long. At most 10: a hang is to end some day.
measure_pace() {
    local start=${EPOCHREALTIME/[.,]/} i pace
    for ((i = 0; i < 400000; i++)); do :; done
    pace=$(((${EPOCHREALTIME/[.,]/} - start) / 600000 + 1))
    echo $((pace < 10 ? pace : 10))
}

least() { echo $(($1 < $2 ? $1 : $2)); }

# Prometheus and promtool without a service that starts: build/tools/usr/bin.
get_prometheus() {
    local tools=$root/build/tools
    [ ! -x "$tools/usr/bin/promtool" ] || return 0
    rm -rf "$tools"
    mkdir -p "$tools"
    (cd "$tools" && apt-get -q download prometheus && dpkg -x prometheus_*.deb .)
}

# PyTorch for tests torch*: build/torch-VERSION, or $SHD_TORCH_ENV; beside it what torch_trainers needs.
get_torch() {
    (step torch scripts/torch_env.py) || say "no PyTorch: tests torch* are skipped"
    (step trainers scripts/torch_env.py --trainers) || say "no transformers, no Lightning: torch_trainers is skipped"
}

# Not tested once more in release: what has been held in dev and no optimization changes, which are memory,
# the order of events, and words. (client_again and emulate_trail are both: a part in dev, all in release.)
held_in_dev='adopt|adopt_state|arbiter.*|chaos_elastic|chaos_file|chaos_hosts.*|checkpoint_bad|checkpoint_ctl|client_follow|client_fork'
held_in_dev+='|client_common|client_drop|client_kept|client_lease|client_membe.*|client_open|client_parts|client_put.*|client_read|client_reset|client_session|client_show|client_sizes'
held_in_dev+='|client_waits|client_withdraw|client_wrong|commit_steps|configure_bare|ctl|ctl_doctor|ctl_drain|ctl_keeper|ctl_meter|ctl_pairs'
held_in_dev+='|ctl_plan|ctl_reshard|ctl_status|ctl_top|ctl_up|cuda_faults|cuda_share|elastic|fault'
held_in_dev+='|faults|fuzz_.*|gpu_client|gpu_client_faults|gpu_daemon|gpu_daemon_ctl|gpu_stream'
held_in_dev+='|guard|host|host_replicas|hosts_many|hosts_replicas|hosts_ucx|hosts_refill|hosts_reshard|house.*|http|log|log_lines'
held_in_dev+='|adopt_file|adopt_state_file|client_kept_file|client_rewind|client_rewind_file|client_.*_pairs|replace_pairs|client_codec|client_replica|client_tiles|refill|hosts_codec|tiles'
held_in_dev+='|lossy|manuals|memory|merge|metrics|model_files|model_files_room|nccl_client|nccl_daemon|nccl_waits|norms|notify|page|page_dashboard'
held_in_dev+='|plan_file|plan_own|plan_time|proto_.*|ready|recover|replace|replicas|requests|requests_spec|sim|slurm|slurm_replicas|soak|spill|step_crash|units|units_merge'

# The other way round: what computes alone and looks at no memory but its own (what it computes with, "sim" has in dev),
# and kills at each instruction of what users run.
held_in_release='sim_bugs|kern_trail_kill'

# timed NAME COMMAND...: note how long it took, and (of its children) the processors.
timed() {
    local name=$1 start=$SECONDS TIMEFORMAT='%0U %0S' user system
    shift
    { time "$@" 2>&3; } 3>&2 2>"$logs/$name.time"
    read -r user system <"$logs/$name.time"
    note seconds "$name $((SECONDS - start)) ($((user + system))),"
}
# must NAME COMMAND...: a step without which there is nothing to go on with.
must() { timed "$1" step "$@"; }
# check NAME COMMAND...: a step whose failure is counted, so that one run shows all of them.
count_failed() { (step "$@") || note failed "$1"; }
check() { timed "$1" count_failed "$@"; }

# Of ctest's output: where nobody looks on, each twentieth test, and those that fail with what was said of
# it. Who shows a part of a long output shows that about the first failure, so the reasons stand there, too.
shown() {
    if [ -t 1 ]; then
        sed -u "s/^/$1: /"
    else
        sed -Eun "s/^/$1: /
            /^$1: +[0-9]+\/[0-9]+ Test |^$1: +Start |^$1: [0-9]+% tests passed/ {
                h
                /\*\*\*Skipped/d
                /\*\*\*| [0-9]*[02468]0\/[0-9]+ Test /p
                d
            }
            x
            /\*\*\*(Failed|Timeout|Exception)/! { x; d }
            x
            /\.(c|cc|cpp|cu|cuh|h|sh|py):[0-9]+(:[0-9]+)?: |^$1: +FAIL(ED)?([ :]|\$)|^$1: (FAIL|ERROR)/p
            /^$1: ([A-Za-z_.]*(Error|Exception|Expired)|libshd\.errors\.[A-Za-z]+)(: |\$)|(ERROR|WARNING): [A-Za-z]*Sanitizer/p"
    fi
}

# What hangs in the last minutes is ended in time to be told of.
stop_at=()
[ -z "${SHD_TEST_LIMIT_S:-}" ] || stop_at=(--stop-time "$(date -d "+$SHD_TEST_LIMIT_S seconds" +%T)")

# run_tests PRESET TIMES [ctest arguments]: TIMES slower than release that has the machine to itself; the
# prefix, if any, is in $under.
under=()
run_tests() { timed "test-$1" run_ctest "$@"; }
run_ctest() {
    local preset=$1 log=$logs/ctest-$1.log pace
    pace=$(($2 * $(measure_pace)))
    shift 2
    say "testing $preset, $CTEST_PARALLEL_LEVEL at a time, at pace $pace"
    "${under[@]}" env SHD_TEST_PACE="$pace" ctest --preset "$preset" --timeout "$(least $((600 + 200 * pace)) 1500)" \
        "${stop_at[@]}" "$@" 2>&1 | tee "$log" | shown "$preset" || note failed "ctest-$preset"
    ! grep -q "^The stop time has been passed" "$log" || note failed "ctest-$preset-in-$SHD_TEST_LIMIT_S-s"
    sed -n -e "s/^[0-9]*% tests passed.*/closing $preset: &/p" -e "s/^Total Test time.*/closing $preset: &/p" \
        -e "s/^.*[0-9] - \(.*\) (Skipped)/closing $preset: skipped: \1/p" "$log" >>"$notes"
}

# why NAME: what a failed step's log says of it.
why() {
    local log=$logs/$1.log
    [ -f "$log" ] || return 0
    case $1 in
    ctest-*) awk -v preset="${1#ctest-}" -f scripts/failed.awk "$log" ;;
    *) awk -v step="$1" '/(error|warning|ERROR|FAILED)[: ]/ && n++ < 8 { print step ": " $0 }' "$log" ;;
    esac
}

# build_release: all but programs of tests that are not run there. (ptx_NAME runs that of NAME.) The same code as for
# users, of whose variables no debugger is told, which compiles in a tenth less time.
build_release() {
    local all run targets
    configure release ON "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O2 -g1"
    build release build.ninja # which has no test yet that was added since
    all=$(sed -n 's|^build \(.*/\)\?all: phony ||p' build/release/build.ninja | tr ' ' '\n' | grep -v '\(^\|/\)all$')
    run=$(ctest --preset release -N -E "^($held_in_dev)\$" | sed -n 's|^ *Test *#[0-9]*: \(ptx_\)\?|tests/test_|p')
    mapfile -t targets < <(grep -v '^tests/test_\|^fuzz/' <<<"$all" && grep -Fx "$run" <<<"$all")
    build release "${targets[@]}"
}

# What is not dev's.
other_half() {
    trap wait EXIT # for clang-tidy
    timed torch get_torch &
    local torch=$!
    must build-release build_release
    check format check_format
    check shellcheck check_scripts
    check clang-tidy nice scripts/tidy.py & # in the time in which tests wait
    must build-tsan build tsan test_threads
    # gcc 12's ThreadSanitizer knows no address spaces as random as newer kernels' are.
    under=(setarch "$(uname -m)" -R)
    run_tests tsan 6 -L threads
    under=()
    wait "$torch"
    run_tests release 2 -E "^($held_in_dev)\$"
    check fuzz scripts/fuzz.sh --seconds 3
}

cd "$root"
if [ "$quick" = yes ]; then
    must install-deps scripts/install-deps.sh
    must build-release build release
    run_tests release 1
else
    must install-deps scripts/install-deps.sh --dev
    # A python3 that is a script, as pyenv's, starts a dozen programs before the one that is meant, in each of the tests.
    if head -c 2 "$(command -v python3)" | grep -q '#!'; then
        PATH=$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH
    fi
    (step prometheus get_prometheus) || say "no prometheus: a part of metrics is skipped"
    must build-dev build dev
    [ "$level" = 1 ] || CTEST_PARALLEL_LEVEL=$(((level + 1) / 2))
    trap 'trap - TERM; kill 0' INT TERM # the other half, too
    other_half &
    other=$!
    [ "$level" -gt 1 ] || wait "$other" || note failed other-half
    run_tests dev 3 -E "^($held_in_release)\$"
    [ "$level" = 1 ] || wait "$other" || note failed other-half
fi

printf '%s\n' "" "$(noted closing)" "$(sed -n '/ runs /p' "$logs/fuzz.log" 2>/dev/null)"
times >"$logs/all.time" # "0m0.1s 0m0.1s", of children in the second line
processors=$(awk -F '[ms ]' 'NR == 2 { printf "%.0f", 60 * ($1 + $4) + $2 + $5 }' "$logs/all.time")
say "seconds: $(noted seconds | tr '\n' ' ')all $SECONDS ($processors)"
failed=$(noted failed | tr '\n' ' ')
if [ -n "$failed" ]; then
    for name in $failed; do why "$name"; done
    say "FAILED: $failed(logs in $logs)"
    exit 1
fi
say "all passed"
