/* The decision of a step: pure, so checked as data. */
#include <float.h>

#include "client/paths/decide.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

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
