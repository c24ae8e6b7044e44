/* The spec of a request: in its message, or, if it is too large for one, in a segment that the
 * client has passed on the side channel (proto/share/spec_segment.h).
 *
 * Happy path: the segment is taken from the session, checked and copied on libuv's pool, compared
 * with its sum; then the request is served. Failure: an error that names what is wrong answers the
 * request. What is passed is the session's until a request names it, and ends with it.
 *
 * Bounds: 64 MiB a spec; 256 MiB of all requests that are being served, beyond which a request is
 * to be asked again; and what parsing it takes must be free. */
#ifndef SHD_SPEC_IN_H
#define SHD_SPEC_IN_H

#include <stdint.h>

struct op;
struct wire_bytes;
struct wire_spec_at;

/* Serve op by then(op), as its handler would: with op->spec, or with none if the request has none.
 * *text, of the request, is good for as long as op then. SHD_PENDING: later. */
int spec_in(struct op *op, const struct wire_bytes *spec, const struct wire_spec_at *at,
            const char **text, int (*then)(struct op *op));

#endif
