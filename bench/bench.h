/* The shared parts of the benchmarks in C: their command lines, and their output: medians of rounds
 * with their spread, as a table or as JSON lines. */
#ifndef SHD_BENCH_BENCH_H
#define SHD_BENCH_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/flags.h"

#define STAT_ROUNDS_MAX 1001

struct stat_series { /* one figure per round */
    double value[STAT_ROUNDS_MAX];
    uint32_t count;
};

struct stat_summary {
    double median, min, max;
    uint32_t count;
};

/* count must be below STAT_ROUNDS_MAX. */
void stat_add(struct stat_series *s, double value);

/* Compares two doubles, for qsort(). */
int stat_ascending(const void *a, const void *b);

/* s must not be empty. */
struct stat_summary stat_summarize(const struct stat_series *s);

/* Round by round a / b. Both have the same count. */
struct stat_series stat_ratio(const struct stat_series *a, const struct stat_series *b);

/* One line: {"name","value","unit","min","max","n"} as JSON, or a row of a table. */
void stat_print(bool json, const char *name, const char *unit, const struct stat_series *s);

/* Head of the table; nothing for JSON. */
void stat_print_head(bool json);

/* End the process with e's text when r is not SHD_OK: code 1, as from a child of fork(). */
void bench_check(int r, const struct shd_err *e);

/* Parse the command line: ends the process after --help, and with code 2 when it is wrong. Words
 * that are no flags are refused, but for one in front if ret_word is not NULL (NULL: none was
 * given). */
void bench_flags(const struct flags *f, int argc, char **argv, const char **ret_word);

/* --json, a row of a table of flags. */
#define BENCH_JSON(value)                                                    \
    {                                                                        \
        "json", 0, FLAG_BOOL, NULL, "print one object a line", (value), 0, 0 \
    }

#endif
