#!/bin/sh
# One digest however the work is split: shd-gpt alone in one process, and under `shardctl run` with
# daemons x workers, must end with the same bits of parameters and optimizer state.
#
#   tests/digest_matrix.sh [BIN_DIR] [--daemons "1 2 3 5"] [--workers "1 2 4"] [-- shd-gpt options]
set -eu

bin=build/release/bin
daemons="1 2 3 5"
workers="1 2 4"
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then
    bin=$1
    shift
fi
while [ $# -gt 0 ]; do
    case $1 in
    --daemons) daemons=$2; shift 2 ;;
    --workers) workers=$2; shift 2 ;;
    --) shift; break ;;
    *) echo "usage: $0 [BIN_DIR] [--daemons LIST] [--workers LIST] [-- shd-gpt options]" >&2; exit 2 ;;
    esac
done
model="--layers 2 --dim 64 --heads 2 --seq 64 --batch 4 --micro-batches 4 --steps 20 --sample 0 --eval-every 0"

digest_of() { # the last line, which must be the digest line
    last=$(tail -n 1)
    case $last in
    "digest sha256:"*) echo "$last" ;;
    *) echo "no digest line but: $last" ;;
    esac
}

# shellcheck disable=SC2086 # options are words
want=$("$bin/shd-gpt" --standalone $model "$@" | digest_of)
echo "standalone           $want"
bad=0
runs=0
for d in $daemons; do
    for w in $workers; do
        # shellcheck disable=SC2086
        got=$("$bin/shardctl" run --daemons "$d" --workers "$w" -- "$bin/shd-gpt" $model "$@" |
            digest_of)
        runs=$((runs + 1))
        if [ "$got" = "$want" ]; then
            echo "daemons=$d workers=$w  same"
        else
            echo "daemons=$d workers=$w  DIFFERS: $got"
            bad=$((bad + 1))
        fi
    done
done
case $want in "digest sha256:"*" step=20") ;; *) bad=$((bad + 1)) ;; esac
echo "$((runs - bad)) passed, $bad failed"
[ "$bad" -eq 0 ]
