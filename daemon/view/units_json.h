/* /units: norms of each unit over the last steps, of this owner's slices (docs/status.md). Any
 * thread. */
#ifndef SHD_UNITS_JSON_H
#define SHD_UNITS_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

struct view_snapshot;

#define UNITS_CELLS_MAX 16384u /* steps times units of an answer, but for one step's, */
#define UNITS_AT_ONCE   4096u  /* of so many units at most */

struct units_question {
    char model[128]; /* "": the only one */
    uint64_t from;   /* the first step; UINT64_MAX: so that the last ones are there */
    uint64_t unit;   /* the first one */
    bool sums;       /* exact, for who adds those of several owners */
};

/* JSON [*ret_bytes], the caller's to free. Errors: SHD_ENOENT no such model; SHD_ERANGE no such
 * unit; SHD_ENOMEM. */
int units_json(const struct view_snapshot *s, const struct units_question *q, char **ret_text,
               size_t *ret_bytes, struct shd_err *e);

#endif
