/* A host's relay of bench_scale: each message that passes it in a step, looked at as
 * daemon/relay/{stand_in,served,feed}.c look at it, between frames' heads. Not here: what moves the
 * bytes, TLS, threads and system calls. */
#include "bench/scale.h"

#include <stdlib.h>

#include "daemon/relay/bulk_head.h"
#include "daemon/relay/frames.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

struct relay_host {
    const struct scale *s;
    const struct scale_daemon *daemon;
    uint32_t first, end; /* its owners, and its workers' ranks: as many */
    struct wire_arena arena;
    struct scale_frame *returns; /* owned, [units] */
    struct scale_frame prepare, commit;
    struct scale_relay figures;
};

static void send_head(struct relay_host *h, struct bulk_head head)
{
    uint8_t bytes[BULK_HEAD_BYTES];
    bulk_head_pack(&head, bytes);
    h->figures.frames++;
}

/* As the other relay has packed it. */
static void receive_head(struct relay_host *h, struct bulk_head head)
{
    uint8_t bytes[BULK_HEAD_BYTES];
    struct bulk_head got;
    struct shd_err e;
    bulk_head_pack(&head, bytes);
    CHECK(bulk_head_unpack(bytes, &got, &e) == SHD_OK && got.bytes == head.bytes);
    h->figures.frames++;
}

static void look_at_request(struct relay_host *h, const struct scale_frame *frame,
                            enum wire_request_type type)
{
    struct wire_request q;
    struct shd_err e;
    h->arena.used = 0;
    CHECK(wire_request_unpack(frame->bytes, frame->used, &h->arena, &q, &e) == SHD_OK);
    CHECK(q.type == type && frame_admits(&q, /* files= */ true, &e) == SHD_OK);
}

static void look_at_reply(struct relay_host *h, const struct scale_frame *frame)
{
    struct wire_reply reply;
    struct shd_err e;
    h->arena.used = 0;
    CHECK(wire_reply_unpack(frame->bytes, frame->used, &h->arena, &reply, &e) == SHD_OK);
    h->figures.replies++;
}

static uint64_t grad_bytes(const struct relay_host *h, uint32_t owner, uint32_t unit)
{
    return h->s->maps[owner]->slice[unit].elems * dtype_bytes(SHD_BF16);
}

/* Of a worker here, to an owner elsewhere (bytes: of its gradient), and the answer. */
static void pass_out(struct relay_host *h, const struct scale_frame *request,
                     enum wire_request_type type, uint64_t bytes, const struct scale_frame *reply)
{
    look_at_request(h, request, type);
    if (bytes > 0)
        send_head(h, (struct bulk_head){ .type = FRAME_BYTES, .bytes = bytes });
    send_head(h, (struct bulk_head){ .type = FRAME_MESSAGE, .bytes = request->used });
    h->figures.out++;
    receive_head(h, (struct bulk_head){ .type = FRAME_MESSAGE, .bytes = reply->used });
    look_at_reply(h, reply);
}

/* Of a worker elsewhere, to an owner here, and its answer. */
static void pass_in(struct relay_host *h, const struct scale_frame *request,
                    enum wire_request_type type, uint64_t bytes, const struct scale_frame *reply)
{
    if (bytes > 0)
        receive_head(h, (struct bulk_head){ .type = FRAME_BYTES, .bytes = bytes });
    receive_head(h, (struct bulk_head){ .type = FRAME_MESSAGE, .bytes = request->used });
    look_at_request(h, request, type);
    h->figures.in++;
    look_at_reply(h, reply);
    send_head(h, (struct bulk_head){ .type = FRAME_MESSAGE, .bytes = reply->used });
}

/* All requests of one worker to one owner. */
static void pass_session(struct relay_host *h, uint32_t owner,
                         void (*pass)(struct relay_host *h, const struct scale_frame *request,
                                      enum wire_request_type type, uint64_t bytes,
                                      const struct scale_frame *reply))
{
    for (uint32_t i = 0; i < h->s->micros; i++)
        for (uint32_t u = 0; u < h->s->spec->unit_count; u++)
            pass(h, &h->returns[u], WIRE_RETURN, grad_bytes(h, owner, u), &h->daemon->credit);
    pass(h, &h->prepare, WIRE_PREPARE, 0, &h->daemon->prepared);
    pass(h, &h->commit, WIRE_COMMIT, 0, &h->daemon->committed);
    h->figures.sessions++;
}

/* A step of one owner's parameters, to one host or from one: the board says APPLYING, each slice
 * and its version, and the board is open again. */
static void pass_model(struct relay_host *h, uint32_t owner,
                       void (*move)(struct relay_host *h, struct bulk_head head), uint64_t *slices)
{
    move(h, (struct bulk_head){ .type = FRAME_STATE });
    for (uint32_t u = 0; u < h->s->spec->unit_count; u++) {
        const uint64_t bytes = shardmap_publish_slice_bytes(h->s->maps[owner], u);
        if (bytes > 0)
            move(h, (struct bulk_head){ .type = FRAME_UNIT, .index = u, .bytes = bytes });
        *slices += bytes > 0;
        move(h, (struct bulk_head){ .type = FRAME_VERSION, .index = u });
    }
    move(h, (struct bulk_head){ .type = FRAME_STATE });
    h->figures.mirrors++;
}

static void pass_all(struct relay_host *h)
{
    const uint32_t owners = scale_owners(h->s);
    for (uint32_t other = 0; other < owners; other++) {
        if (other >= h->first && other < h->end)
            continue;
        for (uint32_t own = h->first; own < h->end; own++) {
            pass_session(h, other, pass_out); /* worker `own`, owner `other` */
            pass_session(h, own, pass_in);    /* worker `other`, owner `own` */
        }
        pass_model(h, other, receive_head, &h->figures.in);
    }
    for (uint32_t host = 0; host + 1 < h->s->hosts; host++)
        for (uint32_t own = h->first; own < h->end; own++)
            pass_model(h, own, send_head, &h->figures.out);
}

static void make_requests(struct relay_host *h)
{
    struct wire_reply reply;
    struct shd_err e;
    for (uint32_t u = 0; u < h->s->spec->unit_count; u++) {
        struct wire_request q = scale_return(1, 1, u);
        q.seq = q.session = u + 1;
        scale_pack(&q, &h->returns[u]);
    }
    struct wire_request q = scale_prepare(1);
    q.seq = q.session = 1;
    scale_pack(&q, &h->prepare);
    h->arena.used = 0;
    CHECK(wire_reply_unpack(h->daemon->committed.bytes, h->daemon->committed.used, &h->arena,
                            &reply, &e) == SHD_OK);
    q = scale_commit(1, &reply.committed.decision);
    q.seq = q.session = 1;
    scale_pack(&q, &h->commit);
}

int scale_relay(const struct scale *s, uint32_t host, const struct scale_daemon *daemon,
                struct scale_relay *ret, struct shd_err *e)
{
    struct relay_host h = {
        .s = s, .daemon = daemon, .first = host * s->gpus, .end = (host + 1) * s->gpus
    };
    h.returns = sys_calloc(s->spec->unit_count, sizeof *h.returns);
    h.arena = (struct wire_arena){ .base = sys_malloc(WIRE_ARENA_BYTES),
                                   .bytes = WIRE_ARENA_BYTES };
    const int r = h.returns != NULL && h.arena.base != NULL
                      ? SHD_OK
                      : err_set(e, SHD_ENOMEM, "no memory for a relay's requests");
    if (r == SHD_OK) {
        make_requests(&h);
        const uint64_t begun_ns = scale_cpu_ns();
        pass_all(&h);
        h.figures.cpu_ns = scale_cpu_ns() - begun_ns;
        *ret = h.figures;
    }
    free(h.returns);
    free(h.arena.base);
    return r;
}
