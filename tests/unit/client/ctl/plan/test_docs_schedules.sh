#!/usr/bin/env bash
# The drawings in docs/schedules.md are what the commands above them print.
# usage: test_docs_schedules.sh BIN_DIR [--update]    (--update writes the page anew)
set -euo pipefail
bin=$(cd "$1" && pwd)
cd "$(dirname "$0")/../../../../.."
export PATH="$bin:$PATH"
export XDG_CACHE_HOME=/nowhere # no rates of whoever runs this: no seconds
page=docs/schedules.md
made=$(mktemp)
trap 'rm -f "$made"' EXIT

commands=0 skip=
while IFS= read -r line; do
    if [[ $line == '```' ]]; then
        skip=
    elif [[ $line == '$ shardctl plan '* ]]; then
        printf '%s\n' "$line"
        # a refusal is worth showing too: exit codes are not looked at
        eval "${line#\$ }" 2>&1 || true
        commands=$((commands + 1)) skip=1
        continue
    fi
    [[ $skip ]] || printf '%s\n' "$line"
done <"$page" >"$made"

if [[ $commands -lt 10 ]]; then
    echo "only $commands commands found in $page" >&2
    exit 1
fi
if [[ ${2-} == --update ]]; then
    cp "$made" "$page"
else
    diff -u "$page" "$made"
fi
echo "$commands commands, all as drawn"
