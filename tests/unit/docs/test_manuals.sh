#!/usr/bin/env bash
# Each flag of --help is in the manual page, and the other way round (shardctl's page is made from its
# flags) and each verb has its section there; each function of shd.h has its entry in libshd(3), and no other has.
# usage: test_manuals.sh BIN_DIR SOURCE_DIR
set -euo pipefail

bin=$1
man=$2/docs/man
bad=0

# agree PROGRAM PAGE
agree() {
    local apart
    apart=$(diff <("$bin/$1" --help | grep -oE '(^|, ) *--[a-z][a-z0-9-]*' | tr -d ' ,' | sort -u) \
        <(grep -E '^\.It Fl' "$man/$2" | grep -oE 'Fl -[a-z][a-z0-9-]*' | sed 's/Fl -/--/' | sort -u)) ||
        bad=1
    printf '%s and %s\n%s' "$1" "$2" "${apart:+$apart$'\n'}"
}

agree shardd shardd.8
agree shd-gpt shd-gpt.1

verbs=$("$bin/shardctl" --help | sed -n '/^verbs:/,/^$/s/^  \([a-z]*\) .*/\1/p' | sort)
[ "$(wc -l <<<"$verbs")" -gt 20 ] || bad=1
apart=$(diff <(echo "$verbs") <(sed -n 's/^\.Ss \([a-z]*\)$/\1/p' "$man/shardctl.1.in" | sort)) || bad=1
printf 'verbs and shardctl.1\n%s' "${apart:+$apart$'\n'}"

functions=$(grep '^SHD_API' "$2/client/shd.h" | grep -oE 'shd_[a-z_]+\(' | tr -d '(' | sort)
[ "$(wc -l <<<"$functions")" -gt 30 ] || bad=1
apart=$(diff <(echo "$functions") <(grep '^\.It Fn' "$man/libshd.3" | grep -oE 'shd_[a-z_]+' | sort)) || bad=1
printf 'shd.h and libshd.3\n%s' "${apart:+$apart$'\n'}"
exit "$bad"
