/* The window of sequence numbers that makes a repeated request harmless. */
#include "daemon/core/replies.h"

#include "proto/base/check.h"
#include "tests/lib/test.h"

static enum replies_verdict take_seq(struct replies *r, uint64_t seq)
{
    const void *frame;
    size_t bytes;
    return replies_take(r, seq, &frame, &bytes);
}

static struct replies *window_new(void)
{
    struct replies *r;
    struct shd_err e;
    CHECK(replies_new(&r, &e) == SHD_OK);
    return r;
}

TEST(repeated_request_is_ignored_then_answered_alike)
{
    struct replies *r = window_new();
    const void *frame;
    size_t bytes;
    EXPECT_EQ(take_seq(r, 1), REPLIES_NEW);
    EXPECT_EQ(take_seq(r, 1), REPLIES_PENDING);
    replies_keep(r, 1, "one", 4);
    replies_keep(r, 1, "two", 4); /* the first answer counts */
    EXPECT_EQ(replies_take(r, 1, &frame, &bytes), REPLIES_AGAIN);
    EXPECT_EQ(bytes, 4);
    EXPECT_STR((const char *)frame, "one");
    replies_free(r);
}

TEST(longest_kept_reply_is_kept_whole_and_a_longer_one_is_served_again)
{
    static const uint8_t long_frame[REPLIES_BYTES_MAX + 1] = { [REPLIES_BYTES_MAX - 1] = 7 };
    struct replies *r = window_new();
    const void *frame;
    size_t bytes;
    EXPECT_EQ(take_seq(r, 1), REPLIES_NEW);
    EXPECT_EQ(take_seq(r, 2), REPLIES_NEW);
    replies_keep(r, 1, long_frame, REPLIES_BYTES_MAX);
    replies_keep(r, 2, long_frame, REPLIES_BYTES_MAX + 1);
    EXPECT_EQ(replies_take(r, 1, &frame, &bytes), REPLIES_AGAIN);
    EXPECT(bytes == REPLIES_BYTES_MAX && memcmp(frame, long_frame, bytes) == 0);
    EXPECT_EQ(take_seq(r, 2), REPLIES_SERVE);
    EXPECT_EQ(take_seq(r, 2), REPLIES_PENDING); /* until it is answered again */
    replies_keep(r, 2, "short", 6);
    EXPECT_EQ(take_seq(r, 2), REPLIES_AGAIN);
    replies_free(r);
}

TEST(numbers_may_come_out_of_order_inside_the_window)
{
    struct replies *r = window_new();
    EXPECT_EQ(take_seq(r, REPLIES_WINDOW), REPLIES_NEW);
    for (uint64_t seq = REPLIES_WINDOW - 1; seq >= 1; seq--)
        EXPECT_EQ(take_seq(r, seq), REPLIES_NEW);
    for (uint64_t seq = 1; seq <= REPLIES_WINDOW; seq++)
        EXPECT_EQ(take_seq(r, seq), REPLIES_PENDING);
    replies_free(r);
}

TEST(number_below_the_window_is_old_and_its_late_answer_goes_nowhere)
{
    struct replies *r = window_new();
    EXPECT_EQ(take_seq(r, 1), REPLIES_NEW);
    EXPECT_EQ(take_seq(r, REPLIES_WINDOW), REPLIES_NEW);
    EXPECT_EQ(take_seq(r, 1), REPLIES_PENDING); /* the last that is still told apart */
    EXPECT_EQ(take_seq(r, REPLIES_WINDOW + 1), REPLIES_NEW);
    EXPECT_EQ(take_seq(r, 1), REPLIES_OLD);
    replies_keep(r, 1, "late", 5);
    EXPECT_EQ(take_seq(r, 1 + REPLIES_WINDOW), REPLIES_PENDING);
    EXPECT_EQ(take_seq(r, 1), REPLIES_OLD);
    EXPECT_EQ(take_seq(r, UINT64_MAX), REPLIES_NEW); /* one client's nonsense is its own */
    EXPECT_EQ(take_seq(r, REPLIES_WINDOW + 2), REPLIES_OLD);
    EXPECT_EQ(take_seq(r, UINT64_MAX - 1), REPLIES_NEW);
    replies_free(r);
    replies_free(NULL);
}

/* Against a plain list of everything that ever happened. */
TEST(random_numbers_agree_with_a_list_of_all)
{
    enum { COUNT = 4000 };
    static uint8_t state[COUNT]; /* 0 never seen, 1 pending, 2 answered */
    uint64_t seed = test_seed(20261121), highest = 0;
    struct replies *r = window_new();
    for (uint32_t i = 0; i < 20000; i++) {
        uint64_t seq = 1 + (uint64_t)i / 6 + test_random(&seed) % 400;
        const void *frame;
        size_t bytes;
        const enum replies_verdict v = replies_take(r, seq, &frame, &bytes);
        if (seq + REPLIES_WINDOW <= highest) {
            EXPECT_EQ(v, REPLIES_OLD);
            continue;
        }
        highest = seq > highest ? seq : highest;
        EXPECT_EQ(v, state[seq] == 0   ? REPLIES_NEW
                     : state[seq] == 1 ? REPLIES_PENDING
                                       : REPLIES_AGAIN);
        if (v == REPLIES_AGAIN)
            EXPECT(bytes == sizeof seq && memcmp(frame, &seq, bytes) == 0);
        if (state[seq] == 0)
            state[seq] = 1;
        if (state[seq] == 1 && test_random(&seed) % 2 == 0) {
            replies_keep(r, seq, &seq, sizeof seq);
            state[seq] = 2;
        }
    }
    replies_free(r);
}

TEST_MAIN()
