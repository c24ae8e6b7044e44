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
    for dir in "$work/up" "$work/codes"; do
        [ ! -d "$dir" ] || shardctl down --runtime-dir "$dir" --yes >/dev/null 2>&1 || true
    done
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
no_pin() { shardctl status --json | grep -q '"pins": \?\[\]'; }
soon 'something is pinned still' no_pin

# --memory: the same bytes by a path, in the memory of the process that exports, and in a directory a link to it.
# Nothing is pinned meanwhile, nobody can change them, and who has them mapped keeps them.
saved=$work/w/step-000000000060.safetensors
shardctl export "$work/mem" --memory --json >"$work/mem.out" 2>&1 &
export_pid=$!
soon "no weights in memory" grep -q '"path"' "$work/mem.out"
path=$(sed -n 's/.*"path":"\([^"]*\)".*"step":60.*/\1/p' "$work/mem.out")
case $path in /proc/"$export_pid"/fd/*) ;; *) fail "no path of its own: $(cat "$work/mem.out")" ;; esac
cmp "$path" "$saved"
[ "$(readlink "$work/mem/step-000000000060.safetensors")" = "$path" ] || fail "no link: $(ls -l "$work/mem")"
[ "$(cat "$work/mem/LATEST")" = step-000000000060.safetensors ] || fail "LATEST: $(cat "$work/mem/LATEST")"
soon 'weights in memory hold a pin' no_pin
cat >"$work/mapped.py" <<'EOF2'
import mmap, os, signal, sys, time

path, pid, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with open(path, 'rb') as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
before = mapped[:]
for change in (lambda f: os.pwrite(f, b'x', 0), lambda f: os.ftruncate(f, 0), lambda f: mmap.mmap(f, 4096)):
    with open(path, 'rb+', buffering=0) as file:
        try:
            change(file.fileno())
        except PermissionError:
            continue
    sys.exit('weights in memory can be changed')
os.kill(pid, signal.SIGTERM)
end = time.monotonic() + seconds
while os.path.exists(path):
    assert time.monotonic() < end, 'they are there still'
    time.sleep(0.05)
assert mapped[:] == before
EOF2
python3 "$work/mapped.py" "$path" "$export_pid" "$limit_s" || fail 'weights in memory are not what they should be'
wait "$export_pid" || fail "export --memory: $? $(cat "$work/mem.out")"
export_pid=
[ -z "$(ls -A "$work/mem")" ] || fail "left over: $(ls -A "$work/mem")"

# A command has them, and only as long as it runs; it finds them where the processes that it starts look, too.
shardctl export --memory -- cmp {} "$saved" || fail "a command: $?"
code=0
# shellcheck disable=SC2016 # the command's own
shardctl export --memory -- sh -c 'cat "$1" | cmp - "$2" && exit 7' sh {} "$saved" || code=$?
[ "$code" -eq 7 ] || fail "a command's exit code: $code"

# What is wrong is said.
wrong() {
    wants=$1
    shift
    if shardctl export "$@" >"$work/out" 2>&1; then fail "took: export $*"; fi
    expect "$work/out" "$wants"
}
wrong 'no directory: shardctl export DIR, or --memory'
wrong 'shardctl export --memory -- CMD {}' "$work/mem" -- cat {}
wrong 'no {} in the command' --memory -- cat
wrong 'leave --follow out' --memory --follow -- cat {}
wrong "leave $work/mem out" "$work/mem" --memory -- cat {}
wrong 'at most 1024 files in memory' --memory --keep 1025
wrong "cannot run 'no-such-command'" --memory -- no-such-command {}
wrong "'step-000000000060.safetensors' is a file there already" "$work/w" --memory
cmp "$saved" "$work/again/step-000000000060.safetensors" || fail 'a file was replaced'
(ulimit -f 8 && wrong 'of memory: File too large' --memory -- cat {})

# --follow keeps the last ones.
shardctl export "$work/mem" --memory --follow --keep 1 >"$work/mem.out" 2>&1 &
export_pid=$!
soon "no weights in memory" grep -q 'step=60 ' "$work/mem.out"
first=$(sed -n 's/ .*//p' "$work/mem.out")
# shellcheck disable=SC2086
shd-gpt ${gpt%%--steps*}--steps 62 --threads 1 >"$work/more.out" 2>&1 || fail "more: $(cat "$work/more.out")"
soon "no step 62 in memory" grep -q 'step=62 ' "$work/mem.out"
test -L "$work/mem/step-000000000062.safetensors" || fail "no link: $(ls -l "$work/mem")"
[ ! -e "$work/mem/step-000000000060.safetensors" ] || fail '--keep 1 kept two'
[ "$(find "$work/mem" -type l | wc -l)" -eq 1 ] || fail "--keep 1 left: $(ls "$work/mem")"
shardctl export "$work/again" >/dev/null
cmp "$work/again/step-000000000062.safetensors" "$work/mem/step-000000000062.safetensors"
[ "$first" != "$(sed -n '$s/ .*//p' "$work/mem.out")" ] || fail "one path for two steps: $(cat "$work/mem.out")"
kill -9 "$export_pid"
wait "$export_pid" 2>/dev/null || true
export_pid=
[ ! -e "$work/mem/step-000000000062.safetensors" ] || fail 'memory of a process that was killed is there'

# Published in codes: what a reader sees is what the trainer saw, and export says that it is rounded.
gpt='--layers 2 --dim 64 --seq 32 --sample 0 --steps 5 --threads 1 --codec int4'
shardctl up --daemons 2 --runtime-dir "$work/codes" >"$work/up.out" 2>&1 || fail "up: $(cat "$work/up.out")"
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/codes shd-gpt $gpt >"$work/codes.out" 2>&1 || fail "int4: $(cat "$work/codes.out")"
# shellcheck disable=SC2086
SHARDD_ADDRESS=$work/codes shd-gpt --evaluate $gpt >"$work/beside.out" 2>&1 || fail "beside: $(cat "$work/beside.out")"
expect "$work/beside.out" "$(grep '^eval step 5 ' "$work/codes.out")"
shardctl export -a "$work/codes" "$work/coded" >"$work/out" 2>&1 || fail "export: $(cat "$work/out")"
expect "$work/out" 'published in codes (codec: int4)'
[ -s "$work/coded/step-000000000005.safetensors" ] || fail 'nothing is exported'

# The package of that format itself reads it there, and PyTorch maps it.
python=$("$(dirname "$0")/../../../../../scripts/torch_env.py" --print 2>/dev/null) || {
    echo 'no PyTorch here: the safetensors package is not asked'
    exit 0
}
cat >"$work/open.py" <<'EOF2'
import sys
from safetensors import safe_open

tensors = {}
for path in sys.argv[1:]:
    with safe_open(path, framework='pt') as file:
        tensors[path] = {name: file.get_tensor(name) for name in file.keys()}
one, other = tensors.values()
assert len(one) > 10 and one.keys() == other.keys() and all(one[n].equal(other[n]) for n in one)
with open('/proc/self/maps', encoding='ascii') as file:
    assert any('/memfd:step-000000000062.safetensors' in line for line in file), 'it was copied'
EOF2
shardctl export --memory -- "$python" "$work/open.py" {} "$work/again/step-000000000062.safetensors" || fail 'safe_open() does not read it'
