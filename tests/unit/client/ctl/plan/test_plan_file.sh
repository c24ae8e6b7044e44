#!/usr/bin/env bash
# Plans as files, from shardctl through an editor to shd-gpt and real daemons: the same digest as by
# the policy's name, also of plans that no policy makes, and what is wrong is said before anything runs.
# usage: test_plan_file.sh BIN_DIR
set -euo pipefail
command -v python3 >/dev/null || exit 77
bin=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export PATH="$bin:$PATH"
export XDG_CACHE_HOME=/nowhere # no rates of whoever runs this

steps=3
model="--layers 2 --dim 32 --heads 2 --seq 32 --batch 2 --micro-batches 4 --steps $steps"
model="$model --sample 0 --eval-windows 0 --log-every 1"
bad=0

fail() {
    echo "FAILED: $*" >&2
    bad=1
}

digest_of() { grep '^digest sha256:' "$1" || true; }

# same WHAT PLAN DAEMONS WORKERS OPTIONS...: training by the plan comes to $want.
same() {
    local what=$1 plan=$2 daemons=$3 workers=$4
    shift 4
    # shellcheck disable=SC2086 # options are words
    shardctl run --daemons "$daemons" --workers "$workers" -- shd-gpt $model --plan "$plan" "$@" >out 2>&1 || true
    if [[ $(digest_of out) == "$want" ]] && grep -q "schedule of $plan, path" out; then
        echo "$what: same"
    else
        fail "$what: $(tail -n 3 out)"
    fi
}

# refused TEXT COMMAND...: ends with 1 or 2 and says so.
refused() {
    local text=$1 code=0
    shift
    "$@" >out 2>&1 || code=$?
    { [[ $code == 1 || $code == 2 ]] && grep -qF -- "$text" out; } ||
        fail "'$*' ended with $code and said: $(cat out)"
}

# shellcheck disable=SC2086
shd-gpt $model --print-spec >spec.json
# shellcheck disable=SC2086
shd-gpt $model --standalone >out 2>&1
want=$(digest_of out)
[[ $want == *" step=$steps" ]] || fail "no digest: $(tail -n 3 out)"

# What is printed, read and printed again is the same text; a whole --json document is read, too.
for policy in ddp zero1 zero2 "zero3 --prefetch post" "zero3 --forward-prefetch 3" \
    "zero3 --max-live-units 2" "zero3 --max-live-bytes 300KiB --prefetch none"; do
    # shellcheck disable=SC2086
    shardctl plan --spec spec.json --strategy $policy --ops >plan.json
    shardctl plan --spec spec.json --check plan.json --ops | cmp - plan.json || fail "$policy: another text"
    # shellcheck disable=SC2086
    shardctl plan --spec spec.json --strategy $policy --json >whole.json
    shardctl plan --spec spec.json --check whole.json --ops | cmp - plan.json || fail "$policy: --json is another plan"
    shardctl plan --spec spec.json --check plan.json --json | cmp - whole.json || fail "$policy: other costs"
    cp plan.json "${policy%% *}.json"
done
same "ddp on two daemons" ddp.json 2 1
same "zero2 by copy, two workers" zero2.json 1 2 --path copy

# Edits, as an editor makes them: the fetch of unit 2 for its backward two units earlier; embed (0),
# which the head uses, and unit 1 held from forward to backward and over the micro-batches.
python3 - <<'PY'
import json
def ops_of(path):
    with open(path, encoding='utf-8') as file:
        return json.load(file)
def write(path, plan):
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(plan, file)
plan = ops_of('zero3.json')
ahead = json.loads(json.dumps(plan))
ahead['policy'].update(max_live_units=0, max_live_bytes=0, strategy='own')
for micro in range(4):
    ops = ahead['ops']
    back = ops.index(['BACKWARD', 3, micro])
    fetch = next(i for i in range(back, len(ops)) if ops[i] == ['FETCH', 1, micro])
    ops.insert(back, ops.pop(fetch))
write('ahead.json', ahead)
kept = ops_of('zero2.json')
kept['policy']['strategy'] = 'own'
keep = [op for op in kept['ops'] if not (op[0] in ('FETCH', 'WAIT') and op[1] in (0, 1) and op[2] > 0)
        and not (op[0] == 'FREE' and op[1] in (0, 1) and op[2] < 3)]
kept['ops'] = keep
write('kept.json', kept)
PY
for plan in ahead kept; do
    shardctl plan --spec spec.json --check $plan.json >checked || fail "$plan: $(cat checked)"
    same "$plan" $plan.json 2 2 --path copy
    same "$plan, elastic" $plan.json 1 2 --elastic
    # shellcheck disable=SC2086
    shd-gpt $model --standalone --plan $plan.json >out 2>&1
    [[ $(digest_of out) == "$want" ]] || fail "$plan alone: $(tail -n 3 out)"
done
# Held over the micro-batches means fetched once: said before, and counted by the daemons' client.
fetches() { shardctl plan --spec spec.json --check "$1" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["cost"]["fetches"])'; }
[[ $(fetches kept.json) == $(($(fetches zero2.json) - 6)) ]] || fail "kept.json: $(fetches kept.json) fetches"

# Policies, as --tune prints them: real steps by each, the quickest is gone on by, and no bit differs.
row() { printf '{"policy":{"strategy":"%s","backward_prefetch":"%s","forward_prefetch":1,"max_live_units":0,"max_live_bytes":0},"time":{"step_s":%s}}' "$@"; }
printf '{"schema":1,"tuned":[%s,%s,%s]}' "$(row zero1 pre 0.001)" "$(row zero3 post 0.0625)" "$(row ddp pre 0.125)" >tune.json
by_name=$want model=${model/--steps $steps/--steps 21}
# shellcheck disable=SC2086
shd-gpt $model --standalone >out 2>&1
want=$(digest_of out)
for how in "--path copy" --elastic; do
    workers=2 # of elastic ones a late one has fewer steps than are tried
    [[ $how == --elastic ]] && workers=1
    # shellcheck disable=SC2086
    same "tuned, $how" tune.json 2 $workers $how --json steps.json
    { [[ $(grep -c "^tried .*: predicted .* ms, measured [0-9.e+]* ms" out) == 3 ]] && grep -q "^tried zero3, .*predicted 62.5 ms" out &&
        [[ $(grep -c "going on by this one" out) == 1 ]]; } || fail "tuned: $(cat out)"
    [[ $how == --elastic ]] && break
    # What the steps have fetched says whose they were: six of zero1, of zero3 and of ddp, the rest the chosen one's.
    for strategy in zero1 zero3 ddp; do
        shardctl plan --spec spec.json --strategy $strategy --micro-batches-per-worker 2 --json >$strategy.cost
    done
    python3 - "$(sed -n 's/^tried \([a-z0-9]*\),.*going on.*/\1/p' out)" <<'PY' || fail "tuned: steps were other policies'"
import json
import sys
def fetched_by(strategy):
    with open(strategy + '.cost', encoding='utf-8') as file:
        return json.load(file)['cost']['fetched_bytes']
with open('steps.json', encoding='utf-8') as file:
    steps = [row for row in map(json.loads, file) if 'bytes_fetched' in row]
chosen = sys.argv[1]
want = [strategy for strategy in ('zero1', 'zero3', 'ddp') for _ in range(6)] + [chosen] * 3
got = [row['bytes_fetched'] for row in steps]
assert fetched_by('zero1') != fetched_by('zero3')
assert got == [fetched_by(strategy) for strategy in want], (chosen, got)
PY
done
# shellcheck disable=SC2086
shardctl run --daemons 1 --workers 1 -- shd-gpt ${model/--steps 21/--steps 7} --plan tune.json >out 2>&1 || true
grep -q "^3 policies are tried in 18 steps: there were too few" out || fail "too few steps: $(cat out)"
# shellcheck disable=SC2086
refused "with --standalone: the model is opened anew" shd-gpt $model --standalone --plan tune.json
want=$by_name model=${model/--steps 21/--steps $steps}

# Wrong ones, by whoever reads them.
sed 's/"FREE", 0, 3/"FERE", 0, 3/' zero2.json >word.json
sed '/"RETURN", 0, 3/d' zero2.json >unreturned.json
sed 's/"strategy": "zero2"/"strategy": "ddp"/' zero2.json >ddp-not.json
sed 's/"name": "h.1"/"name": "h.7"/' zero2.json >units.json
cmp -s units.json zero2.json && fail "no unit h.1 in $(head -n 3 zero2.json)"
refused "word.json: operation " shardctl plan --spec spec.json --check word.json
refused "'FERE' is no operation; did you mean FREE?" shardctl plan --spec spec.json --check word.json
refused "PREPARE: RETURN of unit 0" shardctl plan --spec spec.json --check unreturned.json
refused "must be kept until the end of the step: ddp does" shardctl plan --spec spec.json --check ddp-not.json
refused "is 'h.7', the model has 'h.1' there" shardctl plan --spec spec.json --check units.json
refused "open 'none.json'" shardctl plan --spec spec.json --check none.json
refused "--strategy with --check zero2.json" shardctl plan --spec spec.json --check zero2.json --strategy ddp
refused "--ops is an answer of its own" shardctl plan --spec spec.json --ops --json
# shellcheck disable=SC2086
refused "unreturned.json: operation " shd-gpt $model --standalone --plan unreturned.json
# shellcheck disable=SC2086
refused "open 'none.json'" shd-gpt $model --standalone --plan none.json
# shellcheck disable=SC2086
refused "is 'h.7'" shd-gpt $model --standalone --plan units.json
# shellcheck disable=SC2086
refused "--strategy with --plan zero2.json" shd-gpt $model --standalone --plan zero2.json --strategy ddp
exit $bad
