#!/bin/sh
# Daemons and workers killed at each fail point (proto/base/failpoint.h), at its 1st, 2nd and 5th passage, under
# `shardctl run` with two daemons and two workers; then again at each point of the recovery. Every
# run must end with the digest that one process without daemons comes to, and in bounded time.
#
#   tests/e2e/test_failpoints.sh BIN_DIR [--passages "1 2 5"]
#
# Exit code 77 when the fail points are not compiled in (preset dev has them).
set -eu

bin=$(cd "$1" && pwd)
passages="1 2 5"
if [ "${2:-}" = --passages ]; then
    passages=$3
fi
model="--steps 3 --layers 2 --dim 32 --heads 2 --seq 16 --batch 2 --micro-batches 4 --sample 0 --eval-windows 0"
limit_s=$((300 * ${SHD_TEST_PACE:-1}))

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
runs=0
killed=0

# The n-th start of a device's daemon gets the n-th line of fail.DEVICE as its SHARDD_FAIL.
cat >"$work/shardd" <<EOF
#!/bin/sh
device=
last=
for word; do
    [ "\$last" = --device ] && device=\$word
    last=\$word
done
echo >>"$work/starts.\$device"
SHARDD_FAIL=\$(sed -n "\$(wc -l <"$work/starts.\$device")p" "$work/fail.\$device" 2>/dev/null)
export SHARDD_FAIL
exec "$bin/shardd" "\$@"
EOF
# Likewise a worker, by its rank.
cat >"$work/worker" <<EOF
#!/bin/sh
echo >>"$work/starts.rank\$RANK"
SHARDD_FAIL=\$(sed -n "\$(wc -l <"$work/starts.rank\$RANK")p" "$work/fail.rank\$RANK" 2>/dev/null)
export SHARDD_FAIL
exec "$bin/shd-gpt" "\$@"
EOF
chmod +x "$work/shardd" "$work/worker"

# run_with WHERE FAIL...: the daemon, or worker (rank0), WHERE is started with each FAIL in turn.
run_with() {
    where=$1
    shift
    rm -f "$work"/starts.* "$work"/fail.*
    printf '%s\n' "$@" >"$work/fail.$where"
    # shellcheck disable=SC2086 # options are words
    SHARDD_BIN=$work/shardd timeout "$limit_s" "$bin/shardctl" run --daemons 2 --workers 2 \
        --threads-per-daemon 1 -- "$work/worker" $model >"$work/out" 2>"$work/err" || true
    tail -n 1 "$work/out"
}

expect_same() {
    got=$(run_with "$@")
    starts=$(wc -l <"$work/starts.$1")
    runs=$((runs + 1))
    killed=$((killed + starts - 1))
    if [ "$got" != "$want" ]; then
        echo "  $* ($starts starts): DIFFERS: $got"
        tail -n 20 "$work/err" | sed 's/^/    /'
        bad=$((bad + 1))
    fi
}

points_named() { # in the last run
    sed -n 's/.*fail_point \([a-z_:]*\).*/\1/p' "$work/err" | sort -u
}

# shellcheck disable=SC2086
want=$("$bin/shd-gpt" --standalone $model 2>"$work/err" | tail -n 1)
case $want in
"digest sha256:"*) ;;
*) cat "$work/err"; exit 1 ;;
esac
run_with cpu0 list >/dev/null
points=$(points_named)
if [ -z "$points" ]; then
    echo "fail points are not compiled in: skipped"
    exit 77
fi
run_with cpu0 step:commit:after@2 list >/dev/null
recovery=$(points_named)
run_with rank1 list >/dev/null
sends=$(points_named)
echo "points:" "$points"
echo "in a recovery:" "$recovery"
echo "of a worker:" "$sends"

for point in $points; do
    for n in $passages; do
        expect_same cpu0 "$point@$n"
    done
    expect_same cpu1 "$point@3" "$point@1"
done
for point in $recovery; do
    expect_same cpu1 step:commit:after@2 "$point@1" "$point@2"
    expect_same cpu0 kern:done:before@9 "$point@1" "$point@1"
done
for point in $sends; do
    for n in $passages; do
        expect_same rank1 "$point@$n"
    done
    expect_same rank0 "$point@2" "$point@1" "$point@1"
done
# And of the moving average behind an update.
model="$model --ema 0.9"
# shellcheck disable=SC2086
want=$("$bin/shd-gpt" --standalone $model 2>"$work/err" | tail -n 1)
for point in $(echo "$points" | grep '^kern:'); do
    for n in $passages; do
        expect_same cpu0 "$point@$n"
    done
    expect_same cpu1 "$point@3" "$point@1"
done
echo "$runs runs, $killed processes killed, $bad differ"
[ "$bad" -eq 0 ] && [ "$killed" -gt 0 ]
