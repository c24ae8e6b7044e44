/* The step core where steps have different numbers of micro-batches: what is taken and refused, and
 * what a successor knows of them, at each point of the step that changes the number. */
#include <math.h>

#include "daemon/core/ledger.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_init.h"
#include "daemon/core/step_set.h"
#include "proto/base/check.h"
#include "proto/spec/ramp.h"
#include "proto/spec/settings.h"
#include "tests/lib/test.h"

#define UNITS 2u
#define MOST  6u

static const struct ramp ramp = { 2, { { 0, 2 }, { 1, 4 } } };
static const uint32_t one_group = 1;

struct rig {
    struct ledger ledger;
    void *ledger_memory;
    uint64_t ledger_bytes;
    void *memory;
    struct step *core;
    struct step_action running[STEP_ACTIONS_MAX * UNITS];
    uint32_t running_count, credits, stale, sealed;
    step_ref ref;
};

static struct rig rig;
static struct shd_err e;

static void carry_out(const struct step_actions *actions)
{
    for (uint32_t i = 0; i < actions->count; i++) {
        const struct step_action *a = &actions->items[i];
        rig.credits += a->kind == STEP_DO_CREDIT && !a->stale;
        rig.stale += a->kind == STEP_DO_CREDIT && a->stale;
        rig.sealed += a->kind == STEP_DO_SEALED;
        if (a->kind <= STEP_DO_ZERO || a->kind == STEP_DO_APPLY)
            rig.running[rig.running_count++] = *a;
    }
}

/* On the ledger as it is: of a model that was just made, or of one whose daemon has died. */
static void start_core(void)
{
    struct step_actions actions;
    rig.running_count = 0;
    EXPECT_OK(ledger_adopt(&rig.ledger, rig.ledger_memory, rig.ledger_bytes, &e), &e);
    rig.core = step_init(rig.memory, &rig.ledger, /* frozen= */ NULL);
    EXPECT_OK(step_ramp(rig.core, &ramp, 1, &e), &e);
    for (uint32_t u = 0; u < UNITS; u++) {
        step_resume(rig.core, u, &actions);
        carry_out(&actions);
    }
}

static void start(void)
{
    const struct ledger_shape shape = {
        .name = "m", .spec = "{}", .spec_bytes = 2, .owners = 1, .units = UNITS, .micros = MOST
    };
    rig = (struct rig){ 0 };
    EXPECT_OK(ledger_bytes(&shape, &rig.ledger_bytes, &e), &e);
    rig.ledger_memory = aligned_alloc(128, rig.ledger_bytes);
    rig.memory = malloc(step_bytes(UNITS, MOST));
    CHECK(rig.ledger_memory != NULL && rig.memory != NULL);
    memset(rig.ledger_memory, 0, rig.ledger_bytes);
    ledger_init(&rig.ledger, rig.ledger_memory, &shape);
    start_core();
}

static void stop(void)
{
    free(rig.ledger_memory);
    free(rig.memory);
}

static int give(uint64_t step, uint32_t unit, uint32_t micro)
{
    const double metric = 1;
    struct step_actions actions;
    const int r = step_return(rig.core, ++rig.ref, step, unit, micro, false, &metric, 1, &actions,
                              &e);
    if (r == SHD_OK)
        carry_out(&actions);
    return r;
}

static void finish_one(void)
{
    const struct step_action a = rig.running[0];
    struct step_actions actions;
    struct fixsum sum;
    fixsum_init(&sum);
    rig.running_count--;
    memmove(rig.running, rig.running + 1, rig.running_count * sizeof a);
    if (a.done.word != NULL)
        atomic_store(a.done.word, a.done.value);
    if (a.kind == STEP_DO_APPLY)
        step_applied(rig.core, a.unit, &actions);
    else
        step_accumulated(rig.core, a.unit, a.last || a.kind == STEP_DO_SUM ? &sum : NULL, true,
                         &actions);
    carry_out(&actions);
}

static void finish_all(void)
{
    while (rig.running_count > 0)
        finish_one();
}

static int try_commit(uint64_t step, uint32_t micro_batches, struct decision *ret_counts)
{
    const struct decision d = { .scale = 1, .lr = 1, .micro_batches = micro_batches };
    struct step_actions actions;
    enum step_committed how;
    const int r = step_commit(rig.core, step, &d, (struct step_blob){ NULL, 0 }, ret_counts, &how,
                              &actions, &e);
    if (r == SHD_OK)
        carry_out(&actions);
    return r;
}

static void commit(uint64_t step)
{
    struct decision counts = { 0 };
    EXPECT_OK(try_commit(step, 0, &counts), &e);
}

static uint64_t set(uint32_t micros, uint64_t at)
{
    struct settings change = { .count = settings_count(one_group) };
    uint64_t from = UINT64_MAX;
    for (uint32_t i = 0; i < change.count; i++)
        change.numbers[i] = (double)NAN;
    change.numbers[setting_micros(one_group)] = micros > 0 ? micros : SETTINGS_BACK;
    EXPECT_OK(step_set(rig.core, &change, at, 0, &from, &e), &e);
    return from;
}

static void give_all(uint64_t step, uint32_t micros)
{
    for (uint32_t micro = 0; micro < micros; micro++)
        for (uint32_t u = 0; u < UNITS; u++)
            EXPECT_OK(give(step, u, micro), &e);
    finish_all();
}

TEST(steps_number_is_what_seals_it_and_more_is_refused)
{
    struct step_prepared p;
    start();
    EXPECT_EQ(step_returns(rig.core), 2);
    EXPECT_EQ(step_cells(rig.core), 2 * UNITS);
    EXPECT_STATUS(give(0, 1, 2), SHD_ERANGE);
    EXPECT_HAS(e.text, "gradient 2 of unit 1, step 0 has 2 of each");
    EXPECT_EQ(step_cells_waiting(rig.core), 0);
    give_all(0, 2);
    EXPECT_EQ(rig.sealed, 1);
    EXPECT_OK(step_prepare(rig.core, 0, &p, &e), &e);
    EXPECT_EQ(p.reported, 2);
    stop();
}

/* Gradients of the larger step are taken while the smaller one is applied, and a successor goes on
 * with it at each point. */
TEST(larger_step_begins_while_the_smaller_one_is_applied)
{
    for (uint32_t crash = 0; crash < 8; crash++) {
        struct step_prepared p;
        start();
        give_all(0, 2);
        if (crash == 1) { /* sums are formed anew */
            start_core();
            finish_all();
        }
        commit(0);
        if (crash == 2)
            start_core();
        EXPECT_EQ(step_phase(rig.core), STEP_APPLYING);
        EXPECT_EQ(step_returns(rig.core), 4);
        EXPECT_EQ(step_returns_before(rig.core), 2);
        EXPECT_OK(give(1, 0, 3), &e);
        EXPECT_STATUS(give(1, 0, 4), SHD_ERANGE);
        EXPECT_OK(give(0, 0, 1), &e); /* late: it was in */
        finish_one();                 /* unit 0 is applied, unit 1 is not */
        if (crash == 3)
            start_core();
        EXPECT_OK(give(1, 0, 0), &e);
        if (crash == 4)
            start_core();
        finish_all();
        EXPECT_EQ(step_now(rig.core), 1);
        EXPECT_EQ(step_cells(rig.core), 4 * UNITS);
        if (crash == 5)
            start_core();
        give_all(1, 3); /* those of before come twice, or were lost with their daemon */
        if (crash == 6)
            start_core();
        EXPECT_EQ(step_phase(rig.core), STEP_OPEN);
        EXPECT_EQ(rig.sealed, crash == 1 ? 2 : 1);
        give_all(1, 4);
        EXPECT_EQ(step_phase(rig.core), STEP_SEALED);
        if (crash == 7) {
            start_core();
            finish_all();
        }
        EXPECT_OK(step_prepare(rig.core, 1, &p, &e), &e);
        EXPECT_EQ(p.reported, 4);
        commit(1);
        finish_all();
        EXPECT_EQ(step_returns_before(rig.core), 4);
        stop();
    }
}

/* Owner 0 says what is set in the commit of the step before, whatever it was sent, and a successor
 * goes on with it at each point. */
TEST(number_that_is_set_is_said_by_owner_0_in_the_commit_before)
{
    for (uint32_t crash = 0; crash < 6; crash++) {
        struct decision counts = { 0 };
        struct step_prepared p;
        start();
        EXPECT_EQ(set(5, 0), 1);
        EXPECT_EQ(step_returns(rig.core), 2);
        if (crash == 1)
            start_core();
        give_all(0, 2);
        EXPECT_OK(step_prepare(rig.core, 0, &p, &e), &e);
        EXPECT(p.settings == NULL); /* nothing that this step is decided with */
        EXPECT_EQ(set(3, 0), 1);    /* prepared or not, the commit has not said it */
        if (crash == 2) {
            start_core();
            finish_all();
        }
        EXPECT_OK(try_commit(0, 6, &counts), &e);
        EXPECT_EQ(counts.micro_batches, 3);
        EXPECT_EQ(set(1, 0), 2); /* now it is */
        if (crash == 3)
            start_core();
        EXPECT_EQ(step_returns(rig.core), 3);
        EXPECT_EQ(step_returns_before(rig.core), 2);
        EXPECT_STATUS(give(1, 0, 3), SHD_ERANGE);
        EXPECT_OK(give(1, 0, 2), &e);
        finish_all();
        if (crash == 4)
            start_core();
        EXPECT_OK(try_commit(0, 6, &counts), &e); /* again: as it is on record */
        EXPECT_EQ(counts.micro_batches, 3);
        EXPECT_EQ(set(0, 3), 3);
        give_all(1, 3);
        EXPECT_EQ(step_phase(rig.core), STEP_SEALED);
        commit(1);
        finish_all();
        EXPECT_EQ(step_returns(rig.core), 1);
        EXPECT_EQ(step_returns_before(rig.core), 3);
        give_all(2, 1);
        commit(2);
        if (crash == 5)
            start_core();
        EXPECT_EQ(step_returns(rig.core), 4); /* as the spec says again */
        EXPECT_EQ(step_returns_before(rig.core), 1);
        finish_all();
        stop();
    }
}

/* The others take what owner 0 has recorded, if it can be. */
TEST(another_owner_takes_the_number_that_it_is_told)
{
    struct decision counts = { 0 };
    start();
    rig.ledger.head->owners = 2;
    rig.ledger.head->owner = 1;
    start_core();
    set(1, 0); /* nobody sets it here: it says nothing of its own */
    give_all(0, 2);
    EXPECT_STATUS(try_commit(0, MOST + 1, &counts), SHD_EINVAL);
    EXPECT_HAS(e.text, "with 7 micro-batches for the next one, of at most 6 times 1");
    EXPECT_OK(try_commit(0, MOST, &counts), &e);
    EXPECT_EQ(counts.micro_batches, MOST);
    EXPECT_EQ(step_returns(rig.core), MOST);
    finish_all();
    stop();
}

/* A mean's sum is of the step's own number of values, not of those that the step could have. */
TEST(mean_counts_the_steps_own_micro_batches)
{
    start();
    step_means(rig.core, 1);
    give_all(0, 2);
    commit(0);
    EXPECT_EQ(rig.ledger.unit[1].took, 2);
    stop();
}

TEST(ledgers_numbers_must_be_the_models)
{
    static const struct ramp less = { 1, { { 0, 1 } } };
    start();
    give_all(0, 2);
    rig.core = step_init(rig.memory, &rig.ledger, NULL);
    EXPECT_STATUS(step_ramp(rig.core, &less, 1, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "2 gradients of step 0, which has 1");
    start_core();
    finish_all();
    commit(0);
    rig.ledger.chosen[1].micro_batches = MOST + 1;
    rig.core = step_init(rig.memory, &rig.ledger, NULL);
    EXPECT_STATUS(step_ramp(rig.core, &ramp, 1, &e), SHD_ESEGMENT);
    EXPECT_HAS(e.text, "decision of step 0 says 7 micro-batches for the next one, of at most 6");
    stop();
}

TEST_MAIN()
