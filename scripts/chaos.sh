#!/usr/bin/env bash
# chaos.sh [flags] [-- shd-gpt arguments]: train while daemons and workers are killed at random.
#
#   scripts/chaos.sh --kills 100 --seed 1      until 100 kills are made
#   scripts/chaos.sh --seconds 60              for about a minute
#   scripts/chaos.sh --hosts 2 --replicas 2 --kills 300
#                                              two hosts, or three (network namespaces: takes root), with replicas: also
#                                              relays, whole hosts, and the wires between them
#   scripts/chaos.sh --faults [--brief]        instead: one fault after the other, as the daemons'
#                                              program away, a full disk, a requeue; --list names them
#
# First the training undisturbed, for its digest; then again, as often as it takes, with SIGKILL at
# random: which process and when, a quarter of them two at once. Each run must end by itself with
# the same digest. The last line says so, `kills=... digest=equal` (exit 0), or how to do it again
# (exit 1). --help lists the flags.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

step build-release build_to_use shardd shardctl shd-gpt
if ! command -v python3 >/dev/null; then
    say "needs python3 (scripts/install-deps.sh --dev installs it)"
    exit 1
fi
program=chaos.py
if [ "${1:-}" = --faults ]; then
    program=chaos_faults.py
    shift
elif [ "${1:-}" = --hosts ]; then
    program=chaos_hosts.py
fi
exec python3 "$root/tests/e2e/$program" --bin "$root/build/release/bin" --logs "$logs" "$@"
