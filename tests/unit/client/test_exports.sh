#!/usr/bin/env bash
# libshd exports what shd.h declares, each with a version, and nothing else but what benches use.
# usage: test_exports.sh LIBRARY SOURCE_DIR
set -euo pipefail

command -v nm >/dev/null || exit 77
declared=$(grep '^SHD_API' "$2/client/shd.h" | grep -oE 'shd_[a-z_]+\(' | tr -d '(' | sort)
exported=$(nm -D --defined-only --with-symbol-versions "$1" |
    awk '$2 ~ /[TDBR]/ && $3 !~ /^shd_bench_/ { print $3 }' | sort)
diff <(awk '{ print $0 "@@SHD_0" }' <<<"$declared") <(echo "$exported")
