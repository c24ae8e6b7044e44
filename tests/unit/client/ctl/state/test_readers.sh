#!/bin/sh
# Readers beside training as a user starts them: an evaluation and an export that follow it, with real
# daemons. test_readers.sh BIN_DIR
set -eu
# shellcheck source=tests/lib/wait.sh
. "$(dirname "$0")/../../../../lib/wait.sh"
PATH=$1:$PATH
work=$(mktemp -d)
export_pid=
end() {
    [ -z "$export_pid" ] || kill -9 "$export_pid" 2>/dev/null || true
    [ ! -d "$work/up" ] || shardctl down --runtime-dir "$work/up" --yes >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap end EXIT
gpt='--layers 2 --dim 64 --seq 32 --sample 0 --eval-every 5 --steps 60 --threads 1'

shardctl up --daemons 2 --runtime-dir "$work/up" >"$work/up.out" 2>&1 || fail "up: $(cat "$work/up.out")"
SHARDD_ADDRESS=$work/up
export SHARDD_ADDRESS
if shardctl export "$work/none" >"$work/out" 2>&1; then fail 'exported no model'; fi
expect "$work/out" 'has no model: a worker makes one'
if shd-gpt --evaluate --standalone >"$work/out" 2>&1; then fail 'evaluated without daemons'; fi

# The evaluation waits for the model, the workers make it. Of each step that it prints it has the
# trainer's number, in all digits.
# shellcheck disable=SC2086
shd-gpt --evaluate --follow --json "$work/beside" $gpt >"$work/beside.out" 2>&1 &
beside=$!
# shellcheck disable=SC2086
RANK=1 WORLD_SIZE=2 shd-gpt $gpt >"$work/one.out" 2>&1 &
one=$!
# shellcheck disable=SC2086
RANK=0 WORLD_SIZE=2 shd-gpt --json "$work/trained" $gpt >"$work/zero.out" 2>&1 &
zero=$!
soon "no export of the model" shardctl export "$work/w" >"$work/first.out" 2>&1
shardctl export "$work/w" --follow --every 2 >"$work/export.out" 2>&1 &
export_pid=$!
wait "$one" || fail "worker 1: $(cat "$work/one.out")"
wait "$zero" || fail "worker 0: $(cat "$work/zero.out")"
wait "$beside" || fail "beside: $(cat "$work/beside.out")"
grep -h eval_step "$work/trained" | sort >"$work/want"
grep -h eval_step "$work/beside" | grep -v '"eval_step":0,' | grep -v '"eval_step":60,' | sort >"$work/got"
[ "$(wc -l <"$work/want")" -ge 11 ] || fail "the trainer evaluated too little: $(cat "$work/want")"
[ -z "$(comm -13 "$work/want" "$work/got")" ] ||
    fail "not the trainer's: $(comm -13 "$work/want" "$work/got")"
[ "$(wc -l <"$work/got")" -ge 1 ] || fail "nothing evaluated on the way: $(cat "$work/beside.out")"
expect "$work/beside.out" "$(grep '^eval step 60 ' "$work/zero.out")"

# What is exported of the last step is what a checkpoint has of it.
soon "step 60 is not exported" test -e "$work/w/step-000000000060.safetensors"
kill "$export_pid"
wait "$export_pid" || fail "export --follow: $? $(cat "$work/export.out")"
export_pid=
[ "$(cat "$work/w/LATEST")" = step-000000000060.safetensors ] || fail "LATEST: $(cat "$work/w/LATEST")"
[ -z "$(find "$work/w" -name '.*' -type f)" ] || fail "left over: $(ls -A "$work/w")"
shardctl export "$work/again" --json >"$work/out"
expect "$work/out" '"step":60'
cmp "$work/again/step-000000000060.safetensors" "$work/w/step-000000000060.safetensors"
shardctl checkpoint "$work/saved" >/dev/null

# --keep: the oldest go; what is no file of a step before this one stays.
mkdir "$work/kept"
for step in 1 2 3 59 61; do touch "$work/kept/step-$(printf %012d "$step").safetensors"; done
touch "$work/kept/step-7.safetensors" "$work/kept/step-000000000005.safetensors.old"
shardctl export "$work/kept" --keep 2 >/dev/null
LC_ALL=C ls "$work/kept" >"$work/out"
printf '%s\n' LATEST step-000000000005.safetensors.old step-000000000059.safetensors \
    step-000000000060.safetensors step-000000000061.safetensors step-7.safetensors >"$work/want"
cmp "$work/out" "$work/want" || fail "--keep 2 left: $(cat "$work/out")"
cat >"$work/same.py" <<'EOF'
import json, struct, sys

def tensors(path):
    with open(path, 'rb') as file:
        data = file.read()
    size, = struct.unpack('<Q', data[:8])
    header = json.loads(data[8:8 + size])
    header.pop('__metadata__', None)
    return {name: (t['dtype'], t['shape'], data[8 + size + t['data_offsets'][0]:8 + size + t['data_offsets'][1]])
            for name, t in header.items()}

one, other = tensors(sys.argv[1]), tensors(sys.argv[2])
assert len(one) > 10 and one == other
EOF
python3 "$work/same.py" "$work/w/step-000000000060.safetensors" \
    "$work/saved/step-000000000060/model.safetensors" || fail 'weights differ from the checkpoint'
shardctl status --json >"$work/status"
grep -q '"pins":\[\]' "$work/status" || grep -q '"pins": \[\]' "$work/status" || fail 'something is pinned still'
