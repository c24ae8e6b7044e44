# Sourced by tests of several processes, each of which may have a fail() of its own. Waits are for what must
# come and end with it; only one that would never end meets limit_s. Longer where the machine is slow:
# scripts/test.sh measures SHD_TEST_PACE.
# shellcheck shell=dash
limit_s=$((120 * ${SHD_TEST_PACE:-1}))

# Ended like that dash would not do what is to be done at the end, and daemons would stay.
trap 'exit 130' INT
trap 'exit 143' TERM

fail() {
    echo "FAILED: $*" >&2
    exit 1
}

# expect FILE PATTERN: of grep
expect() {
    grep -qe "$2" "$1" || fail "no '$2' in $1: $(cat "$1")"
}

# soon COMPLAINT COMMAND...: until that is so. A look starts as few processes as it can, and rests three times as long
# as it took, or a twentieth of what the wait has taken, half a second at most: what it waits for wants the processors, too.
soon() {
    soon_complaint=$1
    read -r soon_now _ </proc/uptime
    soon_at=${soon_now%.*}${soon_now#*.} # in hundredths of a second
    soon_begin=$soon_at
    shift
    until "$@"; do
        read -r soon_now _ </proc/uptime
        soon_waited=$((${soon_now%.*}${soon_now#*.} - soon_begin))
        [ $soon_waited -lt $((100 * limit_s)) ] || fail "$soon_complaint"
        soon_rest=$((3 * (soon_begin + soon_waited - soon_at)))
        [ $((20 * soon_rest)) -ge $soon_waited ] || soon_rest=$((soon_waited / 20))
        if [ $soon_rest -ge 50 ]; then
            sleep 0.5
        elif [ $soon_rest -ge 10 ]; then
            sleep 0.$soon_rest
        else
            sleep 0.05
        fi
        read -r soon_now _ </proc/uptime
        soon_at=${soon_now%.*}${soon_now#*.}
    done
}
