/* wire: what is packed comes back, and every field out of its limits is an error that names it. */
#include "proto/wire/wire.h"

#include "proto/base/check.h"
#include "proto/spec/spec.h"
#include "shd.pb-c.h"
#include "tests/lib/proto_same.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

static uint8_t frame[WIRE_FRAME_BYTES_MAX], again[WIRE_FRAME_BYTES_MAX];

/* -- Round trips ----------------------------------------------------------------------------- */

TEST(requests_round_trip)
{
    uint64_t seed = test_seed(0x3e9);
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    for (int i = 0; i < 9000; i++) {
        struct shd_err e;
        char name[WIRE_NAME_BYTES_MAX];
        struct wire_request back,
            q = random_request(&seed, (enum wire_request_type)(i % WIRE_REQUEST_TYPES), name);
        size_t bytes, more;
        EXPECT_OK(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), &e);
        arena.used = 0;
        EXPECT_OK(wire_request_unpack(frame, bytes, &arena, &back, &e), &e);
        EXPECT(same_request(&q, &back));
        EXPECT_OK(wire_request_pack(&back, again, sizeof again, &more, &e), &e);
        EXPECT(bytes == more && memcmp(frame, again, bytes) == 0);
    }
    free(arena.base);
}

TEST(replies_round_trip)
{
    uint64_t seed = test_seed(0x3ea);
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    for (int i = 0; i < 9000; i++) {
        struct shd_err e;
        char name[WIRE_NAME_BYTES_MAX];
        struct wire_reply back,
            p = random_reply(&seed, (enum wire_reply_type)(i % WIRE_REPLY_TYPES), name);
        size_t bytes, more;
        EXPECT_OK(wire_reply_pack(&p, frame, sizeof frame, &bytes, &e), &e);
        arena.used = 0;
        EXPECT_OK(wire_reply_unpack(frame, bytes, &arena, &back, &e), &e);
        EXPECT(same_reply(&p, &back));
        EXPECT_OK(wire_reply_pack(&back, again, sizeof again, &more, &e), &e);
        EXPECT(bytes == more && memcmp(frame, again, bytes) == 0);
    }
    free(arena.base);
}

TEST(request_names_are_those_of_the_map)
{
    EXPECT_STR(wire_request_name(WIRE_HELLO), "HELLO");
    EXPECT_STR(wire_request_name(WIRE_OPEN_MODEL), "OPEN_MODEL");
    EXPECT_STR(wire_request_name(WIRE_DETACH), "DETACH");
}

/* -- Limits, in received frames: a valid one is decoded, one field set, and sent again -------- */

struct bad_field {
    int type; /* of the request or reply */
    int status;
    const char *path; /* "return_grad.micro"; last part names the field that is set */
    double number;
    const char *text;
};

/* Set a number by its path in the protobuf message, whatever its width. */
static void field_set(ProtobufCMessage *m, const char *path, double number)
{
    char part[64];
    const char *dot = strchr(path, '.');
    snprintf(part, sizeof part, "%.*s", dot != NULL ? (int)(dot - path) : 63, path);
    const ProtobufCFieldDescriptor *f = protobuf_c_message_descriptor_get_field_by_name(
        m->descriptor, part);
    EXPECT(f != NULL);
    uint8_t *at = (uint8_t *)m + f->offset;
    if (dot != NULL) {
        ProtobufCMessage *inner = f->label == PROTOBUF_C_LABEL_REPEATED
                                      ? (*(ProtobufCMessage ***)(void *)at)[0]
                                      : *(ProtobufCMessage **)(void *)at;
        field_set(inner, dot + 1, number);
        return;
    }
    switch (f->type) {
    case PROTOBUF_C_TYPE_UINT32:
        *(uint32_t *)(void *)at = (uint32_t)number;
        break;
    case PROTOBUF_C_TYPE_SINT32:
        *(int32_t *)(void *)at = (int32_t)number;
        break;
    case PROTOBUF_C_TYPE_UINT64:
        *(uint64_t *)(void *)at = (uint64_t)number;
        break;
    case PROTOBUF_C_TYPE_BOOL:
        *(protobuf_c_boolean *)(void *)at = number != 0;
        break;
    case PROTOBUF_C_TYPE_FLOAT:
        *(float *)(void *)at = (float)number;
        break;
    case PROTOBUF_C_TYPE_DOUBLE:
        *(double *)(void *)at = number;
        break;
    case PROTOBUF_C_TYPE_BYTES: /* its length */
        ((ProtobufCBinaryData *)(void *)at)->data = again;
        ((ProtobufCBinaryData *)(void *)at)->len = (size_t)number;
        break;
    default:
        FAIL("%s has a type this test does not set", path);
    }
}

static void *scratch_alloc(void *ctx, size_t bytes)
{
    struct wire_arena *scratch = ctx;
    uint8_t *at = scratch->base + scratch->used;
    scratch->used += (bytes + 15) / 16 * 16;
    EXPECT(scratch->used <= scratch->bytes);
    return at;
}

static void scratch_free(void *ctx, void *p)
{
    (void)ctx;
    (void)p;
}

static ProtobufCMessage *decode(const ProtobufCMessageDescriptor *descriptor, size_t bytes,
                                struct wire_arena *scratch)
{
    ProtobufCAllocator allocator = { scratch_alloc, scratch_free, scratch };
    ProtobufCMessage *m = protobuf_c_message_unpack(descriptor, &allocator, bytes, frame);
    EXPECT(m != NULL);
    return m;
}

static void expect_bad_request(const struct bad_field *b)
{
    uint64_t seed = test_seed(5);
    char name[WIRE_NAME_BYTES_MAX];
    struct shd_err e = { .text = "" };
    struct wire_arena scratch = arena_new(WIRE_ARENA_BYTES), arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_request q = random_request(&seed, (enum wire_request_type)b->type, name);
    if (b->type == WIRE_RETURN)
        q.return_grad.none = false;
    size_t bytes;
    ProtobufCMessage *m;
    EXPECT_OK(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), &e);
    m = decode(&shd__request__descriptor, bytes, &scratch);
    field_set(m, b->path, b->number);
    bytes = protobuf_c_message_pack(m, frame);
    struct wire_request back = { .seq = 77 };
    const int r = wire_request_unpack(frame, bytes, &arena, &back, &e);
    if (r != b->status || strstr(e.text, b->text) == NULL)
        FAIL("%s = %g: got %s '%s'", b->path, b->number, status_name(r), e.text);
    EXPECT_EQ(wire_request_unpack(frame, bytes, &arena, &back, NULL), b->status);
    EXPECT_EQ(back.seq, 77);
    EXPECT_EQ(arena.used, 0);
    free(scratch.base);
    free(arena.base);
}

TEST(request_fields_out_of_range_are_named)
{
    static const struct bad_field cases[] = {
        { WIRE_HELLO, SHD_ERANGE, "hello.role", 0, "hello.role is 0, must be 1 to 3" },
        { WIRE_HELLO, SHD_ERANGE, "hello.role", 4, "hello.role is 4, must be 1 to 3" },
        { WIRE_HELLO, SHD_ERANGE, "hello.role", UINT32_MAX, "hello.role is 4294967295" },
        { WIRE_HELLO, SHD_ERANGE, "hello.token", 15, "hello.token has 15 bytes, must be 16" },
        { WIRE_HELLO, SHD_ERANGE, "hello.token", 17, "hello.token has 17 bytes, must be 16" },
        { WIRE_HELLO, SHD_ERANGE, "hello.token", 0, "hello.token has 0 bytes, must be 16" },
        { WIRE_OPEN_MODEL, SHD_ERANGE, "open_model.spec", SPEC_MESSAGE_BYTES_MAX + 1,
          "open_model.spec's size is 786433, must be 0 to 786432" },
        { WIRE_OPEN_MODEL, SHD_ERANGE, "open_model.owners", 0,
          "open_model.owners is 0, must be 1" },
        { WIRE_OPEN_MODEL, SHD_ERANGE, "open_model.owners", 1025, "open_model.owners is 1025" },
        { WIRE_OPEN_MODEL, SHD_ERANGE, "open_model.owner", 1024, "open_model.owner is 1024" },
        { WIRE_OPEN_MODEL, SHD_ERANGE, "open_model.slots", 65, "slots is 65, must be 0 to 64" },
        { WIRE_RETURN, SHD_ERANGE, "return_grad.micro", 4096, "return.micro is 4096, must be" },
        { WIRE_RETURN, SHD_ERANGE, "return_grad.unit", 65536, "return.unit is 65536, must be" },
        { WIRE_RETURN, SHD_ERANGE, "return_grad.slot", 64, "return.slot is 64, must be 0 to 63" },
        { WIRE_RETURN, SHD_ERANGE, "return_grad.dtype", 0, "return.dtype is 0, must be 1 to 3" },
        { WIRE_RETURN, SHD_ERANGE, "return_grad.dtype", 4, "return.dtype is 4, must be 1 to 3" },
        { WIRE_COMMIT, SHD_ERANGE, "commit.decision.scale", -1, "decision.scale is -1, must be" },
        { WIRE_COMMIT, SHD_ERANGE, "commit.decision.scale", INFINITY, "decision.scale is inf" },
        { WIRE_COMMIT, SHD_ERANGE, "commit.decision.scale", NAN, "decision.scale is nan" },
        { WIRE_COMMIT, SHD_ERANGE, "commit.decision.lr", -0x1p-1000, "decision.lr is -9" },
        { WIRE_COMMIT, SHD_ERANGE, "commit.decision.lr", NAN, "decision.lr is nan" },
        { WIRE_DIGEST, SHD_ERANGE, "digest.tensor", 262144, "digest.tensor is 262144, must" },
        { WIRE_DIGEST, SHD_ERANGE, "digest.array", 4, "digest.array is 4, must be 0 to 3" },
        { WIRE_OPEN_MODEL, SHD_ERANGE, "open_model.spec_bytes", 67108865,
          "open_model.spec_bytes is 67108865, must be 0 to 67108864" },
        { WIRE_OPEN_MODEL, SHD_ERANGE, "open_model.spec_sum", 33,
          "open_model.spec_sum's size is 33, must be 0 to 32" },
        { WIRE_CREATE, SHD_ERANGE, "create.spec_bytes", 0x1p63, "create.spec_bytes is 922" },
        { WIRE_CREATE, SHD_ERANGE, "create.spec_sum", 31, "size is 31, must be a multiple of 32" },
        { WIRE_RESTORE, SHD_ERANGE, "restore.spec_bytes", 67108865, "restore.spec_bytes is 67" },
        { WIRE_RESTORE, SHD_ERANGE, "restore.spec_sum", 1, "size is 1, must be a multiple of 32" },
        { WIRE_RESTORE, SHD_ERANGE, "restore.spec", SPEC_MESSAGE_BYTES_MAX + 1, "size is 786433" },
        { WIRE_RESTORE, SHD_ERANGE, "restore.owners", 0, "restore.owners is 0, must be 1" },
        { WIRE_RESTORE, SHD_ERANGE, "restore.owners", 1025, "restore.owners is 1025" },
        { WIRE_RESTORE, SHD_ERANGE, "restore.owner", 1024, "restore.owner is 1024" },
        { WIRE_JOIN, SHD_ERANGE, "join.down", 127, "join.down has 127 bytes, must be 128" },
        { WIRE_JOIN, SHD_ERANGE, "join.up", 129, "join.up has 129 bytes, must be 128" },
        { WIRE_FETCH, SHD_ERANGE, "fetch.unit", 65536, "fetch.unit is 65536, must be 0 to 65535" },
        { WIRE_FETCH, SHD_ERANGE, "fetch.turn", 0, "fetch.turn is 0, must be 1 to" },
        { WIRE_CREATE, SHD_ERANGE, "create.what", 0, "create.what is 0, must be 1 to 7" },
        { WIRE_CREATE, SHD_ERANGE, "create.what", 8, "create.what is 8, must be 1 to 7" },
        { WIRE_CREATE, SHD_ERANGE, "create.origin", 0, "create.origin is 0, must be 1 to" },
        { WIRE_CREATE, SHD_ERANGE, "create.owner", 1024, "create.owner is 1024" },
        { WIRE_PUT, SHD_ERANGE, "put.origin", 0, "put.origin is 0, must be 1 to" },
        { WIRE_GET, SHD_ERANGE, "get.unit", 65536, "get.unit is 65536, must be 0 to 65535" },
        { WIRE_GET, SHD_ERANGE, "get.array", 4, "get.array is 4, must be 0 to 3" },
        { WIRE_SHOW, SHD_ERANGE, "show.tensor", 262144, "show.tensor is 262144, must be" },
        { WIRE_SHOW, SHD_ERANGE, "show.array", 6, "show.array is 6, must be 0 to 5" },
        { WIRE_SHOW, SHD_ERANGE, "show.elems", 0, "show.elems is 0, must be 1 to" },
        { WIRE_SHOW, SHD_ERANGE, "show.elems", 0x1p49, "show.elems is 562949953421312, must" },
        { WIRE_PUT, SHD_ERANGE, "put.unit", 65536, "put.unit is 65536, must be 0 to 65535" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        expect_bad_request(&cases[i]);
}

static void expect_bad_reply(const struct bad_field *b)
{
    uint64_t seed = test_seed(8);
    char name[WIRE_NAME_BYTES_MAX];
    struct shd_err e = { .text = "" };
    struct wire_arena scratch = arena_new(WIRE_ARENA_BYTES), arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_reply p = random_reply(&seed, (enum wire_reply_type)b->type, name);
    p.status = SHD_OK;
    if (b->type == WIRE_LAYOUT && p.layout.segment_count == 0) {
        p.layout.segment_count = 1;
        p.layout.segments[0] = (struct wire_segment){ .kind = SEGMENT_BOARD,
                                                      .ticket = 1,
                                                      .bytes = 4096 };
    }
    if (b->type == WIRE_PREPARED) /* a member of a union */
        p.prepared.has_decision = true;
    size_t bytes;
    ProtobufCMessage *m;
    EXPECT_OK(wire_reply_pack(&p, frame, sizeof frame, &bytes, &e), &e);
    m = decode(&shd__reply__descriptor, bytes, &scratch);
    field_set(m, b->path, b->number);
    bytes = protobuf_c_message_pack(m, frame);
    struct wire_reply back = { .seq = 77 };
    const int r = wire_reply_unpack(frame, bytes, &arena, &back, &e);
    if (r != b->status || strstr(e.text, b->text) == NULL)
        FAIL("%s = %g: got %s '%s'", b->path, b->number, status_name(r), e.text);
    EXPECT_EQ(back.seq, 77);
    EXPECT_EQ(arena.used, 0);
    free(scratch.base);
    free(arena.base);
}

TEST(reply_fields_out_of_range_are_named)
{
    static const struct bad_field cases[] = {
        { WIRE_CREDIT, SHD_ERANGE, "status", 1, "reply.status is 1, an unknown code" },
        { WIRE_CREDIT, SHD_ERANGE, "status", -21, "reply.status is -21, an unknown code" },
        { WIRE_CREDIT, SHD_ERANGE, "layout", 1, "reply.layout is 1, this build knows 0" },
        { WIRE_CREDIT, SHD_ERANGE, "credit.slot", 64, "credit.slot is 64, must be 0 to 63" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.owners", 0, "layout.owners is 0, must be 1" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.owners", 1025, "layout.owners is 1025" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.owner", 1024, "layout.owner is 1024" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.slots", 65, "layout.slots is 65" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.slot_bytes", 4097,
          "layout.slot_bytes is 4097, must be a multiple of 4096" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.slot_bytes", 0x1p57, "layout.slot_bytes is 1441" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.segments.kind", 0, "segments.kind is 0, must be" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.segments.kind", 5, "segments.kind is 5, must be" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.segments.kind", 12,
          "segments.kind is 12, must be 1 to 4, or 7 to 11" },
        { WIRE_RING, SHD_ERANGE, "ring.bytes", 0, "ring.bytes is 0, must be 1 to" },
        { WIRE_RING, SHD_ERANGE, "ring.bytes", 100, "ring.bytes is 100, must be a multiple" },
        { WIRE_SHOWN, SHD_ERANGE, "shown.groups", 4097, "shown.groups is 4097, must be 0 to" },
        { WIRE_SHOWN, SHD_ERANGE, "shown.tally", 5151, "tally's size is 5151, must be a multiple" },
        { WIRE_SHOWN, SHD_ERANGE, "shown.tally", 10304, "tally's size is 10304, must be 0 to" },
        { WIRE_SHOWN, SHD_ERANGE, "shown.values", 7, "values's size is 7, must be a multiple" },
        { WIRE_SHOWN, SHD_ERANGE, "shown.values", 524292, "values's size is 524292, must be 0" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.segments.bytes", 0, "segments.bytes is 0, must" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.segments.bytes", 100, "segments.bytes is 100" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.segments.bytes", 0x1p63, "segments.bytes is 922" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.spec", SPEC_MESSAGE_BYTES_MAX + 1,
          "layout.spec's size is 786433" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.spec_bytes", 67108865, "layout.spec_bytes is 67" },
        { WIRE_PREPARED, SHD_ERANGE, "prepared.decided.scale", NAN, "decision.scale is nan" },
        { WIRE_PREPARED, SHD_ERANGE, "prepared.decided.lr", -1, "decision.lr is -1" },
        { WIRE_COMMITTED, SHD_ERANGE, "committed.decision.lr", INFINITY, "decision.lr is inf" },
        { WIRE_BLOB, SHD_ERANGE, "blob.blob", WIRE_BLOB_BYTES_MAX + 1, "blob's size is 786433" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.segments.place", 2, "segments.place is 2, must" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.in", 513, "layout.in's size is 513" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.device", 15, "size is 15, must be a multiple" },
        { WIRE_LAYOUT, SHD_ERANGE, "layout_info.device", 32, "size is 32, must be 0 to 16" },
        { WIRE_LEASED, SHD_ERANGE, "leased.what", 0, "leased.what is 0, must be 1 to 4" },
        { WIRE_LEASED, SHD_ERANGE, "leased.what", 5, "leased.what is 5, must be 1 to 4" },
        { WIRE_LEASED, SHD_ERANGE, "leased.group", 4096, "leased.group is 4096, must be" },
        { WIRE_CHECKPOINTED, SHD_ERANGE, "checkpointed.blob", WIRE_BLOB_BYTES_MAX + 1,
          "checkpointed.blob's size is 786433" },
        { WIRE_LEAVES, SHD_ERANGE, "leaves.leaves", 33, "size is 33, must be a multiple of 32" },
        { WIRE_LEAVES, SHD_ERANGE, "leaves.leaves", WIRE_LEAVES_MAX * 32 + 32, "size is 524320" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++)
        expect_bad_reply(&cases[i]);
}

/* -- Frames built by hand -------------------------------------------------------------------- */

static void expect_request(ProtobufCMessage *m, int status, const char *text)
{
    struct shd_err e = { .text = "" };
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_request q;
    const size_t bytes = protobuf_c_message_pack(m, frame);
    const int r = wire_request_unpack(frame, bytes, &arena, &q, &e);
    free(arena.base);
    if (r != status || strstr(e.text, text) == NULL)
        FAIL("expected %s '%s', got %s '%s'", status_name(status), text, status_name(r), e.text);
}

static void expect_reply(ProtobufCMessage *m, int status, const char *text)
{
    struct shd_err e = { .text = "" };
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_reply p;
    const size_t bytes = protobuf_c_message_pack(m, frame);
    const int r = wire_reply_unpack(frame, bytes, &arena, &p, &e);
    free(arena.base);
    if (r != status || strstr(e.text, text) == NULL)
        FAIL("expected %s '%s', got %s '%s'", status_name(status), text, status_name(r), e.text);
}

TEST(missing_and_unknown_bodies_are_errors)
{
    struct shd_err e;
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_request q;
    EXPECT_STATUS(wire_request_unpack(frame, 0, &arena, &q, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "has no body");
    const uint8_t unknown[] = { 8, 7, 0xa2, 6, 0 }; /* seq 7, empty field 100 */
    EXPECT_STATUS(wire_request_unpack(unknown, sizeof unknown, &arena, &q, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "request has field number 100, unknown to this build");
    struct wire_reply p;
    EXPECT_STATUS(wire_reply_unpack(unknown, sizeof unknown, &arena, &p, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "reply has field number 100");
    const uint8_t inner[] = { 0x6a, 2, 0x38, 1 }; /* Prepare with field 7 */
    EXPECT_STATUS(wire_request_unpack(inner, sizeof inner, &arena, &q, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "PREPARE has field number 7");
    EXPECT_OK(wire_reply_unpack(frame, 0, &arena, &p, &e), &e); /* status alone: all defaults */
    EXPECT(p.type == WIRE_REPLY_NONE && p.status == SHD_OK && p.text[0] == 0 && p.seq == 0);
    free(arena.base);
}

TEST(garbage_is_not_a_message)
{
    struct shd_err e;
    struct wire_arena arena = arena_new(4096);
    struct wire_request q;
    memset(again, 0xff, 64);
    EXPECT_STATUS(wire_request_unpack(again, 64, &arena, &q, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "64 bytes are not a Request");
    EXPECT_EQ(arena.used, 0);
    free(arena.base);
}

TEST(oversized_frames_are_refused_unread)
{
    struct shd_err e;
    struct wire_arena arena = arena_new(64);
    struct wire_request q;
    struct wire_reply p;
    EXPECT_STATUS(wire_request_unpack(NULL, WIRE_FRAME_BYTES_MAX + 1, &arena, &q, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "frame has 1048577 bytes, the limit is 1048576");
    EXPECT_STATUS(wire_reply_unpack(NULL, SIZE_MAX, &arena, &p, &e), SHD_ERANGE);
    free(arena.base);
}

TEST(frame_that_does_not_fit_the_arena_is_an_error)
{
    struct shd_err e;
    struct wire_request back, q = { .type = WIRE_COMMIT };
    q.commit.has_blob = true;
    q.commit.blob = (struct wire_bytes){ again, 5000 };
    size_t bytes;
    EXPECT_OK(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), &e);
    bool fitted = false;
    for (size_t room = 0; room < 8192; room += 16) {
        struct wire_arena arena = arena_new(room);
        const int r = wire_request_unpack(frame, bytes, &arena, &back, &e);
        if (r == SHD_OK)
            fitted = true;
        else
            EXPECT(!fitted && r == SHD_ERANGE && arena.used == 0);
        free(arena.base);
    }
    EXPECT(fitted);
    EXPECT_HAS(e.text, "does not fit the arena's");
}

TEST(full_size_blob_and_spec_fit_frame_and_arena)
{
    struct shd_err e;
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_request back, q = { .type = WIRE_COMMIT, .seq = UINT64_MAX };
    q.commit.has_blob = true;
    q.commit.blob = (struct wire_bytes){ again, WIRE_BLOB_BYTES_MAX };
    size_t bytes;
    EXPECT_OK(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), &e);
    EXPECT_OK(wire_request_unpack(frame, bytes, &arena, &back, &e), &e);
    q.commit.blob.bytes++;
    EXPECT_STATUS(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "commit.blob's size is 786433");
    free(arena.base);
}

static void negate(uint8_t *number, size_t bytes)
{
    memset(number, 0, bytes);
    number[bytes - 1] = 0x80;
}

/* A sender that is not protobuf-c, which leaves it out as it does zero. */
TEST(minus_zero_is_zero)
{
    static const uint8_t scale[] = { 2 << 3 | 5, 0, 0, 0x80, 0x3f };
    static const uint8_t lr[] = { 3 << 3 | 1, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f };
    struct shd_err e;
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_request back, q = { .type = WIRE_COMMIT, .seq = 1 };
    size_t bytes;
    q.commit.decision = (struct decision){ .scale = 1, .lr = 1 };
    EXPECT_OK(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), &e);
    uint8_t *at = memmem(frame, bytes, scale, sizeof scale);
    EXPECT(at != NULL);
    negate(at + 1, sizeof(float));
    at = memmem(frame, bytes, lr, sizeof lr);
    EXPECT(at != NULL);
    negate(at + 1, sizeof(double));
    EXPECT_OK(wire_request_unpack(frame, bytes, &arena, &back, &e), &e);
    q.commit.decision.scale = 0;
    q.commit.decision.lr = 0;
    EXPECT(decision_equal(&back.commit.decision, &q.commit.decision));
    EXPECT(!signbit(back.commit.decision.scale) && !signbit(back.commit.decision.lr));
    free(arena.base);
}

TEST(blob_without_has_blob_is_an_error)
{
    Shd__Request m = SHD__REQUEST__INIT;
    Shd__Commit c = SHD__COMMIT__INIT;
    Shd__Decision d = SHD__DECISION__INIT;
    m.body_case = SHD__REQUEST__BODY_COMMIT;
    m.commit = &c;
    expect_request(&m.base, SHD_EPROTO, "decision is missing");
    c.decision = &d;
    expect_request(&m.base, SHD_OK, "");
    c.blob = (ProtobufCBinaryData){ .len = 3, .data = again };
    expect_request(&m.base, SHD_ERANGE, "commit.blob's size is 3, must be 0 to 0");
}

TEST(names_must_be_short_and_printable)
{
    static const struct {
        const char *name, *text;
        int status;
    } cases[] = {
        { "a\tb", "hello.name has byte 0x9 at 1, must be printable ASCII", SHD_EINVAL },
        { "\x7f", "hello.name has byte 0x7f at 0", SHD_EINVAL },
        { "gr\xc3\xbc\xc3\x9f", "hello.name has byte 0xc3 at 2", SHD_EINVAL },
        { "\x1b[2J", "hello.name has byte 0x1b at 0", SHD_EINVAL },
    };
    Shd__Request m = SHD__REQUEST__INIT;
    Shd__Hello h = SHD__HELLO__INIT;
    uint8_t token[WIRE_TOKEN_BYTES] = { 0 };
    char name[300];
    m.body_case = SHD__REQUEST__BODY_HELLO;
    m.hello = &h;
    h.role = WIRE_READER;
    h.token = (ProtobufCBinaryData){ .len = sizeof token, .data = token };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        snprintf(name, sizeof name, "%s", cases[i].name);
        h.name = name;
        expect_request(&m.base, cases[i].status, cases[i].text);
    }
    memset(name, 'n', sizeof name);
    name[127] = 0;
    expect_request(&m.base, SHD_OK, "");
    name[127] = 'n';
    name[128] = 0;
    expect_request(&m.base, SHD_ERANGE, "hello.name has 128 bytes, must be 0 to 127");
}

TEST(paths_must_be_absolute_and_printable)
{
    Shd__Request m = SHD__REQUEST__INIT;
    Shd__Checkpoint c = SHD__CHECKPOINT__INIT;
    char path[WIRE_PATH_BYTES_MAX + 1] = "/gr\xc3\xbc\xc3\x9f";
    m.body_case = SHD__REQUEST__BODY_CHECKPOINT;
    m.checkpoint = &c;
    expect_request(&m.base, SHD_EINVAL, "checkpoint.path is '', not an absolute path");
    c.path = path;
    expect_request(&m.base, SHD_OK, "");
    path[0] = '.';
    expect_request(&m.base, SHD_EINVAL, "checkpoint.path is '.gr");
    memset(path, '/', sizeof path);
    path[9] = '\x1b';
    path[WIRE_PATH_BYTES_MAX - 1] = 0;
    expect_request(&m.base, SHD_EINVAL, "checkpoint.path has byte 0x1b at 9, must be printable");
    path[9] = '/';
    expect_request(&m.base, SHD_OK, "");
    path[WIRE_PATH_BYTES_MAX - 1] = '/';
    path[WIRE_PATH_BYTES_MAX] = 0;
    expect_request(&m.base, SHD_ERANGE, "checkpoint.path has 4096 bytes, must be 0 to 4095");
}

TEST(return_of_nothing_needs_no_dtype)
{
    struct shd_err e;
    struct wire_arena arena = arena_new(4096);
    struct wire_request back, q = { .type = WIRE_RETURN };
    size_t bytes;
    q.return_grad.none = true;
    EXPECT_OK(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), &e);
    EXPECT_OK(wire_request_unpack(frame, bytes, &arena, &back, &e), &e);
    EXPECT(back.return_grad.none && back.return_grad.dtype == SHD_F32);
    q.return_grad.none = false;
    EXPECT_STATUS(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "return.dtype is 0");
    free(arena.base);
}

TEST(too_many_repeated_fields_are_errors)
{
    double metrics[5] = { 0 };
    Shd__Request m = SHD__REQUEST__INIT;
    Shd__Return t = SHD__RETURN__INIT;
    m.body_case = SHD__REQUEST__BODY_RETURN_GRAD;
    m.return_grad = &t;
    t.dtype = SHD_F32;
    t.metrics = metrics;
    t.n_metrics = 5;
    expect_request(&m.base, SHD_ERANGE, "return.metrics has 5 numbers, must be 0 to 4");

    uint32_t limbs[FIXSUM_LIMBS + 1] = { 0 };
    Shd__Reply r = SHD__REPLY__INIT;
    Shd__Prepared p = SHD__PREPARED__INIT;
    r.body_case = SHD__REPLY__BODY_PREPARED;
    r.prepared = &p;
    p.sum = limbs;
    for (size_t n = 0; n <= FIXSUM_LIMBS + 1; n++) {
        p.n_sum = n;
        if (n == FIXSUM_LIMBS)
            expect_reply(&r.base, SHD_OK, "");
        else
            expect_reply(&r.base, SHD_ERANGE, "limbs, must be 20");
    }
    p.n_sum = FIXSUM_LIMBS;
    p.n_metrics = 5;
    p.metrics = metrics;
    expect_reply(&r.base, SHD_ERANGE, "prepared.metrics has 5 numbers");
    p.n_metrics = 0;
    limbs[FIXSUM_LIMBS - 1] = 1; /* would let a peer overflow the sum over owners */
    expect_reply(&r.base, SHD_ERANGE, "prepared.sum's top limb is 1, must be 0 to 0");

    Shd__Segment s = SHD__SEGMENT__INIT;
    Shd__Segment *segments[6] = { &s, &s, &s, &s, &s, &s };
    Shd__Layout l = SHD__LAYOUT__INIT;
    s.kind = SEGMENT_BOARD;
    s.bytes = 4096;
    r.body_case = SHD__REPLY__BODY_LAYOUT_INFO;
    r.layout_info = &l;
    l.owners = 1;
    l.segments = segments;
    l.n_segments = 5;
    expect_reply(&r.base, SHD_OK, "");
    l.n_segments = 6;
    expect_reply(&r.base, SHD_ERANGE, "layout.segments' count is 6, must be 0 to 5");
}

TEST(error_text_is_made_fit_for_terminals)
{
    struct shd_err e;
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_reply p;
    char text[1000];
    Shd__Reply r = SHD__REPLY__INIT;
    r.text = text;
    snprintf(text, sizeof text, "a\x1b[2J\nb\x7f");
    expect_reply(&r.base, SHD_EPROTO, "reply has status SHD_OK and the text 'a?[2J?b?'");
    r.status = SHD_EIO;
    EXPECT_OK(wire_reply_unpack(frame, protobuf_c_message_pack(&r.base, frame), &arena, &p, &e),
              &e);
    EXPECT_STR(p.text, "a?[2J?b?");
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    EXPECT_OK(wire_reply_unpack(frame, protobuf_c_message_pack(&r.base, frame), &arena, &p, &e),
              &e);
    EXPECT_EQ(strlen(p.text), SHD_ERR_TEXT_BYTES - 1);

    struct wire_reply out = { .status = SHD_EIO, .text = text };
    size_t bytes;
    EXPECT_OK(wire_reply_pack(&out, frame, sizeof frame, &bytes, &e), &e);
    EXPECT_OK(wire_reply_unpack(frame, bytes, &arena, &p, &e), &e);
    EXPECT_EQ(strlen(p.text), SHD_ERR_TEXT_BYTES - 1);
    out = (struct wire_reply){ .status = SHD_OK, .text = "left over from before" };
    EXPECT_OK(wire_reply_pack(&out, frame, sizeof frame, &bytes, &e), &e);
    EXPECT_OK(wire_reply_unpack(frame, bytes, &arena, &p, &e), &e);
    EXPECT_STR(p.text, "");
    free(arena.base);
}

TEST(packing_stays_inside_the_buffer)
{
    uint64_t seed = test_seed(0x3eb);
    for (int i = 0; i < 500; i++) {
        struct shd_err e;
        char name[WIRE_NAME_BYTES_MAX];
        const struct wire_request q = random_request(
            &seed, (enum wire_request_type)(i % WIRE_REQUEST_TYPES), name);
        size_t bytes, got = 12345;
        EXPECT_OK(wire_request_pack(&q, frame, sizeof frame, &bytes, &e), &e);
        uint8_t *exact = malloc(bytes + 1);
        EXPECT_OK(wire_request_pack(&q, exact, bytes, &got, &e), &e);
        EXPECT_EQ(got, bytes);
        got = 12345;
        if (bytes > 0) {
            EXPECT_STATUS(wire_request_pack(&q, exact, bytes - 1, &got, &e), SHD_ERANGE);
            EXPECT_HAS(e.text, "Request packs to");
            EXPECT_EQ(got, 12345);
        }
        free(exact);
    }
}

TEST(frames_above_the_limit_are_not_packed)
{
    struct shd_err e;
    struct wire_reply p = { .text = "", .type = WIRE_STATUS_TEXT };
    uint8_t *big = calloc(1, WIRE_FRAME_BYTES_MAX * 2);
    size_t bytes;
    p.status_text.json = (struct wire_bytes){ big, WIRE_FRAME_BYTES_MAX };
    EXPECT_STATUS(wire_reply_pack(&p, big, WIRE_FRAME_BYTES_MAX * 2, &bytes, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "the limit is 1048576");
    free(big);
}

TEST_MAIN()
