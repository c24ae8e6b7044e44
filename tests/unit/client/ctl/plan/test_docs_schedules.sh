#!/usr/bin/env bash
# The drawings in docs/schedules.md and the answers in docs/peers.md are what the commands above them print.
# usage: test_docs_schedules.sh BIN_DIR [--update]    (--update writes the pages anew)
set -euo pipefail
bin=$(cd "$1" && pwd)
cd "$(dirname "$0")/../../../../.."
export PATH="$bin:$PATH"
export XDG_CACHE_HOME=/nowhere # no rates of whoever runs this: no seconds
made=$(mktemp)
trap 'rm -f "$made"' EXIT

# draw PAGE COMMANDS_MIN: the page with what its commands print, in $made.
draw() {
    local commands=0 skip=
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
    done <"$1" >"$made"
    if [[ $commands -lt $2 ]]; then
        echo "only $commands commands found in $1" >&2
        exit 1
    fi
    echo "$1: $commands commands"
}

for page in docs/schedules.md:10 docs/peers.md:2; do
    draw "${page%:*}" "${page#*:}"
    if [[ ${2-} == --update ]]; then
        cp "$made" "${page%:*}"
    else
        diff -u "${page%:*}" "$made"
    fi
done
echo "all as drawn"
