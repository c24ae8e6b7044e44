#!/usr/bin/env bash
# demo.sh [shd-gpt arguments]: from a bare Debian or Ubuntu to a GPT in training, in one command.
#
# Installs what is missing, builds, and trains in two worker processes a transformer whose
# parameters and optimizer state live in two other processes. `demo.sh --steps 20` is short;
# `build/release/bin/shd-gpt --help` lists the rest.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

bin=$root/build/release/bin
step install-deps "$root/scripts/install-deps.sh"
step build-release build_to_use shardd shardctl shd-gpt shd shardctl-texts # what cmake --install takes
say "running: shardctl run --daemons 2 --workers 2 -- shd-gpt $*"
code=0
"$bin/shardctl" run --daemons 2 --workers 2 -- "$bin/shd-gpt" "$@" || code=$?
if [ "$code" -ne 0 ]; then
    say "step 'run' failed with code $code; the reason is above"
fi
exit "$code"
