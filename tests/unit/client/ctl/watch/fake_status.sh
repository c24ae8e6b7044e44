# Sourced by tests whose daemons are those of fake_status.py, in a fresh directory $dir/at.
# shellcheck shell=bash disable=SC2154 # $dir and fail() are the test's
server=
# shellcheck source=tests/lib/wait.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../../../lib/wait.sh"
# Of one answer: a server that is slow with 10 MB is not silent.
export SHARDD_STATUS_TIMEOUT_MS=$((4000 * ${SHD_TEST_PACE:-1}))

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
    soon "the fake server did not start" grep -qs ready "$dir/ready"
}
