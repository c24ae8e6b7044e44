/* The output of benchmarks: medians of rounds with their spread, as a table or as JSON lines. */
#ifndef SHD_BENCH_STAT_H
#define SHD_BENCH_STAT_H

#include <stdbool.h>
#include <stdint.h>

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

/* s must not be empty. */
struct stat_summary stat_summarize(const struct stat_series *s);

/* Round by round a / b. Both have the same count. */
struct stat_series stat_ratio(const struct stat_series *a, const struct stat_series *b);

/* One line: {"name","value","unit","min","max","n"} as JSON, or a row of a table. */
void stat_print(bool json, const char *name, const char *unit, const struct stat_series *s);

/* Head of the table; nothing for JSON. */
void stat_print_head(bool json);

#endif
