# Sourced by tests of several processes, each of which may have a fail() of its own. Waits are for what must
# come and end with it; only one that would never end meets limit_s. Longer where the machine is slow:
# scripts/test.sh measures SHD_TEST_PACE.
# shellcheck shell=dash
limit_s=$((120 * ${SHD_TEST_PACE:-1}))

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# expect FILE PATTERN: of grep
expect() {
    grep -qe "$2" "$1" || fail "no '$2' in $1: $(cat "$1")"
}

# soon COMPLAINT COMMAND...: until that is so. A look starts as few processes as it can: what it waits for wants
# the processors, too.
soon() {
    soon_complaint=$1
    read -r soon_now _ </proc/uptime
    soon_end=$((${soon_now%.*} + limit_s))
    soon_looks=0
    shift
    until "$@"; do
        read -r soon_now _ </proc/uptime
        [ "${soon_now%.*}" -lt "$soon_end" ] || fail "$soon_complaint"
        soon_looks=$((soon_looks + 1))
        if [ "$soon_looks" -lt 40 ]; then sleep 0.05; else sleep 0.1; fi
    done
}
