/* Trails without a death: the same bits as without one, what each word says afterwards, resuming,
 * and what is refused. */
#include "kernels/cpu/trail.h"
#include "tests/lib/kern_trail_util.h"

/* No record speaks, the words of this operation's chunks say that all is done. */
static void expect_trail_idle(const struct world *w, uint64_t op, const char *label)
{
    for (uint32_t i = 0; i < CPU_THREADS_MAX; i++)
        EXPECT_EQ(w->area->records[i].op, 0);
    for (uint64_t c = 0; c < CHUNKS; c++) {
        const uint64_t left = ELEMS - c * KERN_CHUNK_ELEMS;
        const uint64_t elems = left < KERN_CHUNK_ELEMS ? left : KERN_CHUNK_ELEMS;
        const uint64_t word = w->marks->chunks[(op % 4 == 0 ? CHUNKS : 0) + c];
        if (word != (op << 17 | elems))
            FAIL("%s: op %" PRIu64 ": chunk %" PRIu64 " says %" PRIx64, label, op, c, word);
        const uint64_t average = w->marks->chunks[2 * CHUNKS + c], last = op - op % 4;
        if (op / 4 % SCRIPT_UPDATES != 3 && average != (last == 0 ? 0 : last << 17 | elems))
            FAIL("%s: op %" PRIu64 ": chunk %" PRIu64 " of the average says %" PRIx64, label, op, c,
                 average);
    }
    EXPECT_EQ(w->marks->done, op);
}

struct bits_case {
    struct world with, without;
    struct inputs *in;
};

static void check_bits(struct kern *k, const char *label, void *arg)
{
    const struct bits_case *c = arg;
    static float publish[ELEMS];
    world_reset(&c->with);
    world_reset(&c->without);
    for (uint64_t op = 1; op <= 3 * SCRIPT_OPS; op++) { /* all grad and publish dtypes */
        struct kern_sum sum, want;
        memset(c->in->publish, 0x5a, sizeof publish);
        EXPECT_STATUS(script_run(k, &c->without, c->in, op, false, &want), SHD_OK);
        memcpy(publish, c->in->publish, sizeof publish);
        memset(c->in->publish, 0x5a, sizeof publish);
        EXPECT_STATUS(script_run(k, &c->with, c->in, op, true, &sum), SHD_OK);
        if (!same_sum(&sum, &want) || memcmp(publish, c->in->publish, sizeof publish) != 0 ||
            memcmp(c->with.acc, c->without.acc, 4 * ELEMS * sizeof(float)) != 0)
            FAIL("%s: op %" PRIu64 " has other bits with a trail", label, op);
        expect_trail_idle(&c->with, op, label);
    }
}

TEST(a_trail_changes_no_bit)
{
    struct bits_case c = { world_new(), world_new(), inputs_new() };
    devices_each(check_bits, &c);
    world_free(&c.with);
    world_free(&c.without);
    free(c.in);
}

/* Given again under the same number, an operation does nothing but its sum; under another one it
 * is another operation. */
static void check_again(struct kern *k, const char *label, void *arg)
{
    const struct bits_case *c = arg;
    world_reset(&c->with);
    for (uint64_t op = 1; op <= SCRIPT_OPS; op++) {
        struct kern_sum sum, again;
        EXPECT_STATUS(script_run(k, &c->with, c->in, op, true, &sum), SHD_OK);
        const uint64_t digest = world_digest(&c->with);
        EXPECT_STATUS(script_run(k, &c->with, c->in, op, true, &again), SHD_OK);
        if (world_digest(&c->with) != digest || !same_sum(&sum, &again))
            FAIL("%s: op %" PRIu64 " was done twice", label, op);
    }
    const uint64_t digest = world_digest(&c->with);
    struct kern_sum sum;
    EXPECT_STATUS(script_run(k, &c->with, c->in, SCRIPT_OPS + 12, true, &sum), SHD_OK);
    EXPECT(world_digest(&c->with) != digest);
}

TEST(an_operation_given_again_is_not_done_again)
{
    struct bits_case c = { .with = world_new(), .in = inputs_new() };
    devices_each(check_again, &c);
    world_free(&c.with);
    free(c.in);
}

static struct kern_change no_change(void)
{
    return (struct kern_change){ .update.finite = true, .weight.finite = true, .whole = true };
}

/* With a trail an update comes to the same; one of which something was done already says so, and
 * one that nobody had begun is whole again. */
static void check_change(struct kern *k, const char *label, void *arg)
{
    const struct bits_case *c = arg;
    struct kern_change with = no_change(), without = no_change(), again = no_change();
    struct kern_sum sum;
    world_reset(&c->with);
    world_reset(&c->without);
    c->in->change = &without;
    EXPECT_STATUS(script_run(k, &c->without, c->in, 4, false, &sum), SHD_OK);
    c->in->change = &with;
    EXPECT_STATUS(script_run(k, &c->with, c->in, 4, true, &sum), SHD_OK);
    if (!with.whole || !same_sum(&with.update, &without.update) ||
        !same_sum(&with.weight, &without.weight))
        FAIL("%s: an update comes to something else with a trail", label);
    c->in->change = &again;
    EXPECT_STATUS(script_run(k, &c->with, c->in, 4, true, &sum), SHD_OK);
    EXPECT(!again.whole);
    world_reset(&c->with);
    c->with.marks->chunks[CHUNKS + 1] = 4 << 17 | 64; /* the first group of one chunk was done */
    again = no_change();
    EXPECT_STATUS(script_run(k, &c->with, c->in, 4, true, &sum), SHD_OK);
    EXPECT(!again.whole);
    c->in->change = NULL;
}

TEST(an_update_that_was_begun_before_is_not_measured_whole)
{
    struct bits_case c = { world_new(), world_new(), inputs_new() };
    devices_each(check_change, &c);
    world_free(&c.with);
    world_free(&c.without);
    free(c.in);
}

TEST(an_operation_of_nothing_stores_its_done_word)
{
    struct world w = world_new();
    struct kern *k = device_new(NULL, 2);
    EXPECT_RUNS(accumulate, k,
                (&(struct kern_accumulate){ .grad_dtype = SHD_F32, .trail = trail_of(&w, 7, 0) }));
    EXPECT_EQ(w.marks->done, 7);
    EXPECT_RUNS(update, k,
                (&(struct kern_update){
                    .kind = SPEC_SGD, .publish_dtype = SHD_F32, .trail = trail_of(&w, 8, 0) }));
    EXPECT_EQ(w.marks->done, 8);
    k->ops->free(k);
    world_free(&w);
}

/* A chunk word that no trail of this operation leaves: the operation fails, the done word stays. */
TEST(chunk_words_beyond_their_chunk_fail_the_operation)
{
    struct world w = world_new();
    struct inputs *in = inputs_new();
    struct kern *k = device_new(NULL, 2);
    struct kern_sum sum;
    w.marks->chunks[CHUNKS - 1] = 3 << 17 | 65536; /* the last chunk is shorter */
    EXPECT_STATUS(script_run(k, &w, in, 3, true, &sum), SHD_ESEGMENT);
    w.marks->chunks[CHUNKS - 1] = 3 << 17 | 33; /* between groups */
    EXPECT_STATUS(script_run(k, &w, in, 3, true, &sum), SHD_ESEGMENT);
    w.marks->chunks[2 * CHUNKS - 1] = 4 << 17 | 65536;
    EXPECT_STATUS(script_run(k, &w, in, 4, true, &sum), SHD_ESEGMENT);
    w.marks->chunks[2 * CHUNKS - 1] = 0;
    w.marks->chunks[3 * CHUNKS - 1] = 4 << 17 | 65536; /* its average's */
    EXPECT_STATUS(script_run(k, &w, in, 4, true, &sum), SHD_ESEGMENT);
    w.marks->chunks[3 * CHUNKS - 1] = 4 << 17 | 33;
    EXPECT_STATUS(script_run(k, &w, in, 4, true, &sum), SHD_ESEGMENT);
    EXPECT_EQ(w.marks->done, 0);
    k->ops->free(k);
    world_free(&w);
    free(in);
}

TEST(bad_trails_are_refused)
{
    struct world w = world_new();
    struct kern *k = device_new(NULL, 1);
    struct shd_err e = { 0 };
    const struct kern_accumulate good = {
        .acc = w.acc,
        .grad = w.p,
        .grad_dtype = SHD_F32,
        .elems = BLOCK,
        .trail = trail_of(&w, 1, 0),
    };
    struct kern_accumulate a = good;
    a.trail.op = 0;
    EXPECT_STATUS(kern_accumulate(k, &a, NULL, &e), SHD_ERANGE);
    a.trail.op = KERN_OP_MAX + 1;
    EXPECT_STATUS(kern_accumulate(k, &a, NULL, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "70368744177664");
    a = good, a.trail.area = (void *)(w.base + 64);
    EXPECT_STATUS(kern_accumulate(k, &a, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "128");
    a = good, a.trail.chunks = NULL;
    EXPECT_STATUS(kern_accumulate(k, &a, NULL, &e), SHD_EINVAL);
    a = good, a.trail.base = NULL;
    EXPECT_STATUS(kern_accumulate(k, &a, NULL, &e), SHD_EINVAL);
    a = good, a.trail.base = w.acc + 1;
    EXPECT_STATUS(kern_accumulate(k, &a, NULL, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "before its base");
    k->ops->free(k);
    world_free(&w);
}

/* A record as a dead AdamW leaves it: element 70000 of the slice, in chunk 1, 16 at once. */
static void record_good(const struct world *w, struct trail_record *r)
{
    r->chunk = CHUNKS + 1;
    r->first_elem = KERN_CHUNK_ELEMS;
    r->array_count = 3;
    const float *const arrays[] = { w->p, w->m, w->v };
    for (uint32_t i = 0; i < 3; i++) {
        r->offset_bytes[i] = (uint64_t)((const uint8_t *)arrays[i] - w->base);
        for (uint32_t j = 0; j < TRAIL_GROUP_MAX; j++)
            r->old[i][j] = (float)(100 * i + j);
    }
    r->pos = 70000 << 8 | 16;
    r->op = 9;
}

static int repair(const struct world *w, struct shd_err *e)
{
    return kern_trail_repair(w->area, w->base, w->bytes, w->marks->chunks, 2 * CHUNKS, e);
}

TEST(repair_puts_old_values_back_and_says_how_far)
{
    struct world w = world_new();
    struct shd_err e = { 0 };
    world_reset(&w);
    EXPECT_OK(repair(&w, &e), &e); /* nothing to do */
    record_good(&w, &w.area->records[CPU_THREADS_MAX - 1]);
    const float before = w.p[70016];
    EXPECT_OK(repair(&w, &e), &e);
    for (uint32_t j = 0; j < 16; j++) {
        EXPECT_EQ(w.p[70000 + j], j);
        EXPECT_EQ(w.m[70000 + j], 100 + j);
        EXPECT_EQ(w.v[70000 + j], 200 + j);
    }
    EXPECT(w.p[70016] == before);
    EXPECT_EQ(w.marks->chunks[CHUNKS + 1], UINT64_C(9) << 17 | (70000 - 65536));
    EXPECT_EQ(w.area->records[CPU_THREADS_MAX - 1].op, 0);
    world_free(&w);
}

TEST(corrupt_records_are_refused_and_nothing_is_changed)
{
    struct world w = world_new();
    enum { OP, CHUNK, FIRST, COUNT, OFFSET, POS };
    const struct {
        int field;
        uint64_t value;
        const char *text;
    } cases[] = {
        { OP, KERN_OP_MAX + 1, "op 70368744177664" },
        { CHUNK, 2 * CHUNKS, "chunk 12, there are 12" },
        { CHUNK, UINT64_MAX, "chunk 18446744073709551615" },
        { FIRST, 5, "element 5 begins no chunk" },
        { FIRST, 2 * KERN_CHUNK_ELEMS, "not in the chunk at 131072" },
        { FIRST, 0, "not in the chunk at 0" },
        { FIRST, UINT64_MAX - 65535, "not in the chunk" },
        { COUNT, 0, "0 arrays" },
        { COUNT, 4, "4 arrays" },
        { OFFSET, 2, "array 1 at byte 2" },
        { OFFSET, w.bytes - 4, "array 1" },
        { OFFSET, UINT64_MAX - 3, "array 1 at byte 18446744073709551612" },
        { OFFSET, w.bytes - (70000 + 15) * 4, "elements to 70016" },
        { POS, 70000 << 8 | 65, "65 elements at once" },
        { POS, 131071 << 8 | 2, "elements 131071+2 are not in the chunk" },
        { POS, UINT64_MAX - 255, "elements 72057594037927935+0" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        memset(w.base, 0, w.bytes);
        struct trail_record *r = &w.area->records[5];
        record_good(&w, &w.area->records[2]);
        record_good(&w, r);
        switch (cases[i].field) {
        case OP:
            r->op = cases[i].value;
            break;
        case CHUNK:
            r->chunk = cases[i].value;
            break;
        case FIRST:
            r->first_elem = cases[i].value;
            break;
        case COUNT:
            r->array_count = cases[i].value;
            break;
        case OFFSET:
            r->offset_bytes[1] = cases[i].value;
            break;
        default:
            r->pos = cases[i].value;
            break;
        }
        const uint64_t digest = world_digest(&w);
        struct shd_err e = { 0 };
        EXPECT_STATUS(repair(&w, &e), SHD_ESEGMENT);
        EXPECT_HAS(e.text, "trail record 5");
        EXPECT_HAS(e.text, cases[i].text);
        EXPECT(world_digest(&w) == digest && w.area->records[2].op == 9 &&
               w.marks->chunks[CHUNKS + 1] == 0);
    }
    world_free(&w);
}

TEST(chunk_counts_round_up)
{
    EXPECT_EQ(kern_trail_chunks(0), 0);
    EXPECT_EQ(kern_trail_chunks(1), 1);
    EXPECT_EQ(kern_trail_chunks(65536), 1);
    EXPECT_EQ(kern_trail_chunks(65537), 2);
    EXPECT_EQ(KERN_TRAIL_BYTES % 128, 0);
}

TEST_MAIN()
