/* What a worker of a replay may do, by $SHARDD_REPLAY. That sessions go by it shows
 * test_ctl_replay.sh.
 */
#include <stdlib.h>
#include <string.h>

#include "client/session/replay.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

static char name[SPEC_NAME_BYTES_MAX];
static struct shd_err e;

TEST(without_the_variable_nothing_is_done)
{
    unsetenv(REPLAY_ENV);
    for (int set = 0; set < 2; set++) {
        EXPECT_OK(replay_name("gpt", name, &e), &e);
        EXPECT_STR(name, "gpt");
        EXPECT_OK(replay_name("", name, &e), &e);
        EXPECT_STR(name, "");
        EXPECT_OK(replay_goes_on(UINT64_MAX, &e), &e);
        EXPECT_OK(replay_allows("shd_restore()", &e), &e);
        setenv(REPLAY_ENV, "", 1); /* as not set */
    }
}

TEST(the_fork_is_opened_for_the_model_and_nothing_else)
{
    setenv(REPLAY_ENV, "12 gpt.replay-7 gpt", 1);
    EXPECT_OK(replay_name("gpt", name, &e), &e);
    EXPECT_STR(name, "gpt.replay-7");
    EXPECT_OK(replay_name("", name, &e), &e); /* the only one: there are two now */
    EXPECT_STR(name, "gpt.replay-7");
    EXPECT_OK(replay_name("gpt.replay-7", name, &e), &e);
    EXPECT_STR(name, "gpt.replay-7");
    EXPECT_EQ(replay_name("critic", name, &e), SHD_ENOTSUP);
    EXPECT(strstr(e.text, "model 'gpt' is replayed, and this program opens 'critic'") != NULL);
}

TEST(the_step_ends_it)
{
    setenv(REPLAY_ENV, "12 gpt.replay-7 gpt", 1);
    EXPECT_OK(replay_goes_on(11, &e), &e);
    EXPECT_EQ(replay_goes_on(12, &e), SHD_ESTOPPED);
    EXPECT(strstr(e.text, "the replay of step 12 of model 'gpt' is done") != NULL);
    EXPECT_EQ(replay_goes_on(13, &e), SHD_ESTOPPED);
}

TEST(what_reaches_beyond_the_fork_is_refused)
{
    setenv(REPLAY_ENV, "12 gpt.replay-7 gpt", 1);
    EXPECT_EQ(replay_allows("shd_restore()", &e), SHD_ENOTSUP);
    EXPECT(strstr(e.text, "shd_restore() in a worker that shardctl replay has started") != NULL);
}

/* A worker that took it for "no replay" would train the run itself. */
TEST(a_text_that_is_none_is_an_error)
{
    static const char *const bad[] = { "12", "12 a", "12 a b c", "x a b", " ", "12 a b " };
    char longer[3 * SPEC_NAME_BYTES_MAX] = "12 ";
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        setenv(REPLAY_ENV, bad[i], 1);
        EXPECT_EQ(replay_name("gpt", name, &e), SHD_EINVAL);
        EXPECT(strstr(e.text, "must be \"STEP FORK MODEL\"") != NULL);
        EXPECT_EQ(replay_goes_on(0, &e), SHD_EINVAL);
        EXPECT_EQ(replay_allows("shd_restore()", &e), SHD_ENOTSUP);
    }
    memset(longer + 3, 'n', SPEC_NAME_BYTES_MAX);
    strcat(longer, " gpt");
    setenv(REPLAY_ENV, longer, 1);
    EXPECT_EQ(replay_name("gpt", name, &e), SHD_EINVAL);
}

TEST_MAIN()
