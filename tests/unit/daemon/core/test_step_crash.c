/* The step core thrown away at every event and at every fail point, and a new one on the ledger:
 * every gradient counts exactly once, in order.
 *
 * A small world that outlives the core: the ledger, what was summed and applied (with the last
 * operation done, as the kernels' trail has it), spilled gradients, and a worker that sends again
 * what was not credited. Time is counted in ticks: one at each event, one at each fail point. */

#include <math.h>

#include "daemon/core/step.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_guard.h"
#include "daemon/core/step_init.h"

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_guard.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/share/guard_window.h"
#include "proto/share/history.h"
#include "proto/share/unit_window.h"
#include "proto/spec/guard.h"
#include "tests/lib/test.h"

#define EVENTS_MAX   64u
#define CRASH_UNITS  3u /* unit 1 is frozen */
#define CRASH_MICROS 4u
#define CRASH_STEPS  4u
#define CRASH_ROWS   2u /* of the history */

struct world {
    struct ledger ledger;
    void *ledger_memory, *core_memory;
    struct step *core;
    uint64_t seed;
    uint64_t ticks, crash_at; /* 0: never */
    uint32_t crash_again;     /* so many ticks after that */
    bool in_core;
    jmp_buf crashed;
    uint32_t crashes;
    /* outlives the core */
    uint64_t op[CRASH_UNITS];
    uint32_t sum[CRASH_UNITS]; /* micro-batches in order, a digit each, from 1 */
    uint64_t spilled[CRASH_UNITS][CRASH_MICROS];
    uint64_t updates[CRASH_UNITS];
    bool credited[CRASH_STEPS][CRASH_UNITS][CRASH_MICROS];
    struct decision decision[CRASH_STEPS];
    bool decided[CRASH_STEPS];
    /* dies with it */
    struct step_action running[EVENTS_MAX];
    uint32_t running_count;
    struct {
        uint64_t step;
        uint32_t unit, micro;
    } of_ref[256];
    uint32_t ref_last;
    bool sent[CRASH_UNITS][CRASH_MICROS];
    uint64_t sent_step;
};

static uint8_t watched[CRASH_UNITS] = { 1, 0, 1 };
static uint32_t column[CRASH_UNITS] = { 1, 0, 2 };
static const struct guard guard = {
    .count = 1,
    .rules = { { .what = GUARD_UNIT_ZSCORE, .threshold = 3, .window = 2, .units = "a c" } },
    .watched = watched,
    .columns = 2,
    .rows = 3,
    .column = column,
};

static struct world *world; /* that fail points belong to */

static void tick(struct world *w)
{
    w->ticks++;
    if (w->ticks != w->crash_at)
        return;
    w->crash_at = w->crash_again > 0 ? w->ticks + w->crash_again : 0;
    w->crash_again = 0;
    w->crashes++;
    longjmp(w->crashed, 1);
}

static void on_fail_point(const char *name)
{
    (void)name;
    if (world->in_core)
        tick(world);
}

static bool crash_none(uint64_t step, uint32_t unit, uint32_t micro)
{
    return (step + unit + micro) % 4 == 0 || (step == 2 && unit == 2);
}

static void world_credit(struct world *w, const struct step_action *a)
{
    const uint64_t step = w->of_ref[a->ref].step;
    bool *credited = &w->credited[step][w->of_ref[a->ref].unit][w->of_ref[a->ref].micro];
    if (!a->stale)
        EXPECT(!*credited);
    *credited = true; /* stale: it is in, for nobody else sends here */
}

static void world_sealed(struct world *w)
{
    const uint64_t step = step_now(w->core);
    for (uint32_t u = 0; u < CRASH_UNITS; u++) {
        uint32_t want = 0;
        for (uint32_t m = 0; m < CRASH_MICROS; m++)
            want = u == 1 || crash_none(step, u, m) ? want : want * 10 + m + 1;
        EXPECT_EQ(w->sum[u], want); /* each once, ascending */
    }
    const struct step_prepared *p = step_record(w->core);
    EXPECT(p->step == step && p->metric_count == 1 && p->metrics[0] == 0 + 1 + 2 + 3);
}

static void world_take(struct world *w, const struct step_actions *actions)
{
    for (uint32_t i = 0; i < actions->count; i++) {
        const struct step_action *a = &actions->items[i];
        tick(w);
        if (a->kind == STEP_DO_CREDIT)
            world_credit(w, a);
        else if (a->kind == STEP_DO_SEALED)
            world_sealed(w);
        else if (a->kind != STEP_DO_PUBLISH && a->kind != STEP_DO_OPENED)
            w->running[w->running_count++] = *a;
    }
}

/* What a kernel does, once per operation's number however often it is asked. */
static void world_compute(struct world *w, const struct step_action *a)
{
    const uint32_t u = a->unit;
    if (a->kind == STEP_DO_SUM)
        return;
    if (a->kind == STEP_DO_ZERO) {
        w->sum[u] = 0;
        return;
    }
    const uint64_t op = a->done.op;
    if (op != w->op[u] && a->kind == STEP_DO_APPLY) {
        w->updates[u] += a->skip ? 0 : 1;
        EXPECT(a->skip || a->updates == w->updates[u]);
    } else if (op != w->op[u]) {
        if (a->ref == 0)
            EXPECT_EQ(w->spilled[u][a->micro], step_collecting(w->core) * 100 + a->micro);
        w->sum[u] = (a->first ? 0 : w->sum[u] * 10) + a->micro + 1;
    }
    w->op[u] = op;
    tick(w);
    const struct step_word done = a->done;
    atomic_store(done.word, done.value);
    tick(w);
}

static void world_finish(struct world *w, uint32_t index)
{
    const struct step_action a = w->running[index];
    struct step_actions actions;
    struct fixsum sum;
    fixsum_init(&sum);
    world_compute(w, &a);
    w->running[index] = w->running[--w->running_count];
    if (a.kind == STEP_DO_APPLY)
        step_applied(w->core, a.unit, &actions);
    else
        step_accumulated(w->core, a.unit,
                         a.kind == STEP_DO_SUM || (a.kind == STEP_DO_ACCUMULATE && a.last) ? &sum
                                                                                           : NULL,
                         true, &actions);
    world_take(w, &actions);
}

static void world_send(struct world *w, uint32_t unit, uint32_t micro)
{
    const uint64_t step = step_collecting(w->core);
    const double metric = micro;
    struct step_actions actions;
    struct shd_err e;
    if (w->sent_step != step)
        memset(w->sent, 0, sizeof w->sent);
    w->sent_step = step;
    if (step >= CRASH_STEPS || unit == 1 || w->sent[unit][micro] || w->credited[step][unit][micro])
        return;
    w->sent[unit][micro] = true;
    const uint32_t ref = ++w->ref_last;
    CHECK(ref < ARRAY_SIZE(w->of_ref));
    w->of_ref[ref].step = step;
    w->of_ref[ref].unit = unit;
    w->of_ref[ref].micro = micro;
    EXPECT_OK(step_return(w->core, ref, step, unit, micro, crash_none(step, unit, micro), &metric,
                          1, &actions, &e),
              &e);
    world_take(w, &actions);
    if (!step_waits(w->core, unit, micro, ref) || test_random(&w->seed) % 2 == 0)
        return;
    w->spilled[unit][micro] = step * 100 + micro;
    tick(w);
    step_spilled(w->core, unit, micro, ref, SHD_F32, &actions);
    world_take(w, &actions);
}

static void world_commit(struct world *w)
{
    const uint64_t step = step_now(w->core);
    const struct decision mine = { .skip = step == 1, .scale = 1, .lr = (double)w->ticks };
    struct decision counts;
    struct step_actions actions;
    enum step_committed how;
    struct shd_err e;
    step_seen(w->core, (double)step + 0.5, 1000 + step);
    const double norms[2] = { (double)step + 0.25, 1 };
    EXPECT_OK(step_seen_units(w->core, (const uint8_t *)norms, sizeof norms, &e), &e);
    EXPECT_OK(step_commit(w->core, step, &mine, (struct step_blob){ &step, sizeof step }, &counts,
                          &how, &actions, &e),
              &e);
    tick(w);
    w->decision[step] = counts;
    w->decided[step] = true;
    world_take(w, &actions);
}

/* The last steps that were committed, whole, and no other. */
static void world_history(const struct ledger *l)
{
    const uint64_t commits = atomic_load(&l->head->commits);
    const uint64_t first = commits > CRASH_ROWS ? commits - CRASH_ROWS : 0;
    struct history_row rows[CRASH_STEPS];
    uint64_t from = 0;
    const uint32_t count = history_read(l->history, l->head->history_slots, commits, &from, rows,
                                        CRASH_STEPS);
    EXPECT_EQ(from, commits);
    EXPECT_EQ(count, commits - first);
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t step = first + i;
        EXPECT(rows[i].step == step && rows[i].time_ns == 1000 + step);
        EXPECT(rows[i].norm == (double)step + 0.5 && rows[i].skipped == (step == 1));
        EXPECT(rows[i].metric_count == 1 && rows[i].metrics[0] == 0 + 1 + 2 + 3);
    }
}

/* Of the last two steps that were committed and not skipped. */
static void world_window(const struct world *w)
{
    const uint64_t commits = step_now(w->core);
    const double last = commits == 2 ? 0.25 : (double)commits - 0.75;
    const double before = commits == 3 ? 0.25 : last - 1;
    const double x[2] = { last, before };
    double limits[CRASH_UNITS * GUARD_RULES_MAX];
    EXPECT_EQ(step_unit_limits(w->core, 0, CRASH_UNITS, limits), 2);
    if (commits < 3)
        EXPECT(isinf(limits[0]) && isinf(limits[1]));
    else
        EXPECT(limits[0] == guard_window_limit(&guard.rules[0], x) && limits[1] > 1);
}

/* A new core on the ledger: nothing that was promised is gone. */
static void world_recover(struct world *w)
{
    struct ledger adopted;
    struct decision last;
    struct shd_err e;
    w->running_count = w->ref_last = 0;
    memset(w->sent, 0, sizeof w->sent);
    EXPECT_OK(ledger_adopt(&adopted, w->ledger_memory, w->ledger.head->bytes, &e), &e);
    w->core = step_init(w->core_memory, &adopted, (const bool[]){ false, true, false });
    step_skips_idle(w->core, 2);
    step_guard(w->core, &guard);
    for (uint64_t k = 0; k < CRASH_STEPS && w->decided[k]; k++)
        EXPECT(step_collecting(w->core) > k);
    const uint64_t commits = step_collecting(w->core);
    world_history(&adopted);
    world_window(w);
    if (commits > 0 && w->decided[commits - 1])
        EXPECT(step_last_decision(w->core, &last) && last.lr == w->decision[commits - 1].lr);
    if (commits > 0) {
        const struct step_blob blob = step_last_blob(w->core);
        EXPECT(blob.bytes == sizeof commits && *(const uint64_t *)blob.data == commits - 1);
    }
    for (uint32_t u = 0; u < CRASH_UNITS; u++) {
        struct step_actions actions;
        step_resume(w->core, u, &actions);
        world_take(w, &actions);
    }
}

static void world_run(struct world *w)
{
    for (uint32_t turn = 0; step_now(w->core) < CRASH_STEPS; turn++) {
        EXPECT(turn < 10000); /* something credited is gone, and nobody sends it again */
        const uint64_t random = test_random(&w->seed) >> 33;
        tick(w);
        if (step_phase(w->core) == STEP_SEALED)
            world_commit(w);
        else if (w->running_count > 0 && random % 3 == 0)
            world_finish(w, 0); /* kernels run in order */
        else
            world_send(w, (uint32_t)(random / 3 % CRASH_UNITS),
                       (uint32_t)(random / 16 % CRASH_MICROS));
    }
    world_history(&w->ledger);
    world_window(w);
    for (uint32_t u = 0; u < CRASH_UNITS; u++) { /* step 1 is skipped, unit 2 was idle in step 2 */
        EXPECT_EQ(w->updates[u], u == 1 ? 0 : CRASH_STEPS - 1 - (u == 2));
        EXPECT_EQ(step_unit_updates(w->core, u), CRASH_STEPS - 1 - (u == 2));
    }
}

/* Returns the ticks of the whole run. */
static uint64_t run_with_crash(uint64_t seed, uint64_t crash_at, uint32_t crash_again)
{
    static struct world w;
    static uint8_t *ledger, *core;
    const struct ledger_shape shape = { .name = "m",
                                        .spec = "{}",
                                        .spec_bytes = 2,
                                        .owners = 1,
                                        .units = CRASH_UNITS,
                                        .micros = CRASH_MICROS,
                                        .history_slots = CRASH_ROWS + 1,
                                        .window = step_guard_shape(&guard, 0) };
    uint64_t bytes;
    struct shd_err e;
    CHECK(ledger_bytes(&shape, &bytes, &e) == SHD_OK);
    if (ledger == NULL) {
        ledger = aligned_alloc(128, bytes);
        core = malloc(step_bytes(CRASH_UNITS, CRASH_MICROS));
    }
    CHECK(ledger != NULL && core != NULL);
    memset(ledger, 0, bytes - 2 * LEDGER_BLOB_BYTES); /* blobs lie behind the rest */
    w = (struct world){ .ledger_memory = ledger, .core_memory = core, .seed = seed };
    w.crash_at = crash_at;
    w.crash_again = crash_again;
    ledger_init(&w.ledger, ledger, &shape);
    memset(w.ledger.guard, 0, sizeof *w.ledger.guard); /* behind them */
    memset(w.ledger.window, 0, unit_window_bytes(guard.rows, guard.columns));
    world = &w;
    fail_point_hook = on_fail_point;
    (void)setjmp(w.crashed); /* a crash goes on from here */
    w.in_core = true;
    world_recover(&w);
    world_run(&w);
    w.in_core = false;
    fail_point_hook = NULL;
    EXPECT_EQ(w.crashes, (crash_at > 0) + (crash_at > 0 && crash_again > 0 && w.crash_at == 0));
    return w.ticks;
}

TEST(core_thrown_away_at_any_event_or_fail_point_loses_and_doubles_nothing)
{
    uint64_t runs = 0;
    for (uint64_t n = 1; n <= 4; n++) {
        const uint64_t seed = test_seed(n);
        const uint64_t ticks = run_with_crash(seed, 0, 0);
        for (uint64_t at = 1; at < ticks; at++)
            for (uint32_t again = 0; again < 14; again++, runs++)
                run_with_crash(seed, at, again);
    }
    printf("%" PRIu64 " crashed runs\n", runs);
}

TEST_MAIN()
