/* --batch auto: how many micro-batches a step of S sequences is cut to. */

#include "examples/gpt/batch.h"
#include "examples/gpt/model.h"
#include "examples/gpt/pool.h"
#include "tests/lib/test.h"

/* Beside a look at each number. */
static uint64_t looked_up(uint64_t sequences, uint64_t share, uint64_t most)
{
    for (uint64_t m = 1; m <= sequences; m++)
        if (sequences % m == 0 && m % share == 0 && sequences / m <= most)
            return m;
    return 0;
}

TEST(the_fewest_that_can_be_shared_out)
{
    EXPECT_EQ(batch_fewest(32, 1, 100), 1);
    EXPECT_EQ(batch_fewest(32, 1, 31), 2);
    EXPECT_EQ(batch_fewest(32, 4, 100), 4);
    EXPECT_EQ(batch_fewest(30, 1, 7), 5); /* 4 would be 7.5 each */
    EXPECT_EQ(batch_fewest(32, 1, 0), 0);
    for (uint64_t sequences = 1; sequences <= 96; sequences++)
        for (uint64_t share = 1; share <= sequences; share++)
            for (uint64_t most = 0; most < 40; most++)
                if (sequences % share == 0)
                    EXPECT_EQ(batch_fewest(sequences, share, most),
                              looked_up(sequences, share, most));
}

/* What gpt_new() takes, and no sequence less than there is room for. */
TEST(a_batch_has_room)
{
    static char *const argv[] = { "shd-gpt", "--batch", "auto", "--threads", "3", NULL };
    struct options o;
    struct shd_err e;
    EXPECT_OK(options_parse(5, (char **)argv, &o, &e), &e);
    const struct gpt_shape shape = options_shape(&o);
    const uint64_t one = gpt_bytes(&shape, 1, false, 3);
    EXPECT_EQ(batch_most(&o, one - 1), 0);
    EXPECT_EQ(batch_most(&o, one), 1);
    EXPECT_EQ(batch_most(&o, UINT64_MAX), GPT_BATCH_MAX);
    for (uint64_t bytes = one; bytes < 40 * one; bytes += one / 3) {
        const uint32_t most = (uint32_t)batch_most(&o, bytes);
        EXPECT(gpt_bytes(&shape, most, false, 3) <= bytes);
        EXPECT(gpt_bytes(&shape, most + 1, false, 3) > bytes);
    }
    o.layer.recompute = true;
    EXPECT(batch_most(&o, 40 * one) > 40);
}

TEST(it_is_what_is_allocated)
{
    const struct gpt_shape shape = { .layers = 3, .dim = 64, .heads = 2, .seq = 32 };
    const struct gpt_layout layout = { 0 };
    struct pool *pool;
    struct gpt *gpt;
    struct shd_err e;
    EXPECT_OK(pool_new(2, &pool, &e), &e);
    for (int recompute = 0; recompute < 2; recompute++) {
        EXPECT_OK(gpt_new(&shape, &layout, 5, recompute == 1, pool, &gpt, &e), &e);
        EXPECT_EQ(gpt_activation_bytes(gpt, recompute == 1),
                  gpt_bytes(&shape, 5, recompute == 1, 2));
        gpt_free(gpt);
    }
    pool_free(pool);
}

TEST_MAIN()
