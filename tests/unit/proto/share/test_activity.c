/* What workers show of themselves: both sides of proto/share/activity.h, and nonsense in it. */
#include "proto/share/activity.h"

#include "proto/base/check.h"
#include "tests/lib/test.h"

static _Alignas(4096) uint8_t memory[ACTIVITY_BYTES];
static struct activity_span got[ACTIVITY_SPANS];
static const struct activity_limits limits = { .units = 10, .micros = 8, .now_ns = 1000000 };

static struct activity *fresh(void)
{
    memset(memory, 0, sizeof memory);
    struct activity *a = (struct activity *)memory;
    activity_init(a, ACTIVITY_PATH_MAP);
    return a;
}

static struct activity_span span_at(uint64_t begin_ns)
{
    return (struct activity_span){ ACTIVITY_FORWARD, 3, 5, 7, begin_ns, 10 };
}

TEST(now_is_read_as_it_was_written)
{
    struct activity *a = fresh();
    struct activity_span now = span_at(500), read;
    EXPECT(!activity_now(a, &limits, &read)); /* nothing was said */
    activity_set_now(a, &now);
    EXPECT(activity_now(a, &limits, &read));
    EXPECT_EQ(read.what, ACTIVITY_FORWARD);
    EXPECT_EQ(read.unit, 3);
    EXPECT_EQ(read.micro, 5);
    EXPECT_EQ(read.step, 7);
    EXPECT_EQ(read.begin_ns, 500);
    EXPECT_STR(activity_path_name(a), "map");
}

TEST(nonsense_is_silence)
{
    static const struct activity_span wrong[] = {
        { ACTIVITY_SILENT, 3, 5, 7, 500, 0 },           { ACTIVITY_WHATS, 3, 5, 7, 500, 0 },
        { ACTIVITY_FORWARD, 10, 5, 7, 500, 0 },         { ACTIVITY_FORWARD, 3, 8, 7, 500, 0 },
        { ACTIVITY_FORWARD, 3, 5, UINT64_MAX, 500, 0 }, { ACTIVITY_FORWARD, 3, 5, 7, 1000001, 0 },
        { ACTIVITY_FORWARD, 3, 5, 7, 500, UINT64_MAX },
    };
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        struct activity *a = fresh();
        struct activity_span read;
        activity_set_now(a, &wrong[i]);
        activity_add_span(a, &wrong[i]);
        EXPECT(!activity_now(a, &limits, &read));
        EXPECT_EQ(activity_spans(a, &limits, 0, got), 0);
    }
    struct activity *a = fresh();
    struct activity_waits waits;
    a->bucket[3] = UINT64_MAX;
    EXPECT(!activity_waits(a, &waits));
    a = fresh();
    a->magic++;
    EXPECT(!activity_waits(a, &waits));
}

TEST(half_written_now_is_not_waited_for)
{
    struct activity *a = fresh();
    struct activity_span now = span_at(500), read;
    activity_set_now(a, &now);
    a->now_seq++; /* as a worker that was stopped in the middle leaves it */
    EXPECT(!activity_now(a, &limits, &read));
    activity_set_now(a, &now);
    EXPECT(activity_now(a, &limits, &read));
}

TEST(random_memory_is_read_without_harm)
{
    uint64_t seed = 42;
    for (int round = 0; round < 200; round++) {
        struct activity *a = fresh();
        struct activity_span read;
        struct activity_waits waits;
        for (size_t i = 8; i + 8 <= sizeof memory; i += 8) {
            const uint64_t word = test_random(&seed);
            memcpy(memory + i, &word, sizeof word);
        }
        activity_now(a, &limits, &read);
        activity_waits(a, &waits);
        EXPECT(activity_spans(a, &limits, 0, got) <= ACTIVITY_SPANS);
    }
}

TEST(ring_keeps_the_newest)
{
    struct activity *a = fresh();
    for (uint64_t i = 0; i < 3 * ACTIVITY_SPANS; i++) {
        const struct activity_span s = span_at(i);
        activity_add_span(a, &s);
    }
    const uint32_t count = activity_spans(a, &limits, 0, got);
    EXPECT_EQ(count, ACTIVITY_SPANS - 1); /* the oldest may be the one being written over */
    for (uint32_t i = 0; i < count; i++)
        EXPECT_EQ(got[i].begin_ns, 2 * ACTIVITY_SPANS + 1 + i);
    EXPECT_EQ(activity_spans(a, &limits, 3 * ACTIVITY_SPANS + 9, got), 1);
}

TEST(waits_fall_into_their_buckets)
{
    struct activity *a = fresh();
    struct activity_waits waits;
    activity_add_wait(a, 0);
    activity_add_wait(a, 50000);
    activity_add_wait(a, 50001);
    activity_add_wait(a, UINT64_C(1000000000000));
    EXPECT(activity_waits(a, &waits));
    EXPECT_EQ(waits.bucket[0], 2);
    EXPECT_EQ(waits.bucket[1], 1);
    EXPECT_EQ(waits.bucket[ACTIVITY_BUCKETS], 1);
    EXPECT_EQ(waits.sum_ns, 1000000100001);
}

TEST_MAIN()
