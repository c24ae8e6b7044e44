#!/bin/sh
# shardctl's checkpoint and restore as a user meets them, with real daemons and training.
# test_checkpoint_ctl.sh BIN_DIR
set -eu
# shellcheck source=tests/lib/wait.sh
. "$(dirname "$0")/../../../../lib/wait.sh"
PATH=$1:$PATH
work=$(mktemp -d)
daemon=
end() {
    [ -z "$daemon" ] || kill -9 "$daemon" 2>/dev/null || true
    [ ! -d "$work/up" ] || shardctl down --runtime-dir "$work/up" --yes >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap end EXIT
gpt='--layers 2 --dim 64 --seq 32 --sample 0 --eval-windows 0 --threads 1'

refused() { # refused TEXT WORDS...: exit code 2, or 1 with the text
    text=$1
    shift
    if "$@" >"$work/refused" 2>&1; then fail "not refused: $*"; fi
    expect "$work/refused" "$text"
}

# Undisturbed, with checkpoints, and from one of those on with other daemons and workers: one
# digest. The last state is saved too, although no multiple of 10.
# shellcheck disable=SC2086
want=$(shd-gpt --standalone --steps 47 $gpt | tail -n 1)
# shellcheck disable=SC2086
shardctl run --daemons 2 --workers 2 --checkpoint "$work/run" --checkpoint-every 10 --keep 3 -- \
    shd-gpt --steps 47 $gpt >"$work/out" 2>"$work/err" || fail "run: $(cat "$work/err")"
shardctl checkpoint --list "$work/run" >"$work/list"
expect "$work/list" 'step-000000000047 .* latest'
[ "$(wc -l <"$work/list")" -le 3 ] || fail "more than 3 kept: $(cat "$work/list")"
shardctl checkpoint --verify "$work/run" >"$work/verify"
expect "$work/verify" 'good model=gpt step=47 updates=47'
expect "$work/verify" "$(echo "$want" | cut -d' ' -f2)"
first=$(head -n 1 "$work/list" | cut -d' ' -f1)
[ "$first" != step-000000000047 ] || fail 'nothing was saved on the way'
# shellcheck disable=SC2086
shardctl run --daemons 3 --workers 1 --restore "$work/run/$first" -- shd-gpt --steps 47 $gpt \
    >"$work/out" 2>"$work/err" || fail "run --restore: $(cat "$work/err")"
[ "$(tail -n 1 "$work/out")" = "$want" ] || fail "after a restore: $(tail -n 1 "$work/out"), not $want"
expect "$work/err" "restored model=gpt step=$(echo "$first" | sed 's/step-0*//')"

# One command line for the first start and for each after a kill of all of it, as a batch system
# kills and requeues a job: it goes on from the latest, with the undisturbed digest at the end.
requeue() {
    # shellcheck disable=SC2086
    exec setsid shardctl run --daemons 2 --workers 1 --resume "$work/again" --checkpoint-every 5 \
        --keep 2 -- shd-gpt --steps 47 $gpt "$@"
}
saved() {
    [ -e "$work/again/LATEST" ] && [ "$(cat "$work/again/LATEST")" != "$1" ]
}
last=none
for _ in 1 2; do
    requeue --slow 20 >"$work/out" 2>"$work/err" &
    job=$!
    soon "nothing saved: $(cat "$work/err")" saved "$last"
    # shellcheck disable=SC2046
    kill -9 $(pgrep -s "$job") 2>/dev/null || true
    wait "$job" || true
    last=$(cat "$work/again/LATEST")
done
expect "$work/err" 'resuming from .*/again/step-'
(requeue) >"$work/out" 2>"$work/err" || fail "requeued: $(cat "$work/err")"
[ "$(tail -n 1 "$work/out")" = "$want" ] || fail "requeued: $(tail -n 1 "$work/out"), not $want"
(requeue) >"$work/out" 2>"$work/err" || fail "requeued at the end: $(cat "$work/err")"
[ "$(tail -n 1 "$work/out")" = "$want" ] || fail "requeued at the end: $(tail -n 1 "$work/out")"

# One that stays whatever happens: all is lost with the daemons' keeper, and comes back with the next daemons; what
# somebody drops does not.
up() { shardctl up --daemons 2 --threads-per-daemon 1 --runtime-dir "$work/up" >/dev/null; }
has_restored() { [ "$(grep -c "^restored $work/stay/step-0*[1-9]" "$work/stayed")" = "$1" ]; }
refused 'resume is of one that stays' shardctl checkpoint "$work/stay" --resume
shardctl checkpoint "$work/stay" --every 5 --keep 2 --resume --address "$work/up?cpu0,cpu1" >"$work/stayed" 2>"$work/why" &
saver=$!
up
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/up shd-gpt --steps 47 $gpt --slow 60 >"$work/out" 2>"$work/err" &
job=$!
soon "nothing saved: $(cat "$work/why")" [ -e "$work/stay/LATEST" ]
# shellcheck disable=SC2046
kill -9 $(pgrep -f -- "[ ]$work/up( |$)") 2>/dev/null || true # some end with others
rm -rf "$work/up"
up
! wait "$job" || fail 'training went on without its daemons'
soon "not restored: $(cat "$work/stayed" "$work/why")" has_restored 1
# Slowly: of steps that are over before it asks for one, the last is saved.
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/up shd-gpt --steps 47 $gpt --slow 20 >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
[ "$(tail -n 1 "$work/out")" = "$want" ] || fail "restored by one that stays: $(tail -n 1 "$work/out"), not $want"
soon "the end not saved: $(cat "$work/stayed" "$work/why")" grep -q 'step-000000000045' "$work/stayed"
shardctl drop --yes --force --runtime-dir "$work/up" gpt >/dev/null
soon "no word of the drop: $(cat "$work/why")" grep -q "model 'gpt' was dropped: nothing is restored" "$work/why"
has_restored 1 || fail "$(cat "$work/stayed")"
kill "$saver"
wait "$saver" || fail "the end of one that stays: $? $(cat "$work/why")"

# Workers were quicker than what restores as it begins.
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/up shd-gpt --steps 47 $gpt --slow 1000 >"$work/out" 2>"$work/err" &
job=$!
is_begun() { shardctl status --json --runtime-dir "$work/up" | grep -q '"step": *0'; }
soon "no training: $(cat "$work/err")" is_begun
kill -STOP "$job"
refused 'being trained by shd-gpt' shardctl restore --replace --runtime-dir "$work/up" "$work/stay"
refused 'force without --replace' shardctl restore --force --runtime-dir "$work/up" "$work/stay"
: >"$work/stayed" # has_restored is so in what the one before has said
shardctl checkpoint "$work/stay" --every 5 --resume --runtime-dir "$work/up" >"$work/stayed" 2>"$work/why" &
saver=$!
soon "not restored: $(cat "$work/stayed" "$work/why")" has_restored 1
expect "$work/why" 'was begun at step 0, and .* has step 45 of it'
kill -KILL "$job" # it hung, and lost its session
wait "$job" || true
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/up shd-gpt --steps 47 $gpt >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
[ "$(tail -n 1 "$work/out")" = "$want" ] || fail "begun too early: $(tail -n 1 "$work/out"), not $want"
kill "$saver"
wait "$saver" || fail "the end of one that stays: $? $(cat "$work/why")"

# One that stays has asked for a step that does not come: others may save what training has ended with.
shardctl checkpoint "$work/stay" --every 48 --resume --runtime-dir "$work/up" >"$work/stayed" 2>"$work/why" &
saver=$!
is_asked() { ! flock --nonblock "$work/stay/.lock" true; }
soon "it asks for nothing: $(cat "$work/why")" is_asked
saves_end() { shardctl checkpoint "$work/stay" --runtime-dir "$work/up" >"$work/saved" 2>&1; }
soon "the end cannot be saved: $(cat "$work/why")" saves_end
expect "$work/saved" "^saved $work/stay/step-000000000047"
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/up shd-gpt --steps 48 $gpt >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
soon "its own not saved: $(cat "$work/stayed" "$work/why")" grep -q 'step-000000000048' "$work/stayed"
kill "$saver"
wait "$saver" || fail "the end of one that stays: $? $(cat "$work/why")"
shardctl down --yes --runtime-dir "$work/up" >/dev/null

# An older run's checkpoints are in nobody's way: neither removed by --keep nor mixed with.
find "$work/again" | sort >"$work/before"
# shellcheck disable=SC2086
refused 'holds later steps (.*47) than step 0, .* (shardctl run --resume)' \
    shardctl run --checkpoint "$work/again" --keep 1 -- shd-gpt --steps 4 $gpt
refused 'holds later steps' shardctl run --restore "$(grep -m 1 /step- "$work/before")" \
    --checkpoint "$work/again" -- true
find "$work/again" | sort | cmp - "$work/before" || fail 'a refused run has changed the directory'

# The one that saves is killed when all is done: another saves what is new.
# shellcheck disable=SC2016,SC2086
shardctl run -v --checkpoint "$work/killed" --checkpoint-every 1000 -- sh -c \
    'shd-gpt "$@" && kill -9 $(sed -n "s/.*started checkpoint pid=//p" '"$work/err)" sh --steps 5 $gpt \
    >"$work/out" 2>"$work/err" || fail "saver killed: $(cat "$work/err")"
shardctl checkpoint --verify "$work/killed" >"$work/verify"
expect "$work/verify" 'good model=gpt step=5 updates=5'

# The last save fails: the daemons stay, and can be saved elsewhere; then they are told to end.
# shellcheck disable=SC2016,SC2086
shardctl run --daemons 2 --checkpoint "$work/full" -- sh -c \
    'shd-gpt "$@" && rm -r '"$work/full && : >$work/full" sh --steps 5 $gpt >"$work/out" 2>"$work/err" &
run=$!
soon "not kept, see $(cat "$work/err")" grep -q 'shardctl down --runtime-dir' "$work/err"
expect "$work/err" "NOT SAVED: the last save in '$work/full' failed. The daemons stay"
dir=$(sed -n "s/.*shardctl down --runtime-dir '\(.*\)'$/\1/p" "$work/err")
refused "in no checkpoint: model 'gpt', 5 steps" shardctl down --runtime-dir "$dir" </dev/null
shardctl checkpoint --runtime-dir "$dir" "$work/elsewhere" >"$work/saved"
expect "$work/saved" "$(tail -n 1 "$work/out" | cut -d' ' -f2)"
shardctl down --runtime-dir "$dir" </dev/null >"$work/down" || fail 'down asked'
expect "$work/down" "stopped the run at $dir"
code=0
wait "$run" || code=$?
[ "$code" = 73 ] || fail "code $code of a run whose last save failed: $(cat "$work/err")"

# Where nothing can be saved, or has room, nothing is trained.
: >"$work/file"
refused "cannot save in '$work/file' (--checkpoint)" shardctl run --checkpoint "$work/file" -- true
mkdir "$work/small"
# shellcheck disable=SC2016,SC2086
if unshare -m true 2>/dev/null; then
    refused "no room for a checkpoint in '$work/small' (--checkpoint): it needs more than" \
        unshare -m sh -c 'mount -t tmpfs -o size=128k none "$1" && exec shardctl run --checkpoint "$@"' \
        sh "$work/small" -- shd-gpt --steps 100000 $gpt
fi

# Damage: the exit code and the first bad tensor.
cp -a "$work/run/step-000000000047" "$work/bad"
shardctl checkpoint --verify "$work/bad" >"$work/verify" 2>&1 || fail "$(cat "$work/verify")"
! grep -q note: "$work/verify" || fail 'a checksum is not there'
cp -a "$work/bad" "$work/older"
sed -i -z 's/,\n "sha256": "[0-9a-f]*"//' "$work/older/shardd.json"
shardctl checkpoint --verify "$work/older" >"$work/verify" 2>&1 || fail "$(cat "$work/verify")"
expect "$work/verify" 'note: shardd.json has no checksum'
printf 'x' | dd of="$work/bad/model.safetensors" bs=1 seek=5000 conv=notrunc 2>/dev/null
refused "tensor '.*' in 'model.safetensors', elements" shardctl checkpoint --verify "$work/bad"
refused 'the file is damaged' shardctl run --daemons 2 --restore "$work/bad" -- true

# Root saves for daemons of another user: what it makes is theirs, so that they can restore it; and
# who cannot get at the files says which, and as whom.
serve() { # a daemon of that user at $SHARDD_ADDRESS
    setpriv --reuid 12345 --regid 12345 --clear-groups shardd --device=cpu0 \
        --runtime-dir="$SHARDD_ADDRESS" >>"$work/log" 2>&1 &
    daemon=$!
    soon "no daemon, see $work/log" [ -S "$SHARDD_ADDRESS/cpu0.sock" ]
}
if [ "$(id -u)" = 0 ]; then
    SHARDD_ADDRESS=$work/run-12345
    export SHARDD_ADDRESS
    chmod 755 "$work"
    mkdir -m 700 "$SHARDD_ADDRESS" "$work/theirs" "$work/ours"
    chown 12345:12345 "$SHARDD_ADDRESS" "$work/theirs"
    serve
    # shellcheck disable=SC2086
    shd-gpt --steps 2 $gpt >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
    refused "daemon cpu0: as user 12345 it may not enter '$work/ours' (Permission denied): save in a" \
        shardctl checkpoint "$work/ours/saved"
    refused "as user 12345 it may not enter '$work/ours' (Permission denied): save in a" \
        shardctl drain --checkpoint "$work/ours/saved"
    shardctl drain --checkpoint "$work/theirs/saved" >"$work/drain" 2>&1 || fail "$(cat "$work/drain")"
    wait "$daemon" || true
    foreign=$(find "$work/theirs" ! -user 12345)
    [ -z "$foreign" ] || fail "not given to the daemons' user: $foreign"
    serve
    info=$(echo "$work"/theirs/saved/step-*/shardd.json)
    chown 0:0 "$info"
    refused "as user 12345 it may not read '$info' (Permission denied): let that user" \
        shardctl restore "$work/theirs/saved"
    chown 12345 "$info"
    shardctl restore "$work/theirs/saved" >"$work/restored" || fail 'not restored'
    expect "$work/restored" 'step=2'
    kill "$daemon"
    wait "$daemon" || true
    daemon=
    unset SHARDD_ADDRESS
fi

# Daemons with the model open are not restored onto: which one, and at which step.
SHARDD_ADDRESS=$work/at
export SHARDD_ADDRESS
mkdir -m 700 "$SHARDD_ADDRESS"
shardd --device=cpu0 --runtime-dir="$SHARDD_ADDRESS" >>"$work/log" 2>&1 &
daemon=$!
soon "no daemon, see $work/log" [ -S "$SHARDD_ADDRESS/cpu0.sock" ]
# shellcheck disable=SC2086
shd-gpt --steps 3 $gpt >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
refused "daemon cpu0 has model 'gpt' open at step 3" shardctl restore "$work/run"
expect "$work/refused" 'nothing was changed; to go on from the checkpoint instead .* with --replace'
refused 'daemon cpu0 has no keeper' shardctl restore --replace "$work/run"
[ "$(shardctl digest | cut -d' ' -f3)" = step=3 ] || fail 'the open model is another one now'

# With a keeper the checkpoint takes the model's place, and training goes on to the same digest.
shardctl up --daemons 2 --runtime-dir "$work/up" >"$work/out" 2>&1 || fail "$(cat "$work/out")"
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/up shd-gpt --steps 3 $gpt >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
shardctl restore --runtime-dir "$work/up" --replace "$work/run/$first" >"$work/restored" 2>"$work/err" ||
    fail "restore --replace: $(cat "$work/err")"
expect "$work/restored" "restored model=gpt step=$(echo "$first" | sed 's/step-0*//')"
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/up shd-gpt --steps 47 $gpt >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
[ "$(tail -n 1 "$work/out")" = "$want" ] || fail "after a replacement: $(tail -n 1 "$work/out")"
shardctl down --runtime-dir "$work/up" --yes >"$work/out" 2>&1 || fail "$(cat "$work/out")"

# A worker for whom there is no work says so.
# shellcheck disable=SC2086
RANK=4 WORLD_SIZE=5 shd-gpt --steps 3 $gpt >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
expect "$work/err" 'rank 4 of 5 has nothing to compute: a step has work for 4'

# A signal ends at once what waits, with its code, and nothing half saved is left: first where the
# next step does not come, for nobody trains; then where the daemon is stopped.
no_partial() { [ -z "$(find "$work/broken" -name '.step-*' 2>/dev/null)" ]; }
has_partial() { ! no_partial; }
begin() { # a shell lets what it starts in the background ignore SIGINT
    env --default-signal=INT shardctl "$@" >"$work/verb" 2>&1 &
    verb=$!
    soon 'it does not begin' grep -q . "/proc/$verb/task/$verb/children" # it has signals by then
}
broken_by() { # broken_by SIGNAL CODE TEXT
    kill -s "$1" $verb
    code=0
    wait $verb || code=$?
    [ $code = "$2" ] || fail "exit code $code after SIG$1: $(cat "$work/verb")"
    expect "$work/verb" "got SIG$1: .*$3"
}
begin checkpoint "$work/broken" --every 4
soon 'nothing is being saved' has_partial
broken_by INT 130 'not saved; training goes on'
no_partial || fail "left in it: $(ls -a "$work/broken")"
begin checkpoint "$work/broken" --every 4
soon 'nothing is being saved' has_partial
kill -TERM $verb
wait $verb || fail "SIGTERM to one that stays: $(cat "$work/verb")"
expect "$work/verb" 'saved .*/step-000000000003'
# The same where the signal comes while it begins to wait: held there at a fail point, in builds that have them.
SHARDD_FAIL=list shardctl checkpoint "$work/listed" >"$work/verb" 2>&1
if grep -q 'fail_point save:begin' "$work/verb"; then
    export SHARDD_FAIL='save:begin:after!'
    begin checkpoint "$work/broken" --every 4
    unset SHARDD_FAIL
    saver=$(cat "/proc/$verb/task/$verb/children")
    is_held() { grep -q '^State:.T' "/proc/${saver% }/status"; }
    soon 'the saver is not held' is_held
    kill -TERM $verb
    is_told() { grep -q '^ShdPnd:.*4...$' "/proc/${saver% }/status"; }
    soon 'the signal is not passed on' is_told
    kill -CONT "${saver% }"
    wait $verb || fail "SIGTERM to one that begins to wait: $(cat "$work/verb")"
fi
kill -STOP $daemon
for verb_words in "checkpoint $work/broken" "checkpoint $work/broken --every 4" "drain --checkpoint $work/broken"; do
    # shellcheck disable=SC2086
    begin $verb_words
    broken_by INT 130 'training goes on'
    no_partial || fail "left in it: $(ls -a "$work/broken")"
done
begin drain
broken_by TERM 143 'training goes on'
kill -CONT $daemon
shardctl checkpoint "$work/broken" >"$work/verb" || fail 'a drain was not taken back'

# A fork is another model, and is dropped by itself.
shardctl fork gpt twin >"$work/fork" || fail 'no fork'
expect "$work/fork" 'forked model=twin from=gpt step=3'
[ "$(shardctl digest --model twin | cut -d' ' -f2)" = "$(shardctl digest --model gpt | cut -d' ' -f2)" ] ||
    fail 'the fork is something else'
refused "model 'twin' is open already" shardctl fork gpt twin
refused "daemon cpu0 has 2 models, name one: gpt, twin" shardctl digest
refused "not dropped: model 'twin' would be lost" shardctl drop twin </dev/null
refused "no model 'twim' is open at daemon cpu0; did you mean twin?" shardctl drop --yes twim
shardctl drop --yes twin >"$work/dropped" || fail 'not dropped'
expect "$work/dropped" 'dropped model=twin'
refused "no model 'twin'" shardctl digest --model twin
expect "$work/log" 'op=dropped model=twin by="shardctl drop (pid '
[ "$(shardctl digest | cut -d' ' -f3)" = step=3 ] || fail 'the other model has gone as well'

# A fork of a step that is kept, with what is other; and typed slightly wrong.
refused "model 'gpt' has no step 2 to fork: its open step is 3, and it has no snapshots" shardctl fork gpt@2 twin
shardctl snapshot gpt >"$work/snapshot" || fail 'no snapshot'
shardctl fork gpt@3 twin --set lr_scale=0.5 --set 'guard=[{"norm_above": 1e-9}]' --json >"$work/fork" || fail 'no fork'
expect "$work/fork" '{"model":"gpt","fork":"twin","step":3}'
shardctl set twin >"$work/set"
expect "$work/set" 'lr_scale.decay=0.5  from step 3 on'
[ "$(shardctl digest --model twin | cut -d' ' -f2)" = "$(shardctl digest --model gpt | cut -d' ' -f2)" ] ||
    fail 'the fork is something else'
shardctl drop --yes twin >"$work/dropped" || fail 'not dropped'
refused "no model 'gpt@three'" shardctl fork gpt@three twin
refused "no model 'gpd'" shardctl fork gpd@3 twin
refused 'seed cannot be other in a fork: the initial values are made of it' shardctl fork gpt twin --set seed=4
refused 'did you mean micro_batches' shardctl fork gpt twin --set microbatches=4
refused 'which model' shardctl fork gpt@3

# Two models: each in a directory of its own.
shd-gpt --print-spec --layers 2 --dim 64 --seq 32 | sed 's/"name":"gpt"/"name":"other"/' >"$work/other.json"
shardctl restore --weights "$work/run/step-000000000047" --spec "$work/other.json" >"$work/restored"
expect "$work/restored" 'model=other step=0'
shardctl drain --checkpoint "$work/two" >"$work/drain" 2>&1 || fail "$(cat "$work/drain")"
expect "$work/drain" "saved $work/two/gpt/step-000000000003 model=gpt"
expect "$work/drain" "saved $work/two/other/step-000000000000 model=other"
wait $daemon || true
daemon=
unset SHARDD_ADDRESS
shardctl checkpoint --verify "$work/two/gpt" >"$work/verify"
expect "$work/verify" 'good model=gpt step=3'
shardctl checkpoint --verify "$work/two/other" >"$work/verify"

# Command lines.
refused 'no directory' shardctl checkpoint
refused 'only look' shardctl checkpoint "$work/run" --list --keep 2
refused 'one at a time' shardctl checkpoint "$work/run" --every 5 --every-minutes 5
refused 'go together' shardctl restore --weights x
refused 'nothing to restore' shardctl restore
refused 'which model' shardctl drop
refused 'which model' shardctl fork gpt
refused 'says where' shardctl run --keep 2 -- true
refused 'restores and saves' shardctl run --resume "$work/x" --checkpoint "$work/y" -- true
refused 'No such file' shardctl checkpoint --list "$work/nothing"
refused 'No such file' shardctl run --restore "$work/nothing" -- true
echo ok
