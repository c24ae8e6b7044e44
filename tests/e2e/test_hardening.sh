#!/usr/bin/env bash
# test_hardening.sh BUILD, or FILE...: programs and libraries are hardened as Debian's packages are.
#
# BUILD is a build tree: its programs, libshd.so, and every object of ours in its archives, for the CET note
# of what is linked is the linker's word alone. By readelf; also by hardening-check where that is installed.
set -euo pipefail

command -v readelf >/dev/null || {
    echo "skipped: no readelf here (binutils)"
    exit 77
}
failed=0
finding() {
    echo "FAILED: $*"
    failed=1
}

# has FILE PATTERN TEXT WHAT: a line of TEXT matches.
has() { grep -Eq -e "$2" <<<"$3" || finding "$1: $4"; }
hasnot() { ! grep -Eq -e "$2" <<<"$3" || finding "$1: $4"; }

check_file() {
    local file=$1 headers dynamic symbols notes
    headers=$(readelf -hlW "$file")
    dynamic=$(readelf -dW "$file")
    symbols=$(readelf --dyn-syms -W "$file")
    notes=$(readelf -nW "$file")
    has "$file" 'Type: +DYN ' "$headers" "at a fixed address (no -pie)"
    has "$file" ' INTERP |Shared object file' "$headers" "neither a program nor a library"
    has "$file" ' GNU_RELRO ' "$headers" "no read-only relocations (-z relro)"
    has "$file" 'BIND_NOW|Flags:.* NOW' "$dynamic" "bound lazily (-z now)"
    has "$file" ' GNU_STACK .* RW +0x' "$headers" "a stack that is executable, or unsaid"
    hasnot "$file" ' LOAD .* RWE ' "$headers" "a segment to write and to execute"
    has "$file" '__stack_chk_fail' "$symbols" "no stack protector (-fstack-protector-strong)"
    has "$file" ' __[a-z]+_chk' "$symbols" "nothing fortified (_FORTIFY_SOURCE)"
    has "$file" 'x86 feature: IBT, SHSTK' "$notes" "no note of CET (-fcf-protection)"
    ! command -v hardening-check >/dev/null || hardening-check --quiet "$file" || finding "$file: hardening-check"
}

# Of ours: what a sanitizer or the emulation of GPUs needs otherwise lies in the tests.
check_archives() {
    local archive members=0 marked=0
    for archive in "$@"; do
        members=$((members + $(readelf -hW "$archive" | grep -c '^ELF Header')))
        marked=$((marked + $(readelf -nW "$archive" | grep -c 'x86 feature: IBT, SHSTK')))
    done
    if [ "$members" -le 50 ] || [ "$members" != "$marked" ]; then
        finding "$marked of $members objects have a note of CET: $*"
    fi
}

if [ -d "${1:?usage: test_hardening.sh BUILD, or FILE...}" ]; then
    build=$1
    set -- "$build"/bin/{shardd,shardctl,shd-gpt} "$build"/lib/libshd.so
    check_archives "$build"/{proto,kernels,daemon,client,client/ctl,examples/gpt}/lib*.a
fi
for file in "$@"; do
    check_file "$file"
done
[ "$failed" = 0 ] && echo "ok      $# files"
exit "$failed"
