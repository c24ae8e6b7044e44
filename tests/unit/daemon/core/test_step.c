/* The pure step core under a small random shell: gradients arrive in any order, doubled, late;
 * kernels finish in any order. What each (step, unit) summed is recorded and compared with what it
 * must be: every micro-batch that took part exactly once, in ascending order. Then the same with
 * the core thrown away at every event and every fail point, and a new one on the ledger. */
#include <math.h>
#include <stdatomic.h>

#include "daemon/core/ledger.h"
#include "daemon/core/ledger_back.h"
#include "daemon/core/ledger_rewind.h"
#include "daemon/core/ledger_set.h"
#include "daemon/core/step.h"
#include "daemon/core/step_commit.h"
#include "daemon/core/step_guard.h"
#include "daemon/core/step_init.h"
#include "daemon/core/step_put.h"
#include "daemon/core/step_rewind.h"
#include "daemon/core/step_set.h"
#include "proto/base/check.h"
#include "proto/spec/guard.h"
#include "tests/lib/test.h"

#define UNITS_MAX  9u
#define MICROS_MAX 7u
#define EVENTS_MAX 64u

struct shell {
    struct step *core;
    void *memory;
    struct ledger ledger;
    void *ledger_memory;
    uint32_t units, micros;
    uint64_t seed;
    /* kernels that run now */
    struct step_action running[EVENTS_MAX];
    uint32_t running_count;
    /* what was seen */
    uint32_t summed[UNITS_MAX][MICROS_MAX]; /* of the collecting step, in order */
    uint32_t summed_count[UNITS_MAX];
    bool sum_asked[UNITS_MAX];
    uint64_t version[UNITS_MAX];
    uint32_t applied_next;
    uint32_t credits, stale_credits, sealed, opened;
    /* requests: ref → what it carried */
    uint32_t ref_unit[4096], ref_micro[4096];
    uint64_t ref_step[4096];
    bool ref_open[4096];
    uint32_t ref_last;
};

static void shell_init(struct shell *sh, uint32_t units, uint32_t micros, uint64_t seed)
{
    memset(sh, 0, sizeof *sh);
    sh->units = units;
    sh->micros = micros;
    sh->seed = seed;
    const struct ledger_shape shape = {
        .name = "m", .spec = "{}", .spec_bytes = 2, .owners = 1, .units = units, .micros = micros
    };
    uint64_t bytes;
    struct shd_err e;
    CHECK(ledger_bytes(&shape, &bytes, &e) == SHD_OK);
    sh->ledger_memory = aligned_alloc(128, bytes);
    sh->memory = malloc(step_bytes(units, micros));
    CHECK(sh->memory != NULL && sh->ledger_memory != NULL);
    memset(sh->ledger_memory, 0, bytes);
    ledger_init(&sh->ledger, sh->ledger_memory, &shape);
    sh->core = step_init(sh->memory, &sh->ledger, /* frozen= */ NULL);
}

static void shell_deinit(struct shell *sh)
{
    free(sh->memory);
    free(sh->ledger_memory);
}

static uint32_t below(struct shell *sh, uint32_t n)
{
    CHECK(n > 0);
    return (uint32_t)(test_random(&sh->seed) >> 33) % n;
}

static void saw_credit(struct shell *sh, const struct step_action *a)
{
    EXPECT(a->ref <= sh->ref_last && sh->ref_open[a->ref]); /* answered exactly once */
    sh->ref_open[a->ref] = false;
    if (a->stale)
        sh->stale_credits++;
    else
        sh->credits++;
}

static void saw_accumulate(struct shell *sh, const struct step_action *a)
{
    const uint32_t u = a->unit, micro = sh->ref_micro[a->ref];
    EXPECT_EQ(sh->ref_unit[a->ref], u);
    EXPECT_EQ(sh->ref_step[a->ref], step_collecting(sh->core));
    EXPECT_EQ(a->first, sh->summed_count[u] == 0);
    EXPECT_EQ(a->last, micro + 1 == sh->micros);
    if (sh->summed_count[u] > 0)
        EXPECT(sh->summed[u][sh->summed_count[u] - 1] < micro);
    sh->summed[u][sh->summed_count[u]++] = micro;
    sh->sum_asked[u] = a->last;
}

static void take(struct shell *sh, const struct step_actions *actions)
{
    for (uint32_t i = 0; i < actions->count; i++) {
        const struct step_action *a = &actions->items[i];
        switch (a->kind) {
        case STEP_DO_CREDIT:
            saw_credit(sh, a);
            continue;
        case STEP_DO_PUBLISH:
            EXPECT_EQ(a->step, sh->version[a->unit] + 1);
            sh->version[a->unit] = a->step;
            sh->summed_count[a->unit] = 0;
            sh->sum_asked[a->unit] = false;
            continue;
        case STEP_DO_SEALED:
            sh->sealed++;
            continue;
        case STEP_DO_DROPPED:
            continue;
        case STEP_DO_OPENED:
            sh->opened++;
            EXPECT_EQ(a->step, sh->opened);
            for (uint32_t u = 0; u < sh->units; u++)
                EXPECT_EQ(sh->version[u], a->step);
            continue;
        case STEP_DO_ACCUMULATE:
            saw_accumulate(sh, a);
            break;
        case STEP_DO_SUM:
            EXPECT(sh->summed_count[a->unit] > 0);
            sh->sum_asked[a->unit] = true;
            break;
        case STEP_DO_ZERO:
            EXPECT_EQ(sh->summed_count[a->unit], 0);
            break;
        case STEP_DO_APPLY:
            EXPECT_EQ(a->unit, sh->applied_next); /* forward order */
            if (++sh->applied_next == sh->units)
                sh->applied_next = 0;
            break;
        }
        CHECK(sh->running_count < EVENTS_MAX);
        sh->running[sh->running_count++] = *a;
    }
}

static void finish_one(struct shell *sh, uint32_t index)
{
    const struct step_action a = sh->running[index];
    sh->running[index] = sh->running[--sh->running_count];
    struct step_actions actions;
    if (a.kind == STEP_DO_APPLY || a.kind == STEP_DO_ACCUMULATE) {
        const struct step_word done = a.done;
        atomic_store(done.word, done.value);
    }
    if (a.kind == STEP_DO_APPLY) {
        step_applied(sh->core, a.unit, &actions);
    } else {
        struct fixsum sum;
        fixsum_init(&sum);
        fixsum_add(&sum, 1.0 + a.unit);
        const bool summed = a.kind == STEP_DO_SUM || (a.kind == STEP_DO_ACCUMULATE && a.last);
        step_accumulated(sh->core, a.unit, summed ? &sum : NULL, true, &actions);
    }
    take(sh, &actions);
}

static int give(struct shell *sh, uint64_t step, uint32_t unit, uint32_t micro, bool none)
{
    const uint32_t ref = ++sh->ref_last;
    CHECK(ref < 4096);
    sh->ref_unit[ref] = unit;
    sh->ref_micro[ref] = micro;
    sh->ref_step[ref] = step;
    sh->ref_open[ref] = true;
    const double metrics[1] = { 10.0 + micro };
    struct step_actions actions;
    struct shd_err e;
    const int r = step_return(sh->core, ref, step, unit, micro, none, metrics, 1, &actions, &e);
    if (r == SHD_OK)
        take(sh, &actions);
    else
        sh->ref_open[ref] = false;
    return r;
}

static void finish_all(struct shell *sh)
{
    while (sh->running_count > 0)
        finish_one(sh, below(sh, sh->running_count));
}

static int commit(struct shell *sh, uint64_t step, bool skip, struct decision *ret)
{
    const struct decision d = { .skip = skip, .scale = 0.5f, .lr = 1e-3 + 1e-6 * (double)step };
    struct step_actions actions;
    struct shd_err e;
    enum step_committed how;
    const int r = step_commit(sh->core, step, &d, (struct step_blob){ NULL, 0 }, ret, &how,
                              &actions, &e);
    if (r == SHD_OK && how == STEP_COMMITTED_FIRST)
        take(sh, &actions);
    return r;
}

/* One random step: every cell once or twice, in random order, some as "took no part"; now and
 * then of the step before. Kernels finish at random in between. */
static void random_step(struct shell *sh, uint64_t step)
{
    uint32_t order[UNITS_MAX * MICROS_MAX * 2];
    bool none[UNITS_MAX * MICROS_MAX];
    const uint32_t cells = sh->units * sh->micros;
    uint32_t count = 0, participants[UNITS_MAX] = { 0 };
    for (uint32_t c = 0; c < cells; c++) {
        none[c] = below(sh, 4) == 0;
        participants[c / sh->micros] += none[c] ? 0 : 1;
        order[count++] = c;
        if (below(sh, 3) == 0)
            order[count++] = c;
    }
    for (uint32_t i = count; i-- > 1;) {
        const uint32_t j = below(sh, i + 1), t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
    sh->ref_last = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t c = order[i];
        if (step > 0 && below(sh, 8) == 0)
            EXPECT_OK(give(sh, step - 1, c / sh->micros, c % sh->micros, none[c]),
                      &(struct shd_err){ 0 });
        EXPECT_OK(give(sh, step, c / sh->micros, c % sh->micros, none[c]), &(struct shd_err){ 0 });
        while (sh->running_count > 0 && below(sh, 2) == 0)
            finish_one(sh, below(sh, sh->running_count));
    }
    finish_all(sh);
    for (uint32_t u = 0; u < sh->units; u++)
        EXPECT_EQ(sh->summed_count[u], participants[u]);
    for (uint32_t ref = 1; ref <= sh->ref_last; ref++)
        EXPECT(!sh->ref_open[ref]); /* every request was answered */
    EXPECT_EQ(sh->sealed, step + 1);
}

static void expect_prepared(struct shell *sh, uint64_t step)
{
    struct step_prepared p;
    struct shd_err e;
    EXPECT_OK(step_prepare(sh->core, step, &p, &e), &e);
    EXPECT(p.finite && !p.has_decision && p.metric_count == 1 && p.reported == sh->micros);
    double want = 0;
    for (uint32_t micro = 0; micro < sh->micros; micro++)
        want += 10.0 + micro;
    EXPECT_NEAR(p.metrics[0], want, 0);
    double sum = 0; /* units in which nobody took part add nothing */
    for (uint32_t u = 0; u < sh->units; u++)
        sum += sh->summed_count[u] > 0 ? 1.0 + u : 0;
    EXPECT_NEAR(fixsum_value(&p.sum), sum, 0);
}

TEST(random_orders_sum_every_gradient_once_in_ascending_order)
{
    const uint64_t first_seed = test_seed(20261121);
    for (uint64_t seed = first_seed; seed < first_seed + 400; seed++) {
        static struct shell sh;
        uint64_t pick = seed;
        shell_init(&sh, 1 + (uint32_t)(test_random(&pick) % UNITS_MAX),
                   1 + (uint32_t)(test_random(&pick) % MICROS_MAX), seed);
        uint64_t updates = 0;
        for (uint64_t step = 0; step < 5; step++) {
            random_step(&sh, step);
            expect_prepared(&sh, step);
            struct decision d;
            const bool skip = below(&sh, 4) == 0;
            updates += skip ? 0 : 1;
            EXPECT_OK(commit(&sh, step, skip, &d), &(struct shd_err){ 0 });
            EXPECT_EQ(d.skip, skip);
            EXPECT_OK(commit(&sh, step, !skip, &d), &(struct shd_err){ 0 });
            EXPECT_EQ(d.skip, skip); /* the first decision counts */
            if (below(&sh, 2) == 0)
                finish_all(&sh); /* else the next step's gradients arrive while APPLYING */
        }
        finish_all(&sh);
        EXPECT_EQ(step_now(sh.core), 5);
        EXPECT_EQ(step_updates(sh.core), updates);
        for (uint32_t u = 0; u < sh.units; u++)
            EXPECT_EQ(step_unit_updates(sh.core, u), updates);
        EXPECT(!step_units_counted_apart(sh.core));
        shell_deinit(&sh);
    }
}

TEST(out_of_order_gradient_waits_for_the_one_before)
{
    static struct shell sh;
    shell_init(&sh, 1, 3, 1);
    give(&sh, 0, 0, 2, false);
    give(&sh, 0, 0, 1, false);
    EXPECT_EQ(sh.running_count, 0);
    EXPECT_EQ(step_cells_waiting(sh.core), 2);
    EXPECT_EQ(step_unit_next(sh.core, 0), 0);
    give(&sh, 0, 0, 0, false);
    EXPECT_EQ(sh.running_count, 1);
    finish_all(&sh);
    EXPECT_EQ(step_phase(sh.core), STEP_SEALED);
    shell_deinit(&sh);
}

TEST(prepare_waits_until_sealed_and_keeps_its_record_until_the_next)
{
    static struct shell sh;
    struct step_prepared p;
    struct decision d;
    struct shd_err e;
    shell_init(&sh, 2, 1, 1);
    EXPECT_EQ(step_prepare(sh.core, 0, &p, &e), SHD_PENDING);
    EXPECT_STATUS(step_prepare(sh.core, 1, &p, &e), SHD_ESTEP);
    EXPECT_STATUS(step_prepare(sh.core, UINT64_MAX, &p, &e), SHD_ESTEP);
    give(&sh, 0, 0, 0, false);
    finish_all(&sh);
    EXPECT_EQ(step_prepare(sh.core, 0, &p, &e), SHD_PENDING);
    EXPECT_STATUS(commit(&sh, 0, false, &d), SHD_ESTEP); /* not sealed */
    give(&sh, 0, 1, 0, false);
    finish_all(&sh);
    EXPECT_OK(step_prepare(sh.core, 0, &p, &e), &e);
    EXPECT_OK(commit(&sh, 0, false, &d), &e);
    EXPECT_OK(step_prepare(sh.core, 0, &p, &e), &e); /* while APPLYING */
    EXPECT(p.has_decision && p.decision.lr == d.lr);
    EXPECT_EQ(step_prepare(sh.core, 1, &p, &e), SHD_PENDING);
    finish_all(&sh);
    EXPECT_OK(step_prepare(sh.core, 0, &p, &e), &e); /* and after */
    EXPECT(p.has_decision);
    random_step(&sh, 1);
    EXPECT_OK(step_prepare(sh.core, 0, &p, &e), &e); /* its record is gone, so is the step */
    EXPECT(p.over && !p.has_decision);
    EXPECT_OK(commit(&sh, 0, false, &d), &e);
    EXPECT_EQ(step_now(sh.core), 1);
    shell_deinit(&sh);
}

TEST(non_finite_gradients_can_only_be_skipped)
{
    static struct shell sh;
    struct decision d;
    struct step_actions actions;
    struct shd_err e;
    shell_init(&sh, 1, 1, 1);
    give(&sh, 0, 0, 0, false);
    const struct step_word done = sh.running[0].done;
    atomic_store(done.word, done.value);
    step_accumulated(sh.core, 0, &(struct fixsum){ 0 }, /* finite= */ false, &actions);
    sh.running_count = 0;
    take(&sh, &actions);
    EXPECT_STATUS(commit(&sh, 0, false, &d), SHD_EINVAL);
    EXPECT_OK(commit(&sh, 0, true, &d), &e);
    EXPECT(sh.running[0].kind == STEP_DO_APPLY && sh.running[0].skip);
    finish_all(&sh);
    EXPECT_EQ(step_now(sh.core), 1);
    EXPECT_EQ(step_updates(sh.core), 0);
    shell_deinit(&sh);
}

TEST(next_steps_gradient_waits_for_its_unit_to_be_applied)
{
    static struct shell sh;
    struct decision d;
    struct shd_err e;
    shell_init(&sh, 2, 1, 1);
    EXPECT_STATUS(give(&sh, 1, 0, 0, false), SHD_ESTEP);
    random_step(&sh, 0);
    EXPECT_OK(commit(&sh, 0, false, &d), &e);
    EXPECT_EQ(sh.running_count, 2); /* both APPLYs */
    give(&sh, 1, 1, 0, false);
    EXPECT_EQ(sh.running_count, 2); /* unit 1 is still being applied */
    finish_one(&sh, 0);             /* unit 0 applied */
    give(&sh, 1, 0, 0, false);      /* its accumulator is free: summed at once */
    EXPECT_EQ(sh.running_count, 2);
    EXPECT_EQ(step_phase(sh.core), STEP_APPLYING);
    finish_all(&sh);
    EXPECT_EQ(step_phase(sh.core), STEP_SEALED); /* step 1, complete as soon as it was opened */
    EXPECT_EQ(step_now(sh.core), 1);
    shell_deinit(&sh);
}

TEST(frozen_units_need_no_gradient_and_get_every_version)
{
    static struct shell sh;
    struct decision d, last;
    struct shd_err e;
    shell_init(&sh, 3, 2, 1);
    sh.core = step_init(sh.memory, &sh.ledger, (const bool[]){ true, false, true });
    EXPECT_EQ(step_cells(sh.core), 2);
    EXPECT(!step_last_decision(sh.core, &last));
    for (uint64_t step = 0; step < 3; step++) {
        sh.ref_last = 0;
        EXPECT_OK(give(&sh, step, 1, 1, false), &e);
        EXPECT_EQ(step_phase(sh.core), STEP_OPEN);
        EXPECT_OK(give(&sh, step, 1, 0, false), &e);
        finish_all(&sh);
        EXPECT_EQ(step_phase(sh.core), STEP_SEALED);
        EXPECT_OK(commit(&sh, step, false, &d), &e);
        EXPECT_EQ(sh.running_count, 3);
        for (uint32_t i = 0; i < sh.running_count; i++) /* frozen ones are only published */
            EXPECT_EQ(sh.running[i].skip, sh.running[i].unit != 1);
        finish_all(&sh);
        EXPECT(step_last_decision(sh.core, &last) && last.lr == d.lr);
    }
    EXPECT_EQ(step_now(sh.core), 3); /* OPENED checked the versions of all units */
    shell_deinit(&sh);
}

/* Also when whoever applies the step has not seen it being collected. Nor does the step count for
 * them. */
TEST(idle_units_that_skip_are_only_published)
{
    static struct shell sh;
    struct decision d;
    struct step_actions actions;
    struct shd_err e;
    shell_init(&sh, 3, 2, 1);
    step_skips_idle(sh.core, 1);
    step_skips_idle(sh.core, 2);
    for (uint64_t step = 0; step < 4; step++) {
        sh.ref_last = 0;
        for (uint32_t u = 0; u < 3; u++)
            for (uint32_t micro = 0; micro < 2; micro++) /* unit 2 has one of step 3 */
                EXPECT_OK(
                    give(&sh, step, u, micro, u != 2 ? step % 2 == 0 : step != 3 || micro == 1),
                    &e);
        finish_all(&sh);
        EXPECT_OK(commit(&sh, step, false, &d), &e);
        if (step == 1) {
            sh.core = step_init(sh.memory, &sh.ledger, NULL);
            step_skips_idle(sh.core, 1);
            step_skips_idle(sh.core, 2);
            step_resume(sh.core, 0, &actions);
            EXPECT_EQ(actions.count, 3);
            for (uint32_t u = 0; u < 3; u++)
                EXPECT(actions.items[u].skip == sh.running[u].skip &&
                       actions.items[u].updates == sh.running[u].updates);
        }
        EXPECT_EQ(sh.running_count, 3);
        for (uint32_t i = 0; i < 3; i++) {
            const uint32_t u = sh.running[i].unit;
            EXPECT_EQ(sh.running[i].skip, (u == 1 && step % 2 == 0) || (u == 2 && step != 3));
            EXPECT_EQ(sh.running[i].updates, u == 0   ? step + 1
                                             : u == 1 ? (step + 1) / 2
                                                      : step / 3);
        }
        finish_all(&sh);
    }
    EXPECT_EQ(step_now(sh.core), 4);
    EXPECT(step_updates(sh.core) == 4 && step_units_counted_apart(sh.core));
    shell_deinit(&sh);
}

static void commit_all_but(struct shell *sh, uint64_t step, uint32_t idle, bool skip)
{
    struct decision d;
    struct shd_err e = { 0 };
    sh->ref_last = 0;
    for (uint32_t u = 0; u < 3; u++)
        EXPECT_OK(give(sh, step, u, 0, /* none= */ u == idle), &e);
    finish_all(sh);
    EXPECT_OK(commit(sh, step, skip, &d), &e);
    finish_all(sh);
}

static void expect_counts(const struct shell *sh, uint64_t model, const uint64_t units[3])
{
    EXPECT_EQ(step_updates(sh->core), model);
    for (uint32_t u = 0; u < 3; u++)
        EXPECT_EQ(step_unit_updates(sh->core, u), units[u]);
}

/* Unit 0 is a mean, unit 2 skips idle steps. A skipped step counts for nobody; a put counts for
 * nobody, and may say how many count. */
TEST(updates_of_each_unit_are_counted)
{
    static struct shell sh;
    struct decision d, put = { .skip = true, .put = 5, .puts = 1 };
    enum step_committed how;
    struct step_actions actions;
    struct shd_err e = { 0 };
    shell_init(&sh, 3, 1, 1);
    step_means(sh.core, 0);
    step_skips_idle(sh.core, 2);
    commit_all_but(&sh, 0, 2, false);
    commit_all_but(&sh, 1, 0, false);
    commit_all_but(&sh, 2, 1, /* skip= */ true);
    commit_all_but(&sh, 3, 1, false);
    expect_counts(&sh, 3, (const uint64_t[]){ 3, 3, 2 });
    const uint64_t given[] = { 0, 1 + 70, 1 + 0 };
    for (uint64_t i = 0; i < 3; i++) { /* of none, of some, of all */
        put.updates = i == 2 ? 1 + 9 : 0;
        step_put_updates(sh.core, i == 1 ? given : NULL);
        EXPECT_OK(step_commit(sh.core, 4 + i, &put, (struct step_blob){ NULL, 0 }, &d, &how,
                              &actions, &e),
                  &e);
        take(&sh, &actions);
        finish_all(&sh);
        expect_counts(&sh, i == 2 ? 9 : 3,
                      i == 0   ? (const uint64_t[]){ 3, 3, 2 }
                      : i == 1 ? (const uint64_t[]){ 3, 70, 0 }
                               : (const uint64_t[]){ 9, 9, 9 });
        put.put++;
        put.puts++;
    }
    const uint64_t too_many[] = { 0, LEDGER_STEP_MAX + 2, 0 };
    EXPECT_STATUS(step_put_check_updates(sh.core, too_many, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "updates of unit 1");
    EXPECT_OK(step_put_check_updates(sh.core, given, &e), &e);
    sh.ledger.head->version = 4; /* as if an older build had made it */
    sh.core = step_init(sh.memory, &sh.ledger, NULL);
    EXPECT_STATUS(step_put_check_updates(sh.core, given, &e), SHD_ENOTSUP);
    EXPECT_OK(step_put_check_updates(sh.core, NULL, &e), &e);
    shell_deinit(&sh);
}

/* How many gradients a mean is of is known to who applies it, also to a successor, and when
 * gradients of the next step are in already; their squares are in no norm. */
TEST(means_count_what_took_part)
{
    struct fixsum squares;
    fixsum_init(&squares);
    fixsum_add(&squares, 1.0); /* unit 0's */
    fixsum_carry(&squares);
    for (uint32_t took = 0; took < 4; took++) {
        static struct shell sh;
        struct decision d;
        struct step_actions actions;
        struct shd_err e;
        shell_init(&sh, 2, 3, 1);
        step_means(sh.core, 1);
        for (uint32_t micro = 0; micro < 3; micro++) {
            EXPECT_OK(give(&sh, 0, 0, micro, false), &e);
            EXPECT_OK(give(&sh, 0, 1, 2 - micro, micro >= took), &e);
        }
        finish_all(&sh);
        EXPECT(memcmp(&squares, &step_record(sh.core)->sum, sizeof squares) == 0);
        EXPECT_OK(commit(&sh, 0, false, &d), &e);
        for (uint32_t micro = 0; micro < 3; micro++)
            EXPECT_OK(give(&sh, 1, 1, micro, true), &e);
        EXPECT_EQ(sh.running_count, 2);
        EXPECT(sh.running[0].took == 0 && !sh.running[0].skip);
        EXPECT(sh.running[1].took == took && sh.running[1].skip == (took == 0));
        sh.core = step_init(sh.memory, &sh.ledger, NULL);
        step_means(sh.core, 1);
        step_resume(sh.core, 0, &actions);
        EXPECT_EQ(actions.count, 2);
        EXPECT(actions.items[1].took == took && actions.items[1].skip == (took == 0));
        shell_deinit(&sh);
    }
}

/* A value that is not finite has the step skipped, as a gradient's has. */
TEST(a_mean_that_is_not_finite_counts)
{
    static struct shell sh;
    struct decision d;
    struct step_actions actions;
    struct fixsum sum;
    shell_init(&sh, 2, 1, 1);
    step_means(sh.core, 1);
    give(&sh, 0, 0, 0, false);
    finish_all(&sh);
    give(&sh, 0, 1, 0, false);
    fixsum_init(&sum);
    const struct step_word done = sh.running[0].done;
    atomic_store(done.word, done.value);
    sh.running_count = 0;
    step_accumulated(sh.core, 1, &sum, /* finite= */ false, &actions);
    take(&sh, &actions);
    EXPECT(step_phase(sh.core) == STEP_SEALED && !step_record(sh.core)->finite);
    EXPECT_STATUS(commit(&sh, 0, false, &d), SHD_EINVAL);
    shell_deinit(&sh);
}

TEST(commit_waits_while_a_successor_forms_the_sums_anew)
{
    static struct shell sh;
    struct decision d;
    struct step_actions actions;
    struct shd_err e;
    shell_init(&sh, 1, 1, 1);
    give(&sh, 0, 0, 0, false);
    finish_all(&sh);
    EXPECT_EQ(step_phase(sh.core), STEP_SEALED); /* and a worker was told so */
    sh.core = step_init(sh.memory, &sh.ledger, NULL);
    step_resume(sh.core, 0, &actions);
    EXPECT(actions.count == 1 && actions.items[0].kind == STEP_DO_SUM);
    EXPECT_EQ(commit(&sh, 0, false, &d), SHD_PENDING);
    sh.sealed = 0;
    sh.running_count = 0;
    sh.running[sh.running_count++] = actions.items[0];
    finish_all(&sh);
    EXPECT_EQ(sh.sealed, 1);
    EXPECT_OK(commit(&sh, 0, false, &d), &e);
    finish_all(&sh);
    EXPECT_EQ(step_now(sh.core), 1);
    shell_deinit(&sh);
}

TEST(arrived_is_told_from_needs_no_sender)
{
    static struct shell sh;
    shell_init(&sh, 2, 2, 1);
    give(&sh, 0, 0, 1, false);
    EXPECT(!step_micro_came(sh.core, 1));
    give(&sh, 0, 1, 1, true);
    EXPECT(step_micro_came(sh.core, 1) && !step_micro_in(sh.core, 1)); /* unit 0's waits */
    give(&sh, 0, 0, 0, false);
    finish_all(&sh);
    EXPECT(step_micro_in(sh.core, 1) && !step_micro_came(sh.core, 0));
    shell_deinit(&sh);
}

/* Steps go back and rounds do not: what carries an attempt of before is told from what comes now,
 * also of a step that is open again, or was committed before. */
TEST(what_was_given_up_is_told_by_its_attempt)
{
    static struct shell sh;
    struct rewind_record record;
    struct rewind_more more;
    uint64_t updates[2];
    uint8_t *blob = malloc(LEDGER_BLOB_BYTES);
    struct step_actions actions;
    struct shd_err e = { 0 };
    CHECK(blob != NULL);
    shell_init(&sh, 2, 3, 1);
    for (uint64_t step = 0; step < 4; step++) {
        struct decision d;
        if (step == 2)
            step_rewind_take(sh.core, &record, &more, updates, blob);
        random_step(&sh, step);
        EXPECT_OK(commit(&sh, step, /* skip= */ false, &d), &e);
        finish_all(&sh);
    }
    const uint64_t before = step_attempt(sh.core);
    EXPECT_STATUS(step_rewind(sh.core, 5, 0, NULL, &e), SHD_ESTEP);
    EXPECT_STATUS(step_rewind(sh.core, 2, before + 2, NULL, &e),
                  SHD_ERANGE); /* its round was there */
    EXPECT_OK(step_rewind(sh.core, 2, 0, &more, &e), &e);
    EXPECT_OK(step_rewind_drop(sh.core, &actions), &e);
    step_rewind_done(&sh.ledger, &record, &more, updates, blob);
    sh.core = step_init(sh.memory, &sh.ledger, NULL);
    EXPECT(step_now(sh.core) == 2 && step_updates(sh.core) == 2);
    EXPECT(step_attempt(sh.core) > before + 2);
    EXPECT_EQ(step_when(sh.core, 4, before), STEP_WHEN_PAST);
    EXPECT_EQ(step_when(sh.core, 2, before), STEP_WHEN_PAST);
    EXPECT_EQ(step_when(sh.core, 1, before), STEP_WHEN_PAST);
    EXPECT_EQ(step_when(sh.core, 2, step_attempt(sh.core)), STEP_WHEN_NOW);
    free(blob);
    shell_deinit(&sh);
}

/* -- Settings through a rewind ----------------------------------------------------------------- */

/* clip_norm, of a model of one group. */
static void set_clip(struct shell *sh, double to, uint64_t from)
{
    struct settings change = { .count = settings_count(1) };
    uint64_t at;
    struct shd_err e;
    for (uint32_t i = 0; i < change.count; i++)
        change.numbers[i] = (double)NAN;
    change.numbers[SETTINGS_CLIP_NORM] = to;
    EXPECT_OK(step_set(sh->core, &change, from, 0, &at, &e), &e);
    EXPECT_EQ(at, from);
}

static double clip_at(const struct shell *sh, uint64_t step)
{
    struct settings s;
    step_settings(sh->core, step, &s);
    return s.count > 0 ? setting_get(&s, SETTINGS_CLIP_NORM) : (double)NAN;
}

struct kept_step { /* to go back to */
    struct rewind_record record;
    struct rewind_more more;
    uint64_t updates[2];
    uint8_t *blob; /* [LEDGER_BLOB_BYTES] */
};

static void keep_step(struct shell *sh, struct kept_step *ret_kept)
{
    step_rewind_take(sh->core, &ret_kept->record, &ret_kept->more, ret_kept->updates,
                     ret_kept->blob);
}

/* times: as often as it is killed right before the last word of it, and once. */
static void go_back_to(struct shell *sh, const struct kept_step *to, bool keep_settings, int times)
{
    const struct rewind_ask ask = { .step = to->record.step, .keep_settings = keep_settings };
    struct step_actions actions;
    struct shd_err e;
    step_rewind_hold(&sh->ledger, &ask);
    EXPECT_OK(step_rewind(sh->core, to->record.step, 0, &to->more, &e), &e);
    EXPECT_OK(step_rewind_drop(sh->core, &actions), &e);
    for (int i = 0; i < times; i++) {
        step_rewind_done(&sh->ledger, &to->record, &to->more, to->updates, to->blob);
        if (i + 1 < times)
            atomic_store(&sh->ledger.rewind->under_way, 1);
    }
    sh->core = step_init(sh->memory, &sh->ledger, NULL);
    sh->sealed = sh->opened = (uint32_t)to->record.step;
    for (uint32_t u = 0; u < sh->units; u++)
        sh->version[u] = to->record.step;
}

TEST(what_was_set_behind_a_snapshot_stays_where_that_is_asked_for)
{
    static struct shell sh;
    struct kept_step to = { .blob = malloc(LEDGER_BLOB_BYTES) };
    struct shd_err e;
    CHECK(to.blob != NULL);
    shell_init(&sh, 1, 1, 1);
    set_clip(&sh, 1, 1);
    keep_step(&sh, &to);
    set_clip(&sh, 2, 3);
    for (uint64_t step = 0; step < 4; step++) {
        struct decision d;
        random_step(&sh, step);
        EXPECT_OK(commit(&sh, step, /* skip= */ false, &d), &e);
        finish_all(&sh);
    }
    set_clip(&sh, 2.5, 5); /* what is set is that of step 4 by then */
    for (int times = 1; times <= 3; times++) {
        go_back_to(&sh, &to, /* keep_settings= */ true, times);
        EXPECT(clip_at(&sh, 2) == 1 && clip_at(&sh, 3) == 2);
        set_clip(&sh, 2 + times, 5); /* also what was set since then */
    }
    go_back_to(&sh, &to, /* keep_settings= */ true, 2);
    EXPECT(clip_at(&sh, 3) == 2 && clip_at(&sh, 5) == 5);
    set_clip(&sh, 6, 6);
    go_back_to(&sh, &to, /* keep_settings= */ false, 2);
    EXPECT(clip_at(&sh, 2) == 1 && clip_at(&sh, 6) == 1);
    /* One that was killed before its word has done nothing, whatever it had written. */
    set_clip(&sh, 7, 7);
    step_rewind_hold(&sh.ledger, &(struct rewind_ask){ .step = 0, .keep_settings = true });
    EXPECT_OK(step_rewind(sh.core, 0, 0, &to.more, &e), &e);
    atomic_store(&sh.ledger.rewind->under_way, 0);
    EXPECT(clip_at(&sh, 7) == 7);
    go_back_to(&sh, &to, /* keep_settings= */ false, 1);
    EXPECT(clip_at(&sh, 7) == 1);
    free(to.blob);
    shell_deinit(&sh);
}

TEST(settings_without_room_refuse_a_rewind_that_is_to_keep_them)
{
    static struct shell sh;
    struct kept_step to = { .blob = malloc(LEDGER_BLOB_BYTES) };
    struct shd_err e = { 0 };
    CHECK(to.blob != NULL);
    shell_init(&sh, 1, 1, 1);
    keep_step(&sh, &to);
    for (uint64_t i = 0; i < SETTINGS_WAITS_MAX; i++)
        set_clip(&sh, i % 2 == 0 ? 1 : 2, 10 + i);
    to.more.kept.now = sh.ledger.settings->kept[0].now;
    to.more.kept.waiting = SETTINGS_WAITS_MAX; /* other ones */
    for (uint64_t i = 0; i < SETTINGS_WAITS_MAX; i++)
        to.more.kept.waits[i] = (struct settings_wait){ .from = 1000 + 2 * i,
                                                        .value = i % 2 == 0 ? 1 : 2 };
    step_rewind_hold(&sh.ledger, &(struct rewind_ask){ .step = 0, .keep_settings = true });
    EXPECT_STATUS(step_rewind(sh.core, 0, 0, &to.more, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "is more than the 384 changes that can wait for their steps");
    EXPECT(!ledger_rewinding(&sh.ledger, &(uint64_t){ 0 }) && clip_at(&sh, 10) == 1);
    free(to.blob);
    shell_deinit(&sh);
}

/* -- A guard that goes back -------------------------------------------------------------------- */

static const struct guard going_back = {
    .count = 1,
    .rules = { { .what = GUARD_NORM_ABOVE, .stop = true, .rewind = true, .threshold = 10 } }
};

static void begin_core(struct shell *sh)
{
    sh->core = step_init(sh->memory, &sh->ledger, NULL);
    step_guard(sh->core, &going_back);
}

/* What the rule does at the open step: as in struct guard_limits. */
static double told(const struct shell *sh)
{
    struct guard_limits limits;
    step_guard_limits(sh->core, &limits);
    EXPECT(limits.count == 3 && limits.numbers[0] == GUARD_NORM_ABOVE && limits.numbers[2] == 10);
    return limits.numbers[1];
}

/* The open step is above the limit, and decided as the rule says. */
static void veto(struct shell *sh)
{
    const uint64_t step = step_now(sh->core);
    const double stops = told(sh);
    const struct decision d = { .skip = true,
                                .guard = { .what = GUARD_NORM_ABOVE,
                                           .stop = stops > 0,
                                           .rewind = stops == 2,
                                           .value = 11,
                                           .bound = 10 } };
    struct decision counts;
    struct step_actions actions;
    enum step_committed how;
    struct shd_err e;
    random_step(sh, step);
    EXPECT_OK(
        step_commit(sh->core, step, &d, (struct step_blob){ NULL, 0 }, &counts, &how, &actions, &e),
        &e);
    take(sh, &actions);
    finish_all(sh);
}

static void go_back(struct shell *sh, const struct kept_step *to)
{
    struct step_actions actions;
    struct shd_err e;
    EXPECT_OK(step_rewind(sh->core, to->record.step, 0, &to->more, &e), &e);
    EXPECT_OK(step_rewind_drop(sh->core, &actions), &e);
    step_rewind_done(&sh->ledger, &to->record, &to->more, to->updates, to->blob);
    sh->sealed = sh->opened = (uint32_t)to->record.step;
    for (uint32_t u = 0; u < sh->units; u++)
        sh->version[u] = to->record.step;
    begin_core(sh);
}

/* Every step is above the limit: each is gone back for once, and skipped then; as many as there are
 * places for, until it goes back to a step behind them. What somebody else goes back from is none
 * of these. */
TEST(each_step_is_gone_back_for_once)
{
    static struct shell sh;
    struct kept_step early = { .blob = malloc(LEDGER_BLOB_BYTES) };
    struct kept_step late = { .blob = malloc(LEDGER_BLOB_BYTES) };
    CHECK(early.blob != NULL && late.blob != NULL);
    shell_init(&sh, 2, 1, 1);
    begin_core(&sh);
    keep_step(&sh, &early);
    for (uint64_t bad = 0; bad < LEDGER_BACK_STEPS; bad++) {
        while (step_now(sh.core) < bad) {
            EXPECT(told(&sh) == 0); /* it was gone back for */
            veto(&sh);
        }
        EXPECT(told(&sh) == 2);
        go_back(&sh, &early); /* somebody asks for it */
        EXPECT_EQ(step_gone_back(sh.core), 0);
        while (step_now(sh.core) < bad)
            veto(&sh);
        veto(&sh);
        EXPECT(step_check_stopped(sh.core, NULL) == SHD_ESTOPPED);
        go_back(&sh, &early);
        EXPECT_EQ(step_gone_back(sh.core), bad + 1);
        EXPECT(step_check_stopped(sh.core, NULL) == SHD_OK);
    }
    while (step_now(sh.core) < LEDGER_BACK_STEPS)
        veto(&sh);
    EXPECT(told(&sh) == 1); /* there is no place to note it: it stops */
    keep_step(&sh, &late);
    go_back(&sh, &late);
    EXPECT(told(&sh) == 1);
    sh.ledger.back->steps[7] = 0;
    EXPECT(told(&sh) == 2);
    veto(&sh);
    go_back(&sh, &late); /* behind all others, which are forgotten */
    EXPECT(told(&sh) == 0 && step_gone_back(sh.core) == LEDGER_BACK_STEPS + 1);
    veto(&sh);
    EXPECT(told(&sh) == 2);
    free(early.blob);
    free(late.blob);
    shell_deinit(&sh);
}

TEST_MAIN()
