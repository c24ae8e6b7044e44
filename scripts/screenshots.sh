#!/usr/bin/env bash
# screenshots.sh: make docs/images/*.png anew: the status page in a headless Chromium.
#
# Needs Chromium (Debian: apt-get install chromium). A real training where the daemons' build has
# status sockets, with one worker stopped; --made: documents made by tests/lib/page_fake.py instead.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

step build-release build_to_use shardd shardctl shd-gpt
mkdir -p "$root/docs/images"
PYTHONDONTWRITEBYTECODE=1 python3 "$root/tests/unit/proto/page/page_shots.py" "$root/build/release/bin" \
    "$root/build/release/proto/page/page.html" "$root/docs/images" "$@"
