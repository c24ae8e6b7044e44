/* Numbers of micro-batches by the step: which row holds. */
#include "proto/spec/ramp.h"

#include "proto/base/check.h"
#include "tests/lib/test.h"

TEST(row_holds_until_the_next)
{
    const struct ramp r = { 3, { { 0, 4 }, { 5, 2 }, { 9, 16 } } };
    static const uint32_t want[] = { 4, 4, 4, 4, 4, 2, 2, 2, 2, 16, 16 };
    for (uint64_t step = 0; step < ARRAY_SIZE(want); step++)
        EXPECT_EQ(ramp_at(&r, step), want[step]);
    EXPECT_EQ(ramp_at(&r, UINT64_MAX), 16);
    EXPECT_EQ(ramp_max(&r), 16);
}

TEST(one_row_is_of_all_steps)
{
    const struct ramp r = { 1, { { 0, 3 } } };
    EXPECT_EQ(ramp_at(&r, 0), 3);
    EXPECT_EQ(ramp_at(&r, UINT64_MAX), 3);
    EXPECT_EQ(ramp_max(&r), 3);
}

TEST_MAIN()
