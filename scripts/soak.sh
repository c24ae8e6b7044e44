#!/usr/bin/env bash
# soak.sh [--seconds N] [--seed N]: do to daemons, over and over, what workers and tools do to them.
#
#   scripts/soak.sh                    for 30 minutes
#   scripts/soak.sh --seconds 600      for ten; below 300 memory is not judged, for much is made once
#
# Attach, open models, train, save, ask; workers are killed, and one of two daemons is. Descriptors,
# mappings, threads and private memory of daemons and keeper must be flat at the end; how that is judged
# is at the top of tests/e2e/test_soak.c. Exit code: 0 flat, 1 something grows (it is named) or
# fails, 2 wrong usage.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

usage() {
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
seconds=1800 seed=1
while [ $# -gt 0 ]; do
    case $1 in
    --seconds) seconds=${2:-} ;;
    --seed) seed=${2:-} ;;
    *) usage ;;
    esac
    case ${2:-} in
    '' | *[!0-9]*) usage ;;
    esac
    shift 2
done
step build-soak build_to_use shardd shardctl test_soak
SHD_SOAK_SECONDS=$seconds SHD_TEST_SEED=$seed exec "$root/build/release/tests/test_soak"
