#!/usr/bin/env bash
# bench.sh NAME [--json] [arguments]: build release and measure.
#
#   update    ns per parameter of accumulate and AdamW, beside the machine's own limit, and
#             with a trail over without one; --pages: in 4 KiB pages over huge ones;
#             --against avx2: that instruction set over the widest
#   step      a training step with daemons, over the same compute without exchange
#   memory    what each arrangement of memory takes, as predicted and as measured, and its step time
#   policies  step time, waiting and memory of each strategy and path, with a slow link
#   elastic   a step of two workers, beside a third one that is slow, or is not
#   recompute  shd-gpt --recompute: step time and memory, beside without
#   attach    a fresh worker's first forward on a warm model, beside loading a file
#   checkpoint  step time while checkpoints are saved; restoring beside attaching
#   status    step time while ten clients read /status and /metrics, over the same unwatched
#   readers   step time while a process pins steps and reads them, over the same without
#   plan      step time that `shardctl plan` predicts, beside the measured one
#   torch     a GPT from Python: shardd beside DDP, FSDP2 and DeepSpeed; 8 minutes, --size 60m as long
#   peers     the same GPT by all of them and by shd-gpt, with a killed rank: 0.84, 10.8 and 64 M; 22 minutes
#   control   requests per second and latency of one daemon with 1, 8 and 64 sessions; processor time of a return
#   return    processor time of a Return, of worker and daemons, by rings and by connections
#   scale     messages, processor time and memory of a step of 2 to 1,024 hosts, as one daemon, worker and relay have it
#   bulk      rate and processor time of bytes between two relays, beside the same by UCX, without TLS, ZeroMQ, UCX's test and iperf3
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
bin=$root/build/release/bin
script() { # NAME.py ARGUMENTS...
    command=(python3 "$root/bench/$1" "${@:2}" --bin "$bin")
}
case $what in
update) targets=(bench_update) && command=("$bin/bench_update") ;;
step | elastic) targets=(shardd shardctl shd-gpt) && script bench_step.py "$what" ;;
recompute) targets=(shd-gpt) && script bench_step.py "$what" ;;
memory) targets=(shardd shardctl shd-gpt) && script bench_memory.py ;;
policies) targets=(shardd shardctl shd-gpt) && script bench_policies.py ;;
plan) targets=(shardd shardctl shd-gpt) && script bench_plan.py ;;
checkpoint) targets=(shardd shardctl shd-gpt shd) && script bench_checkpoint.py ;;
status) targets=(shardd shd-gpt) && script bench_status.py ;;
readers) targets=(shardd shd-gpt shd python) && script bench_readers.py ;;
torch) targets=(shardd shardctl shd python) && script bench_torch.py ;;
peers) targets=(shardd shardctl shd shd-gpt python) && script bench_peers.py ;;
control) targets=(shardd bench_control) && command=("$bin/bench_control") ;;
return)
    targets=(shardd shardctl bench_return)
    command=("$bin/shardctl" run --daemons "${DAEMONS:-2}" -- "$bin/bench_return")
    ;;
scale) targets=(shardctl bench_scale) && command=("$bin/bench_scale") ;;
bulk) targets=(bench_bulk) && command=("$bin/bench_bulk") ;;
attach)
    targets=(shardd shardctl bench_attach)
    command=("$bin/shardctl" run --daemons 2 -- "$bin/bench_attach")
    ;;
--help | -h)
    usage
    exit 0
    ;;
*)
    usage >&2
    say "unknown benchmark '$what'; known: update, step, memory, policies, plan, elastic, control, return, bulk, scale, recompute, attach, checkpoint, status, readers, torch, peers"
    exit 2
    ;;
esac
step install-deps "$root/scripts/install-deps.sh" --dev
step build-release build_to_use "${targets[@]}"
exec "${command[@]}" "$@"
