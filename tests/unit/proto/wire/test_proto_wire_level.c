/* Feature levels: each field has one, what is packed for a lower level has no field above it, and
 * what cannot be said without one is refused by name. Frames are read here as a build without those
 * fields would: tag by tag. */
#include "proto/base/check.h"
#include "proto/wire/wire_tables.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

static uint8_t frame[WIRE_FRAME_BYTES_MAX];

/* -- The table ----------------------------------------------------------------------------------
 */

/* How many fields there are of each level. That of a level in use never changes: another field of
 * a message is of a new level (wire.h), with a line here. */
static const uint32_t fields_of_level[] = {
    [WIRE_LEVEL_BASE] = 160, [WIRE_LEVEL_SPECS] = 14,  [WIRE_LEVEL_TOLD] = 1,
    [WIRE_LEVEL_RANGES] = 1, [WIRE_LEVEL_MEETS] = 1,   [WIRE_LEVEL_COUNTS] = 5,
    [WIRE_LEVEL_RINGS] = 3,  [WIRE_LEVEL_SAID] = 1,    [WIRE_LEVEL_STATES] = 44,
    [WIRE_LEVEL_RULES] = 25, [WIRE_LEVEL_AUDITS] = 27, [WIRE_LEVEL_FORCES] = 1,
    [WIRE_LEVEL_VIEWS] = 1,  [WIRE_LEVEL_MOVES] = 15,  [WIRE_LEVEL_TWINS] = 2,
    [WIRE_LEVEL_PAIRS] = 5,  [WIRE_LEVEL_STAYS] = 1,
};

static uint32_t counts[WIRE_LEVEL_END];

/* Fields of a message ascend by number, and by level. */
static void count_fields(const struct wire_message *t)
{
    uint32_t before = 0;
    for (uint32_t i = 0; i < t->field_count; i++) {
        const uint32_t level = t->fields[i].level;
        if (level > WIRE_LEVEL || level < before)
            FAIL("%s.%s is of level %u, after one of %u", t->name, t->fields[i].name, level,
                 before);
        before = level;
        counts[level]++;
    }
}

/* Messages inside others, once each. */
static void count_inner(const struct wire_message *t, const struct wire_message **seen)
{
    for (uint32_t i = 0; i < t->field_count; i++) {
        const struct wire_message *of = t->fields[i].of;
        if (of == NULL || of == seen[0] || of == seen[1])
            continue;
        seen[seen[0] != NULL] = of;
        count_fields(of);
    }
}

TEST(each_field_has_a_level_and_those_in_use_are_closed)
{
    const struct wire_message *inner[2] = { NULL, NULL };
    for (int i = 0; i < WIRE_REQUEST_TYPES; i++) {
        count_fields(&wire_requests[i]);
        count_inner(&wire_requests[i], inner);
    }
    for (int i = WIRE_WELCOME; i < (int)WIRE_REPLY_TYPES; i++) {
        count_fields(&wire_replies[i]);
        count_inner(&wire_replies[i], inner);
    }
    EXPECT_EQ(ARRAY_SIZE(fields_of_level), WIRE_LEVEL_END);
    for (uint32_t i = 0; i < WIRE_LEVEL_END; i++)
        if (counts[i] != fields_of_level[i])
            FAIL("level %u has %u fields, not %u: a new field is of a new level (wire.h)", i,
                 counts[i], fields_of_level[i]);
}

/* -- Frames as an older build reads them --------------------------------------------------------
 */

static uint64_t read_varint(const uint8_t **at, const uint8_t *end)
{
    uint64_t x = 0;
    for (int shift = 0; *at < end; shift += 7) {
        const uint8_t byte = *(*at)++;
        x |= (uint64_t)(byte & 0x7f) << shift;
        if ((byte & 0x80) == 0)
            return x;
    }
    FAIL("a number goes beyond its frame");
}

static void expect_known(const struct wire_message *t, const uint8_t *at, const uint8_t *end,
                         uint32_t level);

/* The value of one field: what it holds of another message is looked at, too. */
static void skip_value(const struct wire_field *row, uint32_t wire_type, const uint8_t **at,
                       const uint8_t *end, uint32_t level)
{
    if (wire_type == 0) {
        read_varint(at, end);
    } else if (wire_type == 2) {
        const uint64_t bytes = read_varint(at, end);
        EXPECT(bytes <= (uint64_t)(end - *at));
        if (row->of != NULL)
            expect_known(row->of, *at, *at + bytes, level);
        *at += bytes;
    } else {
        EXPECT(wire_type == 1 || wire_type == 5);
        *at += wire_type == 1 ? 8 : 4;
    }
}

static void expect_known(const struct wire_message *t, const uint8_t *at, const uint8_t *end,
                         uint32_t level)
{
    while (at < end) {
        const uint64_t key = read_varint(&at, end);
        const struct wire_field *row = NULL;
        for (uint32_t i = 0; i < t->field_count; i++)
            if (t->descriptor->fields[i].id == key >> 3)
                row = &t->fields[i];
        if (row == NULL || row->level > level)
            FAIL("%s has field %u, which builds of level %u do not know", t->name,
                 (unsigned)(key >> 3), level);
        skip_value(row, key & 7, &at, end, level);
    }
    EXPECT(at == end);
}

/* The body of a Request or Reply: their only field from number 10 on. */
static void expect_body_known(const struct wire_message *t, size_t bytes, uint32_t level)
{
    const uint8_t *at = frame, *end = frame + bytes;
    static const struct wire_field none;
    while (at < end) {
        const uint64_t key = read_varint(&at, end);
        const struct wire_field body = { .of = t };
        skip_value(key >> 3 >= 10 ? &body : &none, key & 7, &at, end, level);
    }
}

static bool names_inner(const struct wire_message *t, uint32_t level, const struct shd_err *e);

/* Does a refusal name a field of this message, or of one in it, that has to be there? */
static bool is_named(const struct wire_message *t, uint32_t level, const struct shd_err *e)
{
    char start[100];
    for (uint32_t i = 0; i < t->field_count; i++) {
        const struct wire_field *row = &t->fields[i];
        snprintf(start, sizeof start, "%s.%s is of feature level %u, the other side's build has %u",
                 t->name, row->name, (unsigned)row->level, level);
        if (row->needed && row->level > level && strncmp(e->text, start, strlen(start)) == 0)
            return true;
    }
    return names_inner(t, level, e);
}

static bool names_inner(const struct wire_message *t, uint32_t level, const struct shd_err *e)
{
    for (uint32_t i = 0; i < t->field_count; i++)
        if (t->fields[i].of != NULL && is_named(t->fields[i].of, level, e))
            return true;
    return false;
}

static void expect_named(const struct wire_message *t, uint32_t level, const struct shd_err *e)
{
    if (!is_named(t, level, e))
        FAIL("%s", e->text);
}

TEST(what_is_packed_for_a_level_has_no_field_above_it)
{
    uint64_t seed = test_seed(0x1e7e1);
    uint32_t refused = 0;
    for (int i = 0; i < 6000; i++) {
        struct shd_err e = { 0 };
        char name[WIRE_NAME_BYTES_MAX];
        const uint32_t level = (uint32_t)i % WIRE_LEVEL_END;
        const struct wire_request q = random_request(
            &seed, (enum wire_request_type)((uint32_t)i / WIRE_LEVEL_END % WIRE_REQUEST_TYPES),
            name);
        size_t bytes = 0;
        const int r = wire_request_pack_for(&q, level, frame, sizeof frame, &bytes, &e);
        if (r == SHD_OK)
            expect_body_known(&wire_requests[q.type], bytes, level);
        else
            EXPECT_STATUS(r, SHD_ENOTSUP);
        if (r != SHD_OK)
            expect_named(&wire_requests[q.type], level, &e);
        EXPECT(r == SHD_OK || level < WIRE_LEVEL);
        refused += r != SHD_OK;
    }
    EXPECT(refused > 0);
}

TEST(replies_for_a_level_have_no_field_above_it)
{
    uint64_t seed = test_seed(0x1e7e2);
    for (int i = 0; i < 6000; i++) {
        struct shd_err e = { 0 };
        char name[WIRE_NAME_BYTES_MAX];
        const uint32_t level = (uint32_t)i % WIRE_LEVEL_END;
        const struct wire_reply p = random_reply(
            &seed, (enum wire_reply_type)((uint32_t)i / WIRE_LEVEL_END % WIRE_REPLY_TYPES), name);
        size_t bytes = 0;
        const int r = wire_reply_pack_for(&p, level, frame, sizeof frame, &bytes, &e);
        if (r == SHD_OK && p.type != WIRE_REPLY_NONE)
            expect_body_known(&wire_replies[p.type], bytes, level);
        if (r != SHD_OK)
            expect_named(&wire_replies[p.type], level, &e);
    }
}

TEST(fields_are_left_out_or_refused)
{
    struct shd_err e = { 0 };
    struct wire_arena arena = arena_new(WIRE_ARENA_BYTES);
    struct wire_request back,
        q = { .type = WIRE_OPEN_MODEL,
              .open_model = { .name = "m", .owners = 1, .spec_apart = true } };
    const uint8_t sum[WIRE_SUM_BYTES] = { 1 };
    size_t bytes;
    EXPECT_OK(wire_request_pack_for(&q, WIRE_LEVEL_SPECS, frame, sizeof frame, &bytes, &e), &e);
    EXPECT_OK(wire_request_unpack(frame, bytes, &arena, &back, &e), &e);
    EXPECT(back.open_model.spec_apart);
    EXPECT_OK(wire_request_pack_for(&q, WIRE_LEVEL_BASE, frame, sizeof frame, &bytes, &e), &e);
    EXPECT_OK(wire_request_unpack(frame, bytes, &arena, &back, &e), &e);
    EXPECT(!back.open_model.spec_apart);
    q.open_model.spec_at = (struct wire_spec_at){ 7, 9, { sum, sizeof sum } };
    EXPECT_STATUS(wire_request_pack_for(&q, WIRE_LEVEL_BASE, frame, sizeof frame, &bytes, &e),
                  SHD_ENOTSUP);
    EXPECT_STR(e.text,
               "open_model.spec_ticket is of feature level 1, the other side's build has 0: "
               "it is of an older version");
    EXPECT_OK(wire_request_pack_for(&q, WIRE_LEVEL + 9, frame, sizeof frame, &bytes, &e), &e);
    free(arena.base);
}

TEST_MAIN()
