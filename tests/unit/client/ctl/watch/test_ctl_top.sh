#!/usr/bin/env bash
# shardctl top on a terminal of tmux: what is on the screen, sizes, keys, ways out; with a fake
# server, then with real daemons and a worker that is stopped.
# usage: test_ctl_top.sh BIN_DIR
set -uo pipefail

bin=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
for need in tmux python3; do
    if ! command -v "$need" >/dev/null; then
        echo "skipped: $need is not installed" >&2
        exit 77
    fi
done
dir=$(mktemp -d)
runner=
export PATH="$bin:$PATH"
unset SHARDD_ADDRESS TMUX

opened=0 # a server of tmux for each terminal: one that ends takes its time
tm() { tmux -S "$dir/tmux.$opened" -f /dev/null "$@"; }
# shellcheck source=tests/unit/client/ctl/watch/fake_status.sh
. "$here/fake_status.sh"
trap 'tm kill-server 2>/dev/null; [ -z "$runner" ] || kill "$runner"; stop_server; rm -rf "$dir"' EXIT

screen() { tm capture-pane -p -t top; }
fail() {
    printf 'FAILED: %s\n' "$*" >&2
    screen >&2
    exit 1
}
# open COLS ROWS COMMAND: in a shell that says how it ended
open() {
    tm kill-server 2>/dev/null
    opened=$((opened + 1))
    LC_ALL=C.UTF-8 tm -u new-session -d -s top -x "$1" -y "$2" \
        "trap '' INT; echo before; $3; echo \"left \$?\"; stty -a | grep -o '[-]*icanon\|[-]*echo '; sleep 1000"
}
# await TEXT: until it is on the screen
# Not by pipes: grep -q hangs up at its match, and who has more to say has failed.
shows() { grep -qF -- "$1" <<<"$(screen)"; }
await() { soon "no '$1' on the screen" shows "$1"; }
# Nothing is wider or longer than the terminal, and nothing was wrapped.
is_within() {
    screen | python3 -c 'import sys; sys.exit(max(len(l.rstrip("\n")) for l in sys.stdin) > int(sys.argv[1]))' "$1"
}
fits() { soon "wider than $1" is_within "$1"; }
has_lines() { [ "$(screen | grep -c .)" -ge "$1" ]; }
has_line() { grep -q -- "$1" <<<"$(screen)"; }
hides() { ! shows "$1"; }
step() { screen | sed -n 's/^gpt  step \([0-9]*\).*/\1/p'; }
# The screen may be half drawn: see_step is $seen once there is one.
has_step() { seen=$(step) && [ -n "$seen" ]; }
see_step() { soon "no step on the screen" has_step; }
is_past() { has_step && [ "$seen" -gt "$1" ]; }
advances() {
    see_step
    soon "the step does not advance" is_past "$seen"
}
restored() {
    await "$1"
    await icanon
    soon "the screen from before is not back" has_line '^before'
    ! has_line '-icanon\|-echo' || fail "the terminal is still raw"
}

echo "80x24"
serve cpu0=good cpu1=good
at="LC_ALL=C.UTF-8 shardctl top -d $dir/at"
open 80 24 "$at"
await "2/2 daemons up  1 model  2 workers"
await "cpu1      4001 OPEN"
await "shd-gpt          13 running"
await "loss 2.503"
fits 80
advances

echo "a stopped worker is named"
touch "$dir/at/stop"
await "shd-gpt (pid 13) is stopped: 1 worker waits"
worst_is() { grep -q "$1" <<<"$(screen | sed -n '/^WORKER/{n;p}')"; }
soon "the worst is not first" worst_is "13 stopped"
rm "$dir/at/stop"

echo "sizes"
tm resize-window -t top -x 60 -y 15
soon "a part of the model's line is cut, or one that fits is missing" \
    has_line '^gpt  step [0-9]*  [0-9.]* steps/s  loss 2.503  grad norm [0-9.]*$'
await "WORKER"
fits 60
soon "60x15 is not full" has_lines 10
await "cpu1"
await "h help"
tm send-keys -t top h
await "goes back from here"
fits 60
tm send-keys -t top x
await "WORKER"
tm resize-window -t top -x 200 -y 50
await "GRAD/S"
await "STALE"
tm resize-window -t top -x 20 -y 4
sleep 0.4
tm resize-window -t top -x 80 -y 24
await "h help"

echo "keys"
tm send-keys -t top h
await "any key goes back"
tm send-keys -t top x
await "s sort: worst"
tm send-keys -t top s
await "s sort: pid"
tm send-keys -t top p
await "PAUSED"
see_step
first=$seen
sleep 1.2
see_step
[ "$seen" = "$first" ] || fail "not paused"
tm send-keys -t top p
tm send-keys -t top q
restored "left 0"

echo "scrolling"
serve cpu0=many
open 80 24 "$at"
await "1-"
await "of 40"
tm send-keys -t top End
await "w39"
tm send-keys -t top Home
await "w0 "
tm send-keys -t top NPage
soon "page down did nothing" hides "w0 "

echo "signals"
for signal in TERM HUP INT QUIT SEGV ABRT; do
    open 80 24 "$at"
    await "h help"
    pkill_pid=$(pgrep -f "shardctl top -d $dir/at" | tail -n 1)
    kill -s "$signal" "$pkill_pid"
    restored "left $((128 + $(kill -l "$signal")))"
done

echo "kinds of terminals"
for kind in xterm linux vt100 screen; do
    open 80 24 "TERM=$kind NO_COLOR=1 LC_ALL=C shardctl top -d $dir/at"
    await "h help"
    await "cpu0      4000 OPEN"
    tm send-keys -t top q
    await "left 0"
done
serve cpu0=good
open 80 24 "TERM=dumb LC_ALL=C shardctl top -d $dir/at"
await "1/1 daemons up"
await "#"
tm send-keys -t top q Enter
await "left 0"
open 80 24 "shardctl top -d $dir/at </dev/null"
await "left 1"
await "shardctl status --watch"
"$bin/shardctl" top -d "$dir/at" >"$dir/out" 2>&1 && fail "top without a terminal went well"
grep -q "status --watch" "$dir/out" || fail "no word of status --watch"

echo "daemons that come, go, hang and lie"
serve cpu0=good cpu1=silent cpu2=control cpu3=huge cpu4=types cpu5=endless
open 80 24 "$at"
await "unreachable for"
await "does not answer"
tm pipe-pane -t top "cat >$dir/raw"
sleep 2.5
python3 - "$dir/raw" <<'PY' || fail "a daemon's escape sequences reached the terminal"
import sys
raw = open(sys.argv[1], "rb").read()
sys.exit(1 if b"\x1b]0;" in raw or b"\x07" in raw or b"\x1b[31mred" in raw or b"\xe2\x80\xae" in raw else 0)
PY
tm send-keys -t top s
await "s sort: pid" # keys work while daemons hang: theirs do so for an hour
kill -9 "$server"
await "0/6 daemons up"
await "nobody listens"
rm "$dir"/at/*.status
python3 "$here/fake_status.py" "$dir/at" cpu0=good cpu9=good >"$dir/ready" &
server=$!
await "2/7 daemons up"
tm send-keys -t top q
await "left 0"
stop_server

echo "daemons elsewhere, by TCP"
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
listen() { # at $port; its pid is $server
    shardd --device cpu0 --runtime-dir "$dir/tcp" --status-address "127.0.0.1:$port" 2>>"$dir/tcp.log" &
    server=$!
}
listen
open 80 24 "LC_ALL=C.UTF-8 shardctl top --host localhost:$port,127.0.0.1:$port"
await "2/2 daemons up"
for host in localhost 127.0.0.1; do
    soon "no $host with the daemon's pid" has_line "^$host:$port *$server no model"
done
fits 80
stop_server
await "0/2 daemons up"
await "nobody listens at localhost:$port"
listen
await "2/2 daemons up"
soon "not the successor's pid" has_line "^localhost:$port *$server no model"
tm send-keys -t top q
restored "left 0"
stop_server
open 80 24 "shardctl top --host nonsense"
await "left 2"
await "is not HOST:PORT"

echo "real daemons"
# shellcheck disable=SC2016
shardctl run --daemons 2 --workers 2 -- sh -c \
    'echo "$SHARDD_ADDRESS" >'"$dir"'/address; echo $$ >'"$dir"'/pid.$RANK
     exec shd-gpt --layers 2 --dim 64 --heads 2 --seq 32 --batch 2 --micro-batches 4 --steps 100000 --sample 0' \
    >"$dir/run" 2>&1 &
runner=$!
soon "no first worker" [ -s "$dir/address" ]
soon "no second worker" [ -s "$dir/pid.1" ]
open 80 24 "LC_ALL=C.UTF-8 shardctl top -d '$(cat "$dir/address")'"
await "2/2 daemons up  1 model  2 workers"
advances
stopped=$(cat "$dir/pid.1")
kill -STOP "$stopped"
await "shd-gpt (pid $stopped) is stopped"
await "$stopped stopped"
screen
kill -CONT "$stopped"
soon "the blame stays after the worker goes on" hides ") is stopped"
tm send-keys -t top q
restored "left 0"
kill "$runner"
wait "$runner"
runner=
echo "passed"
