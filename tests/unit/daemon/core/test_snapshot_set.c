/* Which snapshots an owner has, which go, and who may have a model go back to one: on a ledger
 * alone, without memory or kernels. */
#include "daemon/core/snapshot_set.h"

#include "daemon/core/ledger_rewind.h"
#include "daemon/core/step.h"
#include "daemon/core/step_init.h"
#include "daemon/core/step_rewind.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

static struct ledger ledger;
static void *ledger_memory, *core_memory;
static struct step *core;
static struct snapshot_set set;
static struct shd_err e;

static void start(void)
{
    const struct ledger_shape shape = {
        .name = "m", .spec = "{}", .spec_bytes = 2, .owners = 1, .units = 1, .micros = 1
    };
    uint64_t bytes;
    EXPECT_OK(ledger_bytes(&shape, &bytes, &e), &e);
    ledger_memory = aligned_alloc(128, bytes);
    core_memory = malloc(step_bytes(1, 1));
    CHECK(ledger_memory != NULL && core_memory != NULL);
    memset(ledger_memory, 0, bytes);
    ledger_init(&ledger, ledger_memory, &shape);
    core = step_init(core_memory, &ledger, NULL);
    snapshot_set_init(&set);
}

static void stop(void)
{
    free(ledger_memory);
    free(core_memory);
}

static void keep(uint32_t item, uint64_t step)
{
    set.items[item] = (struct snapshot_item){ .state = SNAPSHOT_READY, .step = step };
}

TEST(step_that_is_asked_for_is_copied_when_it_is_open_and_there_is_memory)
{
    uint32_t item;
    start();
    EXPECT_EQ(snapshot_set_ask(&set, core, 0), SHD_EBUSY);
    EXPECT_EQ(snapshot_set_next(&set, &ledger, core), SNAPSHOT_NO_ITEM); /* no memory */
    set.items[2].state = SNAPSHOT_FREE;
    EXPECT_EQ(snapshot_set_next(&set, &ledger, core), 2);
    snapshot_set_begin(&set, 2, 0);
    EXPECT_EQ(snapshot_set_ask(&set, core, 0), SHD_EBUSY);
    EXPECT_EQ(set.want, UINT64_MAX); /* it is copied already */
    EXPECT(snapshot_set_copied(&set, &ledger, true, &item));
    EXPECT_EQ(item, 2);
    set.items[2].state = SNAPSHOT_READY;
    EXPECT_EQ(snapshot_set_ask(&set, core, 0), SHD_OK);
    EXPECT_EQ(snapshot_set_next(&set, &ledger, core), SNAPSHOT_NO_ITEM);
    stop();
}

TEST(oldest_goes_but_for_the_one_that_is_held)
{
    start();
    snapshot_set_options(&ledger, 0, 2);
    keep(0, 4);
    keep(1, 2);
    EXPECT_EQ(snapshot_set_excess(&set, &ledger), SNAPSHOT_NO_ITEM);
    keep(2, 6);
    EXPECT_EQ(snapshot_set_excess(&set, &ledger), 1);
    step_rewind_hold(&ledger, &(struct rewind_ask){ .step = 2, .consent = 5 });
    EXPECT_EQ(snapshot_set_excess(&set, &ledger), SNAPSHOT_NO_ITEM);
    keep(3, 8);
    EXPECT_EQ(snapshot_set_excess(&set, &ledger), 0);
    stop();
}

TEST(rewind_leaves_none_of_what_came_later)
{
    uint32_t item;
    start();
    keep(0, 4);
    keep(1, 2);
    keep(5, 6);
    set.want = 9;
    EXPECT_EQ(snapshot_set_later(&set, 2), 0);
    set.items[0].state = SNAPSHOT_FREE;
    EXPECT_EQ(snapshot_set_later(&set, 2), 5);
    set.items[5].state = SNAPSHOT_FREE;
    EXPECT_EQ(snapshot_set_later(&set, 2), SNAPSHOT_NO_ITEM);
    EXPECT_EQ(set.want, UINT64_MAX);
    EXPECT_EQ(snapshot_set_spare(&set), 5);
    set.items[5] = (struct snapshot_item){ .state = SNAPSHOT_FREE };
    snapshot_set_begin(&set, 5, 7); /* copied while the model goes back to step 2 */
    ledger.rewind->step = 2;
    atomic_store(&ledger.rewind->under_way, 1);
    EXPECT(!snapshot_set_copied(&set, &ledger, true, &item));
    EXPECT_EQ(set.items[5].state, SNAPSHOT_FREE);
    stop();
}

/* Of two that ask at once the later one counts, and none after another rewind is done. */
TEST(later_of_two_sessions_has_the_model_go_back)
{
    const struct rewind_ask a = { .step = 2, .consent = 10 }, b = { .step = 4, .consent = 11 };
    start();
    EXPECT(step_rewind_may_hold(&ledger, &a));
    step_rewind_hold(&ledger, &a);
    EXPECT_EQ(step_rewind_goes(&ledger, &a), REWIND_GOES);
    EXPECT(step_rewind_may_hold(&ledger, &b));
    step_rewind_hold(&ledger, &b);
    EXPECT(!step_rewind_may_hold(&ledger, &a));
    EXPECT_EQ(step_rewind_goes(&ledger, &a), REWIND_BY_ANOTHER);
    EXPECT_EQ(step_rewind_goes(&ledger, &b), REWIND_GOES);
    EXPECT(!step_rewind_followed(&ledger, 3));
    ledger.rewind->last_step = 4;
    atomic_store(&ledger.rewind->last, 3);
    EXPECT(step_rewind_followed(&ledger, 3));
    EXPECT_EQ(step_rewind_goes(&ledger, &b), REWIND_GONE);
    EXPECT_EQ(step_rewind_goes(&ledger, &a), REWIND_BY_ANOTHER);
    EXPECT(!step_rewind_may_hold(&ledger, &b)); /* it does not know of that one */
    stop();
}

/* A setting, or a put: what a rewind undoes is more than who asked for it knew. */
TEST(what_is_given_behind_the_hold_has_a_session_ask_anew)
{
    const struct rewind_ask a = { .step = 2, .consent = 10 }, b = { .step = 2, .consent = 11 };
    start();
    step_rewind_hold(&ledger, &a);
    ledger_rewind_renew(ledger.rewind);
    EXPECT_EQ(step_rewind_goes(&ledger, &a), REWIND_BY_ANOTHER);
    EXPECT_EQ(atomic_load(&ledger.rewind->held), 3); /* it stays */
    EXPECT(!step_rewind_may_hold(&ledger, &a));
    EXPECT(step_rewind_may_hold(&ledger, &b));
    step_rewind_hold(&ledger, &b);
    EXPECT_EQ(step_rewind_goes(&ledger, &b), REWIND_GOES);
    ledger_rewind_renew(/* r= */ NULL);
    stop();
}

/* The one before was by the clock of an owner 0 whose host is lost since. */
TEST(consent_of_a_rewind_that_is_done_is_in_nobodys_way)
{
    const struct rewind_ask before = { .step = 2, .consent = 1000 };
    const struct rewind_ask a = { .step = 2, .attempt = 3, .consent = 10 };
    const struct rewind_ask b = { .step = 4, .attempt = 3, .consent = 9 };
    start();
    step_rewind_hold(&ledger, &before);
    ledger.rewind->last_step = 2;
    atomic_store(&ledger.rewind->last, 3);
    EXPECT(!step_rewind_may_hold(&ledger, &a)); /* it is held still */
    atomic_store(&ledger.rewind->held, 0);
    EXPECT(step_rewind_may_hold(&ledger, &a));
    step_rewind_hold(&ledger, &a);
    EXPECT(!step_rewind_may_hold(&ledger, &b));
    EXPECT_EQ(step_rewind_goes(&ledger, &a), REWIND_GOES);
    stop();
}

TEST(what_is_read_is_neither_written_nor_given_back)
{
    snapshot_set_init(&set);
    set.items[3] = (struct snapshot_item){ .state = SNAPSHOT_FREE, .lent = 1 };
    EXPECT(snapshot_set_lent(&set));
    EXPECT_EQ(snapshot_set_in(&set, SNAPSHOT_FREE), SNAPSHOT_NO_ITEM);
    set.items[5] = (struct snapshot_item){ .state = SNAPSHOT_FREE };
    EXPECT_EQ(snapshot_set_in(&set, SNAPSHOT_FREE), 5);
    EXPECT_EQ(snapshot_set_spare(&set), SNAPSHOT_NO_ITEM);
    set.items[3].lent = 0;
    EXPECT(!snapshot_set_lent(&set));
    EXPECT_EQ(snapshot_set_spare(&set), 5);
}

TEST_MAIN()
