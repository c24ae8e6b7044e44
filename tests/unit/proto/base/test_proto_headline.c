/* Who holds training up: graphs of waits as daemons report them, and the one sentence. */
#include <string.h>

#include "proto/base/headline.h"
#include "tests/lib/test.h"

#define WAITS_MAX 300u

static struct headline_wait waits[WAITS_MAX];
static struct headline_daemon daemons[2];
static struct headline_view view;
static struct headline h;

static void begin(void)
{
    memset(waits, 0, sizeof waits);
    daemons[0] = (struct headline_daemon){ .process = { 70, "cpu0", "sleeping" }, .answers = true };
    daemons[1] = (struct headline_daemon){ .process = { 71, "cpu1", "sleeping" }, .answers = true };
    view = (struct headline_view){ daemons, waits, 2, 0 };
}

static struct headline_process worker(int64_t pid, const char *state)
{
    return (struct headline_process){ pid, "shd-gpt", state };
}

static struct headline_wait *add(int64_t who, const char *state, double since_s, const char *text)
{
    struct headline_wait *w = &waits[view.wait_count++];
    *w = (struct headline_wait){ .who = worker(who, state), .text = text, .since_s = since_s };
    return w;
}

static void on(struct headline_wait *w, int64_t pid, const char *state)
{
    w->on[w->on_count++] = worker(pid, state);
}

TEST(short_waits_make_no_headline)
{
    begin();
    EXPECT(!headline_make(&view, &h));
    on(add(11, "sleeping", 0.9, ""), 12, "running");
    EXPECT(!headline_make(&view, &h));
    EXPECT_STR(h.text, "");
    EXPECT_EQ(h.pid, 0);
}

TEST(stopped_worker_is_named_with_what_to_do)
{
    begin();
    on(add(11, "sleeping", 3.24,
           "shd-gpt (pid 11) waits 3.2 s for micro-batch 1 of step 7: shd-gpt (pid 13, stopped) "
           "has it"),
       13, "stopped");
    EXPECT(headline_make(&view, &h));
    EXPECT_STR(h.text, "shd-gpt (pid 13) is stopped: 1 worker waits 3.2 s for it (micro-batch 1 of "
                       "step 7)");
    EXPECT_HAS(h.remedy, "kill -CONT 13 lets it go on; after kill -9 13 `shardctl run` starts");
    EXPECT(h.halted && h.pid == 13);
    waits[0].since_s = 0.3; /* for one that does not run at all that is long enough */
    EXPECT(headline_make(&view, &h));
}

TEST(worker_that_runs_is_named_with_its_state)
{
    begin();
    on(add(11, "sleeping", 12, ""), 13, "running");
    on(add(12, "sleeping", 14, ""), 13, "running");
    EXPECT(headline_make(&view, &h));
    EXPECT_STR(h.text, "2 workers wait 14.0 s for shd-gpt (pid 13, running)");
    EXPECT_HAS(h.remedy, "it computes, or hangs");
    EXPECT(!h.halted && h.pid == 13);
}

/* 11 and 12 wait for 13, which waits for 14: the longest wait names 13, and is not the root. */
TEST(root_is_who_waits_for_nobody_itself)
{
    begin();
    on(add(11, "sleeping", 30, ""), 13, "sleeping");
    on(add(12, "sleeping", 30, ""), 13, "sleeping");
    on(add(13, "sleeping", 20, ""), 14, "running");
    EXPECT(headline_make(&view, &h));
    EXPECT_EQ(h.pid, 14);
    EXPECT_HAS(h.text, "3 workers wait 20.0 s for shd-gpt (pid 14, running)");
}

/* What a stopped process says it waits for was true before it was stopped. */
TEST(waits_of_one_that_is_stopped_count_for_nothing)
{
    begin();
    on(add(13, "stopped", 50,
           "shd-gpt (pid 13, stopped) waits 50.0 s for unit 'h0' at step 7: it is published here"),
       12, "running");
    on(add(11, "sleeping", 20, ""), 13, "stopped");
    EXPECT(headline_make(&view, &h));
    EXPECT_EQ(h.pid, 13);
    EXPECT_HAS(h.text, "(pid 13) is stopped: 1 worker waits 20.0 s for it");
    view.wait_count = 1; /* and nobody waits for it */
    EXPECT(!headline_make(&view, &h));
}

TEST(who_is_stopped_comes_before_who_is_waited_for_by_more)
{
    begin();
    on(add(11, "sleeping", 30, ""), 13, "running");
    on(add(12, "sleeping", 30, ""), 13, "running");
    on(add(15, "sleeping", 2, ""), 14, "stopped");
    EXPECT(headline_make(&view, &h));
    EXPECT_EQ(h.pid, 14);
}

/* One daemon's commit waits for a worker that another daemon's wait is held up by. */
TEST(daemons_that_wait_are_links_of_the_chain_and_no_workers)
{
    begin();
    struct headline_wait *w = add(70, "running", 9, "cpu0 (pid 70) waits 9.0 s for the commit");
    w->who.name = "cpu0";
    on(w, 14, "gone");
    on(add(11, "sleeping", 8, ""), 70, "running");
    EXPECT(headline_make(&view, &h));
    EXPECT_EQ(h.pid, 14);
    EXPECT_HAS(h.text, "(pid 14) is gone: 1 worker waits 9.0 s for it");
    EXPECT_HAS(h.remedy, "start its rank again");
}

TEST(stopped_daemon_comes_first)
{
    begin();
    on(add(11, "sleeping", 30, ""), 13, "stopped");
    add(12, "sleeping", 31, "shd-gpt (pid 12) waits 31.0 s for unit 'h0' at step 7");
    daemons[1].answers = false;
    daemons[1].process.state = "stopped";
    EXPECT(headline_make(&view, &h));
    EXPECT_STR(h.text, "daemon cpu1 (pid 71) is stopped: 2 workers wait 31.0 s");
    EXPECT_HAS(h.remedy, "kill -CONT 71 lets it go on");
    EXPECT(h.halted && h.pid == 71);
}

TEST(daemon_that_is_away_or_stuck_is_named)
{
    begin();
    daemons[0] = (struct headline_daemon){ .process = { 0, "cpu0", "" },
                                           .why = "nobody listens at /run/x/cpu0.status" };
    EXPECT(headline_make(&view, &h));
    EXPECT_STR(h.text, "daemon cpu0 does not answer; nobody listens at /run/x/cpu0.status");
    EXPECT_HAS(h.remedy, "journalctl -u shardd@cpu0");
    daemons[0] = (struct headline_daemon){ .process = { 70, "cpu0", "running" },
                                           .answers = true,
                                           .stuck_s = 9 };
    EXPECT(headline_make(&view, &h));
    EXPECT_STR(h.text, "daemon cpu0 (pid 70) is stuck: its event loop has not turned for 9.0 s");
}

TEST(wait_that_names_nobody_is_its_own_headline)
{
    static const char text[] =
        "shd-gpt (pid 11) waits 5.0 s for micro-batch 3 of step 0: nobody is "
        "known to have it";
    begin();
    add(11, "sleeping", 5, text);
    EXPECT(headline_make(&view, &h));
    EXPECT_STR(h.text, text);
    EXPECT_HAS(h.remedy, "start the worker whose share that is");
    EXPECT_EQ(h.pid, 0);
}

TEST(circles_and_more_than_fits_end)
{
    begin();
    on(add(11, "sleeping", 5, "a"), 12, "sleeping");
    on(add(12, "sleeping", 6, "b"), 11, "sleeping");
    EXPECT(headline_make(&view, &h));
    EXPECT_STR(h.text, "b"); /* all wait for each other */
    begin();
    for (uint32_t i = 0; i < WAITS_MAX; i++)
        on(add(1000 + i, NULL, 5, NULL), 1001 + i, NULL);
    headline_make(&view, &h);
    begin();
    on(add(0, NULL, 5, NULL), 0, NULL);
    EXPECT(headline_make(&view, &h));
    EXPECT_STR(h.text, "");
}

TEST_MAIN()
