#!/bin/sh
# shardctl replay as a user meets it: a step that shd-gpt made is computed again from a snapshot beside the
# run, with the same bits, or with a flipped one, whose step and unit are named. What cannot be said is
# said with the reason. No fork is left, whatever ends it, and the run is as it was.
# test_ctl_replay.sh BIN_DIR
set -eu
umask 077
# shellcheck source=tests/lib/wait.sh
. "$(dirname "$0")/../../../../lib/wait.sh"
PATH=$1:$PATH
work=$(mktemp -d "${XDG_RUNTIME_DIR:-$HOME}/shd.XXXXXX") # not /tmp: `up` takes no place that is everybody's
replay_pid=
end() {
    [ -z "$replay_pid" ] || kill -KILL "$replay_pid" 2>/dev/null || true
    shardctl down --yes --runtime-dir "$work/up" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap end EXIT
gpt='shd-gpt --lr 0.005 --min-lr 0.005 --warmup 1 --layers 1 --dim 32 --heads 2 --seq 16 --sample 0 --eval-windows 0 --threads 1'

worker() { # worker STEPS RANK WORLD
    # shellcheck disable=SC2086
    RANK=$2 WORLD_SIZE=$3 $gpt --steps "$1" >"$work/out$2" 2>"$work/err$2" || fail "$(cat "$work/err$2")"
}
train() { # train STEPS: two workers, whose bits are the replay's one's
    worker "$1" 0 2 &
    other=$!
    worker "$1" 1 2
    wait "$other"
}
# replays CODE PATTERN WORDS...: the answer, or the reason, has this; no fork is left, the run is as it was
replays() {
    want=$1 pattern=$2 code=0
    shift 2
    shardctl digest --model gpt >"$work/before"
    shardctl replay "$@" >"$work/said" 2>"$work/why" || code=$?
    [ $code -eq "$want" ] || fail "replay $*: exit code $code, not $want: $(cat "$work/said" "$work/why")"
    cat "$work/why" >>"$work/said"
    expect "$work/said" "$pattern"
    shardctl digest --model gpt >"$work/after"
    cmp "$work/before" "$work/after" || fail "the run is another after replay $*"
    soon 'a fork is left' no_fork
}
no_fork() {
    shardctl status --json >"$work/status"
    ! grep -q '"name": "gpt\.replay-' "$work/status"
}

line=$(shardctl up --daemons 2 --runtime-dir "$work/up")
eval "$line"
export SHARDD_ADDRESS

# A run of 12 steps, with snapshots of steps 4 and 8, and something set in between.
worker 1 0 1
code=0
shardctl replay gpt --step 1 -- true >"$work/said" 2>"$work/why" || code=$?
[ $code -eq 3 ] || fail "without a snapshot: exit code $code"
expect "$work/why" 'needs a snapshot of a step before it, and there are none'
shardctl snapshot gpt --every 1000000 --keep 4 >/dev/null # by hand: those of quick steps wait for no memory
shardctl set gpt weight_decay=0.3 --at 10 >/dev/null # waits in the snapshot of step 4
train 4
shardctl snapshot gpt >/dev/null
train 5
shardctl set gpt lr_scale=0.5 --at 6 >/dev/null # is not in it
train 8
shardctl snapshot gpt >/dev/null
train 12
shardctl snapshot gpt >/dev/null
shardctl snapshots gpt --json >"$work/said"
expect "$work/said" '"step":4.*"step":8.*"step":12'
export RANK=1 WORLD_SIZE=2 # of whoever calls: a replay has one worker

# The same bits: behind a snapshot, in front of one, of the open step, between.
# shellcheck disable=SC2086
{
    replays 0 '^agrees model=gpt step=8 from=4 compared=norm,loss,state$' gpt --step 8 -- $gpt --steps 12
    replays 0 '^agrees model=gpt step=12 from=8 compared=norm,loss,state$' gpt --step 12 -- $gpt --steps 12
    replays 0 '^agrees model=gpt step=11 from=8 compared=norm,loss$' gpt --step 11 -- $gpt --steps 12
    expect "$work/why" 'no snapshot of step 11.*not the state'
    replays 0 '^{"model":"gpt","verdict":"agrees","step":8,"from":4,"steps":4,"state":true}$' \
        gpt --step 8 --json -- $gpt --steps 12 --elastic

    # A bit that a worker flips from step 7 on, in the last unit.
    replays 1 'differs .*step=8 from=4 .*first=7 what=norm unit=head' gpt --step 8 -- $gpt --steps 12 --flip-bit 7 --flip-rank 0
    expect "$work/why" 'settings (.*, for one) were changed since the snapshot of step 4'
    replays 1 '"verdict":"differs".*"first":{"step":7,"what":"norm","unit":"head"}' \
        gpt --json --step 8 -- $gpt --steps 12 --flip-bit 7 --flip-rank 0
    replays 0 '^agrees .*step=7 ' gpt --step 7 -- $gpt --steps 12 --flip-bit 8 --flip-rank 0

    # What cannot be said.
    replays 3 'needs a snapshot of a step before it, and there are those of 4, 8, 12' gpt --step 4 -- $gpt --steps 12
    replays 3 'step 13 of model .gpt. is not made yet: 12 are' gpt --step 13 -- $gpt --steps 12
    replays 3 'step 5 was made with another lr (.*it has to be the run.s own command line' \
        gpt --step 8 -- $gpt --steps 12 --min-lr 0.004
    replays 3 'shd-gpt exited with code 1 after step 4' gpt --step 8 -- $gpt --steps 12 --dim 64
    expect "$work/why" 'the open model has 32'
    replays 3 'sh exited with code 7 after step 4' gpt --step 8 -- sh -c 'exit 7'
    replays 3 "cannot run '/no/such'" gpt --step 8 -- /no/such
    replays 3 '"verdict":"unknown".*"reason":"sh exited' gpt --json --step 8 -- sh -c 'exit 7'
    replays 3 'no model .*other' other --step 8 -- $gpt --steps 12
    replays 2 'which step' gpt -- $gpt
    replays 2 'needs a worker' gpt --step 8
    replays 2 'which model' --step 8
    # Of a worker that is told to work on the run itself, or to take it along, nothing comes.
    replays 3 'true exited with code 0 after step 4' gpt --step 8 -- true
    replays 3 'shd_model_drop() in a worker that shardctl replay has started' gpt --step 8 -- shardctl drop --yes --force gpt
    replays 3 'shd_checkpoint() in a worker' gpt --step 8 -- shardctl checkpoint "$work/saved"
    [ ! -e "$work/saved" ] || fail 'it was saved'
}

# What an owner computes is compared, too, as of the open step: the last step's norm is of before the
# clipping, which the command has another of.
worker 13 0 1
# shellcheck disable=SC2086
{
    replays 0 '^agrees .*step=13 from=12 compared=norm,loss,state$' gpt --step 13 -- $gpt --steps 13
    replays 1 '^differs .*compared=norm,loss,state first=13 what=state unit=embed$' gpt --step 13 -- $gpt --steps 13 --clip 0.001
}

# The model has gone back, and on: what is compared is the run that is.
shardctl rewind gpt --to 8 >/dev/null
shardctl set gpt lr_scale=0.25 --at 9 >/dev/null
worker 10 0 1
# shellcheck disable=SC2086
{
    replays 0 '^agrees .*step=10 from=8 compared=norm,loss,state$' gpt --step 10 -- $gpt --steps 12
    replays 3 'step 11 of model .gpt. is not made yet: 10 are' gpt --step 11 -- $gpt --steps 12
}

# A setting that was given up since the snapshot: from when on is not known.
shardctl set gpt lr_scale=spec >/dev/null
# shellcheck disable=SC2086
replays 3 'setting lr_scale.* was changed again since the snapshot' gpt --step 10 -- $gpt --steps 12

# Ended in the middle: the worker goes, and the fork.
shardctl replay gpt --step 6 -- sh -c "echo \$\$ >$work/worker; exec sleep 1000" >"$work/said" 2>"$work/why" &
replay_pid=$!
soon 'the worker does not start' test -s "$work/worker"
if no_fork; then fail 'there is no fork while it is replayed'; fi
kill -TERM "$replay_pid"
code=0
wait "$replay_pid" || code=$?
replay_pid=
[ $code -eq 143 ] || fail "ended by SIGTERM: exit code $code: $(cat "$work/why")"
expect "$work/why" 'got SIGTERM: not replayed'
soon 'a fork is left' no_fork
if kill -0 "$(cat "$work/worker")" 2>/dev/null; then fail 'the worker is left'; fi
shardctl down --yes --runtime-dir "$work/up" >/dev/null 2>&1

# No room for a fork: daemons that let a user have 16 MiB of memory, of which a model's history takes half.
printf '#!/bin/sh\nexec shardd --quota uid:*=16MiB "$@"\n' >"$work/shardd"
chmod +x "$work/shardd"
line=$(SHARDD_BIN=$work/shardd shardctl up --daemons 1 --runtime-dir "$work/up")
eval "$line"
worker 2 0 1
shardctl snapshot gpt >/dev/null
worker 3 0 1
# shellcheck disable=SC2086
replays 3 'quota: .* are asked for' gpt --step 3 -- $gpt --steps 3
expect "$work/why" 'norms and losses are compared, not the state after step 3: .*quota'
