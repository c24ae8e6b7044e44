#!/usr/bin/env bash
# bench.sh NAME [--json] [arguments]: build release and measure.
#
#   update    ns per parameter of accumulate and AdamW, beside the machine's own limit, and
#             with a trail over without one
#   step      a training step with daemons, over the same compute without exchange
#   policies  step time, waiting and memory of each strategy and path, with a slow link
#   elastic   a step of two workers, beside a third one that is slow, or is not
#   recompute  shd-gpt --recompute: step time and memory, beside without
#   attach    a fresh worker's first forward on a warm model, beside loading a file
#   checkpoint  step time while checkpoints are saved; restoring beside attaching
#   status    step time while ten clients read /status and /metrics, over the same unwatched
#   control   requests per second and latency of one daemon with 1, 8 and 64 sessions
#
# Each prints medians with spread and its parameters; --json: one object a line,
# {"name","value","unit","min","max","n"}. `bench.sh NAME --help` lists a benchmark's arguments.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

usage() {
    sed -n -e 1d -e '/^set /q' -e 's/^# \{0,1\}//p' "$root/scripts/bench.sh"
}

what=${1:-}
[ $# -gt 0 ] && shift
targets=()
case $what in
update) targets=(bench_update) && command=("$root/build/release/bin/bench_update") ;;
step)
    targets=(shardd shardctl shd-gpt)
    command=(python3 "$root/bench/bench_step.py" --bin "$root/build/release/bin")
    ;;
policies)
    targets=(shardd shardctl shd-gpt)
    command=(python3 "$root/bench/bench_policies.py" --bin "$root/build/release/bin")
    ;;
checkpoint)
    targets=(shardd shardctl shd-gpt shd)
    command=(python3 "$root/bench/bench_checkpoint.py" --bin "$root/build/release/bin")
    ;;
elastic)
    targets=(shardd shardctl shd-gpt)
    command=(python3 "$root/bench/bench_elastic.py" --bin "$root/build/release/bin")
    ;;
status)
    targets=(shardd shd-gpt)
    command=(python3 "$root/bench/bench_status.py" --bin "$root/build/release/bin")
    ;;
control)
    targets=(shardd bench_control) && command=("$root/build/release/bin/bench_control")
    ;;
recompute)
    targets=(shd-gpt)
    command=(python3 "$root/bench/bench_recompute.py" --bin "$root/build/release/bin")
    ;;
attach)
    targets=(shardd shardctl bench_attach)
    command=("$root/build/release/bin/shardctl" run --daemons 2 --
        "$root/build/release/bin/bench_attach")
    ;;
--help | -h)
    usage
    exit 0
    ;;
*)
    usage >&2
    say "unknown benchmark '$what'; known: update, step, policies, elastic, control, recompute, attach, checkpoint, status"
    exit 2
    ;;
esac
step install-deps "$root/scripts/install-deps.sh" --dev
step build-release build_to_use "${targets[@]}"
exec "${command[@]}" "$@"
