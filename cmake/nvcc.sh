#!/bin/sh
# nvcc.sh REPORT NVCC ARGS...: run nvcc, keep what it and ptxas say in REPORT; show it on failure,
# and show what of it is a warning.
report=$1
shift
"$@" >"$report" 2>&1
status=$?
if [ $status -ne 0 ]; then
    cat "$report" >&2
    rm -f "$report"
    exit $status
fi
grep -i warning "$report" >&2
exit 0
