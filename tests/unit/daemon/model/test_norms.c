/* The rings of what units come to: what is kept of which step, and for how long. */
#include "daemon/model/norms.h"

#include "kernels/kern.h"
#include "tests/lib/test.h"

static struct kern_sum sum_of(double x)
{
    struct kern_sum s = { .finite = isfinite(x) };
    fixsum_init(&s.sum);
    if (s.finite)
        fixsum_add(&s.sum, x);
    fixsum_carry(&s.sum);
    return s;
}

static void put(struct norms *n, uint64_t step, uint32_t unit, double x)
{
    const struct norms_step of = { .step = step, .divisor = 4, .skipped = step % 3 == 2 };
    const struct kern_sum sum = sum_of(x);
    norms_put_gradient(n, &of, unit, &sum);
}

static void change(struct norms *n, uint64_t step, uint32_t unit, double update, bool whole)
{
    struct kern_change *c = norms_take_change(n, step);
    EXPECT((c != NULL) == (step % NORMS_EVERY == 0));
    if (c == NULL)
        return;
    EXPECT(c->whole && c->update.finite && c->weight.finite);
    c->update = sum_of(update);
    c->weight = sum_of(100 * update);
    c->whole = whole;
    norms_put_change(n, step, unit, c);
}

static struct norms_cell cell(struct norms *n, uint64_t step, uint32_t unit)
{
    struct norms_cell c;
    norms_get_cells(n, step, unit, 1, &c);
    return c;
}

TEST(the_last_steps_are_kept_and_older_ones_forgotten)
{
    struct norms *n = norms_new(3);
    struct norms_step step;
    EXPECT_EQ(norms_steps(n), NORMS_STEPS_MAX);
    EXPECT(!norms_get_step(n, 0, &step));
    EXPECT_EQ(cell(n, 0, 0).gradient, NORMS_UNKNOWN);
    for (uint64_t k = 0; k < 1000; k++)
        for (uint32_t u = 0; u < 3; u++) {
            put(n, k, u, (double)(k + u));
            change(n, k, u, (double)(k + 1), /* whole= */ true);
        }
    for (uint64_t k = 0; k < 1002; k++) {
        const bool kept = k >= 1000 - NORMS_STEPS_MAX && k < 1000;
        EXPECT_EQ(norms_get_step(n, k, &step), kept);
        EXPECT(!kept || (step.step == k && step.divisor == 4 && step.skipped == (k % 3 == 2)));
        for (uint32_t u = 0; u < 3; u++) {
            const struct norms_cell c = cell(n, k, u);
            EXPECT_EQ(c.gradient, kept ? NORMS_FINITE : NORMS_UNKNOWN);
            EXPECT(!kept || fixsum_value(&c.grad) == (double)(k + u));
            EXPECT(!kept || (c.change == NORMS_FINITE) == (k % NORMS_EVERY == 0));
            if (kept && k % NORMS_EVERY == 0)
                EXPECT(fixsum_value(&c.update) == (double)(k + 1) &&
                       fixsum_value(&c.weight) == 100 * (double)(k + 1));
        }
    }
    norms_unref(n);
}

TEST(what_nobody_put_is_not_known)
{
    struct norms *n = norms_new(2);
    put(n, 8, 0, 1);
    put(n, 8 + NORMS_STEPS_MAX, 1, INFINITY); /* in the same place */
    EXPECT_EQ(cell(n, 8, 0).gradient, NORMS_UNKNOWN);
    EXPECT_EQ(cell(n, 8 + NORMS_STEPS_MAX, 0).gradient, NORMS_UNKNOWN);
    EXPECT_EQ(cell(n, 8 + NORMS_STEPS_MAX, 1).gradient, NORMS_NOT_FINITE);
    change(n, 16, 0, 2, /* whole= */ false);
    EXPECT_EQ(cell(n, 16, 0).change, NORMS_UNKNOWN);
    change(n, 16, 1, NAN, /* whole= */ true);
    EXPECT_EQ(cell(n, 16, 1).change, NORMS_NOT_FINITE);
    norms_unref(n);
}

TEST(steps_that_are_made_again_are_forgotten)
{
    struct norms *n = norms_new(1);
    struct norms_step step;
    for (uint64_t k = 0; k < 30; k++) {
        put(n, k, 0, (double)k);
        change(n, k, 0, 1, /* whole= */ true);
    }
    norms_forget(n, 16);
    for (uint64_t k = 0; k < 30; k++) {
        EXPECT_EQ(norms_get_step(n, k, &step), k < 16);
        EXPECT_EQ(cell(n, k, 0).gradient, k < 16 ? NORMS_FINITE : NORMS_UNKNOWN);
        EXPECT_EQ(cell(n, k, 0).change,
                  k < 16 && k % NORMS_EVERY == 0 ? NORMS_FINITE : NORMS_UNKNOWN);
    }
    put(n, 16, 0, 5);
    const struct norms_cell again = cell(n, 16, 0);
    EXPECT(fixsum_value(&again.grad) == 5);
    EXPECT_EQ(cell(n, 16, 0).change, NORMS_UNKNOWN);
    norms_unref(n);
}

TEST(as_many_updates_are_measured_at_once_as_run)
{
    struct norms *n = norms_new(8);
    struct kern_change *taken[NORMS_AT_ONCE];
    for (uint32_t i = 0; i < NORMS_AT_ONCE; i++)
        EXPECT((taken[i] = norms_take_change(n, 0)) != NULL);
    EXPECT(norms_take_change(n, 0) == NULL);
    norms_put_change(n, 0, 7, taken[2]);
    EXPECT(norms_take_change(n, 0) == taken[2]);
    norms_unref(n);
}

TEST(many_units_keep_fewer_steps)
{
    struct norms *n = norms_new(4096);
    EXPECT(norms_steps(n) >= NORMS_STEPS_MIN && norms_steps(n) < 32);
    norms_unref(n);
    n = norms_new(65536);
    EXPECT_EQ(norms_steps(n), NORMS_STEPS_MIN);
    put(n, 41, 65535, 3);
    struct norms *second = norms_ref(n);
    norms_unref(n);
    const struct norms_cell last = cell(second, 41, 65535);
    EXPECT(fixsum_value(&last.grad) == 3);
    norms_unref(second);
}

TEST_MAIN()
