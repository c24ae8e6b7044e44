/* The client's protocol core against modelled owners, as data: any order of replies, connections
 * lost at any point, replies repeated, several workers at once, workers that die in their commit.
 */
#include <float.h>

#include "client/paths/decide.h"
#include "client/paths/turn.h"
#include "proto/base/check.h"
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
    _Alignas(16) uint8_t bytes[32768];
};

static struct turn *turn_in(struct memory *memory, uint32_t owners)
{
    CHECK(turn_bytes(owners) <= sizeof memory->bytes);
    return turn_init(memory->bytes, owners);
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

/* -- At random --------------------------------------------------------------------------------- */

struct worker {
    struct memory memory;
    struct turn *turn;
    uint64_t step;
    bool asked[OWNERS_MAX];
    enum turn_kind kind[OWNERS_MAX];
    struct wire_prepared last_prepared[OWNERS_MAX]; /* to be repeated */
    struct wire_committed last_committed[OWNERS_MAX];
    bool has_prepared[OWNERS_MAX], has_committed[OWNERS_MAX];
    uint64_t overs;
};

struct world {
    uint64_t seed;
    uint32_t owners, workers;
    struct owner owner[OWNERS_MAX];
    struct worker worker[WORKERS_MAX];
};

static uint32_t pick(struct world *w, uint32_t below)
{
    return (uint32_t)(test_random(&w->seed) >> 33) % below;
}

static void worker_begin(struct world *w, struct worker *k)
{
    const struct turn_update update = update_of(k->step, 0.5 + (double)(k - w->worker));
    memset(k->asked, 0, sizeof k->asked);
    memset(k->has_prepared, 0, sizeof k->has_prepared);
    memset(k->has_committed, 0, sizeof k->has_committed);
    if (k->step == STEPS)
        return;
    seal_all(w->owner, w->owners, k->step); /* it returns its gradients */
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

/* The owner handles what the worker asked; its answer arrives or is lost. */
static void worker_answer(struct world *w, struct worker *k, uint32_t i, bool arrives)
{
    struct shd_err e = { 0 };
    if (!k->asked[i])
        return;
    k->asked[i] = !arrives; /* else it is asked again, as the hub does it */
    if (turn_state(k->turn) == TURN_OVER)
        return;
    if (k->kind[i] == TURN_PREPARE) {
        k->last_prepared[i] = prepare(&w->owner[i], k->step);
        k->has_prepared[i] = true;
        if (arrives)
            EXPECT_OK(turn_prepared(k->turn, i, &k->last_prepared[i], &e), &e);
    } else {
        k->last_committed[i] = commit(&w->owner[i], k->step, turn_decision(k->turn));
        k->has_committed[i] = true;
        if (arrives)
            EXPECT_OK(turn_committed(k->turn, i, &k->last_committed[i], &e), &e);
    }
}

static void worker_repeat(struct worker *k, uint32_t i)
{
    struct shd_err e = { 0 };
    if (k->has_prepared[i] && !k->asked[i])
        EXPECT_OK(turn_prepared(k->turn, i, &k->last_prepared[i], &e), &e);
    if (k->has_committed[i] && !k->asked[i])
        EXPECT_OK(turn_committed(k->turn, i, &k->last_committed[i], &e), &e);
}

static void worker_move_on(struct world *w, struct worker *k)
{
    const enum turn_state state = turn_state(k->turn);
    if (state != TURN_DONE && state != TURN_OVER)
        return;
    if (state == TURN_DONE) /* whoever says done is right */
        for (uint32_t i = 0; i < w->owners; i++)
            EXPECT(w->owner[i].open > k->step);
    k->overs += state == TURN_OVER;
    k->step++;
    worker_begin(w, k);
}

static void world_event(struct world *w)
{
    struct worker *k = &w->worker[pick(w, w->workers)];
    const uint32_t owner = pick(w, w->owners), what = pick(w, 100);
    if (k->step == STEPS)
        return;
    if (what < 45)
        worker_ask(k);
    else if (what < 80)
        worker_answer(w, k, owner, /* arrives= */ true);
    else if (what < 88)
        worker_answer(w, k, owner, /* arrives= */ false);
    else if (what < 98)
        worker_repeat(k, owner);
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

static uint64_t world_run(uint64_t seed)
{
    static struct world w;
    uint64_t overs = 0;
    w = (struct world){ .seed = seed };
    w.owners = 1 + pick(&w, OWNERS_MAX);
    w.workers = 1 + pick(&w, WORKERS_MAX);
    owners_init(w.owner, w.owners);
    for (uint32_t i = 0; i < w.workers; i++) {
        w.worker[i].turn = turn_in(&w.worker[i].memory, w.owners);
        worker_begin(&w, &w.worker[i]);
    }
    for (uint32_t events = 0; !world_done(&w); events++) {
        if (events > 1000000)
            FAIL("seed %" PRIu64 " does not end", seed);
        world_event(&w);
    }
    for (uint32_t i = 0; i < w.owners; i++)
        for (uint32_t step = 0; step < STEPS; step++)
            EXPECT(decision_equal(&w.owner[i].decided[step], &w.owner[0].decided[step]));
    for (uint32_t i = 0; i < w.workers; i++)
        overs += w.worker[i].overs;
    return overs;
}

TEST(random_orders_losses_and_repeats_end_in_one_decision)
{
    uint64_t overs = 0;
    for (uint64_t n = 1; n <= 2000; n++)
        overs += world_run(test_seed(n * UINT64_C(0x9E3779B97F4A7C15)));
    EXPECT(overs > 0); /* late workers did occur */
}

/* The decision of a step: pure, so checked as data. */

#define DECIDERS_MAX 7u

static struct wire_prepared prepared_of(double sum)
{
    struct wire_prepared p = { .finite = true };
    fixsum_init(&p.sum);
    fixsum_add(&p.sum, sum);
    fixsum_carry(&p.sum);
    return p;
}

static int decide_one(const struct wire_prepared *p, double clip, double loss_scale,
                      struct decided *ret, struct shd_err *e)
{
    const struct decide_args args = { .prepared = p,
                                      .owners = 1,
                                      .micro_batches = 4,
                                      .lr = 0.1,
                                      .clip_norm = clip,
                                      .loss_scale = loss_scale };
    return decide(&args, ret, e);
}

TEST(mean_norm_and_scale)
{
    const struct wire_prepared p = prepared_of(64); /* summed gradient of norm 8, 4 micro-batches */
    struct decided d;
    struct shd_err e = { 0 };
    EXPECT_OK(decide_one(&p, 0, 0, &d, &e), &e);
    EXPECT(d.grad_norm == 2 && d.decision.scale == 0.25f && !d.decision.skip);
    EXPECT(d.decision.lr == 0.1);
    EXPECT_OK(decide_one(&p, 0, 16, &d, &e), &e);
    EXPECT(d.grad_norm == 0.125 && d.decision.scale == 0.25f / 16);
}

TEST(clipping_bounds_the_norm_and_leaves_small_ones_alone)
{
    const struct wire_prepared p = prepared_of(64);
    struct decided d;
    struct shd_err e = { 0 };
    EXPECT_OK(decide_one(&p, 0.5, 0, &d, &e), &e);
    EXPECT(d.decision.scale == (float)(0.25 * (0.5 / (2 + 1e-6))));
    EXPECT(d.grad_norm == 2); /* before clipping */
    EXPECT_OK(decide_one(&p, 2.5, 0, &d, &e), &e);
    EXPECT(d.decision.scale == 0.25f);
}

TEST(zero_gradient_is_not_a_division_by_zero)
{
    const struct wire_prepared p = prepared_of(0);
    struct decided d;
    struct shd_err e = { 0 };
    EXPECT_OK(decide_one(&p, 1, 0, &d, &e), &e);
    EXPECT(d.grad_norm == 0 && d.decision.scale == 0.25f && !d.decision.skip);
}

/* The same block sums over 1 to 7 owners, in any order: the same decision, to the bit. */
TEST(decision_does_not_depend_on_number_of_owners)
{
    enum { BLOCKS = 500 };
    static double blocks[BLOCKS];
    uint64_t rng = test_seed(11);
    for (int i = 0; i < BLOCKS; i++)
        blocks[i] = ldexp((double)(test_random(&rng) >> 11), (int)(test_random(&rng) % 120) - 110);
    struct decided first;
    for (uint32_t owners = 1; owners <= DECIDERS_MAX; owners++) {
        struct wire_prepared p[DECIDERS_MAX];
        struct shd_err e = { 0 };
        for (uint32_t i = 0; i < owners; i++)
            p[i] = prepared_of(0);
        for (int i = 0; i < BLOCKS; i++)
            fixsum_add(&p[test_random(&rng) % owners].sum, blocks[i]);
        for (uint32_t i = 0; i < owners; i++)
            fixsum_carry(&p[i].sum);
        const struct decide_args args = {
            .prepared = p, .owners = owners, .micro_batches = 3, .lr = 1e-3, .clip_norm = 0.7
        };
        struct decided d;
        EXPECT_OK(decide(&args, &d, &e), &e);
        if (owners == 1)
            first = d;
        EXPECT(d.grad_norm == first.grad_norm);
        EXPECT(decision_equal(&d.decision, &first.decision));
    }
}

TEST(one_owner_not_finite_skips)
{
    struct wire_prepared p[2] = { prepared_of(1), prepared_of(1) };
    const struct decide_args args = { .prepared = p, .owners = 2, .micro_batches = 1, .lr = 0.5 };
    struct decided d;
    struct shd_err e = { 0 };
    p[1].finite = false;
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.decision.skip && d.decision.scale == 0 && isinf(d.grad_norm));
}

TEST(recorded_decision_is_passed_on_verbatim)
{
    struct wire_prepared p[3] = { prepared_of(1), prepared_of(1), prepared_of(1) };
    const struct decide_args args = { .prepared = p, .owners = 3, .micro_batches = 1, .lr = 0.5 };
    struct decided d;
    struct shd_err e = { 0 };
    p[1].has_decision = true;
    p[1].decision = (struct decision){ .scale = 0.125f, .lr = 3 };
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.decision.scale == 0.125f && d.decision.lr == 3);
    p[2].has_decision = true;
    p[2].decision = p[1].decision;
    EXPECT_OK(decide(&args, &d, &e), &e);
    p[2].decision.lr = nextafter(3, 4);
    EXPECT_STATUS(decide(&args, &d, &e), SHD_EINTERNAL);
    EXPECT_HAS(e.text, "owner 2 recorded another decision");
}

/* A micro-batch that was computed twice need not have come to the same bits. */
TEST(metrics_are_those_of_owner_0)
{
    struct wire_prepared p[2] = { prepared_of(1), prepared_of(1) };
    const struct decide_args args = { .prepared = p, .owners = 2, .micro_batches = 1, .lr = 0.5 };
    struct decided d;
    struct shd_err e = { 0 };
    p[0].metrics[0] = p[1].metrics[0] = (double)NAN; /* the client's business */
    p[0].metrics[1] = p[1].metrics[1] = 2.5;
    p[0].metric_count = p[1].metric_count = 2;
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.metric_count == 2 && isnan(d.metrics[0]) && d.metrics[1] == 2.5);
    p[1].metrics[1] = 2.25;
    p[1].metric_count = 3;
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.metric_count == 2 && d.metrics[1] == 2.5);
}

TEST(numbers_outside_their_limits_are_named)
{
    const struct wire_prepared p = prepared_of(1);
    struct decided d = { .grad_norm = 77 };
    struct shd_err e = { 0 };
    EXPECT_STATUS(decide_one(&p, -1, 0, &d, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "clip_norm is -1");
    EXPECT_STATUS(decide_one(&p, 0, (double)INFINITY, &d, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "loss_scale is inf");
    EXPECT_STATUS(decide_one(&p, 0, DBL_MIN, &d, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "too small");
    const struct decide_args args = { .prepared = &p, .owners = 1, .micro_batches = 1, .lr = -1 };
    EXPECT_STATUS(decide(&args, &d, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "learning rate is -1");
    EXPECT(d.grad_norm == 77);
}

TEST(dynamic_loss_scale_follows_the_decisions)
{
    uint32_t good;
    struct decision d = { .loss_scale = 65536, .good_steps = 7 };
    EXPECT(loss_scale_next(NULL, &good) == 65536 && good == 1);
    EXPECT(loss_scale_next(&d, &good) == 65536 && good == 8);
    d.good_steps = 2000;
    EXPECT(loss_scale_next(&d, &good) == 131072 && good == 1);
    d.loss_scale = 16777216;
    EXPECT(loss_scale_next(&d, &good) == 16777216 && good == 1);
    d = (struct decision){ .skip = true, .loss_scale = 65536 };
    EXPECT(loss_scale_next(&d, &good) == 32768 && good == 1);
    d.loss_scale = 1.5;
    EXPECT(loss_scale_next(&d, &good) == 1 && good == 1);
    d = (struct decision){ .loss_scale = 8 }; /* static */
    EXPECT(loss_scale_next(&d, &good) == 65536 && good == 1);
}

/* A recorded decision is passed on with the scale it was made with, and the norm follows it. */
TEST(decisions_carry_their_loss_scale)
{
    struct wire_prepared p = prepared_of(64);
    struct decide_args args = { .prepared = &p,
                                .owners = 1,
                                .micro_batches = 4,
                                .lr = 0.1,
                                .loss_scale = 16,
                                .good_steps = 5 };
    struct decided d;
    struct shd_err e = { 0 };
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.decision.loss_scale == 16 && d.decision.good_steps == 5);
    struct decision other = d.decision;
    EXPECT(decision_equal(&other, &d.decision));
    other.good_steps++;
    EXPECT(!decision_equal(&other, &d.decision));
    p.has_decision = true;
    p.decision = (struct decision){ .scale = 1, .lr = 3, .loss_scale = 2, .good_steps = 9 };
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(decision_equal(&d.decision, &p.decision) && d.grad_norm == 1);
    p = prepared_of(64);
    p.finite = false;
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.decision.skip && d.decision.loss_scale == 16 && d.decision.good_steps == 0);
    args.loss_scale = 0;
    p.finite = true;
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.decision.loss_scale == 1);
}

/* The divisor takes the place of M in the norm, in what clipping sees and in the scale. */
TEST(update_divides_by_the_sum_of_a_metric)
{
    struct wire_prepared p[2] = { prepared_of(36), prepared_of(28) };
    struct decide_args args = {
        .prepared = p, .owners = 2, .micro_batches = 4, .lr = 0.1, .clip_norm = 0.5, .divide_by = 2
    };
    struct decided d, again;
    struct shd_err e = { 0 };
    p[0].metric_count = p[1].metric_count = 2;
    p[0].metrics[1] = 10;
    p[1].metrics[1] = 11; /* owner 0's count */
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.grad_norm == 8.0 / 10 && d.decision.divisor == 10);
    EXPECT(d.decision.scale == (float)(1.0 / 10 * (0.5 / (0.8 + 1e-6))));
    /* Whoever passes the record on, without the update, has the same norm. */
    p[1].has_decision = true;
    p[1].decision = d.decision;
    args = (struct decide_args){ .prepared = p, .owners = 2, .micro_batches = 4 };
    EXPECT_OK(decide(&args, &again, &e), &e);
    EXPECT(again.grad_norm == d.grad_norm && decision_equal(&again.decision, &d.decision));
    /* M by another name. */
    p[1].has_decision = false;
    p[0].metrics[0] = 4;
    args.divide_by = 1;
    EXPECT_OK(decide(&args, &d, &e), &e);
    args.divide_by = 0;
    EXPECT_OK(decide(&args, &again, &e), &e);
    EXPECT(d.grad_norm == again.grad_norm && d.decision.scale == again.decision.scale);
    EXPECT(!decision_equal(&d.decision, &again.decision));
}

TEST(divisors_that_are_none_skip_the_step_or_are_named)
{
    static const double bad[] = { 0, -3, (double)INFINITY, (double)NAN };
    struct wire_prepared p = prepared_of(64);
    struct decide_args args = { .prepared = &p, .owners = 1, .micro_batches = 4, .divide_by = 2 };
    struct decided d;
    struct shd_err e = { 0 };
    p.step = 7;
    p.metric_count = 1;
    EXPECT_STATUS(decide(&args, &d, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "metric 1, and the micro-batches of step 7 reported 1");
    p.metric_count = 2;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        p.metrics[1] = bad[i];
        EXPECT_OK(decide(&args, &d, &e), &e);
        EXPECT(d.decision.skip && d.decision.divisor == 0 && d.decision.scale == 0);
    }
    p.metrics[1] = 1e-300;
    EXPECT_STATUS(decide(&args, &d, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "metric 1 sums to 1e-300, too little");
}

TEST(decisions_carry_the_rates_of_groups)
{
    const struct decision_rates groups[] = { { 0.5, NAN, 0.9, NAN }, { NAN, 0, NAN, 0.25 } };
    struct wire_prepared p = prepared_of(64);
    const struct decide_args args = {
        .prepared = &p, .owners = 1, .micro_batches = 4, .groups = groups, .group_count = 2
    };
    struct decided d, other;
    struct shd_err e = { 0 };
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT_EQ(d.decision.rate_count, 8);
    const struct decision_rates r = decision_rates_of(&d.decision, 1);
    EXPECT(isnan(r.lr) && r.weight_decay == 0 && isnan(r.beta1) && r.beta2 == 0.25);
    other = d;
    EXPECT(decision_equal(&other.decision, &d.decision)); /* NaN is NaN */
    other.decision.rates[7] = 0.5;
    EXPECT(!decision_equal(&other.decision, &d.decision));
    p.finite = false; /* skipped, and as much on record */
    EXPECT_OK(decide(&args, &d, &e), &e);
    EXPECT(d.decision.skip && d.decision.rate_count == 8);
    d.decision.rate_count = 0;
    EXPECT(isnan(decision_rates_of(&d.decision, 63).lr));
}

TEST_MAIN()
