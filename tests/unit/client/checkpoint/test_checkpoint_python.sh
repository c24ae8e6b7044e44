#!/bin/sh
# Checkpoints and the Python package `safetensors`: what we save it loads, what it saves we load.
# test_checkpoint_python.sh BIN_DIR VENV_DIR: the package is installed in VENV_DIR on first use; 77
# (skipped) where it cannot be had: no network and not there.
set -eu
bin=$1 venv=$2
here=$(cd "$(dirname "$0")" && pwd)

# Presets' tests run beside each other: one of them makes it, the others wait.
exec 9>"$venv.lock"
flock 9
if ! "$venv/bin/python" -c 'import ml_dtypes, safetensors.numpy' 2>/dev/null; then
    rm -rf "$venv"
    python3 -m venv "$venv" >/dev/null 2>&1 || { echo "skipped: no python3-venv"; exit 77; }
    "$venv/bin/pip" install --quiet --disable-pip-version-check safetensors numpy ml_dtypes || {
        echo "skipped: safetensors cannot be installed here"
        exit 77
    }
fi
flock -u 9
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PATH=$bin:$PATH
for what in 'save 2' 'bf16 3' 'hub 1'; do
    "$bin/shardctl" run --daemons "${what#* }" --workers 1 -- \
        "$venv/bin/python" "$here/checkpoint_python.py" "${what% *}" "$work"
done
