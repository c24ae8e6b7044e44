#!/bin/sh
# A test that is ended by a signal clears up, in each shell that tests are written for.
set -eu
for shell in dash bash; do
    status=0
    # shellcheck disable=SC2016 # it is for the other shell
    out=$($shell -c '. "$1/wait.sh"; trap "echo cleared" EXIT; kill -TERM $$; sleep 0.1; echo went on' \
        - "$(dirname "$0")") || status=$?
    [ "$out $status" = "cleared 143" ] || { echo "FAILED: $shell: '$out', status $status" >&2; exit 1; }
done
