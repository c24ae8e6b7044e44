#!/usr/bin/env bash
# paste_readme.sh [README]: every command of the README, in order, as if pasted into one shell of this
# machine; ends with the first one that fails. Installs packages and programs: for a bare Debian root
# or a container, by hand, from a clean clone.
set -euo pipefail
cd "$(dirname "$0")/../.."
readme=${1:-README.md}
[ -n "${PASTE_HERE:-}" ] || {
    echo "paste_readme.sh: this installs into / what $readme says; set PASTE_HERE=1 in a machine to be thrown away" >&2
    exit 2
}

# Lines with a prompt in blocks of a console; what they print follows without one.
commands=$(awk '/^```console/ { on = 1; next } /^```/ { on = 0 } on && /^\$ / { print substr($0, 3) }' "$readme")
[ -n "$commands" ] || { echo "paste_readme.sh: no command in $readme" >&2; exit 1; }

script=$(mktemp)
trap 'rm -f "$script"' EXIT
{
    echo 'set -eo pipefail'
    command -v sudo >/dev/null || echo 'sudo() { "$@"; }' # root of a minimal system
    while IFS= read -r command; do
        printf 'printf "%%s\\n" %q\n%s\n' "\$ $command" "$command"
    done <<<"$commands"
} >"$script"
bash "$script"
echo "paste_readme.sh: all $(wc -l <<<"$commands") commands of $readme succeeded"
