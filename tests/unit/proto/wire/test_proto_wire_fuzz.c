/* wire against damage: truncated, mutated, spliced and random frames, in arenas too small and
 * exact. Nothing may crash, leave the arena, or let a value pass that cannot be packed again. Run
 * it under AddressSanitizer (preset dev): frames and arenas are heap blocks of the exact size. */
#include "proto/wire/wire.h"
#include "proto/wire/wire_tables.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

#define MUTATIONS 300000
#define FRAME_MAX 4096u

static uint64_t accepted, refused;

static void expect_inside(const struct wire_arena *a, const void *p, size_t bytes)
{
    if (bytes == 0)
        return;
    const uint8_t *b = p;
    EXPECT(b >= a->base && b + bytes <= a->base + a->used);
}

static void expect_text_inside(const struct wire_arena *a, const char *text)
{
    if (text[0] != 0) /* an empty one may be protobuf-c's constant */
        expect_inside(a, text, strlen(text) + 1);
}

static void check_request(const struct wire_request *q, const struct wire_arena *a)
{
    static uint8_t out[FRAME_MAX * 2];
    struct shd_err e;
    size_t bytes;
    EXPECT((unsigned)q->type < WIRE_REQUEST_TYPES);
    if (q->type == WIRE_HELLO)
        expect_text_inside(a, q->hello.name);
    if (q->type == WIRE_OPEN_MODEL) {
        expect_text_inside(a, q->open_model.name);
        expect_inside(a, q->open_model.spec.data, q->open_model.spec.bytes);
        EXPECT(q->open_model.owner < q->open_model.owners);
    }
    if (q->type == WIRE_RETURN)
        EXPECT(q->return_grad.metric_count <= WIRE_METRICS_MAX &&
               dtype_valid(q->return_grad.dtype));
    if (q->type == WIRE_COMMIT)
        expect_inside(a, q->commit.blob.data, q->commit.blob.bytes);
    EXPECT_OK(wire_request_pack(q, out, sizeof out, &bytes, &e), &e);
}

static void check_reply(const struct wire_reply *p, const struct wire_arena *a)
{
    static uint8_t out[FRAME_MAX * 2];
    struct shd_err e;
    size_t bytes;
    EXPECT(status_known(p->status) && strlen(p->text) < SHD_ERR_TEXT_BYTES);
    expect_text_inside(a, p->text);
    if (p->type == WIRE_WELCOME)
        expect_text_inside(a, p->welcome.device);
    if (p->type == WIRE_LAYOUT)
        expect_inside(a, p->layout.spec.data, p->layout.spec.bytes);
    if (p->type == WIRE_PREPARED)
        EXPECT(fixsum_is_carried(&p->prepared.sum));
    if (p->type == WIRE_BLOB)
        expect_inside(a, p->blob.blob.data, p->blob.blob.bytes);
    if (p->type == WIRE_LEAVES)
        expect_inside(a, p->leaves.leaves.data, p->leaves.leaves.bytes);
    if (p->type == WIRE_STATUS_TEXT)
        expect_inside(a, p->status_text.json.data, p->status_text.json.bytes);
    EXPECT_OK(wire_reply_pack(p, out, sizeof out, &bytes, &e), &e);
}

/* Unpack bytes[size] as both, from an exact copy. */
static void feed(const uint8_t *bytes, size_t size, struct wire_arena *arena)
{
    struct shd_err e;
    struct wire_request q;
    struct wire_reply p;
    uint8_t *exact = malloc(size > 0 ? size : 1);
    memcpy(exact, bytes, size);
    arena->used = 0;
    if (wire_request_unpack(exact, size, arena, &q, &e) == SHD_OK) {
        check_request(&q, arena);
        accepted++;
    } else {
        EXPECT(status_known(e.code) && e.text[0] != 0 && arena->used == 0);
        refused++;
    }
    arena->used = 0;
    if (wire_reply_unpack(exact, size, arena, &p, &e) == SHD_OK) {
        check_reply(&p, arena);
        accepted++;
    } else {
        EXPECT(status_known(e.code) && e.text[0] != 0 && arena->used == 0);
        refused++;
    }
    free(exact);
}

/* A valid frame of at most FRAME_MAX bytes into buf. */
static size_t valid_frame(uint64_t *seed, uint8_t buf[FRAME_MAX])
{
    for (;;) {
        char name[WIRE_NAME_BYTES_MAX];
        size_t bytes;
        int r;
        if (test_random(seed) % 2 == 0) {
            const struct wire_request q = random_request(
                seed, (enum wire_request_type)(test_random(seed) % WIRE_REQUEST_TYPES), name);
            r = wire_request_pack(&q, buf, FRAME_MAX, &bytes, NULL);
        } else {
            const struct wire_reply p = random_reply(
                seed, (enum wire_reply_type)(test_random(seed) % WIRE_REPLY_TYPES), name);
            r = wire_reply_pack(&p, buf, FRAME_MAX, &bytes, NULL);
        }
        if (r == SHD_OK)
            return bytes;
    }
}

static size_t mutate(uint64_t *seed, uint8_t *buf, size_t bytes)
{
    static uint8_t other[FRAME_MAX];
    static const uint8_t special[] = { 0, 1, 0x7f, 0x80, 0xff };
    for (uint64_t n = test_random(seed) % 4 + 1; n > 0 && bytes > 0; n--) {
        const size_t at = (size_t)(test_random(seed) % bytes);
        switch (test_random(seed) % 6) {
        case 0:
            buf[at] ^= (uint8_t)(1u << test_random(seed) % 8);
            break;
        case 1:
            buf[at] = special[test_random(seed) % 5];
            break;
        case 2:
            buf[at] = (uint8_t)test_random(seed);
            break;
        case 3: /* delete */
            memmove(buf + at, buf + at + 1, bytes - at - 1);
            bytes--;
            break;
        case 4: /* insert */
            if (bytes < FRAME_MAX) {
                memmove(buf + at + 1, buf + at, bytes - at);
                buf[at] = (uint8_t)test_random(seed);
                bytes++;
            }
            break;
        default: { /* splice in another frame: also merges bodies of one oneof */
            const size_t size = valid_frame(seed, other);
            const size_t take = size < FRAME_MAX - at ? size : FRAME_MAX - at;
            memcpy(buf + at, other, take);
            bytes = at + take;
            break;
        }
        }
    }
    return bytes;
}

TEST(frames_cut_at_every_byte_are_handled)
{
    uint64_t seed = test_seed(0xc07);
    static uint8_t buf[FRAME_MAX];
    struct wire_arena arena = arena_new(16384);
    for (int i = 0; i < 300; i++) {
        const size_t bytes = valid_frame(&seed, buf);
        for (size_t cut = 0; cut <= bytes; cut++)
            feed(buf, cut, &arena);
    }
    free(arena.base);
    EXPECT(accepted > 0 && refused > 0);
}

TEST(mutated_frames_are_handled)
{
    uint64_t seed = test_seed(0xf022);
    static uint8_t buf[FRAME_MAX];
    struct wire_arena arena = arena_new(16384);
    accepted = refused = 0;
    for (int i = 0; i < MUTATIONS; i++) {
        size_t bytes = valid_frame(&seed, buf);
        bytes = mutate(&seed, buf, bytes);
        feed(buf, bytes, &arena);
    }
    free(arena.base);
    printf("%" PRIu64 " accepted, %" PRIu64 " refused\n", accepted, refused);
    EXPECT(accepted > MUTATIONS / 20 && refused > MUTATIONS / 2);
}

TEST(mutated_frames_in_arenas_too_small_are_handled)
{
    uint64_t seed = test_seed(0xf023);
    static uint8_t buf[FRAME_MAX];
    for (int i = 0; i < 50000; i++) {
        struct wire_arena arena = arena_new((size_t)(test_random(&seed) % 1024));
        size_t bytes = valid_frame(&seed, buf);
        if (test_random(&seed) % 2 == 0)
            bytes = mutate(&seed, buf, bytes);
        feed(buf, bytes, &arena);
        free(arena.base);
    }
}

TEST(random_bytes_are_handled)
{
    uint64_t seed = test_seed(0xf024);
    static uint8_t buf[FRAME_MAX];
    struct wire_arena arena = arena_new(65536);
    for (int i = 0; i < 50000; i++) {
        const size_t bytes = (size_t)(test_random(&seed) % 64);
        for (size_t b = 0; b < bytes; b++)
            buf[b] = (uint8_t)test_random(&seed);
        feed(buf, bytes, &arena);
    }
    free(arena.base);
}

/* What grows most in memory per byte of frame: empty submessages, and fields nobody knows. */
TEST(frames_that_swell_stop_at_the_arena)
{
    static uint8_t big[WIRE_FRAME_BYTES_MAX];
    struct shd_err e;
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_reply p;
    struct wire_request q;
    const size_t body = sizeof big - 5; /* Reply.layout_info, 1,048,571 bytes of empty segments */
    const uint8_t head[] = { 0x5a, 0xfa, 0xff, 0x3f, 0 };
    memcpy(big, head, 4);
    for (size_t i = 0; i < body / 2; i++) {
        big[4 + 2 * i] = 0x42;
        big[5 + 2 * i] = 0;
    }
    EXPECT(wire_reply_unpack(big, 4 + (body / 2) * 2, &arena, &p, &e) < 0);
    EXPECT_EQ(arena.used, 0);
    for (size_t i = 0; i + 1 < sizeof big; i += 2) { /* field 9, varint 1: unknown in both */
        big[i] = 0x48;
        big[i + 1] = 1;
    }
    EXPECT_STATUS(wire_request_unpack(big, sizeof big, &arena, &q, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "does not fit the arena's");
    EXPECT(wire_reply_unpack(big, sizeof big, &arena, &p, &e) < 0);
    EXPECT_EQ(arena.used, 0);
    free(arena.base);
}

/* wire_tables: a row for each field of shd.proto, in its place and as wide. */

static uint32_t width_of(const ProtobufCFieldDescriptor *d)
{
    if (d->label == PROTOBUF_C_LABEL_REPEATED)
        return 0;
    switch (d->type) {
    case PROTOBUF_C_TYPE_BOOL:
        return 1;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FLOAT:
        return 4;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_DOUBLE:
    case PROTOBUF_C_TYPE_STRING:
        return 8;
    default:
        return 0;
    }
}

static void expect_table(const struct wire_message *t, const ProtobufCMessageDescriptor *d)
{
    EXPECT(t->descriptor == d && t->field_count == d->n_fields);
    EXPECT(d->sizeof_message <= sizeof((struct wire_parts *)NULL)->body);
    for (uint32_t i = 0; i < t->field_count; i++) {
        const struct wire_field *row = &t->fields[i];
        const bool message = d->fields[i].type == PROTOBUF_C_TYPE_MESSAGE;
        if (strcmp(row->name, d->fields[i].name) != 0 && !message)
            FAIL("row %" PRIu32 " of %s is %s, the field is %s", i, t->name, row->name,
                 d->fields[i].name);
        EXPECT_EQ(row->width, width_of(&d->fields[i]));
        EXPECT(message == (row->of != NULL));
        if (!message)
            continue;
        EXPECT(row->form == WIRE_AMOUNT);
        for (uint32_t k = 0; k < row->of->field_count; k++)
            EXPECT(row->of->fields[k].of == NULL);
        expect_table(row->of, d->fields[i].descriptor);
    }
}

static void expect_bodies(const struct wire_message *tables, const ProtobufCMessageDescriptor *d,
                          uint32_t types)
{
    for (uint32_t i = 0; i < types; i++) {
        const ProtobufCFieldDescriptor *body = &d->fields[d->n_fields - types + i];
        expect_table(&tables[i], body->descriptor);
    }
    EXPECT_EQ(d->fields[d->n_fields - types].id, 10); /* all bodies: no number below it is one */
}

TEST(tables_are_those_of_the_descriptors)
{
    expect_bodies(wire_requests, &shd__request__descriptor, WIRE_REQUEST_TYPES);
    expect_bodies(wire_replies + WIRE_WELCOME, &shd__reply__descriptor,
                  WIRE_REPLY_TYPES - WIRE_WELCOME);
}

TEST_MAIN()
