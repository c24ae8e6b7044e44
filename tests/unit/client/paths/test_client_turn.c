/* The client's protocol core against modelled owners, as data: any order of replies, connections
 * lost at any point, replies repeated, several workers at once, workers that die in their commit.
 */

#include <math.h>

#include "client/paths/decide.h"
#include "client/paths/rewind_turn.h"
#include "client/paths/turn.h"
#include "client/paths/watch.h"
#include "proto/base/check.h"
#include "proto/spec/guard.h"
#include "tests/lib/test.h"

#define OWNERS_MAX  5u
#define WORKERS_MAX 3u
#define STEPS       6u

/* An owner as daemon/core/step.c has it: the record of the last sealed step, and what was decided.
 */
struct owner {
    uint64_t open; /* steps below it are committed */
    struct wire_prepared record;
    struct decision decided[STEPS];
};

static void seal(struct owner *o, uint32_t index, uint64_t step)
{
    if (o->open != step || o->record.step == step)
        return;
    o->record = (struct wire_prepared){ .step = step, .finite = true, .metric_count = 1 };
    o->record.metrics[0] = (double)step + 0.5;
    fixsum_init(&o->record.sum);
    fixsum_add(&o->record.sum, (double)(step + 1) * (index + 1));
    fixsum_carry(&o->record.sum);
}

static struct wire_prepared prepare(const struct owner *o, uint64_t step)
{
    if (step == o->record.step)
        return o->record;
    CHECK(step < o->record.step);
    return (struct wire_prepared){ .step = step, .over = true };
}

static struct wire_committed commit(struct owner *o, uint64_t step, const struct decision *decision)
{
    if (step < o->record.step)
        return (struct wire_committed){ .step = step, .over = true };
    CHECK(step == o->record.step);
    if (!o->record.has_decision) {
        o->record.has_decision = true;
        o->record.decision = o->decided[step] = *decision;
        o->open = step + 1;
    }
    return (struct wire_committed){ .step = step, .decision = o->record.decision };
}

static void owners_init(struct owner *owners, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        owners[i] = (struct owner){ .record = { .step = UINT64_MAX } };
}

static struct turn_update update_of(uint64_t step, double lr)
{
    return (struct turn_update){
        .args = { .micro_batches = 2, .lr = lr / (double)(step + 1), .clip_norm = 1 }
    };
}

struct memory {
    _Alignas(16) uint8_t bytes[131072];
};

static struct turn *turn_in(struct memory *memory, uint32_t owners)
{
    CHECK(turn_bytes(owners) <= sizeof memory->bytes);
    return turn_init(memory->bytes, owners, owners);
}

/* Ask and answer everything in order; stop after `commits` commits. */
static int run(struct turn *t, struct owner *owners, uint32_t commits, struct shd_err *e)
{
    uint32_t owner;
    enum turn_kind kind;
    int r = SHD_OK;
    while (r == SHD_OK && turn_next(t, &owner, &kind)) {
        if (kind == TURN_COMMIT && commits-- == 0)
            return SHD_OK;
        turn_asked(t, owner, kind);
        if (kind == TURN_PREPARE) {
            const struct wire_prepared p = prepare(&owners[owner], turn_step(t));
            r = turn_prepared(t, owner, &p, e);
        } else {
            const struct wire_committed c = commit(&owners[owner], turn_step(t), turn_decision(t));
            r = turn_committed(t, owner, &c, e);
        }
    }
    return r;
}

static void seal_all(struct owner *owners, uint32_t count, uint64_t step)
{
    for (uint32_t i = 0; i < count; i++)
        seal(&owners[i], i, step);
}

TEST(all_owners_get_one_decision)
{
    static struct memory memory;
    struct owner owners[3];
    struct shd_err e = { 0 };
    struct turn *t = turn_in(&memory, 3);
    owners_init(owners, 3);
    for (uint64_t step = 0; step < STEPS; step++) {
        const struct turn_update update = update_of(step, 0.5);
        seal_all(owners, 3, step);
        turn_begin(t, step, &update);
        EXPECT_EQ(turn_state(t), TURN_PREPARING);
        EXPECT_OK(run(t, owners, UINT32_MAX, &e), &e);
        EXPECT_EQ(turn_state(t), TURN_DONE);
        const struct decided d = turn_decided(t);
        EXPECT(!d.over && d.metrics[0] == (double)step + 0.5 && d.decision.lr == update.args.lr);
        for (int i = 0; i < 3; i++)
            EXPECT(decision_equal(&owners[i].decided[step], &d.decision));
    }
}

TEST(recorded_decision_is_passed_on_by_the_next_worker)
{
    for (uint32_t commits = 0; commits <= 3; commits++) {
        static struct memory first, second;
        struct owner owners[3];
        struct shd_err e = { 0 };
        struct turn *dead = turn_in(&first, 3), *next = turn_in(&second, 3);
        const struct turn_update one = update_of(0, 1), two = update_of(0, 2);
        owners_init(owners, 3);
        seal_all(owners, 3, 0);
        turn_begin(dead, 0, &one);
        EXPECT_OK(run(dead, owners, commits, &e), &e);
        turn_begin(next, 0, &two);
        EXPECT_OK(run(next, owners, UINT32_MAX, &e), &e);
        EXPECT_EQ(turn_state(next), TURN_DONE);
        for (int i = 0; i < 3; i++)
            EXPECT(owners[i].decided[0].lr == (commits > 0 ? one.args.lr : two.args.lr));
    }
}

/* It was prepared before the other worker committed: Committed tells it first. */
TEST(decision_learned_from_a_commit_is_passed_on)
{
    static struct memory memory;
    struct owner owners[2];
    struct shd_err e = { 0 };
    struct turn *t = turn_in(&memory, 2);
    const struct turn_update update = update_of(0, 1);
    const struct decision other = { .scale = 0.25f, .lr = 7 };
    owners_init(owners, 2);
    seal_all(owners, 2, 0);
    turn_begin(t, 0, &update);
    EXPECT_OK(run(t, owners, 0, &e), &e);
    commit(&owners[0], 0, &other);
    EXPECT_OK(run(t, owners, UINT32_MAX, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_DONE);
    EXPECT(decision_equal(&owners[1].decided[0], &other));
    EXPECT(turn_decided(t).decision.lr == 7);
}

TEST(settling_derives_nothing)
{
    static struct memory memory;
    struct owner owners[2];
    struct shd_err e = { 0 };
    struct turn *t = turn_in(&memory, 2);
    struct turn_update update = update_of(0, 1);
    const struct decision other = { .scale = 0.25f, .lr = 7 };
    update.recorded_only = true;
    owners_init(owners, 2);
    seal_all(owners, 2, 0);
    turn_begin(t, 0, &update);
    EXPECT_STATUS(run(t, owners, UINT32_MAX, &e), SHD_EINTERNAL);
    EXPECT_HAS(e.text, "decision of step 0 on record");
    EXPECT_EQ(owners[0].open + owners[1].open, 0);
    commit(&owners[1], 0, &other);
    turn_begin(t, 0, &update);
    EXPECT_OK(run(t, owners, UINT32_MAX, &e), &e);
    EXPECT(decision_equal(&owners[0].decided[0], &other));
}

TEST(over_ends_the_turn_wherever_it_comes)
{
    static struct memory memory;
    struct shd_err e = { 0 };
    struct turn *t = turn_in(&memory, 2);
    const struct turn_update update = update_of(3, 1);
    const struct wire_prepared over = { .step = 3, .over = true };
    const struct wire_prepared fine = { .step = 3, .finite = true };
    const struct wire_committed committed_over = { .step = 3, .over = true };
    uint32_t owner;
    enum turn_kind kind;
    turn_begin(t, 3, &update);
    EXPECT_OK(turn_prepared(t, 1, &over, &e), &e);
    EXPECT(turn_state(t) == TURN_OVER && turn_decided(t).over);
    EXPECT(!turn_next(t, &owner, &kind));
    EXPECT_OK(turn_prepared(t, 0, &fine, &e), &e); /* late: dropped */
    turn_begin(t, 3, &update);
    EXPECT_OK(turn_prepared(t, 1, &fine, &e), &e);
    EXPECT_OK(turn_prepared(t, 0, &fine, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_COMMITTING);
    EXPECT_OK(turn_committed(t, 0, &committed_over, &e), &e);
    EXPECT(turn_state(t) == TURN_OVER && turn_decided(t).over);
}

TEST(contradictions_are_internal_errors)
{
    static struct memory memory;
    struct shd_err e = { 0 };
    struct turn *t = turn_in(&memory, 2);
    const struct turn_update update = update_of(0, 1);
    const struct wire_prepared fine = { .finite = true };
    struct wire_prepared other = fine;
    struct wire_committed committed = { .decision = { .scale = 1, .lr = 1 } };
    struct wire_prepared decided = fine;
    decided.has_decision = other.has_decision = true;
    decided.decision.lr = 1;
    other.decision.lr = 2;
    turn_begin(t, 0, &update);
    EXPECT_OK(turn_prepared(t, 0, &decided, &e), &e);
    EXPECT_STATUS(turn_prepared(t, 1, &other, &e), SHD_EINTERNAL);
    turn_begin(t, 0, &update);
    EXPECT_OK(turn_prepared(t, 0, &fine, &e), &e);
    EXPECT_OK(turn_prepared(t, 1, &fine, &e), &e);
    EXPECT_OK(turn_committed(t, 0, &committed, &e), &e);
    committed.decision.lr = 2;
    EXPECT_STATUS(turn_committed(t, 1, &committed, &e), SHD_EINTERNAL);
    EXPECT_HAS(e.text, "owner 1 applies step 0 with scale 1 and rate 2, owner 0 with 1 and 1");
    other = fine;
    other.step = 9;
    turn_begin(t, 0, &update);
    EXPECT_STATUS(turn_prepared(t, 0, &other, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "owner 0 prepared step 9, asked for was step 0");
}

/* -- What a skipped step came from ------------------------------------------------------------- */

#define MANY 300u /* units: three pages */

/* Owner `index` of step 0, whose part of unit u is u + 1; the largest is in `large`. finite: false:
 * unit `large` is not. */
struct unit_owner {
    uint32_t index, large;
    bool finite;
    uint8_t sums[WIRE_UNIT_SUMS_MAX * FIXSUM_BYTES];
};

static struct wire_prepared prepare_units(struct unit_owner *o, uint32_t unit_sums)
{
    struct wire_prepared p = { .finite = o->finite, .unit_sums_from = unit_sums };
    const uint32_t first = unit_sums - 1;
    fixsum_init(&p.sum);
    fixsum_add(&p.sum, 1e6);
    fixsum_carry(&p.sum);
    for (uint32_t u = first; unit_sums > 0 && u < MANY && u < first + WIRE_UNIT_SUMS_MAX; u++) {
        struct fixsum sum;
        fixsum_init(&sum);
        fixsum_add(&sum, u == o->large ? 1000 : (double)(u + 1 + o->index));
        fixsum_carry(&sum);
        fixsum_pack(!o->finite && u == o->large ? NULL : &sum,
                    o->sums + (size_t)(u - first) * FIXSUM_BYTES);
        p.unit_sums.bytes += FIXSUM_BYTES;
    }
    p.unit_sums.data = o->sums;
    return p;
}

static struct turn_update naming_update(void)
{
    struct turn_update u = update_of(0, 1);
    u.units = MANY;
    return u;
}

/* Answer what is asked, up to `replies` times. Returns how many Prepares were asked. */
static uint32_t run_units(struct turn *t, struct unit_owner *owners, uint32_t replies)
{
    struct shd_err e = { 0 };
    uint32_t owner, asked = 0;
    enum turn_kind kind;
    while (replies-- > 0 && turn_state(t) == TURN_PREPARING && turn_next(t, &owner, &kind)) {
        turn_asked(t, owner, kind);
        const struct wire_prepared p = prepare_units(&owners[owner], turn_unit_sums(t));
        EXPECT_OK(turn_prepared(t, owner, &p, &e), &e);
        asked++;
    }
    return asked;
}

#define OWNER(i, l, f)                            \
    {                                             \
        .index = (i), .large = (l), .finite = (f) \
    }

TEST(a_step_that_is_skipped_names_the_first_unit_that_is_not_finite)
{
    static struct memory memory;
    for (uint32_t large = 0; large < MANY; large += 37) {
        struct unit_owner owners[3] = { OWNER(0, large, true), OWNER(1, large, false),
                                        OWNER(2, large + 5, 0) };
        const struct turn_update update = naming_update();
        struct turn *t = turn_in(&memory, 3);
        turn_begin(t, 0, &update);
        EXPECT_EQ(run_units(t, owners, UINT32_MAX), 3 + 3 * (large / WIRE_UNIT_SUMS_MAX + 1));
        EXPECT_EQ(turn_state(t), TURN_COMMITTING);
        EXPECT(turn_decision(t)->skip && turn_decision(t)->cause.unit == large + 1);
        EXPECT(isinf(turn_decision(t)->cause.norm));
    }
}

/* What a guard skips; a step that counts asks nobody again. */
TEST(a_step_above_a_limit_names_the_unit_with_the_largest_norm)
{
    static struct memory memory;
    const struct guard_rule rule = { .what = GUARD_NORM_ABOVE, .threshold = 10 };
    struct guard_limits limits = { 0 };
    guard_limits_add(&limits, &rule, 10);
    for (uint32_t guarded = 0; guarded < 2; guarded++) {
        struct unit_owner owners[2] = { OWNER(0, 170, true), OWNER(1, 170, true) };
        const struct turn_update update = naming_update();
        struct turn *t = turn_in(&memory, 2);
        struct shd_err e = { 0 };
        uint32_t owner;
        enum turn_kind kind;
        turn_begin(t, 0, &update);
        EXPECT(turn_next(t, &owner, &kind) && owner == 0);
        turn_asked(t, 0, kind);
        struct wire_prepared p = prepare_units(&owners[0], 0);
        if (guarded == 1)
            p.guard = (struct wire_bytes){ (const uint8_t *)limits.numbers,
                                           limits.count * sizeof *limits.numbers };
        EXPECT_OK(turn_prepared(t, 0, &p, &e), &e);
        EXPECT_EQ(run_units(t, owners, UINT32_MAX), guarded == 1 ? 1 + 3 * 2 : 1);
        EXPECT_EQ(turn_decision(t)->cause.unit, guarded == 1 ? 171 : 0);
        if (guarded == 1)
            EXPECT(turn_decision(t)->cause.norm == sqrt(2000) / 2);
    }
}

/* An owner of an older build, or one that has lost its sums, leaves the step unnamed. What another
 * worker has committed meanwhile counts. */
TEST(a_cause_that_is_not_known_holds_nobody_up)
{
    static struct memory memory;
    for (uint32_t after = 2; after < 8; after++)
        for (uint32_t recorded = 0; recorded < 2; recorded++) {
            struct unit_owner owners[2] = { OWNER(0, 280, true), OWNER(1, 280, false) };
            const struct turn_update update = naming_update();
            struct turn *t = turn_in(&memory, 2);
            struct shd_err e = { 0 };
            uint32_t owner;
            enum turn_kind kind;
            turn_begin(t, 0, &update);
            EXPECT_EQ(run_units(t, owners, after), after);
            EXPECT(turn_next(t, &owner, &kind) && kind == TURN_PREPARE);
            turn_asked(t, owner, kind);
            struct wire_prepared p = prepare_units(&owners[owner], 0);
            p.has_decision = recorded == 1;
            p.decision = (struct decision){ .skip = true,
                                            .lr = 9,
                                            .cause = { .unit = 4, .norm = INFINITY } };
            EXPECT_OK(turn_prepared(t, owner, &p, &e), &e);
            EXPECT_EQ(turn_state(t), TURN_COMMITTING);
            EXPECT_EQ(turn_decision(t)->cause.unit, recorded == 1 ? 4 : 0);
            EXPECT(turn_decision(t)->skip && turn_decision(t)->lr == (recorded == 1 ? 9 : 1));
        }
}

/* The first rule that is exceeded counts; of its units the one that is above the limit by most. */
TEST(rules_of_units_are_judged_with_the_others_in_their_order)
{
    static const uint8_t watched[4] = { 0x2, 0x6, 0x0, 0x4 }; /* rules 1 and 2 */
    static const struct {
        double norms[4], whole; /* whole: that rule 0 has found, 0: nothing */
        uint32_t what, unit;
        double value;
    } cases[] = {
        { { 5, 5, 999, 7 }, 0, GUARD_NONE, 0, 0 },
        { { 6, 9, 999, 70 }, 0, GUARD_UNIT_ABOVE, 1, 9 },  /* rule 1, its second unit */
        { { 9, 9, 999, 70 }, 0, GUARD_UNIT_ABOVE, 0, 9 },  /* the first of equals */
        { { 5, 5, 999, 70 }, 0, GUARD_UNIT_ABOVE, 3, 70 }, /* rule 2 alone */
        { { 6, 9, 999, 70 }, 11, GUARD_NORM_ABOVE, 0, 11 },
    };
    const struct guard_limits limits = { .count = 9,
                                         .numbers = { GUARD_NORM_ABOVE, 0, 10, GUARD_UNIT_ABOVE, 1,
                                                      5, GUARD_UNIT_ABOVE, 2, 7 } };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct decision d = { .scale = 3 };
        struct watch w;
        watch_begin(&w, watched);
        if (cases[i].whole > 0)
            d = (struct decision){
                .skip = true,
                .guard = { .what = GUARD_NORM_ABOVE, .value = cases[i].whole, .bound = 10 }
            };
        for (uint32_t u = 0; u < 4; u++)
            watch_unit(&w, &limits,
                       &(struct watch_unit){ u, cases[i].norms[u], cases[i].norms[u] * 2, NULL });
        const bool by_unit = cases[i].what == GUARD_UNIT_ABOVE;
        EXPECT_EQ(watch_end(&w, &limits, &d), by_unit);
        EXPECT(d.guard.what == cases[i].what && d.guard.value == cases[i].value);
        EXPECT_EQ(d.skip, cases[i].what != GUARD_NONE);
        if (by_unit)
            EXPECT(w.unit == cases[i].unit && w.squares == 2 * cases[i].value && d.scale == 0);
        EXPECT_EQ(d.guard.stop, by_unit);
        EXPECT_EQ(d.guard.rewind, by_unit && cases[i].unit == 3);
    }
    struct decision none = { .skip = true }; /* nothing to divide by: no norm is one */
    struct watch w;
    watch_begin(&w, watched);
    watch_unit(&w, &limits, &(struct watch_unit){ 0, 99, 1, NULL });
    EXPECT(!watch_end(&w, &limits, &none));
}

/* Each unit has its own limit of a rule with a window; the one that is above its own by most. */
TEST(units_have_limits_of_their_own)
{
    static const uint8_t watched[3] = { 0x2, 0x7, 0x6 };
    const struct guard_limits limits = { .count = 9,
                                         .numbers = { GUARD_UNIT_ABOVE, 0, 100, GUARD_UNIT_ZSCORE,
                                                      2, INFINITY, GUARD_UNIT_ZSCORE, 1,
                                                      INFINITY } };
    static const double own[3][2] = { { 10, 0 }, { 4, INFINITY }, { INFINITY, 6 } };
    static const struct {
        double norms[3];
        uint32_t rule, unit;
        double bound;
    } cases[] = {
        { { 10, 4, 6 }, 0, 0, 0 }, { { 11, 4, 7 }, 2, 0, 10 },    { { 11, 5, 7 }, 2, 1, 4 },
        { { 9, 4, 60 }, 3, 2, 6 }, { { 9, 400, 60 }, 1, 1, 100 },
    };
    EXPECT(watch_own(&limits, 1) == 0 && watch_own(&limits, 2) == 1 && watch_own(&limits, 7) == 2);
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct decision d = { .scale = 3 };
        struct watch w;
        watch_begin(&w, watched);
        for (uint32_t u = 0; u < 3; u++)
            watch_unit(&w, &limits, &(struct watch_unit){ u, cases[i].norms[u], 1, own[u] });
        EXPECT_EQ(watch_end(&w, &limits, &d), cases[i].rule > 0);
        if (cases[i].rule == 0)
            continue;
        EXPECT(w.unit == cases[i].unit && d.guard.bound == cases[i].bound);
        EXPECT_EQ(d.guard.what, cases[i].rule == 1 ? GUARD_UNIT_ABOVE : GUARD_UNIT_ZSCORE);
        EXPECT_EQ(d.guard.rewind, cases[i].rule == 2);
        EXPECT_EQ(d.guard.stop, cases[i].rule > 1);
    }
}

/* An owner that cannot say would have steps counted that a rule skips. */
TEST(an_owner_that_does_not_tell_what_a_rule_is_of_ends_the_turn)
{
    static struct memory memory;
    static const uint8_t watched[MANY];
    struct unit_owner owners[2] = { OWNER(0, 280, true), OWNER(1, 280, true) };
    struct turn_update update = naming_update();
    struct turn *t = turn_in(&memory, 2);
    struct shd_err e = { 0 };
    update.watched = watched;
    turn_begin(t, 0, &update);
    EXPECT_EQ(run_units(t, owners, 2), 2);
    EXPECT_EQ(turn_unit_sums(t), 1); /* of a step that counts, too */
    struct wire_prepared p = prepare_units(&owners[0], 0);
    EXPECT_STATUS(turn_prepared(t, 0, &p, &e), SHD_ENOTSUP);
    EXPECT_HAS(e.text, "owner 0 does not tell the norms of its units");
    turn_begin(t, 0, &update);
    EXPECT_EQ(run_units(t, owners, UINT32_MAX), 2 + 3 * 2);
    EXPECT(turn_state(t) == TURN_COMMITTING && !turn_decision(t)->skip);
    EXPECT_EQ(turn_decision(t)->cause.unit, 0);
}

TEST(sums_that_are_none_end_the_turn)
{
    static struct memory memory;
    for (uint32_t wrong = 0; wrong < 3; wrong++) {
        struct unit_owner owners[1] = { OWNER(0, 280, false) };
        const struct turn_update update = naming_update();
        struct turn *t = turn_in(&memory, 1);
        struct shd_err e = { 0 };
        turn_begin(t, 0, &update);
        run_units(t, owners, 1);
        struct wire_prepared p = prepare_units(&owners[0], 1);
        p.unit_sums_from = wrong == 2 ? 2 : 1;
        if (wrong == 0)
            p.unit_sums.bytes -= FIXSUM_BYTES;
        if (wrong == 1)
            owners[0].sums[5 * FIXSUM_BYTES - 1] = 1; /* the top limb of unit 4 */
        if (wrong == 2) {                             /* of another page: a repeat */
            EXPECT_OK(turn_prepared(t, 0, &p, &e), &e);
            EXPECT_EQ(turn_unit_sums(t), 1);
            continue;
        }
        EXPECT_STATUS(turn_prepared(t, 0, &p, &e), SHD_EPROTO);
        EXPECT_HAS(e.text, wrong == 0 ? "are not the sums of 128 units from 0"
                                      : "the sum of squares of unit 4 is none");
    }
}

/* -- At random --------------------------------------------------------------------------------- */

#define MEMBERS_MAX (2 * OWNERS_MAX)

struct worker {
    struct memory memory;
    struct turn *turn;
    uint64_t step;
    bool knows;               /* which host is lost */
    uint32_t at[MEMBERS_MAX]; /* the owner behind each member */
    bool asked[MEMBERS_MAX];
    enum turn_kind kind[MEMBERS_MAX];
    struct wire_prepared last_prepared[MEMBERS_MAX]; /* to be repeated */
    struct wire_committed last_committed[MEMBERS_MAX];
    bool has_prepared[MEMBERS_MAX], has_committed[MEMBERS_MAX];
    uint64_t overs;
};

/* Member owners + i is owner i's replica. Of two hosts each has one of both. */
struct world {
    uint64_t seed;
    uint32_t owners, members, workers;
    struct owner owner[MEMBERS_MAX];
    struct worker worker[WORKERS_MAX];
    uint32_t lost;   /* 1 + the host that is lost; 0: none */
    uint32_t again;  /* workers that found owner 0 and its replica apart, and began anew */
    uint32_t filled; /* times that the host came back */
};

static uint32_t pick(struct world *w, uint32_t below)
{
    return (uint32_t)(test_random(&w->seed) >> 33) % below;
}

static bool is_lost(const struct world *w, uint32_t owner)
{
    const uint32_t host = (owner % w->owners + owner / w->owners) % 2;
    return w->lost == 1 + host;
}

static void worker_begin(struct world *w, struct worker *k)
{
    const struct turn_update update = update_of(k->step, 0.5 + (double)(k - w->worker));
    memset(k->asked, 0, sizeof k->asked);
    memset(k->has_prepared, 0, sizeof k->has_prepared);
    memset(k->has_committed, 0, sizeof k->has_committed);
    if (k->step == STEPS)
        return;
    for (uint32_t i = 0; i < w->members; i++) /* it returns its gradients */
        if (!is_lost(w, i))
            seal(&w->owner[i], i % w->owners, k->step);
    turn_begin(k->turn, k->step, &update);
}

static void worker_ask(struct worker *k)
{
    uint32_t owner;
    enum turn_kind kind;
    if (!turn_next(k->turn, &owner, &kind))
        return;
    turn_asked(k->turn, owner, kind);
    k->asked[owner] = true;
    k->kind[owner] = kind;
}

/* Owner 0 is lost with a decision that another worker does not know: whoever knows it begins anew.
 */
static bool worker_failed(struct world *w, struct worker *k, int r, const struct shd_err *e)
{
    if (r == SHD_EINTERNAL && w->lost > 0 && strstr(e->text, "applies step") != NULL) {
        w->again++;
        worker_begin(w, k);
        return true;
    }
    EXPECT_OK(r, e);
    return false;
}

/* The owner handles what the worker asked; its answer arrives or is lost. */
static void worker_answer(struct world *w, struct worker *k, uint32_t i, bool arrives)
{
    struct shd_err e = { 0 };
    struct owner *o = &w->owner[k->at[i]];
    if (!k->asked[i] || is_lost(w, k->at[i]))
        return;
    k->asked[i] = !arrives; /* else it is asked again, as the hub does it */
    if (turn_state(k->turn) == TURN_OVER)
        return;
    if (k->kind[i] == TURN_PREPARE) {
        k->last_prepared[i] = prepare(o, k->step);
        k->has_prepared[i] = true;
        if (arrives)
            worker_failed(w, k, turn_prepared(k->turn, i, &k->last_prepared[i], &e), &e);
    } else {
        k->last_committed[i] = commit(o, k->step, turn_decision(k->turn));
        k->has_committed[i] = true;
        if (arrives)
            worker_failed(w, k, turn_committed(k->turn, i, &k->last_committed[i], &e), &e);
    }
}

static void worker_repeat(struct world *w, struct worker *k, uint32_t i)
{
    struct shd_err e = { 0 };
    if (k->has_prepared[i] && !k->asked[i] &&
        worker_failed(w, k, turn_prepared(k->turn, i, &k->last_prepared[i], &e), &e))
        return;
    if (k->has_committed[i] && !k->asked[i])
        worker_failed(w, k, turn_committed(k->turn, i, &k->last_committed[i], &e), &e);
}

/* What was said by, and asked of, the replica is the owner's from here on. */
static void worker_moves(struct worker *k, uint32_t to, uint32_t from)
{
    k->at[to] = k->at[from];
    k->asked[to] = k->asked[from];
    k->kind[to] = k->kind[from];
    k->has_prepared[to] = k->has_prepared[from];
    k->has_committed[to] = k->has_committed[from];
    k->last_prepared[to] = k->last_prepared[from];
    k->last_committed[to] = k->last_committed[from];
    k->asked[from] = k->has_prepared[from] = k->has_committed[from] = false;
}

static void worker_learns(struct world *w, struct worker *k)
{
    if (w->lost == 0 || w->members == w->owners || k->knows)
        return;
    k->knows = true;
    for (uint32_t i = 0; i < w->owners; i++) {
        if (is_lost(w, k->at[i])) {
            turn_succeed(k->turn, i);
            worker_moves(k, i, w->owners + i);
        } else {
            turn_lose(k->turn, w->owners + i);
            k->asked[w->owners + i] = false;
        }
    }
}

/* All go back to a step, and the host that was lost is there again, with what its replicas had.
 * What was asked before is of an earlier attempt, and counts for nothing. */
static void world_refill(struct world *w)
{
    uint64_t step = UINT64_MAX;
    for (uint32_t i = 0; i < w->members; i++)
        if (!is_lost(w, i) && w->owner[i].open < step)
            step = w->owner[i].open;
    step -= pick(w, (uint32_t)(step < 3 ? step : 3) + 1);
    for (uint32_t i = 0; i < w->members; i++)
        if (is_lost(w, i))
            w->owner[i] = w->owner[(i + w->owners) % w->members];
    for (uint32_t i = 0; i < w->members; i++) {
        w->owner[i].open = step;
        w->owner[i].record = (struct wire_prepared){ .step = UINT64_MAX };
    }
    w->lost = 0;
    w->filled++;
    for (uint32_t i = 0; i < w->workers; i++) {
        struct worker *k = &w->worker[i];
        for (uint32_t m = w->owners; m < w->members; m++) {
            EXPECT(turn_has_lost(k->turn, m));
            turn_join(k->turn, m);
            EXPECT(!turn_has_lost(k->turn, m) && turn_state(k->turn) == TURN_OVER);
            k->at[m] = 2 * m - w->owners - k->at[m - w->owners]; /* the other one of its slice */
        }
        k->knows = false;
        k->step = step;
        worker_begin(w, k);
    }
}

static bool all_know(const struct world *w)
{
    for (uint32_t i = 0; i < w->workers; i++)
        if (!w->worker[i].knows)
            return false;
    return w->lost > 0;
}

static void worker_move_on(struct world *w, struct worker *k)
{
    const enum turn_state state = turn_state(k->turn);
    if (state != TURN_DONE && state != TURN_OVER)
        return;
    if (state == TURN_DONE) /* whoever says done is right */
        for (uint32_t i = 0; i < w->members; i++)
            EXPECT(w->owner[i].open > k->step || is_lost(w, i));
    k->overs += state == TURN_OVER;
    k->step++;
    worker_begin(w, k);
}

static void world_event(struct world *w)
{
    struct worker *k = &w->worker[pick(w, w->workers)];
    const uint32_t member = pick(w, w->members), what = pick(w, 100);
    if (w->members > w->owners && w->lost == 0 && pick(w, 300) == 0)
        w->lost = 1 + pick(w, 2);
    if (w->filled < 4 && pick(w, 100) == 0 && all_know(w))
        world_refill(w);
    if (k->step == STEPS)
        return;
    if (what < 45)
        worker_ask(k);
    else if (what < 80)
        worker_answer(w, k, member, /* arrives= */ true);
    else if (what < 88)
        worker_answer(w, k, member, /* arrives= */ false);
    else if (what < 95)
        worker_repeat(w, k, member);
    else if (what < 98)
        worker_learns(w, k);
    else if (what < 99) /* it dies; its successor begins the step again */
        worker_begin(w, k);
    worker_move_on(w, k);
}

static bool world_done(const struct world *w)
{
    for (uint32_t i = 0; i < w->workers; i++)
        if (w->worker[i].step < STEPS)
            return false;
    return true;
}

static void world_begin(struct world *w, bool replicas)
{
    w->owners = 1 + pick(w, OWNERS_MAX);
    w->members = replicas ? 2 * w->owners : w->owners;
    w->workers = 1 + pick(w, WORKERS_MAX);
    owners_init(w->owner, w->members);
    for (uint32_t i = 0; i < w->workers; i++) {
        struct worker *k = &w->worker[i];
        CHECK(turn_bytes(w->members) <= sizeof k->memory.bytes);
        k->turn = turn_init(k->memory.bytes, w->owners, w->members);
        for (uint32_t m = 0; m < w->members; m++)
            k->at[m] = m;
        worker_begin(w, k);
    }
}

static struct world world_run(uint64_t seed, bool replicas)
{
    static struct world w;
    const struct owner *first = NULL;
    w = (struct world){ .seed = seed };
    world_begin(&w, replicas);
    for (uint32_t events = 0; !world_done(&w); events++) {
        if (events > 1000000)
            FAIL("seed %" PRIu64 " does not end", seed);
        world_event(&w);
    }
    for (uint32_t i = 0; i < w.members; i++) {
        if (is_lost(&w, i))
            continue;
        first = first == NULL ? &w.owner[i] : first;
        for (uint32_t step = 0; step < STEPS; step++)
            EXPECT(decision_equal(&w.owner[i].decided[step], &first->decided[step]));
    }
    return w;
}

static uint64_t overs_of(const struct world *w)
{
    uint64_t overs = 0;
    for (uint32_t i = 0; i < w->workers; i++)
        overs += w->worker[i].overs;
    return overs;
}

TEST(random_orders_losses_and_repeats_end_in_one_decision)
{
    uint64_t overs = 0;
    for (uint64_t n = 1; n <= 2000; n++) {
        const struct world w = world_run(test_seed(n * UINT64_C(0x9E3779B97F4A7C15)), false);
        overs += overs_of(&w);
    }
    EXPECT(overs > 0); /* late workers did occur */
}

TEST(whichever_host_of_two_is_lost_the_other_ends_in_one_decision)
{
    uint64_t overs = 0;
    uint32_t lost = 0, again = 0, filled = 0, twice = 0;
    for (uint64_t n = 1; n <= 4000; n++) {
        const struct world w = world_run(test_seed(n * UINT64_C(0xD1B54A32D192ED03)), true);
        overs += overs_of(&w);
        lost += w.lost > 0;
        again += w.again;
        filled += w.filled;
        twice += w.filled > 1 && w.lost > 0;
    }
    EXPECT(overs > 0 && lost > 1000 && again > 0 && filled > 1000 && twice > 100);
}

/* -- Replicas ---------------------------------------------------------------------------------- */

static struct turn *turn_of_pairs(struct memory *memory, uint32_t owners)
{
    CHECK(turn_bytes(2 * owners) <= sizeof memory->bytes);
    return turn_init(memory->bytes, owners, 2 * owners);
}

static struct wire_prepared prepared_sum(double sum)
{
    struct wire_prepared p = { .finite = true };
    fixsum_init(&p.sum);
    fixsum_add(&p.sum, sum);
    fixsum_carry(&p.sum);
    return p;
}

TEST(a_replicas_sum_counts_once_and_must_be_its_owners)
{
    static struct memory memory;
    struct shd_err e = { 0 };
    struct turn *t = turn_of_pairs(&memory, 1);
    const struct turn_update update = update_of(0, 1);
    const struct wire_prepared nine = prepared_sum(9), ten = prepared_sum(10);
    turn_begin(t, 0, &update);
    EXPECT_OK(turn_prepared(t, 0, &nine, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_PREPARING);
    EXPECT_OK(turn_prepared(t, 1, &nine, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_COMMITTING);
    EXPECT(turn_norm(t) == 3.0 / 2);
    turn_begin(t, 0, &update);
    EXPECT_OK(turn_prepared(t, 0, &nine, &e), &e);
    EXPECT_STATUS(turn_prepared(t, 1, &ten, &e), SHD_EINTERNAL);
    EXPECT_HAS(e.text,
               "owner 0 and its replica were returned other gradients of step 0: their sums "
               "of squares are 9 and 10");
}

TEST(owner_0s_replica_commits_before_the_others)
{
    static struct memory memory;
    struct shd_err e = { 0 };
    struct turn *t = turn_of_pairs(&memory, 2);
    const struct turn_update update = update_of(0, 1);
    const struct wire_prepared p = prepared_sum(1);
    struct wire_committed c = { 0 };
    uint32_t owner;
    enum turn_kind kind;
    turn_begin(t, 0, &update);
    for (uint32_t i = 0; i < 4; i++)
        EXPECT_OK(turn_prepared(t, i, &p, &e), &e);
    c.decision = *turn_decision(t);
    EXPECT(turn_next(t, &owner, &kind) && owner == 0 && kind == TURN_COMMIT);
    turn_asked(t, 0, TURN_COMMIT);
    EXPECT(!turn_next(t, &owner, &kind));
    EXPECT_OK(turn_committed(t, 0, &c, &e), &e);
    EXPECT(turn_next(t, &owner, &kind) && owner == 2);
    turn_asked(t, 2, TURN_COMMIT);
    EXPECT(!turn_next(t, &owner, &kind));
    turn_lose(t, 2); /* it is not waited for */
    EXPECT(turn_next(t, &owner, &kind) && owner == 1);
    turn_asked(t, 1, TURN_COMMIT);
    turn_succeed(t, 1); /* nor is an owner: its replica was not asked yet */
    EXPECT(turn_next(t, &owner, &kind) && owner == 1);
    EXPECT_OK(turn_committed(t, 1, &c, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_DONE);
}

/* Whoever is owner 0 in the end: that may have answered before the other one was lost, or not. */
TEST(limits_of_a_lost_owner_0_are_its_replicas)
{
    static const double numbers[] = { GUARD_NORM_ABOVE, 0, 2 };
    const struct turn_update update = update_of(0, 1);
    for (uint32_t first = 0; first < 2; first++) {
        static struct memory memory;
        struct shd_err e = { 0 };
        struct turn *t = turn_of_pairs(&memory, 1);
        struct wire_prepared p = prepared_sum(100);
        p.guard = (struct wire_bytes){ (const uint8_t *)numbers, sizeof numbers };
        turn_begin(t, 0, &update);
        if (first == 1)
            EXPECT_OK(turn_prepared(t, 1, &p, &e), &e);
        turn_succeed(t, 0);
        EXPECT_OK(turn_prepared(t, 0, &p, &e), &e);
        EXPECT_EQ(turn_state(t), TURN_COMMITTING);
        EXPECT_EQ(turn_decision(t)->guard.what, GUARD_NORM_ABOVE); /* 10 / 2 */
        EXPECT(turn_decision(t)->skip);
    }
}

/* Whoever is left may have begun the step again since: in a turn of before and behind the decision.
 */
TEST(who_is_left_is_asked_anew_until_the_decision_is_on_record)
{
    static struct memory memory;
    struct shd_err e = { 0 };
    struct turn *t = turn_of_pairs(&memory, 2);
    const struct turn_update update = update_of(0, 1);
    const struct wire_prepared p = prepared_sum(1);
    struct wire_committed c = { 0 };
    uint32_t owner;
    enum turn_kind kind;
    turn_begin(t, 0, &update);
    EXPECT_OK(turn_prepared(t, 0, &p, &e), &e);
    turn_lose(t, 3);
    for (uint32_t i = 0; i < 3; i++) {
        EXPECT(turn_next(t, &owner, &kind) && owner == i && kind == TURN_PREPARE);
        EXPECT_OK(turn_prepared(t, i, &p, &e), &e);
    }
    c.decision = *turn_decision(t);
    EXPECT(turn_next(t, &owner, &kind) && owner == 0 && kind == TURN_COMMIT);
    turn_succeed(t, 0); /* nobody knows whether it has recorded anything */
    for (uint32_t i = 0; i < 2; i++) {
        EXPECT(turn_next(t, &owner, &kind) && owner == i && kind == TURN_PREPARE);
        EXPECT_OK(turn_prepared(t, i, &p, &e), &e);
    }
    EXPECT(turn_next(t, &owner, &kind) && owner == 0 && kind == TURN_COMMIT);
    EXPECT_OK(turn_committed(t, 0, &c, &e), &e);
    EXPECT_OK(turn_committed(t, 1, &c, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_DONE);
}

/* A commit on its way is asked for once more where its link is new, and that may be in the moment
 * in which a host is lost: it is the same one, with all that owner 0 keeps of the step. */
TEST(what_was_to_be_committed_stays_while_a_loss_has_all_asked_anew)
{
    static struct memory memory;
    static const uint8_t watched[MANY];
    static const uint32_t column[MANY] = { [170] = 1 };
    struct unit_owner owners[2] = { OWNER(0, 170, true), OWNER(0, 170, true) };
    double norms[1] = { 0 };
    struct shd_err e = { 0 };
    struct turn *t = turn_of_pairs(&memory, 1);
    struct turn_update update = naming_update();
    update.watched = watched;
    update.column = column;
    update.norms = norms;
    update.columns = 1;
    turn_begin(t, 0, &update);
    run_units(t, owners, UINT32_MAX);
    EXPECT_EQ(turn_state(t), TURN_COMMITTING);
    const struct decision was = *turn_decision(t);
    const double norm = turn_norm(t), of_unit = norms[0];
    EXPECT(turn_unit_norms(t) == norms && of_unit > 0);
    turn_lose(t, 1);
    EXPECT_EQ(turn_state(t), TURN_PREPARING);
    EXPECT(decision_equal(turn_decision(t), &was) && turn_norm(t) == norm);
    EXPECT(turn_unit_norms(t) == norms && norms[0] == of_unit);
    /* What owner 0 has recorded by then counts, without norms that this turn has not measured. */
    struct wire_prepared p = prepare_units(&owners[0], 0);
    p.has_decision = true;
    p.decision = was;
    EXPECT_OK(turn_prepared(t, 0, &p, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_COMMITTING);
    EXPECT(turn_unit_norms(t) == NULL);
}

/* Who dies behind the commit at owner 0 has not told its replica. */
TEST(norms_that_owner_0_has_on_record_are_told_its_replica)
{
    const double norms[3] = { 1, 0, 3 };
    const struct turn_update update = { .args = { .micro_batches = 2 },
                                        .recorded_only = true,
                                        .columns = 3,
                                        .norms = (double[3]){ 0 } };
    for (uint32_t skips = 0; skips < 2; skips++)
        for (uint32_t from = 0; from < 3; from++) { /* 1 is owner 1, which keeps none */
            static struct memory memory;
            struct shd_err e = { 0 };
            struct turn *t = turn_of_pairs(&memory, 2);
            turn_begin(t, 0, &update);
            for (uint32_t i = 0; i < 4; i++) {
                struct wire_prepared p = prepared_sum(1);
                p.has_decision = i == from;
                p.decision.skip = skips == 1;
                if (i == from)
                    p.unit_norms = (struct wire_bytes){ (const uint8_t *)norms, sizeof norms };
                EXPECT_OK(turn_prepared(t, i, &p, &e), &e);
            }
            EXPECT_EQ(turn_state(t), TURN_COMMITTING);
            EXPECT(turn_unit_norms(t) == (from == 1 || skips == 1 ? NULL : update.norms));
            if (from != 1)
                EXPECT(memcmp(update.norms, norms, sizeof norms) == 0);
        }
}

TEST(norms_of_other_units_are_refused)
{
    static struct memory memory;
    struct shd_err e = { 0 };
    double norms[3] = { 0 };
    const struct turn_update update = {
        .args = { .micro_batches = 2 }, .recorded_only = true, .columns = 3, .norms = norms
    };
    struct turn *t = turn_of_pairs(&memory, 1);
    struct wire_prepared p = prepared_sum(1);
    p.has_decision = true;
    p.unit_norms = (struct wire_bytes){ (const uint8_t *)norms, 2 * sizeof *norms };
    turn_begin(t, 0, &update);
    EXPECT_STATUS(turn_prepared(t, 0, &p, &e), SHD_EPROTO);
    EXPECT_HAS(e.text, "16 bytes are not the norms of the 3 units that the guard has rules of");
}

/* Owner 1 has not answered for long, and is asked once more as owner 2 says that the step is over:
 * both may be read in one look at what has come. */
TEST(what_was_to_be_committed_stays_where_the_step_is_over)
{
    static struct memory memory;
    struct shd_err e = { 0 };
    struct turn *t = turn_init(memory.bytes, 3, 3);
    const struct turn_update update = update_of(0, 1);
    const struct wire_prepared p = prepared_sum(9);
    struct wire_committed c = { 0 };
    turn_begin(t, 0, &update);
    for (uint32_t i = 0; i < 3; i++)
        EXPECT_OK(turn_prepared(t, i, &p, &e), &e);
    const struct decision was = c.decision = *turn_decision(t);
    const double norm = turn_norm(t);
    EXPECT_OK(turn_committed(t, 0, &c, &e), &e);
    c.over = true;
    EXPECT_OK(turn_committed(t, 2, &c, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_OVER);
    EXPECT(decision_equal(turn_decision(t), &was) && turn_norm(t) == norm);
    EXPECT(turn_unit_norms(t) == NULL);
}

/* It was the one that is past the step: nobody is any more, so it is looked at again. */
TEST(settling_with_who_alone_has_the_decision_lost_is_over)
{
    static struct memory memory;
    struct shd_err e = { 0 };
    struct turn *t = turn_of_pairs(&memory, 1);
    struct turn_update update = update_of(0, 1);
    struct wire_prepared p = prepared_sum(1), has = p;
    has.has_decision = true;
    update.recorded_only = true;
    turn_begin(t, 0, &update);
    EXPECT_OK(turn_prepared(t, 0, &has, &e), &e);
    turn_succeed(t, 0);
    EXPECT_OK(turn_prepared(t, 0, &p, &e), &e);
    EXPECT_EQ(turn_state(t), TURN_OVER);
    turn_begin(t, 0, &update); /* with nobody lost since it is an error, as ever */
    EXPECT_STATUS(turn_prepared(t, 0, &p, &e), SHD_EINTERNAL);
}

/* -- Rewinds (rewind_turn.h) ---------------------------------------------------------------------
 */

static void expect_asked(const struct rewind_turn *t, enum wire_rewind_what what, uint32_t first,
                         uint32_t last)
{
    uint32_t from, end;
    EXPECT(rewind_turn_next(t, &from, &end));
    EXPECT_EQ(t->ask.what, what);
    EXPECT_EQ(from, first);
    EXPECT_EQ(end, last + 1);
}

TEST(owners_hold_a_snapshot_before_owner_0_goes_back_and_all_follow)
{
    struct rewind_turn t;
    struct shd_err e = { 0 };
    const struct wire_rewound held = { .consent = 77 }, other = { .consent = 5 },
                              went = { .step = 4, .attempt = 9, .consent = 77 }, not_yet = { 0 };
    uint32_t from, end;
    const struct wire_rewind to = { .step = 4, .attempt = 2, .keep_settings = true };
    rewind_turn_begin(&t, 3, &to);
    expect_asked(&t, WIRE_REWIND_HOLD, 0, 0);
    EXPECT_EQ(t.ask.attempt, 2);
    EXPECT_OK(rewind_turn_answered(&t, 0, &held, &e), &e);
    expect_asked(&t, WIRE_REWIND_HOLD, 1, 2);
    EXPECT(t.ask.consent == 77 && t.ask.keep_settings);
    EXPECT_OK(rewind_turn_answered(&t, 2, &other, &e), &e);
    EXPECT_OK(rewind_turn_answered(&t, 1, &other, &e), &e);
    expect_asked(&t, WIRE_REWIND_GO, 0, 0);
    EXPECT_EQ(t.ask.consent, 77); /* owner 0's */
    EXPECT_OK(rewind_turn_answered(&t, 0, &went, &e), &e);
    expect_asked(&t, WIRE_REWIND_FOLLOW, 0, 2);
    EXPECT_EQ(t.ask.attempt, 9);
    EXPECT_STATUS(rewind_turn_answered(&t, 1, &not_yet, &e), SHD_EPROTO);
    for (uint32_t i = 0; i < 3; i++)
        EXPECT_OK(rewind_turn_answered(&t, i, &went, &e), &e);
    EXPECT(!rewind_turn_next(&t, &from, &end));
    rewind_turn_begin(&t, 1, &to); /* there are no others */
    EXPECT_OK(rewind_turn_answered(&t, 0, &held, &e), &e);
    expect_asked(&t, WIRE_REWIND_GO, 0, 0);
}

TEST(answers_of_before_and_after_a_rewind_are_told_apart)
{
    const struct rewind_seen none[2] = { { 0, 0 }, { 0, 0 } }, half[2] = { { 9, 4 }, { 0, 0 } },
                             all[2] = { { 9, 4 }, { 9, 4 } };
    const struct rewind_mark before = rewind_mark_of(none, 2), amid = rewind_mark_of(half, 2),
                             after = rewind_mark_of(all, 2);
    bool apart;
    EXPECT_EQ(rewind_newest_of(half, 2, &apart).step, 4);
    EXPECT(apart);
    EXPECT(!rewind_between(&before, &before) && !rewind_between(&after, &after));
    EXPECT(rewind_between(&before, &amid) && rewind_between(&before, &after));
    EXPECT(rewind_between(&amid, &amid) && rewind_between(&amid, &after));
}

TEST_MAIN()
