#!/usr/bin/env bash
# examples/slurm with SHARDD_REPLICAS, under a real Slurm of four nodes, two of which are spare: whole nodes are lost, one
# after the other, that of the job's script among them; training goes on from memory, each spare takes a lost one's place
# and is filled meanwhile, and what is left in the end has the digest of a training in one process.
# Skipped (77) where there is no Slurm, no root or no namespaces.
#
#   test_slurm_replicas.sh BIN_DIR SOURCE_DIR [STEPS]
set -euo pipefail

bin=$(cd "$1" && pwd)
source=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d /tmp/shd-slurm.XXXXXX) # on all "nodes", and short: sockets
nodes="A B C D"
steps=${3:-900}
model="--layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 8 --threads 1 --sample 0 --eval-windows 0
       --log-every 1"

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/slurm.sh
. "$here/../lib/slurm.sh"
slurm_begin

mkdir "$work/shared" "$work/workers"

# refused TEXT ENVIRONMENT...: before anything of Slurm is asked
refused() {
    local text=$1
    shift
    if env SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=4 SLURM_SUBMIT_DIR="$work/submit" "$@" \
        bash "$source/examples/slurm/shardd.sbatch" true >"$work/refusal" 2>&1; then fail "not refused: $*"; fi
    grep -qF -- "$text" "$work/refusal" || fail "no '$text' in: $(cat "$work/refusal")"
}
refused "give one of them" SHARDD_REPLICAS="$work/shared" SHARDD_RESUME="$work/shared"
refused "SHARDD_REPLICAS=$work/no: a directory is wanted" SHARDD_REPLICAS="$work/no"
refused "SHARDD_SPARE_NODES=4: how many of the 4 nodes" SHARDD_REPLICAS="$work/shared" SHARDD_SPARE_NODES=4
refused "SHARDD_DAEMON_NODES=3 and SHARDD_SPARE_NODES=2: there are 4 nodes" SHARDD_REPLICAS="$work/shared" \
    SHARDD_SPARE_NODES=2 SHARDD_DAEMON_NODES=3
refused "SHARDD_SPARE_NODES=1: nodes to take a lost one's place are for SHARDD_REPLICAS" SHARDD_SPARE_NODES=1
[ -z "$(ls -A "$work/submit")$(ls -A "$work/shared")" ] || fail "left: $(ls "$work/submit" "$work/shared")"
echo "  what does not fit is refused by name"

# A worker writes to a file of its own, for what it says is lost with the node of the script; and any of them may be the last.
cat >"$work/worker" <<'END'
#!/bin/sh
exec >>"$WORKERS/$SLURM_JOB_ID.$SLURMD_NODENAME.out" 2>&1
[ -e "$WORKERS/fast" ] || slow="--slow 20"
shd-gpt "$@" $slow && shardctl digest && { [ "$RANK" != 0 ] || shardctl checkpoint "$WORKERS/saved"; }
END
chmod +x "$work/worker"
# train NAME STEPS
train() {
    # shellcheck disable=SC2086
    WORKERS=$work/workers SHARDD_REPLICAS=${shared:-$work/shared} submit "$1" "$work/worker" $model --steps "$2" --elastic
}
in_one_process() { # STEPS
    # shellcheck disable=SC2086 # options are words
    "$bin/shd-gpt" --standalone $model --steps "$1" 2>/dev/null | tail -n 1
}
left() { find "$work/submit" "$work/shared" -name 'shardd-*'; }
ended() { # JOB NAME WANT
    soon "the end of the job" is_over "$1"
    [ "$(digests "$work/workers/$1".*.out | sed 's/ model=.*//' | uniq)" = "$3" ] || fail "$2: wanted '$3', got '$(tail -n 2 "$work/workers/$1".*.out)'"
    [ -z "$(left)" ] || fail "$2 left: $(left)"
}

# Nobody is lost: two nodes with daemons, one with a worker alone, and a spare one, which has nothing to do.
job=$(shared=$work/submit SHARDD_DAEMON_NODES=2 SHARDD_SPARE_NODES=1 sbatch=--nodes=4 train whole 20)
ended "$job" whole "$(in_one_process 20)"
say scontrol show job "$job" >"$work/shown"
grep -q 'JobState=COMPLETED.*' "$work/shown" || fail "$(grep JobState "$work/shown")"
[ "$(cd "$work/workers" && echo "$job".*)" = "$job.nodeA$$.out $job.nodeB$$.out $job.nodeC$$.out" ] || fail "workers: $(ls "$work/workers")"
[ "$(cat "$work/workers/saved/LATEST")" = step-000000000020 ] || fail "not saved: $(cat "$work/workers/$job".*)"
echo "  a job that loses nobody ends well"

want=$(in_one_process "$steps")
echo "in one process: $want"
job=$(SHARDD_SPARE_NODES=2 sbatch=--nodes=4 train job "$steps")
now() { { "$bin/shardctl" status -a "/tmp/shardd-$job-node$1$$" 2>/dev/null || true; } | awk '$1 == "gpt" { print $2 }' | sort -n | tail -n 1; }
# Its workers have come to the end: a job that has lost its script's node is over some time later.
is_trained() { grep -q '^digest' "$work/workers/$job".* 2>/dev/null; }
at() { [ "$(now "$1")" -ge "$2" ] 2>/dev/null || is_trained || is_over "$job"; }
# Where the run has come to its end before its script has done its part, all is begun anew with more steps.
still_trains() {
    if is_trained; then
        [ "$steps" -lt 20000 ] || fail "the run is too short"
        echo "the run is too short"
        slurm_clean_up
        exec "$0" "$bin" "$source" $((3 * steps))
    fi
    ! is_over "$job" || fail "over: $(tail -n 3 "$work/workers/$job".*)"
}
go_on() { # NODE STEPS: as its daemons have it
    local to
    echo "    step $(now "$1") ($SECONDS s)"
    to=$(($(now "$1") + $2))
    soon "no step $to" at "$1" "$to"
    still_trains
}
holder() { sed "s/^node\(.\)$$\$/\1/" "$work/submit/shardd-$job/place.node$1$$.$2" 2>/dev/null || true; } # its letter
has_holder() { [ -n "$(holder "$1" "$2")" ]; }
filled() { grep -c "host 'nodeB$$' is in again" "$work/job.out" || true; }
is_filled() { [ "$(filled)" -gt "$1" ]; }
begins_to_fill() { ls "$work/shared/shardd-shared-$job/refill/"* >/dev/null 2>&1 || is_filled "$1"; }
soon "a step" at A 3

# All processes of a node, which is still there: it begins again, and is filled.
host=$(pgrep -f "^[^ ]*shardctl host .*/shardd-$job-nodeB$$ ")
kill -STOP "$host"
# shellcheck disable=SC2046
kill -KILL "$host" $(pgrep -P "$host")
soon "the node filled" is_filled 0
go_on A 3
echo "  all daemons of a node killed: filled again ($SECONDS s)"

# A node is cut off, and ends its daemons when it reads that it was taken for lost; the spare one in its place is lost as it
# fills itself, and the other one does.
before=$(filled)
cut_off B
go_on A 3
soon "a spare node in its place" has_holder B 1
soon "the end of the daemons of the one that was cut off" [ ! -e "/tmp/shardd-$job-nodeB$$" ]
spare=$(holder B 1)
soon "the spare node begins to be filled" begins_to_fill "$before"
before=$(filled)
lose "$spare"
go_on A 3
soon "another spare node in its place" has_holder B 2
last=$(holder B 2)
soon "the other spare node filled" is_filled "$before"
go_on "$last" 3
echo "  a node cut off, and the spare one in its place lost: node $last is filled ($SECONDS s)"

# What it was filled with goes on alone, without the script.
lose A
go_on "$last" 3
grep -q "node$spare$$ is lost: node$last$$ takes its place as host 'nodeB$$'" "$work/job.out" || fail "$(cat "$work/job.out")"
! grep -q "restored" "$work/workers/$job".* || fail "went back: $(grep "restored" "$work/workers/$job".*)"
echo "  the node of the script lost as well: the last one goes on alone ($SECONDS s)"
# Its worker is killed, and started again: one that is not slow, for there is nothing more to lose.
: >"$work/workers/fast"
worker() { fuser "$work/workers/$job.node$last$$.out" 2>/dev/null || true; }
has_worker() { is_trained || [ -n "$(worker)" ]; }
soon "a worker of the last one" has_worker
still_trains
# shellcheck disable=SC2046
kill -KILL $(worker)
ended "$job" job "$want"
[ ! -e "/tmp/shardd-$job-node$last$$" ] || fail "left: /tmp/shardd-$job-node$last$$"
echo "  and its worker is killed and started again: same digest ($SECONDS s)"

# Both that had the model are lost at once: what is in their places is empty, and begins nothing anew.
rm "$work/workers/fast"
kill -KILL "${slurmd[B]}"
ip -n "shdS$$" link set nodeB up
for node in A B "$spare"; do
    start_node "$node"
done
soon "nodes that are idle" all_idle
job=$(SHARDD_SPARE_NODES=2 sbatch=--nodes=4 train both "$steps")
soon "a step" at A 3
soon "a mark of it" [ -e "$work/submit/shardd-$job/begun" ]
kill -KILL "${slurmd[A]}" "${slurmd[B]}"
soon "the end of the job" is_over "$job"
for node in C D; do
    [ ! -e "$work/workers/$job.node$node$$.out" ] || fail "node $node trains: $(cat "$work/workers/$job.node$node$$.out")"
done
[ -z "$(left)" ] || fail "left: $(left)"
echo "  both nodes with the model lost: nobody begins anew ($SECONDS s)"
