/* The trace as Chrome's JSON (also Perfetto's); see trace.h and docs/status.md. Written from copies
 * on the HTTP thread: neither the loop nor a worker notices. */
#ifndef SHD_TRACE_JSON_H
#define SHD_TRACE_JSON_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

struct trace;
struct view_snapshot;

/* The last `seconds` of the daemon and, from their pages, of its workers. *ret_text is the
 * caller's, to be freed. Errors: SHD_ENOMEM. */
int trace_json(const struct trace *t, const struct view_snapshot *s, uint32_t seconds,
               char **ret_text, size_t *ret_bytes, struct shd_err *e);

#endif
