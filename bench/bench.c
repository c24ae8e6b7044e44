/* See bench.h. */
#include "bench/bench.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/check.h"

void stat_add(struct stat_series *s, double value)
{
    CHECK(s->count < STAT_ROUNDS_MAX);
    s->value[s->count++] = value;
}

int stat_ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct stat_summary stat_summarize(const struct stat_series *s)
{
    CHECK(s->count > 0);
    struct stat_series sorted = *s;
    qsort(sorted.value, sorted.count, sizeof sorted.value[0], stat_ascending);
    const uint32_t mid = sorted.count / 2;
    const double upper = sorted.value[mid];
    const double lower = sorted.count % 2 == 1 ? upper : sorted.value[mid - 1];
    return (struct stat_summary){ (lower + upper) / 2, sorted.value[0],
                                  sorted.value[sorted.count - 1], sorted.count };
}

struct stat_series stat_ratio(const struct stat_series *a, const struct stat_series *b)
{
    CHECK(a->count == b->count);
    struct stat_series ratio = { .count = a->count };
    for (uint32_t i = 0; i < a->count; i++)
        ratio.value[i] = a->value[i] / b->value[i];
    return ratio;
}

void stat_print_head(bool json)
{
    if (!json)
        printf("%-48s %10s %10s %10s  %-6s %s\n", "name", "median", "min", "max", "unit", "n");
}

void stat_print(bool json, const char *name, const char *unit, const struct stat_series *s)
{
    const struct stat_summary m = stat_summarize(s);
    if (json)
        printf("{\"name\":\"%s\",\"value\":%.6g,\"unit\":\"%s\",\"min\":%.6g,\"max\":%.6g,"
               "\"n\":%" PRIu32 "}\n",
               name, m.median, unit, m.min, m.max, m.count);
    else
        printf("%-48s %10.4f %10.4f %10.4f  %-6s %" PRIu32 "\n", name, m.median, m.min, m.max, unit,
               m.count);
}

void bench_check(int r, const struct shd_err *e)
{
    if (r == SHD_OK)
        return;
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, e->text);
    fflush(NULL);
    _exit(1);
}

void bench_flags(const struct flags *f, int argc, char **argv, const char **ret_word)
{
    struct shd_err e = { 0 };
    int rest = argc;
    const bool word = ret_word != NULL && argc > 1 && argv[1][0] != '-';
    if (ret_word != NULL)
        *ret_word = word ? argv[1] : NULL;
    const enum flags_result r = flags_parse(f, argc - word, argv + word, &rest, &e);
    if (r == FLAGS_HELP) {
        flags_help(f, stdout);
        exit(0);
    }
    if (r == FLAGS_OK && rest == argc - word)
        return;
    if (r == FLAGS_OK)
        err_set(&e, SHD_EINVAL, "'%s' is not a flag; see --help", argv[rest + word]);
    fprintf(stderr, "%s: %s\n", program_invocation_short_name, e.text);
    exit(2);
}
