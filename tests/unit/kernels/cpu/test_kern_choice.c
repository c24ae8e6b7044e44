/* Which of two instruction sets is taken: from samples; and by a device, whose bits do not show it.
 */
#include "kernels/cpu/choice.h"
#include "kernels/cpu/isa.h"
#include "tests/lib/kern_trail_util.h"

/* -- From samples ------------------------------------------------------------------------------ */

/* A machine: what a chunk takes by each set, and what happens to it. */
struct machine {
    double ns[CHOICE_SIDES];
    double spread;   /* of every chunk's time, evenly to both sides */
    double preempts; /* the share of chunks that take a time slice longer */
    double drift;    /* of all chunks' times, from the first to the last */
};

static double uniform(uint64_t *state)
{
    return (double)(test_random(state) >> 11) * 0x1p-53;
}

static enum choice_side choose(const struct machine *m, uint64_t *state)
{
    struct choice c = { 0 };
    struct choice_verdict v;
    while (!choice_over(&c)) {
        double ns = m->ns[choice_turn(&c)];
        ns *= 1 + m->spread * (2 * uniform(state) - 1);
        ns *= 1 + m->drift * c.samples / (CHOICE_SIDES * CHOICE_PAIRS);
        if (uniform(state) < m->preempts)
            ns += 4e6;
        choice_add(&c, (uint64_t)ns);
    }
    EXPECT(choice_judge(&c, &v));
    return v.taken;
}

/* How often the other one is taken, of 1,000 times. */
static uint32_t taken_of_1000(struct machine m)
{
    uint64_t state = test_seed(20261123);
    uint32_t taken = 0;
    for (uint32_t i = 0; i < 1000; i++)
        taken += choose(&m, &state) == CHOICE_OTHER;
    return taken;
}

TEST(who_is_clearly_quicker_is_taken)
{
    EXPECT_EQ(taken_of_1000((struct machine){ .ns = { 40e3, 30e3 } }), 1000);
    EXPECT_EQ(taken_of_1000((struct machine){ .ns = { 30e3, 40e3 } }), 0);
    EXPECT_EQ(taken_of_1000((struct machine){ .ns = { 40e3, 37e3 } }), 1000);
}

TEST(ties_and_small_gains_keep_the_widest)
{
    EXPECT_EQ(taken_of_1000((struct machine){ .ns = { 40e3, 40e3 } }), 0);
    EXPECT_EQ(taken_of_1000((struct machine){ .ns = { 40e3, 39.2e3 } }), 0); /* 2 % */
    EXPECT_EQ(taken_of_1000((struct machine){ .ns = { 0, 0 } }), 0); /* a clock that stands still */
}

TEST(noise_takes_nobody)
{
    /* The chance that an equal one is taken is that of 12 heads in 16 throws, 3.8 %, or less. */
    EXPECT(taken_of_1000((struct machine){ .ns = { 40e3, 40e3 }, .spread = 0.05 }) < 60);
    EXPECT(taken_of_1000((struct machine){ .ns = { 40e3, 40e3 }, .spread = 0.5 }) < 60);
    EXPECT(taken_of_1000((struct machine){ .ns = { 40e3, 40e3 }, .preempts = 0.3 }) < 60);
    EXPECT(taken_of_1000((struct machine){
               .ns = { 40e3, 40e3 }, .spread = 0.1, .preempts = 0.1, .drift = 0.5 }) < 60);
}

TEST(outliers_and_drift_hide_nobody)
{
    EXPECT(taken_of_1000(
               (struct machine){ .ns = { 40e3, 36e3 }, .spread = 0.03, .preempts = 0.1 }) > 900);
    EXPECT(taken_of_1000((struct machine){ .ns = { 40e3, 36e3 }, .drift = 1 }) > 990);
    EXPECT(taken_of_1000((struct machine){ .ns = { 40e3, 36e3 }, .drift = -0.5 }) > 990);
}

TEST(both_take_turns_and_each_is_first_in_half_of_the_pairs)
{
    struct choice c = { 0 };
    uint32_t first[CHOICE_SIDES] = { 0 };
    for (uint32_t i = 0; i < CHOICE_PAIRS; i++) {
        const enum choice_side one = choice_turn(&c);
        choice_spoil(&c); /* it is its turn still */
        EXPECT(choice_turn(&c) == one && c.samples == 2 * i);
        first[one]++;
        choice_add(&c, 100 + one);
        EXPECT(choice_turn(&c) != one);
        choice_add(&c, 100 + choice_turn(&c));
    }
    EXPECT_EQ(first[CHOICE_WIDEST], CHOICE_PAIRS / 2);
    struct choice_verdict v;
    EXPECT(choice_over(&c) && choice_judge(&c, &v));
    EXPECT(v.ns[CHOICE_WIDEST] == 100 && v.ns[CHOICE_OTHER] == 101);
    EXPECT_NEAR(v.ratio, 1.01, 1e-6);
}

TEST(where_every_chunk_is_disturbed_it_is_given_up)
{
    struct choice c = { 0 };
    struct choice_verdict v = { .taken = CHOICE_OTHER };
    choice_add(&c, 1);
    for (uint32_t i = 0; i < CHOICE_SPOILT_MAX; i++) {
        EXPECT(!choice_over(&c));
        choice_spoil(&c);
    }
    EXPECT(choice_over(&c));
    EXPECT(!choice_judge(&c, &v));
    EXPECT(v.taken == CHOICE_OTHER); /* untouched */
}

/* -- By a device ------------------------------------------------------------------------------- */

#define OPS        (3 * SCRIPT_OPS) /* all dtypes */
#define PASSES_MAX 60u
#define PASSES_MIN 2u /* where there is nothing to choose */
/* So many choices are waited for; with ThreadSanitizer a pass takes a third of a second. */
#define CHOSEN (SANITIZE_THREAD ? 1u : 4u)

/* What the script comes to by an instruction set that was named. */
static void record_script(const char *isa, const struct world *w, struct inputs *in,
                          uint64_t digests[OPS + 1], struct kern_sum sums[OPS + 1])
{
    uint32_t count;
    struct kern *k = device_new(isa, 1);
    world_reset(w);
    for (uint64_t op = 1; op <= OPS; op++) {
        EXPECT_STATUS(script_run(k, w, in, op, true, &sums[op]), SHD_OK);
        digests[op] = world_digest(w);
    }
    k->ops->choices(k, &count);
    EXPECT_EQ(count, 0); /* it was told which */
    k->ops->free(k);
}

static void expect_choice(const struct kern_choice *c)
{
    const bool narrower = strcmp(c->isa, "avx2") == 0;
    EXPECT_STR(c->isa, narrower ? "avx2" : "avx512");
    EXPECT_STR(c->other, narrower ? "avx512" : "avx2");
    EXPECT(c->isa_ns > 0 && c->other_ns > 0);
    EXPECT(narrower ? c->ratio < CHOICE_RATIO_MAX : c->ratio > 0);
    EXPECT(strncmp(c->work, "accumulate ", 11) == 0 || strncmp(c->work, "sgd ", 4) == 0 ||
           strncmp(c->work, "adamw ", 6) == 0 || strncmp(c->work, "lion ", 5) == 0 ||
           strncmp(c->work, "mean ", 5) == 0);
}

/* The script over and over, until several kinds of work have been timed: a busy machine spoils what
 * it likes. Returns how many. */
static uint32_t run_choosing(uint32_t threads, uint32_t passes, const struct world *w,
                             struct inputs *in, const uint64_t digests[OPS + 1],
                             const struct kern_sum sums[OPS + 1])
{
    uint32_t count = 0;
    struct kern *k = device_new(NULL, threads);
    for (uint32_t pass = 0; pass < passes && count < CHOSEN; pass++) {
        world_reset(w);
        for (uint64_t op = 1; op <= OPS; op++) {
            struct kern_sum sum;
            EXPECT_STATUS(script_run(k, w, in, op, true, &sum), SHD_OK);
            if (world_digest(w) != digests[op] || !same_sum(&sum, &sums[op]))
                FAIL("pass %" PRIu32 ", op %" PRIu64 ": other bits than by one set", pass, op);
        }
        const struct kern_choice *made = k->ops->choices(k, &count);
        for (uint32_t i = 0; i < count; i++)
            expect_choice(&made[i]);
    }
    k->ops->free(k);
    return count;
}

TEST(a_device_chooses_while_it_works_and_no_bit_shows_it)
{
    static uint64_t digests[OPS + 1];
    static struct kern_sum sums[OPS + 1];
    const char *widest = "";
    for (const char *const *isa = kern_cpu_isas(); *isa != NULL; isa++)
        widest = *isa;
    struct world w = world_new();
    struct inputs *in = inputs_new();
    record_script(widest, &w, in, digests, sums);
    const bool chooses = strcmp(widest, "avx512") == 0;
    for (uint32_t threads = 1; threads <= 2; threads++) {
        const uint32_t count = run_choosing(threads, chooses ? PASSES_MAX : PASSES_MIN, &w, in,
                                            digests, sums);
        EXPECT(chooses ? count > 0 : count == 0);
    }
    world_free(&w);
    free(in);
}

TEST_MAIN()
