/* See relay.h: what the other host, the worker and the daemon say. */
#include "tests/fuzz/relay.h"

#include "daemon/relay/frames.h"
#include "proto/share/board.h"
#include "proto/share/fdpass.h"
#include "proto/share/shardmap.h"
#include "proto/spec/layout.h"
#include "tests/lib/proto_util.h"

#define SLOTS      2u
#define SENT_BYTES 4096u /* of a message of ours: sockets hold those of an interrupted one */

/* The first unit is frozen, and by far the larger: its gradient fits no slot. */
const char *const relay_specs[RELAY_SPECS] = {
    "{\"name\":\"m\",\"micro_batches\":2,\"optimizer\":{\"kind\":\"sgd\"},\"units\":["
    "{\"name\":\"e\",\"tensors\":[{\"name\":\"t\",\"shape\":[65536],\"trainable\":false}]},"
    "{\"name\":\"u\",\"tensors\":[{\"name\":\"w\",\"shape\":[3]}]}]}",
    "{\"name\":\"n\",\"micro_batches\":1,\"optimizer\":{\"kind\":\"adamw\"},\"units\":["
    "{\"name\":\"u\",\"tensors\":[{\"name\":\"w\",\"shape\":[5000]}]}]}",
};
static uint8_t packed[SENT_BYTES];

/* -- Frames ------------------------------------------------------------------------------------ */

static uint64_t number(struct fuzz_in *in)
{
    switch (fuzz_u8(in) % 4) {
    case 0:
        return fuzz_u8(in);
    case 1:
        return fuzz_u8(in) * (uint64_t)SHD_PAGE_BYTES;
    case 2:
        return UINT64_MAX - fuzz_u8(in);
    default:
        return fuzz_u64(in);
    }
}

/* A size is small, or so large that nobody has it. */
static uint64_t sane(uint64_t bytes)
{
    return bytes > FAR_BYTES_MAX && bytes < UINT64_C(1) << 46 ? bytes % FAR_BYTES_MAX : bytes;
}

static struct far_frame frame_of(uint32_t type, uint32_t index, uint64_t id, uint64_t where,
                                 uint64_t bytes)
{
    return (struct far_frame){
        .head = { .type = type, .index = index, .id = id, .at = where, .bytes = bytes }
    };
}

static struct far_frame any_frame(struct fuzz_in *in)
{
    struct far_frame f = { .head.type = fuzz_u8(in) % 20 };
    f.head.index = (uint32_t)number(in);
    f.head.id = number(in);
    f.head.at = number(in);
    f.head.bytes = number(in);
    const size_t given = fuzz_u8(in);
    if (f.head.type == FRAME_SEGMENT || f.head.type == FRAME_MODEL)
        f.head.at = sane(f.head.at);
    for (size_t i = 0; i < given; i++)
        f.payload[i] = fuzz_u8(in);
    return f;
}

/* Segments are noted: from them alone may bytes come back. */
static int tell(struct bulk *bulk, const struct far_frame *f, struct shd_err *e)
{
    uint64_t segment;
    const int r = far_deliver(bulk, f, e);
    memcpy(&segment, f->payload, sizeof segment);
    if (r != SHD_OK || f->head.type != FRAME_SEGMENT || relay_now.known_count == RELAY_KNOWN_MAX)
        return r;
    relay_now.known[relay_now.known_count].number = segment;
    relay_now.known[relay_now.known_count++].bytes = f->head.at;
    relay_now.last_number = segment > relay_now.last_number ? segment : relay_now.last_number;
    return r;
}

/* false: it is longer than we say. */
static bool frame_of_message(const void *body, size_t bytes, struct far_frame *ret_frame)
{
    if (bytes > sizeof ret_frame->payload)
        return false;
    *ret_frame = frame_of(FRAME_MESSAGE, 0, 0, 0, bytes);
    memcpy(ret_frame->payload, body, bytes);
    return true;
}

static int tell_reply(struct bulk *bulk, const struct wire_reply *reply, struct shd_err *e)
{
    struct far_frame f;
    size_t bytes;
    if (wire_reply_pack(reply, packed, sizeof packed, &bytes, NULL) != SHD_OK ||
        !frame_of_message(packed, bytes, &f))
        return SHD_OK;
    const int r = tell(bulk, &f, e);
    relay_now.layouts += r == SHD_OK && reply->status == SHD_OK && reply->type == WIRE_LAYOUT;
    return r;
}

static int tell_segment(struct bulk *bulk, uint32_t kind, uint64_t ticket, uint64_t bytes,
                        uint64_t segment, struct shd_err *e)
{
    struct far_frame f = frame_of(FRAME_SEGMENT, kind, ticket, bytes, sizeof segment);
    memcpy(f.payload, &segment, sizeof segment);
    return tell(bulk, &f, e);
}

static int tell_any_segment(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    const uint32_t kind = fuzz_u8(in) % 12u;
    const uint64_t ticket = fuzz_u8(in), bytes = sane(number(in));
    return tell_segment(bulk, kind, ticket, bytes, relay_now.last_number + fuzz_u8(in) % 3u, e);
}

/* -- Layouts, as a daemon has them ------------------------------------------------------------- */

static struct wire_layout layout_of(struct fuzz_in *in, uint8_t bits)
{
    const unsigned which = bits & LAYOUT_SPEC;
    const struct shardmap *map = relay_maps[which];
    struct wire_layout l = { .model = 1 + fuzz_u8(in) % 12u,
                             .owners = 1,
                             .slots = SLOTS,
                             .slot_bytes = map->slot_bytes,
                             .attempt = 1,
                             .instance = 1 + (bits & LAYOUT_OTHER) };
    l.segments[l.segment_count++] = (struct wire_segment){ .kind = SEGMENT_PUBLISH,
                                                           .ticket = 100 + which,
                                                           .bytes = shardmap_publish_bytes(map) };
    l.segments[l.segment_count++] = (struct wire_segment){
        .kind = SEGMENT_BOARD,
        .ticket = 102 + which,
        .bytes = layout_align(board_bytes(map->units), SHD_PAGE_BYTES)
    };
    if ((bits & LAYOUT_SMALL) != 0)
        l.segments[0].bytes = SHD_PAGE_BYTES;
    if ((bits & LAYOUT_INBOX) != 0)
        l.segments[l.segment_count++] = (struct wire_segment){
            .kind = SEGMENT_INBOX, .ticket = 104 + which, .bytes = shardmap_inbox_bytes(map, SLOTS)
        };
    l.spec = (struct wire_bytes){ .data = (const uint8_t *)relay_specs[which],
                                  .bytes = strlen(relay_specs[which]) };
    if ((bits & LAYOUT_APART) != 0) {
        l.spec_bytes = l.spec.bytes;
        l.spec.bytes = 0;
        l.segments[l.segment_count++] = (struct wire_segment){ .kind = SEGMENT_SPEC,
                                                               .ticket = 106 + which,
                                                               .bytes = SHD_PAGE_BYTES };
    }
    for (uint32_t i = 0; i < l.segment_count; i++)
        l.segments[i].bytes = layout_align(l.segments[i].bytes, SHD_PAGE_BYTES);
    return l;
}

/* As the other relay does: its segments come before it, the spec with what is in it. */
static int tell_layout(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    const uint8_t bits = fuzz_u8(in);
    const struct wire_reply reply = { .seq = relay_now.seq,
                                      .type = WIRE_LAYOUT,
                                      .layout = layout_of(in, bits) };
    int r = SHD_OK;
    for (uint32_t i = 2; r == SHD_OK && i < reply.layout.segment_count; i++) {
        const struct wire_segment *s = &reply.layout.segments[i];
        const char *text = relay_specs[bits & LAYOUT_SPEC];
        const uint64_t segment = relay_now.last_number + 1;
        struct far_frame f = frame_of(FRAME_BYTES, 0, segment, 0, SHD_PAGE_BYTES);
        r = tell_segment(bulk, s->kind, s->ticket, s->bytes, segment, e);
        memcpy(f.payload, text, strlen(text));
        if (r == SHD_OK && s->kind == SEGMENT_SPEC)
            r = tell(bulk, &f, e);
    }
    return r == SHD_OK ? tell_reply(bulk, &reply, e) : r;
}

/* All that makes a mirror whole. */
static void fill_mirror(struct fuzz_in *in)
{
    const unsigned index = fuzz_u8(in) % 4;
    const uint8_t bits = fuzz_u8(in);
    const struct shardmap *map = relay_maps[bits & LAYOUT_SPEC];
    struct far_frame f = frame_of(FRAME_MODEL, map->units, 1 + (bits & LAYOUT_OTHER),
                                  shardmap_publish_bytes(map), 0);
    far_tell_mirror(index, &f);
    for (uint32_t u = 0; u < map->units; u++) {
        f = frame_of(FRAME_UNIT, u, 0, shardmap_publish_offset_bytes(map, u),
                     shardmap_publish_slice_bytes(map, u));
        far_tell_mirror(index, &f);
        f = frame_of(FRAME_VERSION, u, 0, 0, 0);
        far_tell_mirror(index, &f);
    }
    f = frame_of(FRAME_FILLED, 0, 0, 0, 0);
    far_tell_mirror(index, &f);
}

/* -- What the worker says ---------------------------------------------------------------------- */

void relay_ask(struct wire_request *request)
{
    struct shd_err e = { 0 };
    size_t bytes;
    request->seq = ++relay_now.seq;
    request->session = 1;
    if (relay_now.worker.fd >= 0 &&
        wire_request_pack(request, packed, sizeof packed, &bytes, NULL) == SHD_OK)
        zconn_write(&relay_now.worker, packed, bytes, &e); /* it may have hung up */
}

static void ask_return(struct fuzz_in *in)
{
    struct wire_request request = { .type = WIRE_RETURN };
    request.return_grad.model = 1 + fuzz_u8(in) % 12u;
    request.return_grad.unit = fuzz_u8(in) % 4u;
    request.return_grad.slot = fuzz_u8(in) % 4u;
    request.return_grad.dtype = (enum shd_dtype)(SHD_F32 + fuzz_u8(in) % 3u);
    request.return_grad.none = fuzz_u8(in) % 8u == 7;
    request.return_grad.metric_names = "";
    relay_ask(&request);
}

static void ask_put(struct fuzz_in *in)
{
    struct wire_request request = { .type = WIRE_PUT, .put = { .origin = 1, .unit = fuzz_u8(in) } };
    relay_ask(&request);
}

static void ask_any(struct fuzz_in *in)
{
    const enum wire_request_type type = (enum wire_request_type)(fuzz_u8(in) % WIRE_REQUEST_TYPES);
    uint64_t seed = fuzz_u32(in);
    char name[WIRE_NAME_BYTES_MAX];
    struct wire_request request = random_request(&seed, type, name);
    relay_ask(&request);
}

static void ask_raw(struct fuzz_in *in)
{
    struct shd_err e = { 0 };
    const size_t bytes = fuzz_u8(in);
    for (size_t i = 0; i < bytes; i++)
        packed[i] = fuzz_u8(in);
    if (relay_now.worker.fd >= 0)
        zconn_write(&relay_now.worker, packed, bytes, &e);
}

static void claim(struct fuzz_in *in)
{
    struct side_msg msg = { .type = fuzz_u8(in) % 8 < 6 ? SIDE_CLAIM : SIDE_WAKE };
    struct shd_err e = { 0 };
    msg.ticket = number(in);
    side_send(relay_now.side, &msg, /* pass_fd= */ -1, &e);
}

/* -- Steps ------------------------------------------------------------------------------------- */

static int tell_stage(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    struct wire_reply reply = { .seq = relay_now.seq, .type = WIRE_CREATED };
    const uint64_t ticket = 1u + fuzz_u8(in), pages = 1 + fuzz_u8(in) % 4u;
    const int r = tell_segment(bulk, SEGMENT_STAGE, ticket, pages * SHD_PAGE_BYTES,
                               relay_now.last_number + 1, e);
    reply.created.what = WIRE_CREATED_YOURS;
    reply.created.ticket = ticket;
    reply.created.bytes = pages * SHD_PAGE_BYTES;
    return r == SHD_OK ? tell_reply(bulk, &reply, e) : r;
}

static int tell_random_reply(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    const enum wire_reply_type type = (enum wire_reply_type)(fuzz_u8(in) % WIRE_REPLY_TYPES);
    uint64_t seed = fuzz_u32(in);
    char name[WIRE_NAME_BYTES_MAX];
    const struct wire_reply reply = random_reply(&seed, type, name);
    return tell_reply(bulk, &reply, e);
}

static int tell_side(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    static const uint8_t token[SHD_TOKEN_BYTES] = { 1 };
    struct far_frame f = frame_of(FRAME_SIDE, 0, 0, 0, sizeof(struct side_msg));
    struct side_msg msg = side_welcome(token, WIRE_LEVEL + 1); /* of a later build */
    if (fuzz_u8(in) % 4 == 3) {
        msg.type = SIDE_ERROR;
        msg.status = SHD_EGONE;
    }
    memcpy(f.payload, &msg, sizeof msg);
    return tell(bulk, &f, e);
}

int relay_step_in_stead(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    struct far_frame f;
    const uint8_t what = fuzz_u8(in) % 16;
    switch (what) {
    case 0:
        f = any_frame(in);
        return tell(bulk, &f, e);
    case 1:
        return tell_side(bulk, in, e);
    case 2:
        return tell_any_segment(bulk, in, e);
    case 3:
        return tell_layout(bulk, in, e);
    case 4:
        return tell_stage(bulk, in, e);
    case 5:
        return tell_random_reply(bulk, in, e);
    case 6:
        f = any_frame(in);
        far_tell_mirror(fuzz_u8(in) % 4, &f);
        return SHD_OK;
    case 7:
        fill_mirror(in);
        return SHD_OK;
    case 8:
        far_interrupt(fuzz_u8(in) % 24);
        return SHD_OK;
    case 9:
        claim(in);
        return SHD_OK;
    case 10:
        ask_put(in);
        return SHD_OK;
    case 11:
        ask_any(in);
        return SHD_OK;
    case 12:
        ask_raw(in);
        return SHD_OK;
    default:
        ask_return(in);
        return SHD_OK;
    }
}

static void answer(const struct wire_reply *reply)
{
    struct shd_err e = { 0 };
    size_t bytes;
    if (far_daemon.z.fd >= 0 &&
        wire_reply_pack(reply, packed, sizeof packed, &bytes, NULL) == SHD_OK)
        zconn_write(&far_daemon.z, packed, bytes, &e);
}

/* The daemon tells the truth. */
static void answer_something(struct fuzz_in *in)
{
    struct wire_reply reply = { .seq = 1 };
    const uint8_t what = fuzz_u8(in) % 4, bits = fuzz_u8(in);
    if (what == 0) {
        reply.type = WIRE_LAYOUT;
        reply.layout = layout_of(in, bits & (uint8_t)~LAYOUT_SMALL);
    } else if (what == 1) {
        reply.type = WIRE_CREATED;
        reply.created.what = WIRE_CREATED_YOURS;
        reply.created.ticket = 108 + bits % 4u;
        reply.created.bytes = SHD_PAGE_BYTES;
    } else if (what == 2) {
        reply.type = WIRE_GOT;
        reply.got.ticket = 108 + bits % 4u;
        reply.got.bytes = SHD_PAGE_BYTES;
    } else {
        reply.status = SHD_EBUSY;
        reply.text = "busy";
    }
    answer(&reply);
}

static int tell_request(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    const enum wire_request_type type = (enum wire_request_type)(fuzz_u8(in) % WIRE_REQUEST_TYPES);
    uint64_t seed = fuzz_u32(in);
    char name[WIRE_NAME_BYTES_MAX];
    struct wire_request request = random_request(&seed, type, name);
    struct far_frame f;
    size_t bytes;
    request.seq = ++relay_now.seq;
    if (request.type == WIRE_HELLO)
        request.hello.role = WIRE_TRAINER;
    if (wire_request_pack(&request, packed, sizeof packed, &bytes, NULL) != SHD_OK ||
        !frame_of_message(packed, bytes, &f))
        return SHD_OK;
    return tell(bulk, &f, e);
}

static int tell_open(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    static const char *const devices[] = { "cpu1", "cpu0", "../x", "" };
    struct far_frame f = frame_of(FRAME_OPEN, fuzz_u8(in) % 3, 1, 0, sizeof(struct frame_open));
    struct frame_open open = { .model = "m" };
    strcpy(open.device, devices[fuzz_u8(in) % ARRAY_SIZE(devices)]);
    memcpy(f.payload, &open, sizeof open);
    return tell(bulk, &f, e);
}

int relay_step_beside(struct bulk *bulk, struct fuzz_in *in, struct shd_err *e)
{
    struct far_frame f;
    switch (fuzz_u8(in) % 8) {
    case 0:
        f = any_frame(in);
        return tell(bulk, &f, e);
    case 1:
        return tell_open(bulk, in, e);
    case 2:
        return tell_request(bulk, in, e);
    case 3:
        far_interrupt(fuzz_u8(in) % 8);
        return SHD_OK;
    case 4:
        f = frame_of(FRAME_BYTES, 0, fuzz_u8(in) % 8, 0, 0);
        f.head.at = number(in);
        f.head.bytes = number(in);
        return tell(bulk, &f, e);
    default:
        answer_something(in);
        return SHD_OK;
    }
}
