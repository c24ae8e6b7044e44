#!/bin/sh
# test_log_lines.sh SOURCE_DIR: every warning and error of the daemon says what to do (do="...").
set -eu
cd "$1/daemon"
find . -name '*.c' -exec awk '
    /log_(warn|error)\(/ && FILENAME !~ /\/log\.h$/ { at = FILENAME ":" FNR; text = ""; open = 1 }
    open { text = text $0 }
    open && /\);/ {
        calls++
        if (text !~ /do=\\"/) { print at ": no do=\"...\": what should somebody do about it?"; wrong = 1 }
        open = 0
    }
    END {
        if (calls < 20) { print "only " calls " calls were found"; wrong = 1 }
        exit wrong
    }
' {} +
echo ok
