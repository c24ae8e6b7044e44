# Sourced by tests of a real Slurm, after wait.sh, by bash: nodes with $bin, $source, $work, $model, $steps and $nodes, as "A B".
#
# A node is a network namespace, on a bridge with the others, and a host name; its processes have a pid namespace, and
# end with its slurmd. The first one has the controller, in a pid namespace of its own: that is not lost with the node.
# shellcheck shell=bash disable=SC2154 # variables of who sources this
started=()
declare -A slurmd addresses

skip() {
    echo "skipped: $*"
    exit 77
}
fail() {
    echo "  FAILED: $*"
    tail -n 5 "$work"/*.out "$work"/*.log "$work"/workers/*.out 2>/dev/null | sed 's/^/    /'
    exit 1
}
# Only what was started here: each in a pid namespace of its own, which ends with it.
slurm_clean_up() {
    local pid node
    for pid in "${started[@]}"; do
        kill -KILL "$pid" 2>/dev/null || true
    done
    for node in $nodes; do
        ip netns del "shdS$node$$" 2>/dev/null || true
        rm -rf /tmp/shardd-*-"node$node$$"
    done
    ip netns del "shdS$$" 2>/dev/null || true
    rm -rf "$work"
}

slurm_wire() {
    local node at=0
    ip netns add "shdS$$" 2>/dev/null || skip "no network namespace can be made here"
    ip -n "shdS$$" link add br0 type bridge
    ip -n "shdS$$" link set br0 up
    for node in $nodes; do
        addresses[$node]=10.78.0.$((at += 1))
        ip netns add "shdS$node$$"
        ip link add eth0 netns "shdS$node$$" type veth peer name "node$node" netns "shdS$$"
        ip -n "shdS$$" link set "node$node" master br0 up
        ip -n "shdS$node$$" link set lo up
        ip -n "shdS$node$$" link set eth0 up
        ip -n "shdS$node$$" addr add "${addresses[$node]}/24" dev eth0
    done
}

# on NODE COMMAND...: replaces the shell, as if on that host. A pid namespace of its own: what is left of a node goes
# with its first process.
on() {
    local node=$1 own_time=()
    shift
    # Each has run for a time of its own, where the kernel has such namespaces: A for the longest.
    ! unshare --time true 2>/dev/null || own_time=(--time --monotonic $(((20 - 16#$node) * 500000)))
    # shellcheck disable=SC2016
    exec ip netns exec "shdS$node$$" unshare "${own_time[@]}" --uts --mount --pid --fork --kill-child --mount-proc sh -c '
        hostname "$1"
        mount -t tmpfs tmpfs /sys/fs/cgroup
        mkdir -p /sys/fs/cgroup/systemd
        mount -t cgroup -o none,name=shd"$$" cgroup /sys/fs/cgroup/systemd 2>/dev/null || true
        mount --bind "$2/hosts" /etc/hosts
        export SLURM_CONF="$2/slurm.conf"
        shift 2
        exec "$@"' sh "node$node$$" "$work" "$@"
}
# start NODE NAME COMMAND...
start() {
    local name=$2 node=$1
    shift 2
    (on "$node" "$@") >"$work/$name.out" 2>&1 &
    started+=($!)
    disown
}
# say COMMAND...: of the controller, as if on its host.
say() {
    nsenter --target "${controller:?}" --net --uts --mount env SLURM_CONF="$work/slurm.conf" "$@"
}
# start_node NODE
start_node() {
    start "$1" "slurmd$1" slurmd -D -f "$work/slurm.conf"
    slurmd[$1]=${started[-1]}
}
all_idle() { [ "$(say sinfo -h -N -o %T 2>/dev/null | sort -u)" = idle ]; }

slurm_configure() {
    local first=${nodes%% *} node timeout=10
    # Slurm 23.11 (22.05 not) takes all nodes for lost 10 s after one of them is, which is as long as it waits for
    # an answer of that one (MessageTimeout).
    case $(slurmd -V) in slurm*\ 22.*) ;; *) timeout=20 ;; esac
    echo '127.0.0.1 localhost' >"$work/hosts"
    cat >"$work/slurm.conf" <<CONF
ClusterName=shd$$
SlurmctldHost=node$first$$(${addresses[$first]})
AuthType=auth/munge
AuthInfo=socket=$work/run/munge.sock,cred_expire=20
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool.%n
SlurmctldPidFile=$work/run/slurmctld.pid
SlurmdPidFile=$work/run/slurmd.%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SlurmdTimeout=$timeout
KillWait=5
InactiveLimit=0
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF
    for node in $nodes; do
        echo "${addresses[$node]} node$node$$" >>"$work/hosts"
        echo "NodeName=node$node$$ NodeAddr=${addresses[$node]} CPUs=2 State=UNKNOWN" >>"$work/slurm.conf"
    done
}

# Munge, the controller and a slurmd on each node. Skipped (77) where there is no Slurm, no root or no namespaces.
slurm_begin() {
    local program node
    trap slurm_clean_up EXIT
    for program in slurmctld slurmd sbatch munged; do
        command -v "$program" >/dev/null || skip "no $program"
    done
    [ "$(id -u)" = 0 ] || skip "not root"
    slurm_wire
    mkdir -m 755 "$work/run" "$work/state" "$work/submit"
    chmod 755 "$work"
    slurm_configure
    dd if=/dev/urandom of="$work/munge.key" bs=1024 count=1 2>/dev/null
    chmod 600 "$work/munge.key"
    munged --foreground --force --key-file="$work/munge.key" --socket="$work/run/munge.sock" \
        --pid-file="$work/run/munged.pid" --log-file="$work/run/munged.log" --seed-file="$work/run/seed" \
        >"$work/munged.out" 2>&1 &
    started+=($!)
    disown
    soon "munged" [ -S "$work/run/munge.sock" ]
    start "${nodes%% *}" ctld slurmctld -D -f "$work/slurm.conf"
    controller=${started[-1]}
    for node in $nodes; do
        start_node "$node"
    done
    soon "nodes that are idle" all_idle
}

# submit NAME COMMAND...: the job's number. $sbatch: further flags.
submit() {
    local name=$1
    shift
    # shellcheck disable=SC2016,SC2086 # words
    say sh -c 'cd "$1/submit" && PATH=$2:$PATH && shift 2 && exec sbatch --parsable "$@"' sh "$work" "$bin" \
        --output="$work/$name.out" --export=ALL ${sbatch:-} "$source/examples/slurm/shardd.sbatch" "$@"
}
now_at() { sed -n 's|^step \([0-9]*\)/.*|\1|p' "$work/$1.out" 2>/dev/null | tail -n 1; }
at_step() { [ "$(now_at "$1")" -ge "$2" ] 2>/dev/null; }
is_over() { ! say squeue -h -j "$1" 2>/dev/null | grep -q .; }
is_down() { say sinfo -h -N -n "node$1$$" -o %T 2>/dev/null | grep -q down; }
lose() { # NODE: with all its processes
    kill -KILL "${slurmd[$1]}"
    soon "the loss of node $1" is_down "$1"
}
cut_off() { # NODE: which goes on by itself, and does not see $work/shared any more
    mkdir -p "$work/away"
    nsenter --target "${slurmd[$1]}" --mount --root mount --bind "$work/away" "$work/shared"
    ip -n "shdS$$" link set "node$1" down
    soon "the loss of node $1" is_down "$1"
}
has() { [ "$(grep -c -- "$2" "$work/$1.out" 2>/dev/null || true)" -ge "$3" ] 2>/dev/null; } # NAME TEXT TIMES
digests() { grep -h '^digest' "$@" | sort -u; }
