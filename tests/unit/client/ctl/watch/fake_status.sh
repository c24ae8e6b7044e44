# Sourced by tests whose daemons are those of fake_status.py, in a fresh directory $dir/at.
# shellcheck shell=bash disable=SC2154 # $dir and fail() are the test's
server=

stop_server() {
    [ -z "$server" ] || kill "$server" 2>/dev/null
    wait 2>/dev/null
    server=
}

# serve DEVICE=MODE...
serve() {
    stop_server
    rm -rf "$dir/at" "$dir/ready" # what the one before said is not this one's word
    mkdir "$dir/at"
    python3 "$(dirname "${BASH_SOURCE[0]}")/fake_status.py" "$dir/at" "$@" >"$dir/ready" &
    server=$!
    for _ in $(seq 100); do
        grep -qs ready "$dir/ready" && return
        sleep 0.1
    done
    fail "the fake server did not start"
}
