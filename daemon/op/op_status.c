/* STATUS: what this daemon holds and who is attached: the document that /status gives as well
 * (docs/status.md), without its long lists where a reply would be too large for them. */
#include "daemon/net/op.h"
#include "daemon/op/requests.h"
#include "daemon/view/json.h"
#include "daemon/view/take.h"
#include "proto/base/clock.h"

#define FRAME_REST_BYTES 1024u /* of a reply, beside the document */

static int op_status(struct op *op)
{
    struct view_snapshot *s = view_take(op->daemon, /* with_spans= */ false);
    size_t bytes = 0;
    if (s != NULL)
        op->text = view_json(s, clock_now_ns(), WIRE_FRAME_BYTES_MAX - FRAME_REST_BYTES, &bytes);
    view_unref(s);
    if (op->text == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for the status text");
    op->reply.type = WIRE_STATUS_TEXT;
    op->reply.status_text = (struct wire_status_text){ .json = { (const uint8_t *)op->text,
                                                                 bytes } };
    return SHD_OK;
}

const struct request request_status = { op_status, ANY_ROLE };
