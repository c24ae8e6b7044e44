/* See spec_in.h. */
#include "daemon/net/spec_in.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/base/state.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/spec_segment.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

#define PASSED_BYTES_MAX (4 * (uint64_t)SPEC_JSON_BYTES_MAX) /* of all requests */
#define PARSED_TIMES     16u                                 /* its bytes: what parsing takes */

_Static_assert(SPEC_SUM_BYTES == WIRE_SUM_BYTES, "a message has room for the sum");

struct spec_in {
    uv_work_t work;
    struct op *op; /* borrowed: pending */
    int fd;        /* owned */
    struct spec_stub stub;
    uint64_t at_hand_bytes; /* of specs of all requests, with this one's */
    int (*then)(struct op *op);
    int status;
};

/* op->spec, and behind it a copy of *text. */
static int make_room(struct op *op, uint64_t bytes, const char **text)
{
    const size_t text_bytes = strlen(*text) + 1;
    op->spec = sys_malloc(bytes + 1 + text_bytes);
    if (op->spec == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a spec of %" PRIu64 " bytes", bytes);
    memcpy(op->spec + bytes + 1, *text, text_bytes);
    op->spec[bytes] = '\0';
    op->spec_bytes = bytes;
    *text = op->spec + bytes + 1;
    return SHD_OK;
}

/* Those at hand may all be parsed at the same time. What finds room alone waits for the others; the
 * first of them has nobody to wait for. */
static int check_room(const struct spec_in *in)
{
    struct op *op = in->op;
    struct shd_err why = { 0 };
    if (segment_room(in->stub.bytes * PARSED_TIMES, &op->err) != SHD_OK)
        return err_prefix(&op->err, "a spec of %" PRIu64 " bytes", in->stub.bytes);
    if (segment_room(in->at_hand_bytes * PARSED_TIMES, &why) == SHD_OK)
        return SHD_OK;
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY,
                   "a spec of %" PRIu64 " bytes, while requests have %" PRIu64
                   " bytes of specs, and parsing takes %u times as many: ask again (%.200s)",
                   in->stub.bytes, in->at_hand_bytes, PARSED_TIMES, why.text);
}

/* On the pool: the loop must not wait for megabytes. */
static void read_segment(uv_work_t *work)
{
    struct spec_in *in = work->data;
    struct op *op = in->op;
    in->status = spec_segment_check(in->fd, in->stub.bytes, &op->err);
    if (in->status == SHD_OK)
        in->status = check_room(in);
    if (in->status == SHD_OK)
        in->status = spec_segment_read(in->fd, in->stub.bytes, op->spec, &op->err);
    if (in->status == SHD_OK)
        in->status = spec_stub_check(&in->stub, op->spec, &op->err);
    close(in->fd);
}

static void segment_read(uv_work_t *work, int cancelled)
{
    struct spec_in *in = work->data;
    struct op *op = in->op;
    int (*then)(struct op * op) = in->then;
    int r = in->status;
    CHECK(cancelled == 0); /* nobody cancels */
    free(in);
    if (op->daemon->stopping)
        return;
    if (r == SHD_OK && op->session->state != SESSION_OPEN)
        r = err_set(&op->err, SHD_EGONE, "session ended");
    if (r == SHD_OK)
        r = then(op);
    if (r != SHD_PENDING)
        op_finish(op, r);
}

static int check(struct op *op, const struct wire_bytes *spec, const struct wire_spec_at *at)
{
    const struct op_pool *pool = op->daemon->ops;
    if (spec->bytes > 0)
        return err_set(&op->err, SHD_EINVAL, "a spec in the message, and one in a segment");
    if (at->bytes == 0 || at->sum.bytes == 0)
        return err_set(&op->err, SHD_EINVAL,
                       "a spec in a segment, of %" PRIu64 " bytes and with a sum of %zu", at->bytes,
                       at->sum.bytes);
    if (pool->passed_bytes + at->bytes <= PASSED_BYTES_MAX)
        return SHD_OK;
    op->reply.retry_ms = OPS_RETRY_MS;
    return err_set(&op->err, SHD_EBUSY, "requests have %" PRIu64 " bytes of specs: ask again",
                   pool->passed_bytes);
}

/* A client that is told to ask again passes it again. */
static int not_passed(struct op *op, uint64_t ticket)
{
    if (session_lost_passed(op->session, ticket)) {
        op->reply.retry_ms = OPS_RETRY_MS;
        return err_set(&op->err, SHD_EBUSY,
                       "a segment under ticket %016" PRIx64
                       " made room for those of others (at most %u wait): pass it again",
                       ticket, SESSIONS_PASSED_MAX);
    }
    return err_set(&op->err, op->session->state == SESSION_OPEN ? SHD_ENOENT : SHD_EGONE,
                   "no segment was passed under ticket %016" PRIx64, ticket);
}

static int take_segment(struct op *op, const struct wire_bytes *spec, const struct wire_spec_at *at,
                        const char **text, int (*then)(struct op *op))
{
    struct daemon *d = op->daemon;
    const int fd = session_take_passed(op->session, at->ticket);
    int r = check(op, spec, at);
    if (r == SHD_OK && fd < 0)
        r = not_passed(op, at->ticket);
    if (r == SHD_OK)
        r = make_room(op, at->bytes, text);
    struct spec_in *in = r == SHD_OK ? sys_calloc(1, sizeof *in) : NULL;
    if (in == NULL) {
        if (fd >= 0)
            close(fd);
        return r == SHD_OK ? err_set(&op->err, SHD_ENOMEM, "no memory to take a spec") : r;
    }
    *in = (struct spec_in){ .op = op, .fd = fd, .then = then };
    in->stub.bytes = at->bytes;
    memcpy(in->stub.sum, at->sum.data, sizeof in->stub.sum);
    in->work.data = in;
    op->passed_bytes = at->bytes;
    d->ops->passed_bytes += at->bytes;
    in->at_hand_bytes = d->ops->passed_bytes;
    uv_queue_work(d->loop, &in->work, read_segment, segment_read);
    return SHD_PENDING;
}

int spec_in(struct op *op, const struct wire_bytes *spec, const struct wire_spec_at *at,
            const char **text, int (*then)(struct op *op))
{
    if (at->ticket != 0 || at->bytes != 0)
        return take_segment(op, spec, at, text, then);
    if (spec->bytes == 0)
        return then(op);
    const int r = make_room(op, spec->bytes, text);
    if (r != SHD_OK)
        return r;
    memcpy(op->spec, spec->data, spec->bytes);
    return then(op);
}
