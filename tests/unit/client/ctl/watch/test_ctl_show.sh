#!/usr/bin/env bash
# shardctl show of a model that three daemons hold: what it prints is what the values are.
# usage: test_ctl_show.sh BIN_DIR
set -uo pipefail

bin=$(cd "$1" && pwd)
command -v python3 >/dev/null || exit 77
dir=$(mktemp -d)
export LC_ALL=C.UTF-8 PATH="$bin:$PATH"
unset SHARDD_ADDRESS
limit_s=$((20 * ${SHD_TEST_PACE:-1}))
trap 'shardctl down --runtime-dir "$dir/at" --yes >"$dir/down" 2>&1; rm -rf "$dir"' EXIT

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    [ ! -s "$dir/out" ] || head -c 3000 "$dir/out" >&2
    exit 1
}

# run WANTED-CODE ARGS...: shardctl show's stdout to $dir/out
run() {
    local wanted=$1 code=0
    shift
    timeout "$limit_s" shardctl show "$@" >"$dir/out" 2>"$dir/err" || code=$?
    [ "$code" -eq "$wanted" ] || fail "shardctl show $* exited with $code, not $wanted: $(cat "$dir/err")"
}
has() { grep -qF -- "$1" "$dir/out" || fail "no '$1' in the output"; }
says() { grep -qF -- "$1" "$dir/err" || fail "no '$1' in: $(cat "$dir/err")"; }

timeout "$limit_s" shardctl up --runtime-dir "$dir/at" --daemons 3 >"$dir/up" 2>&1 || fail "up: $(cat "$dir/up")"
export SHARDD_ADDRESS=$dir/at
run 1
says "has no model: a worker makes one"
run 1 --units
says "no model is open here"
timeout "$((3 * limit_s))" shd-gpt --layers 1 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 2 --steps 2 \
    --sample 0 >"$dir/gpt" 2>&1 || fail "shd-gpt: $(cat "$dir/gpt")"

echo "a table of all"
run 0
has "model gpt, step 2"
has "wte.weight              [256, 32]"
run 0 gpt --json
python3 - "$dir/out" <<'PY' || fail "not the tensors"
import json, math, sys
all = json.load(open(sys.argv[1]))
assert (all["model"], all["step"]) == ("gpt", 2), all
for t in all["tensors"]:  # parameters, two moments, gradients
    assert len(t["owner_bytes"]) == 3 and sum(t["owner_bytes"]) == 16 * math.prod(t["shape"]), t
PY

echo "one: numbers and histogram are those of its values"
run 0 wte.weight
has "wte.weight  param  step 2  8192 elements"
has "update/weight 0."
has "2^-6 .. 2^-5"
cp "$dir/out" "$dir/whole"
run 0 gpt wte.weight --stats
! grep -qF '2^-6 .. 2^-5' "$dir/out" || fail "--stats shows the histogram"
run 0 gpt wte.weight --hist
has "2^-6 .. 2^-5"
! grep -qF 'rms' "$dir/out" || fail "--hist shows the numbers"
for array in param m v grad update; do
    run 0 gpt wte.weight --array "$array" --json
    cp "$dir/out" "$dir/stats"
    run 0 gpt wte.weight --array "$array" --slice 0:256 --json
    python3 - "$dir/stats" "$dir/out" "$array" <<'PY' || fail "$array: not what its values come to"
import json, math, sys
stats, part = (json.load(open(path)) for path in sys.argv[1:3])
x = [v for row in part["rows"] for v in row]
assert stats["array"] == part["array"] == sys.argv[3] and stats["step"] == part["step"] == 2
assert len(x) == stats["elems"] == 8192
assert (min(x), max(x)) == (stats["min"], stats["max"])
assert x.count(0) == stats["zeros"] and stats["nan"] == stats["inf"] == 0
assert abs(math.fsum(x) / 8192 - stats["mean"]) <= 1e-15 * max(map(abs, x))
assert abs(math.sqrt(math.fsum(v * v for v in x) / 8192) / stats["rms"] - 1) < 1e-14
for row in stats["histogram"]:
    assert row["below"] == sum(row["from"] <= -v < row["to"] for v in x), row
    assert row["above"] == sum(row["from"] <= v < row["to"] for v in x), row
assert sum(row["below"] + row["above"] for row in stats["histogram"]) + stats["zeros"] == 8192
assert (sys.argv[3] in ("param", "update")) == ("update_ratio" in stats)
if sys.argv[3] == "grad":
    assert (stats["of_step"], stats["micro_batches"]) == (1, 2)
PY
done

echo "the dashboard adds the owners' parts"
shardctl dashboard --socket "$dir/dash" >"$dir/dashboard" 2>&1 &
dashboard=$!
for array in param grad update; do
    run 0 gpt wte.weight --array "$array" --json
    python3 - "$dir/dash" "$dir/out" "$array" "$limit_s" <<'PY' || fail "$array: /tensor says other numbers: $(cat "$dir/dashboard")"
import http.client, json, os, socket, sys, time

def ask(path):
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(sys.argv[1])
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()

end = time.monotonic() + float(sys.argv[4])
while not os.path.exists(sys.argv[1]) and time.monotonic() < end:
    time.sleep(0.05)
want = json.load(open(sys.argv[2]))
status, text = ask("/tensor?model=gpt&name=wte.weight&array=" + sys.argv[3])
assert status == 200, (status, text)
got = json.loads(text)
assert got["owners"] == 3 and "owner" not in got and "tally" not in got, got
for key in ("model", "tensor", "array", "step", "updates", "elems", "zeros", "nan", "inf", "min", "max", "mean", "rms"):
    assert got[key] == want[key], (key, got, want)
assert sys.argv[3] != "update" or got["update_ratio"] == want["update_ratio"]
for path, wanted in (("/tensor", 400), ("/tensor?name=x", 404), ("/tensor?name=%26&model=gpt", 404),
                     ("/tensor?name=" + "x" * 400, 400), ("/tensor?name=wte.weight&model=no", 404)):
    assert ask(path)[0] == wanted, (path, ask(path))
PY
done

echo "units add up to the step's norm, in the terminal and at the dashboard"
run 0 gpt --units
has "model gpt, step 1, gradient norm "
has "; update and parameters of step 0"
grep -qE '^embed +[0-9.e-]+ +[0-9.]+ % +[0-9.e-]+ +[0-9.]+$' "$dir/out" || fail "no line of embed"
run 0 --units --last 2 --json
timeout "$limit_s" shardctl log --last 2 --json >"$dir/log" 2>&1 || fail "log: $(cat "$dir/log")"
python3 - "$dir/dash" "$dir/out" "$dir/log" <<'PY' || fail "units: not what the steps came to: $(cat "$dir/dashboard")"
import http.client, json, math, socket, sys

def ask(path):
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(sys.argv[1])
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read()

shown, log = ([json.loads(line) for line in open(path)] for path in sys.argv[2:])
assert [s["step"] for s in shown] == [0, 1] and [r["step"] for r in log] == [1, 2], (shown, log)
for s, r in zip(shown, log):
    assert abs(s["grad_norm"] / r["norm"] - 1) < 1e-12, (s, r)
    assert abs(sum(u["share"] for u in s["units"]) - 1) < 1e-12, s
    assert s["measured_step"] == 0 and not s["skipped"] and all(u["finite"] for u in s["units"])
    assert all(0 < u["update_ratio"] < 1 and u["weight_norm"] > 0 for u in s["units"])
status, text = ask("/units?model=gpt&from=0")
assert status == 200, (status, text)
got = json.loads(text)
assert (got["owners"], got["next"], got["every"]) == (3, 2, 8) and "owner" not in got, got
for s, row in zip(shown, got["rows"]):
    assert "sums" not in row and row["bad"] == [] and row["skipped"] is False and row["guard"] is None
    assert [u["grad_norm"] for u in s["units"]] == row["grad"], (s, row)
    assert s["step"] > 0 or [u["update_ratio"] for u in s["units"]] == row["ratio"]
assert got["rows"][1]["ratio"] == [None] * len(got["units"])
for path, wanted in (("/units?model=no", 404), ("/units?from=x", 400), ("/units?unit=99", 404),
                     ("/units?model=" + "x" * 400, 400)):
    assert ask(path)[0] == wanted, (path, ask(path))
PY
kill "$dashboard"
wait "$dashboard" || fail "the dashboard ended with $?"

echo "slices"
run 0 wte.weight --slice 3:5,30:
[ "$(grep -cE '^  [34]: \S+ \S+$' "$dir/out")" = 2 ] || fail "not two rows of two"
run 0 wte.weight --slice :,7 --json
python3 -c 'import json, sys; rows = json.load(open(sys.argv[1]))["rows"]; assert len(rows) == 256 and len(rows[0]) == 1' \
    "$dir/out" || fail "not a column"
run 1 wte.weight --slice 3:3
says "slice 3:3 of dimension 0, which has 256"
run 1 wte.weight --slice 0:257
run 1 wte.weight --slice 0,0,0
says "of a tensor with 2 dimensions"
run 1 wte.weight --slice 1:x
says "dimension 0 wants A:B"
run 1 --slice 0
says "of which tensor"

echo "a line for each that matches"
run 0 'h.0.*' --array v
[ "$(grep -c '^h\.0\.' "$dir/out")" = 12 ] || fail "not 12 tensors of h.0"
run 1 'x*'
says "no tensor that matches 'x*'"

echo "what is not there"
run 1 wte.weigth
says "has no tensor 'wte.weigth'; did you mean wte.weight"
run 1 other wte.weight
run 2 wte.weight --array grads
says "did you mean grad?"
run 2 gpt wte.weight more
run 1 other --units
says "no open model 'other' here"
run 2 gpt wte.weight --units
says "--units is of a whole model"
run 2 gpt --last 3
says "--last goes with --units"
run 2 gpt --units --last 0
