#!/bin/sh
# shardctl set as a user meets it: a model that shd-gpt trains is changed at a step, said by set, status
# and /status, refused with the reason, and goes on with another loss than without.
# test_ctl_set.sh BIN_DIR
set -eu
umask 077
# shellcheck source=tests/lib/wait.sh
. "$(dirname "$0")/../../../../lib/wait.sh"
PATH=$1:$PATH
work=$(mktemp -d "${XDG_RUNTIME_DIR:-$HOME}/shd.XXXXXX") # not /tmp: `up` takes no place that is everybody's
end() {
    shardctl down --yes --runtime-dir "$work/up" >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap end EXIT
gpt='--lr 0.005 --min-lr 0.005 --warmup 1 --layers 1 --dim 32 --heads 2 --seq 16 --sample 0 --eval-windows 0 --threads 1'

refused() { # refused TEXT WORDS...: with exit code 1, and nothing on stdout
    text=$1
    shift
    code=0
    shardctl set "$@" >"$work/said" 2>"$work/why" || code=$?
    if [ $code -ne 1 ] || [ -s "$work/said" ]; then fail "set $*: exit code $code"; fi
    expect "$work/why" "$text"
}
train() { # train STEPS
    # shellcheck disable=SC2086
    shd-gpt --steps "$1" $gpt >"$work/out" 2>"$work/err" || fail "$(cat "$work/err")"
}
begin() {
    line=$(shardctl up --daemons 2 --runtime-dir "$work/up")
    eval "$line"
    export SHARDD_ADDRESS
    train 3
}

begin
train 6
shardctl digest >"$work/plain"
shardctl down --yes --runtime-dir "$work/up" >/dev/null

begin
shardctl set >"$work/said"
expect "$work/said" 'gpt: nothing is set'
refused "did you mean lr_scale?" gpt lr_scal=1
refused 'lr_scale multiplies it' lr=0.1
refused 'takes a number' gpt lr_scale=-1
refused 'no model' other lr_scale=1
refused 'laid out for 4: a spec with "micro_batches_max"' gpt micro_batches=8
refused 'must be a whole number, 1 to 4' micro_batches=0
refused 'did you mean micro_batches?' micro-batches=2
refused 'micro_batches can be changed, in multiples of it' accumulate=2
code=0
shardctl set --at 5 2>"$work/why" || code=$?
[ $code -eq 2 ] || fail "exit code $code"
expect "$work/why" 'without a setting'

shardctl set gpt lr_scale=0.5 clip_norm=0.25 >"$work/said"
expect "$work/said" '^set model=gpt from=3$'
shardctl set lr_scale=0.5 --json >"$work/said" # the same again
expect "$work/said" '^{"model":"gpt","from":3}$'
shardctl set gpt weight_decay=0.3 --at 5 --show >"$work/said"
expect "$work/said" 'clip_norm=0.25  from step 3 on'
expect "$work/said" 'weight_decay.*=0.3  waits for step 5'
shardctl set gpt clip_norm=1 eps=1e-6 --at 7 --show >"$work/said"
expect "$work/said" 'clip_norm=1  waits for step 7'
shardctl set gpt micro_batches=2 --at 9 --show --json >"$work/said"
expect "$work/said" '"later":\[{"from":7,"settings":{"clip_norm":1.0,"eps.*},{"from":9,"settings":{"micro_batches":2.0}}\]'
shardctl set gpt clip_norm=now eps=now micro_batches=now --show >"$work/said"
grep -q 'waits for step [79]' "$work/said" && fail "$(cat "$work/said")"
# shows PATTERN [FLAG]: a daemon that is held up shows what was before
# shellcheck disable=SC2317
shows() {
    shardctl status ${2:+"$2"} >"$work/said" || return 1
    grep -q "$1" "$work/said"
}
soon 'status does not show what is set' \
    shows 'set in gpt: clip_norm=0.25 since step 3, .*weight_decay.*=0.3 from step 5'
train 6
shardctl log >"$work/said"
expect "$work/said" '^set from here on: lr_scale.*=0.5$'
refused 'from step 6 on it can be changed' clip_norm=2 --at 4
shardctl digest >"$work/other"
expect "$work/other" 'step=6'
cmp -s "$work/plain" "$work/other" && fail 'the change changed nothing'
shardctl set gpt lr_scale=spec weight_decay=spec clip_norm=spec --show >"$work/said"
expect "$work/said" 'nothing is set'
soon 'status shows that something is set' shows '"now": {}' --json

shardctl set gpt micro_batches=2 >"$work/said" # shd-gpt computes as many as a step has
expect "$work/said" '^set model=gpt from=7$'
train 9
expect "$work/out" 'step *9'
shardctl set gpt micro_batches=spec >"$work/said"
expect "$work/said" '^set model=gpt from=10$'
train 12
shardctl digest >"$work/said"
expect "$work/said" 'step=12'

# Going back says what is not set any more, and what is again.
shardctl set gpt clip_norm=0.5 >/dev/null
train 13
shardctl snapshot gpt >"$work/said"
expect "$work/said" '^snapshot step=13$'
shardctl set gpt clip_norm=spec >/dev/null
shardctl set gpt lr_scale.decay=0.25 >/dev/null
shardctl set gpt beta1=0.5 --at 50 >/dev/null
shardctl rewind gpt >"$work/said" 2>"$work/why"
expect "$work/said" '^rewound model=gpt step=13$'
expect "$work/why" '^shardctl: went with the steps: lr_scale.decay=0.25 from step 13 on$'
expect "$work/why" '^shardctl: went with the steps: beta1.decay=0.5 from step 50 on$'
expect "$work/why" '^shardctl: holds again: clip_norm=0.5 from step 12 on$'
shardctl rewind gpt >"$work/said" 2>"$work/why"
[ ! -s "$work/why" ] || fail "$(cat "$work/why")"
shardctl set gpt clip_norm=2 --at 20 >/dev/null
shardctl rewind gpt --json >"$work/said"
expect "$work/said" '^{"model":"gpt","step":13,"gone":\[{"setting":"clip_norm","value":2.0,"from":20}\],"again":\[\]}$'
