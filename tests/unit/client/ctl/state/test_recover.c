/* What daemons' words about a model come to: is it lost? */
#include <stdio.h>

#include "client/ctl/state/recover.h"
#include "tests/lib/test.h"

#define OWNERS 3u

static struct recover_owner owners[OWNERS];
static uint32_t lost;
static uint64_t step;

/* All have it, ready, at these steps. */
static void fill(uint64_t a, uint64_t b, uint64_t c)
{
    const uint64_t steps[OWNERS] = { a, b, c };
    for (uint32_t i = 0; i < OWNERS; i++) {
        owners[i] = (struct recover_owner){
            .has = true, .ready = true, .step = steps[i], .before = steps[i]
        };
        snprintf(owners[i].device, sizeof owners[i].device, "cpu%u", (unsigned)i);
    }
}

static enum recover_state judge(void)
{
    lost = 99;
    step = 99;
    return recover_judge(owners, OWNERS, &lost, &step);
}

TEST(owners_that_train_are_at_most_a_step_apart)
{
    fill(0, 0, 0);
    EXPECT_EQ(judge(), RECOVER_WHOLE);
    EXPECT_EQ(step, 0);
    fill(7, 8, 7);
    EXPECT_EQ(judge(), RECOVER_WHOLE);
    EXPECT_EQ(step, 8);
    fill(7, 8, 6);
    EXPECT_EQ(judge(), RECOVER_LOST);
    EXPECT_EQ(lost, 2);
    EXPECT_EQ(step, 8);
}

TEST(steps_that_end_between_two_answers_are_no_loss)
{
    fill(0, 0, 0);
    for (uint32_t i = 0; i < OWNERS; i++) {
        owners[i].before = 100 + 5 * (uint64_t)i;
        owners[i].step = 200 + 5 * (uint64_t)i;
    }
    EXPECT_EQ(judge(), RECOVER_WHOLE);
    EXPECT_EQ(step, 110);
    owners[0].step = 108;
    EXPECT_EQ(judge(), RECOVER_LOST);
    EXPECT_EQ(lost, 0);
}

TEST(one_that_has_it_no_more_or_anew_has_lost_it)
{
    fill(7, 7, 7);
    owners[1].has = false;
    EXPECT_EQ(judge(), RECOVER_LOST);
    EXPECT_EQ(lost, 1);
    EXPECT_EQ(step, 7);
    fill(0, 7, 7);
    EXPECT_EQ(judge(), RECOVER_LOST);
    EXPECT_EQ(lost, 0);
}

TEST(what_is_being_made_is_waited_for)
{
    fill(0, 0, 0);
    owners[2].has = false; /* a worker opens it */
    EXPECT_EQ(judge(), RECOVER_WAIT);
    fill(7, 7, 7);
    owners[0].ready = false; /* a successor takes it over */
    EXPECT_EQ(judge(), RECOVER_WAIT);
    fill(7, 7, 7);
    owners[2].has = false; /* and restores it */
    owners[2].reads = true;
    EXPECT_EQ(judge(), RECOVER_WAIT);
    for (uint32_t i = 0; i < OWNERS; i++)
        owners[i] = (struct recover_owner){ .has = false };
    EXPECT_EQ(judge(), RECOVER_NONE);
}

TEST_MAIN()
