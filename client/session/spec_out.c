/* See spec_out.h. */
#include "client/session/spec_out.h"

#include <inttypes.h>
#include <string.h>

#include "client/session/link.h"
#include "proto/share/fdpass.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

int spec_out_init(struct spec_out *out, const char *json, struct shd_err *e)
{
    const size_t bytes = strlen(json);
    *out = (struct spec_out){ .json = json, .segment = SEGMENT_CLOSED };
    if (bytes <= SPEC_MESSAGE_BYTES_MAX)
        return SHD_OK;
    int r = spec_stub_of(json, bytes, &out->stub, e);
    if (r == SHD_OK)
        r = spec_segment_new(json, bytes, &out->segment, e);
    memcpy(&out->ticket, out->stub.sum, sizeof out->ticket);
    out->ticket |= 1; /* not 0 */
    return r;
}

void spec_out_deinit(struct spec_out *out)
{
    segment_close(&out->segment);
}

void spec_out_fill(const struct spec_out *out, struct wire_bytes *ret_spec,
                   struct wire_spec_at *ret_at)
{
    if (out->segment.fd < 0)
        *ret_spec = (struct wire_bytes){ (const uint8_t *)out->json, strlen(out->json) };
    else
        *ret_at = (struct wire_spec_at){ .ticket = out->ticket,
                                         .bytes = out->stub.bytes,
                                         .sum = { out->stub.sum, sizeof out->stub.sum } };
}

int spec_out_pass(const struct spec_out *out, const struct link *link, struct shd_err *e)
{
    struct shd_err why = { 0 };
    if (out->segment.fd < 0)
        return SHD_OK;
    if (link->peer.level < WIRE_LEVEL_SPECS)
        return link_err(link, SHD_ENOTSUP, e,
                        "takes specs of %zu bytes at most, this model's has %" PRIu64
                        ": it is of an older version",
                        SPEC_MESSAGE_BYTES_MAX, out->stub.bytes);
    const struct side_msg msg = { .type = SIDE_SEGMENT,
                                  .ticket = out->ticket,
                                  .bytes = out->segment.bytes,
                                  .kind = SEGMENT_SPEC };
    const int r = side_send(link->side_fd, &msg, out->segment.fd, &why);
    if (r == SHD_OK)
        return r;
    /* One that hung up is seen at the next poll, and the request sent to its successor. */
    return link_err(link, r == SHD_EGONE ? SHD_EBUSY : r, e, "does not take a spec: %s", why.text);
}
