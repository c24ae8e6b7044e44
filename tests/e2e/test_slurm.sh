#!/usr/bin/env bash
# examples/slurm under a real Slurm of two nodes: a network namespace and a host name each. A job's digest is that of a
# training in one process, though a daemon of either node is killed; and though a node is lost that had only workers. With
# SHARDD_RESUME also though a node is lost that had daemons: the job goes on from the latest checkpoint.
# Skipped (77) where there is no Slurm, no root or no namespaces.
#
#   test_slurm.sh BIN_DIR SOURCE_DIR
set -euo pipefail

bin=$(cd "$1" && pwd)
source=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d /tmp/shd-slurm.XXXXXX) # on all "nodes", and short: sockets
nodes="A B"
steps=250
model="--layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 8 --threads 1 --sample 0 --eval-windows 0
       --log-every 1 --steps $steps"

# shellcheck source=tests/lib/wait.sh
. "$here/../lib/wait.sh"
# shellcheck source=tests/lib/slurm.sh
. "$here/../lib/slurm.sh"
slurm_begin

# shellcheck disable=SC2086 # options are words
want=$("$bin/shd-gpt" --standalone $model 2>/dev/null | tail -n 1)
echo "in one process: $want"

# In its own pid namespace a process has another number: by what it has open
daemon_pid() { fuser "/tmp/shardd-$1-node$2$$/$3.lock" 2>/dev/null | awk '{print $1}'; }

# shellcheck disable=SC2086
job=$(submit job shd-gpt $model --slow 5)
soon "a step" at_step job 3
kill -KILL "$(daemon_pid "$job" A cpu0)"
soon "a step more" at_step job 10
kill -KILL "$(daemon_pid "$job" B cpu1)"
soon "the end of the job" is_over "$job"
[ "$(digests "$work/job.out")" = "$want" ] || fail "wanted '$want', got '$(tail -n 2 "$work/job.out")'"
[ "$(grep -c 'started again as pid' "$work/job.out")" -ge 2 ] || fail "no daemon was killed"
for node in A B; do
    [ ! -e "/tmp/shardd-$job-node$node$$" ] || fail "left: /tmp/shardd-$job-node$node$$"
done
[ -z "$(ls "$work/submit")" ] || fail "left: $(ls "$work/submit")"
echo "  two nodes, a daemon of either killed: same digest"

# A node is lost, with all its processes: by Slurm's defaults that would end the job on the other one, and the state. It had
# no daemons, so there is nothing to go back to; the job ends well, by workers on the node that is left.
# shellcheck disable=SC2086
job=$(SHARDD_DAEMON_NODES=1 SHARDD_RESUME=$work/kept submit loss shd-gpt $model --elastic --slow 20)
soon "a step" at_step loss 5
lose B
soon "the end of the job" is_over "$job"
[ "$(digests "$work/loss.out")" = "$want" ] ||
    fail "a lost node: wanted '$want', got '$(tail -n 2 "$work/loss.out")'"
grep -q 'node failure\|Node failure\|NODE FAILURE\|Killed\|error: nodeB' "$work/loss.out" || fail "no node was lost"
! grep -q 'requeued\|workers have ended' "$work/loss.out" || fail "a lost node without daemons: $(tail -n 5 "$work/loss.out")"
[ "$(cat "$work/kept/LATEST")" = step-000000000250 ] || fail "the end was not saved: $(cat "$work/kept/LATEST")"
echo "  a node lost: the other one goes on, same digest"

# The same with daemons on both: those of the lost one begin anew, and all with the latest checkpoint.
run() { # NAME SLOW
    # shellcheck disable=SC2086
    SHARDD_RESUME=$work/saved SHARDD_CHECKPOINT_EVERY=10 SHARDD_KEEP=3 submit "$1" shd-gpt $model --elastic --slow "$2"
}
latest() { sed 's/step-0*//' "$work/saved/LATEST" 2>/dev/null; }
at_checkpoint() { [ "$(latest)" -ge "$1" ] 2>/dev/null; }
further() { # a checkpoint or two further
    local to
    to=$(($(latest) + $1))
    soon "a checkpoint of step $to" at_checkpoint "$to"
}
started_on_b() { pgrep -f "^[^ ]*shardctl host .*/shardd-$1-nodeB$$" | sort -n | tail -n 1; }
is_another() { [ -n "$(started_on_b "$1")" ] && [ "$(started_on_b "$1")" != "$2" ]; }
start_node B
soon "two nodes that are idle" all_idle
job=$(run resume 20)
soon "a checkpoint" at_checkpoint 10
host=$(started_on_b "$job")
kill -STOP "$host"
# shellcheck disable=SC2046 # its processes, the keeper and the daemon with its state
kill -KILL "$host" $(pgrep -P "$host")
soon "another host's start on B" is_another "$job" "$host"
soon "going back" has resume "restored $work/saved/step-" 1
further 20
echo "  all processes of a node killed: back to the latest checkpoint"

say scancel --batch --signal=TERM "$job"
soon "the end of the job" is_over "$job"
has resume "saved $work/saved/step-.*bytes" 1 || fail "the end was not saved"
end=$(latest)
job=$(run again 20)
soon "going back" has again "restored $work/saved/step-0*$end " 1
further 20
echo "  SIGTERM saves, and the next job goes on from there: step $end"

lose B
soon "a requeue" has again "is lost: the job is requeued" 1
start_node B
soon "going back" has again "restored $work/saved/step-" 2
further 20
# The script's own node, which Slurm does not miss.
before=$(latest)
lose A
start_node A
soon "going back" has again "restored $work/saved/step-" 3
[ "$(latest)" -ge "$before" ] || fail "back before the latest checkpoint: $(latest), not $before"
soon "the end of the job" is_over "$job"
[ "$(digests "$work/again.out")" = "$want" ] ||
    fail "requeued: wanted '$want', got '$(tail -n 2 "$work/again.out")'"
[ "$(latest)" = "$steps" ] || fail "the end was not saved: $(latest)"
"$bin/shardctl" checkpoint --verify "$work/saved" >"$work/verified"
grep -q "$(echo "$want" | cut -d' ' -f2)" "$work/verified" || fail "saved: $(cat "$work/verified")"
[ -z "$(ls "$work/submit")" ] || fail "left: $(ls "$work/submit")"
echo "  a node with daemons lost, then that of the script: requeued, from the latest checkpoint to the same digest"
