/* A spec on its way to daemons: in the message, or, where it is too large, in a segment that is
 * passed on the side channel before each request that names it (proto/share/spec_segment.h). So a
 * request that is sent anew, to a successor as well, brings its spec along. */
#ifndef SHD_SPEC_OUT_H
#define SHD_SPEC_OUT_H

#include "proto/share/spec_segment.h"

struct link;
struct wire_bytes;
struct wire_spec_at;

struct spec_out {
    const char *json;       /* borrowed; "": none */
    struct segment segment; /* owned; closed: json fits into a message */
    struct spec_stub stub;
    uint64_t ticket; /* under which the segment is passed */
};

/* Of json, which stays the caller's. Errors: SHD_ERANGE, SHD_ENOMEM, SHD_EIO. */
int spec_out_init(struct spec_out *out, const char *json, struct shd_err *e);
void spec_out_deinit(struct spec_out *out);

/* What a request says of it. */
void spec_out_fill(const struct spec_out *out, struct wire_bytes *ret_spec,
                   struct wire_spec_at *ret_at);

/* To be called before the request is sent. SHD_EBUSY: when the side channel has room again.
 * SHD_ENOTSUP: the daemon is of a version that takes no segments. */
int spec_out_pass(const struct spec_out *out, const struct link *link, struct shd_err *e);

#endif
