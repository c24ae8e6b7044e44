/* What a daemon's /trace (docs/status.md) says of how long things take. */
#ifndef SHD_CTL_PLAN_TRACE_READ_H
#define SHD_CTL_PLAN_TRACE_READ_H

#include <stdint.h>

#include <jansson.h>

#include "proto/base/status.h"

struct spec;

/* The events of the last `seconds` of the daemon whose status socket is at path; the caller's.
 * Errors: SHD_EIO it does not answer; SHD_EPROTO it answers nonsense. */
int trace_read(const char *path, uint32_t seconds, json_t **ret_events, struct shd_err *e);

/* Of the owner's operations called name ("sum", "update"): the time, in ns, that one of a step took
 * it on average, from its beginning or the end of the one before; the median of the steps. (The end
 * of one may be noted late, together with the next one's.) micro: those of this micro-batch, or of
 * it and all later ones (more), or of any (-1). 0: there are none. */
double trace_service_ns(const json_t *events, const char *name, int micro, int more);

/* The median over micro-batches of each unit's forward and backward, in ns, as the workers say.
 * SHD_ENOENT: there is a unit that nobody has computed lately. */
int trace_compute(const json_t *events, const struct spec *spec, double *ret_forward_ns,
                  double *ret_backward_ns, struct shd_err *e);

#endif
