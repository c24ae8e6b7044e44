#!/usr/bin/env bash
# shardctl status and trace against daemons that are well, gone, stuck, silent and hostile.
# usage: test_ctl_status.sh BIN_DIR
set -uo pipefail

bin=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
command -v python3 >/dev/null || exit 77
dir=$(mktemp -d)
export LC_ALL=C.UTF-8
unset SHARDD_ADDRESS

# shellcheck source=tests/unit/client/ctl/watch/fake_status.sh
. "$here/fake_status.sh"
trap 'stop_server; rm -rf "$dir"' EXIT

fail() {
    printf 'FAILED: %s\n' "$*" >&2
    [ ! -s "$dir/out" ] || head -c 3000 "$dir/out" >&2
    exit 1
}

# run WANTED-CODE ARGS...: shardctl's stdout to $dir/out
run() {
    local wanted=$1 code=0
    shift
    timeout "$limit_s" "$bin/shardctl" "$@" >"$dir/out" 2>"$dir/err" || code=$?
    [ "$code" -eq "$wanted" ] || fail "shardctl $* exited with $code, not $wanted: $(cat "$dir/err")"
}
has() { grep -qF -- "$1" "$dir/out" || fail "no '$1' in the output"; }
no() { ! grep -qF -- "$1" "$dir/out" || fail "'$1' is in the output"; }

# Bytes that move a cursor or ring a bell must not come out, whatever a daemon says.
clean() {
    python3 - "$1" <<'PY' || fail "control characters in $1"
import sys
data = open(sys.argv[1], "rb").read().decode()
bad = [c for c in data if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e"]
sys.exit(1 if bad else 0)
PY
}

echo "all well"
serve cpu0=good cpu1=chunked
run 0 status --runtime-dir "$dir/at"
has "cpu0  pid 4000"
has "cpu1  pid 4001"
has "kernels, by their times: adamw f32 avx2 (0.91 of avx512)"
has "on files of gpt: 32.0 MiB published (a successor's too), 1.0 MiB snapshots"
has "blk."
no "waits, the longest"
run 0 status --json --runtime-dir "$dir/at?cpu1,cpu0"
python3 - "$dir/out" <<'PY' || fail "not the documents"
import json, sys
a = json.load(open(sys.argv[1]))
assert [d["device"] for d in a] == ["cpu1", "cpu0"], a
assert a[0]["schema"] == 2 and a[0]["models"][0]["name"] == "gpt"
PY
SHARDD_ADDRESS="$dir/at" run 0 status

echo "a wait and who is to blame"
touch "$dir/at/stop"
sleep 0.3
run 0 status -d "$dir/at"
has "waits, the longest first:"
has "shd-gpt (pid 13, stopped) has it"
has "HELD UP: shd-gpt (pid 13) is stopped: 1 worker waits"
has "     do: kill -CONT 13 lets it go on"
has "(micro-batch 1 of step"

echo "a wait that two daemons tell of counts once, with the longer time"
for daemons in "cpu0=good cpu1=late" "cpu0=late cpu1=good"; do
    # shellcheck disable=SC2086
    serve $daemons
    touch -d '1000 seconds ago' "$dir/at/stop"
    run 3 status -d "$dir/at"
    has "shd-gpt (pid 13) is stopped: 1 worker waits 10" # 1000 s and what has passed since
    grep -q '^ *1[67]:[0-9][0-9]  shd-gpt (pid 12) waits 10[0-9][0-9]' "$dir/out" || fail "not the longer wait"
    [ "$(grep -c '(pid 12) waits' "$dir/out")" = 1 ] || fail "the wait is there twice"
done

echo "the dashboard says the same"
"$bin/shardctl" dashboard --socket "$dir/dash" -d "$dir/at" >"$dir/url" 2>&1 &
dashboard=$!
soon "no dashboard" [ -s "$dir/url" ]
curl -s --unix-socket "$dir/dash" http://localhost/status >"$dir/json"
rm "$dir/at"/cpu0.* # it has left
dashboard_forgets() {
    curl -s --unix-socket "$dir/dash" http://localhost/status >"$dir/left" && ! grep -q '"cpu0"' "$dir/left" && grep -q '"cpu1"' "$dir/left"
}
(soon "" dashboard_forgets 2>/dev/null) || echo "$?" >"$dir/kept" # the dashboard ends first
kill "$dashboard"
wait "$dashboard" 2>/dev/null
[ ! -e "$dir/kept" ] || fail "the dashboard does not forget who has left: $(head -c 300 "$dir/left")"
python3 - "$dir/json" "$dir/out" <<'PY' || fail "another headline: $(head -c 300 "$dir/json")"
import json, re, sys
h = json.load(open(sys.argv[1]))["headline"]
lines = open(sys.argv[2]).read().splitlines()
same = lambda text: re.sub(r"\d+\.\d s|step \d+", "", text)
assert same("HELD UP: " + h["text"]) == same(lines[0]), lines[0]
assert "     do: " + h["remedy"] == lines[1] and h["pid"] == 13 and h["halted"]
PY
serve cpu0=good cpu1=chunked
touch "$dir/at/stop"

echo "training that stands still has an exit code of its own"
touch -d '40 seconds ago' "$dir/at/stop"
run 3 status -d "$dir/at"
has "waits, the longest first:"
grep -q 'training stands still: somebody waits for [4-9][0-9].* s (--stall 30)' "$dir/err" || fail "what is wrong is not said"
run 3 status -d "$dir/at" --json
run 0 status -d "$dir/at" --stall 100000
run 0 status -d "$dir/at" --stall 0

echo "watch"
repeated() { [ "$(grep -c '^-- 20' "$dir/out")" -ge 3 ]; }
"$bin/shardctl" status --watch 0.5 -d "$dir/at" >"$dir/out" 2>&1 &
watch=$!
soon "watch did not repeat" repeated
kill "$watch"
wait "$watch" 2>/dev/null
clean "$dir/out"

echo "trouble"
serve cpu0=good cpu1=stuck
run 1 status -d "$dir/at"
has "NOT WELL: its event loop has not turned for 9.0 s"
serve cpu0=refused
run 1 status -d "$dir/at"
has "NOT WELL: model 'old' was not adopted: its ledger is torn"
serve cpu0=good
run 1 status --json -d "$dir/at?cpu0,cpu7"
python3 - "$dir/out" <<'PY' || fail "no error object"
import json, sys
a = json.load(open(sys.argv[1]))
assert a[1]["device"] == "cpu7" and "no status socket" in a[1]["error"], a
assert a[1]["status"] == "SHD_ENOENT" and "error" not in a[0]
PY
kill -9 "$server"; wait "$server" 2>/dev/null
run 1 status -d "$dir/at"
has "cpu0  unreachable: nobody listens at"

echo "nobody answers: bounded, and the others are shown"
serve cpu0=silent cpu1=trickle cpu2=silent cpu3=good
run 1 status -d "$dir/at" # which otherwise ends after an hour
has "cpu0  unreachable: $dir/at/cpu0.status does not answer"
has "cpu3  pid 4003"

echo "hostile documents"
serve cpu0=half cpu1=junk cpu2=nojson cpu3=types cpu4=huge cpu5=control cpu6=big cpu7=endless \
    cpu8=deep cpu9=http404 cpu10=list
touch "$dir/at/stop" "$dir/at/evil"$'\x1b[31m'".status"
run 1 status -d "$dir/at"
clean "$dir/out"
clean "$dir/err"
has "cpu0  unreachable: $dir/at/cpu0.status broke off in the middle of its answer"
has "cpu1  unreachable: $dir/at/cpu1.status does not answer in HTTP"
has "cpu2  unreachable: the answer is no JSON"
has "cpu4  pid 8.9e+307"
has "cpu5  pid 4005"
has "cpu6  pid 4006"
has "cpu7  unreachable: $dir/at/cpu7.status: the answer is longer than"
has "cpu9  unreachable: $dir/at/cpu9.status answers with HTTP 404"
has "cpu10  unreachable: the answer is no status"
no evil
run 1 status --json -d "$dir/at"
clean "$dir/out"
python3 -c 'import json,sys; assert len(json.load(open(sys.argv[1]))) == 11' "$dir/out" ||
    fail "not 11 objects"

echo "directories"
run 1 status -d "$dir/none"
grep -q "no directory" "$dir/err" || fail "what is wrong is not said"
mkdir "$dir/empty"
run 1 status -d "$dir/empty"
grep -q "no daemon in" "$dir/err" || fail "what is wrong is not said"
if [ "$(id -u)" -ne 0 ]; then
    chmod 0 "$dir/empty"
    run 1 status -d "$dir/empty"
    grep -q "Permission denied" "$dir/err" || fail "what is wrong is not said"
elif command -v setpriv >/dev/null; then
    chmod 0700 "$dir/empty"
    chmod 0755 "$dir"
    setpriv --reuid 65534 --clear-groups "$bin/shardctl" status -d "$dir/empty" 2>"$dir/err"
    grep -q "Permission denied" "$dir/err" || fail "what is wrong is not said"
fi
run 2 status --watch x
run 2 status --watch 0
run 2 status cpu0

echo "daemons elsewhere, by TCP"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
"$bin/shardd" --device cpu0 --runtime-dir "$dir/tcp" --status-address "127.0.0.1:$port" 2>"$dir/tcp.log" &
tcp=$!
answers() { "$bin/shardctl" status --host "localhost:$port" >/dev/null 2>&1; }
soon "no daemon" answers
run 0 status --host "localhost:$port"
has "localhost:$port  pid $tcp"
run 0 status --json --host "127.0.0.1:$port"
has '"device": "cpu0"'
run 0 trace --host "127.0.0.1:$port" -o "$dir/tcp.json"
[ -s "$dir/tcp.json" ] || fail "no trace over TCP"
kill -STOP $tcp
run 1 status -d "$dir/tcp"
has "HELD UP: daemon cpu0 (pid $tcp) is stopped"
has "do: kill -CONT $tcp lets it go on"
kill -CONT $tcp
kill $tcp
wait $tcp 2>/dev/null
run 1 status --host "127.0.0.1:$port"
has "nobody listens at 127.0.0.1:$port"
run 2 status --host nonsense
grep -q "is not HOST:PORT" "$dir/err" || fail "what is wrong is not said"

echo "trace"
serve cpu0=good cpu1=good cpu2=silent
cd "$dir" || exit 1
run 0 trace --json -d "$dir/at?cpu0,cpu1" -o merged.json
python3 - "$dir/out" merged.json <<'PY' || fail "not the merged trace"
import json, sys
s, events = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))["traceEvents"]
assert s["repeated"] == 3 and s["events"] == len(events) == 11, s
w, = s["workers"]
assert "\"pid\": 12," in open(sys.argv[1]).read() # a whole number
assert w["pid"] == 12 and w["name"] == "shd-gpt", w
# Compute 1000..2000; owners update 500..1500, of which half is hidden; return 1500..2500 likewise.
assert abs(w["fetch_hidden"] - 0.5) < 1e-9 and abs(w["return_hidden"] - 0.5) < 1e-9, w
assert len({e["id"] for e in events if e["ph"] == "s"}) == 2
PY
run 1 trace -d "$dir/at" -o partly.json
has "shd-gpt  12"
[ -s partly.json ] || fail "what was there was not written"
run 1 trace -d "$dir/at?cpu0" -o /proc/nonexistent/x.json
run 2 trace --seconds 61
serve cpu0=junk
run 1 trace -d "$dir/at" -o none.json
[ ! -e none.json ] || fail "a trace of nothing was written"
echo "passed"
