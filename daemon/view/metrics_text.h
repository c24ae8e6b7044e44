/* A snapshot as Prometheus text; names and labels as docs/status.md has them. */
#ifndef SHD_METRICS_TEXT_H
#define SHD_METRICS_TEXT_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/base/status.h"

struct view_snapshot;

/* units: of models with many, too. *ret_text is the caller's, to be freed. Errors: SHD_ENOMEM. */
int metrics_text(const struct view_snapshot *s, bool units, char **ret_text, size_t *ret_bytes,
                 struct shd_err *e);

#endif
