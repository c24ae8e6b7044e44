/* The metrics of several daemons as one page of Prometheus text: each family once, with the samples
 * of all.
 *
 * A daemon is not trusted: its page is taken whole, or not at all when it is not what a daemon
 * writes (docs/status.md): families of names "shardd_...", samples with its own device as the first
 * label. */
#ifndef SHD_CTL_METRICS_MERGE_H
#define SHD_CTL_METRICS_MERGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/base/status.h"

#define MERGE_FAMILIES_MAX 256u
#define MERGE_NAME_BYTES   64u

struct merge_family {
    char name[MERGE_NAME_BYTES], type[16];
    char *help;    /* owned */
    FILE *samples; /* owned: into text[bytes] */
    char *text;
    size_t bytes;
};

struct metrics_merge {
    struct merge_family families[MERGE_FAMILIES_MAX]; /* in the order in which they came */
    uint32_t count;
};

/* Of the caller's memory; begins empty when it is all zero. */
void metrics_merge_deinit(struct metrics_merge *m);

/* Add text[bytes], ended by NUL, the page of a daemon. Errors: SHD_EPROTO it is none, nothing was
 * added; SHD_ENOMEM. */
int metrics_merge_add(struct metrics_merge *m, const char *device, const char *text, size_t bytes,
                      struct shd_err *e);

/* Add that a daemon does not answer: shardd_up 0. Errors: SHD_ENOMEM. */
int metrics_merge_add_down(struct metrics_merge *m, const char *device, struct shd_err *e);

/* All of it; the caller's to free. Nothing can be added any more. Errors: SHD_ENOMEM. */
int metrics_merge_text(struct metrics_merge *m, char **ret_text, size_t *ret_bytes,
                       struct shd_err *e);

#endif
