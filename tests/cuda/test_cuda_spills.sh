#!/bin/sh
# test_cuda_spills.sh REPORT: what ptxas said of the kernels. One line per kernel; fails where one
# keeps anything on a stack, or needs so many registers that fewer than 1,024 threads of it fit a
# multiprocessor (65,536 registers).
awk '
/Compiling entry function/ { split($0, q, "\047"); name = q[2]; kernels++ }
/stack frame/ { stack = $1 + $5 + $9 }
/Used [0-9]+ registers/ {
    for (i = 1; i < NF; i++) {
        if ($(i + 1) ~ /^registers/) registers = $i
        if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) shared = $i
    }
    printf "%-18s %3d registers, %5d bytes shared, %d on the stack\n", name, registers, shared, stack
    if (stack > 0 || registers > 64) bad++
    shared = 0
}
END {
    if (kernels == 0) print "no kernel in the report"
    exit kernels == 0 || bad > 0
}' "$1"
