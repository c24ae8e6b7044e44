/* SIGTERM to guarded work reaches it whenever it comes. */
#include <signal.h>
#include <unistd.h>

#include "client/ctl/state/guard.h"
#include "tests/lib/test.h"

#define TRIES   200
#define ENDED   7
#define LIMIT_S 60u /* of a hang alone */

static volatile sig_atomic_t told;

static void on_term(int sig)
{
    (void)sig;
    told = 1;
}

/* Ends when it is told to, as what saves between steps does. */
static int work_until_told(void *arg)
{
    const uint64_t start_ns = clock_now_ns();
    (void)arg;
    while (!told && clock_now_ns() - start_ns < LIMIT_S * NS_PER_S)
        usleep(100);
    return told ? ENDED : 1;
}

/* The guard has SIGTERM before the work has begun. */
static int run_told(void (*handler)(int sig))
{
    sigset_t term, before;
    sigemptyset(&term);
    sigaddset(&term, SIGTERM);
    sigprocmask(SIG_BLOCK, &term, &before);
    raise(SIGTERM);
    const int code = guard_run(&(struct guarded){
        .work = work_until_told, .on_term = handler, .broken = "nothing was done" });
    sigprocmask(SIG_SETMASK, &before, NULL);
    return code;
}

TEST(a_term_before_the_work_begins_is_the_works_own)
{
    for (int i = 0; i < TRIES; i++)
        EXPECT_EQ(run_told(on_term), ENDED);
}

TEST(without_a_handler_it_ends_the_work)
{
    EXPECT_EQ(run_told(NULL), 128 + SIGTERM);
}

TEST_MAIN()
