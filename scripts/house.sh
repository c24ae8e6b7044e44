#!/usr/bin/env bash
# house.sh [--static] [--list]: the measures of the source tree: what ties it, how much it is, and how
# far one request goes through it (tests/house/measure.py; --static leaves that out: it builds). Fails
# where that is further than it may.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONDONTWRITEBYTECODE=1
python3 "$root/tests/house/check_house.py" --measures
if [ "${1:-}" != --static ]; then
    python3 "$root/tests/house/measure.py" "$@"
fi
