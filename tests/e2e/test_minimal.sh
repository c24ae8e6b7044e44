#!/usr/bin/env bash
# test_minimal.sh BUILD SOURCE: examples/minimal.c as somebody else would build it: outside the tree, by
# pkg-config, against an installed libshd. It runs in one process and with two daemons and two
# workers, and the digests are equal.
set -euo pipefail
build=$1
source=$2
work=$(mktemp -d "${TMPDIR:-/tmp}/shd-minimal.XXXXXX")
trap 'rm -rf "$work"' EXIT

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}

for component in libshd0 libshd-dev; do
    cmake --install "$build" --prefix "$work/prefix" --component $component >"$work/install.log" ||
        fail "cmake --install: $(tail -n 3 "$work/install.log")"
done
pc=$(find "$work/prefix" -name libshd.pc)
[ -n "$pc" ] || fail "no libshd.pc was installed"
PKG_CONFIG_PATH=$(dirname "$pc")
LD_LIBRARY_PATH=$(dirname "$PKG_CONFIG_PATH")
export PKG_CONFIG_PATH LD_LIBRARY_PATH

cp "$source/examples/minimal.c" "$work"
cd "$work"
read -ra flags <<<"$(pkg-config --cflags --libs libshd)"
cc -Wall -Wextra -Werror minimal.c "${flags[@]}" -o minimal
lines=$(wc -l <minimal.c)
[ "$lines" -le 120 ] || fail "minimal.c has $lines lines, more than 120"

SHARDD_ADDRESS=local: ./minimal >local.txt
"$build/bin/shardctl" run --daemons 2 --workers 2 -- ./minimal >daemons.txt 2>daemons.log ||
    fail "shardctl run: $(cat daemons.log)"
tail -n 2 local.txt daemons.txt
# All workers say it: rank 0 on stdout, rank 1 on stderr.
wanted=$(grep '^digest ' local.txt)
[ "$(cat daemons.txt daemons.log | grep -c "$wanted\$")" = 2 ] || fail "not twice $wanted"
grep -q '^step 200 loss 0.00' local.txt || fail "it did not learn: $(grep '^step 200' local.txt)"
