/* What two runs' numbers come to: shardctl replay's verdict. */
#include <math.h>
#include <string.h>

#include "client/ctl/state/replay_judge.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

#define STEPS 4u

static struct shd_step_row was[STEPS], now[STEPS];

/* Two runs of steps 8 to 11 with the same numbers, at other times. */
static void fill(void)
{
    for (uint32_t i = 0; i < STEPS; i++) {
        was[i] = (struct shd_step_row){ .size = sizeof *was,
                                        .step = 8 + i,
                                        .time_ns = 1,
                                        .metrics = { 20.0 + i, 0.5 },
                                        .metric_count = 2,
                                        .reported = 4,
                                        .grad_norm = 1.5 + i,
                                        .lr = 1e-3,
                                        .loss_scale = 1 };
        now[i] = was[i];
        now[i].time_ns = 2;
    }
}

static struct replay_finding judge(bool *ret_state)
{
    return replay_judge(was, now, STEPS, ret_state);
}

static void expect(enum replay_verdict verdict, uint64_t step, const char *what)
{
    bool state;
    const struct replay_finding f = judge(&state);
    EXPECT_EQ(f.verdict, verdict);
    EXPECT_EQ(f.step, step);
    EXPECT_STR(f.what != NULL ? f.what : "", what);
    EXPECT(state == (verdict == REPLAY_AGREES));
}

TEST(the_same_numbers_agree_whatever_the_clock_says)
{
    fill();
    now[1].metrics[1] = 7; /* seconds, say: the loss is the first one */
    was[2].grad_norm = INFINITY;
    now[2].grad_norm = INFINITY;
    was[2].skipped = now[2].skipped = true; /* not finite, in both */
    was[3].metrics[0] = nan("1");
    now[3].metrics[0] = nan("2");
    expect(REPLAY_AGREES, 12, "");
}

TEST(the_first_step_whose_bits_differ_is_named)
{
    fill();
    now[2].grad_norm = nextafter(now[2].grad_norm, 9);
    now[3].metrics[0] = 1;
    expect(REPLAY_DIFFERS, 11, "norm");
    fill();
    now[0].metrics[0] = nextafter(now[0].metrics[0], 0);
    expect(REPLAY_DIFFERS, 9, "loss");
    fill();
    now[3].grad_norm = INFINITY;
    now[3].skipped = true;
    expect(REPLAY_DIFFERS, 12, "norm");
    fill();
    was[1].guard = SHD_GUARD_NORM_ABOVE; /* of numbers alone: a fork has it as well */
    was[1].skipped = true;
    expect(REPLAY_DIFFERS, 10, "skipped");
    now[1] = was[1];
    expect(REPLAY_AGREES, 12, "");
}

/* A daemon that was killed may know the metrics of fewer micro-batches. */
TEST(losses_over_other_micro_batches_are_not_compared)
{
    fill();
    was[1].reported = 3;
    was[1].metrics[0] = 15;
    was[2].metric_count = 0;
    was[2].metrics[0] = 0;
    expect(REPLAY_AGREES, 12, "");
}

TEST(what_was_made_of_other_things_says_nothing)
{
    fill();
    now[1].lr = 2e-3;
    now[1].grad_norm = 9; /* follows */
    expect(REPLAY_UNKNOWN, 10, "lr");
    fill();
    now[3].loss_scale = 2;
    expect(REPLAY_UNKNOWN, 12, "loss_scale");
    fill();
    was[1].skipped = true;
    was[1].grad_norm = 0;
    expect(REPLAY_UNKNOWN, 10, "put");
    now[1] = was[1];
    expect(REPLAY_AGREES, 12, "");
}

/* A fork's window begins empty. */
TEST(a_rule_with_a_window_hides_the_state_of_the_last_step_and_all_behind_others)
{
    static const uint32_t rules[] = { SHD_GUARD_NORM_ZSCORE, SHD_GUARD_LOSS_ZSCORE,
                                      SHD_GUARD_UNIT_ZSCORE };
    bool state = true;
    for (size_t i = 0; i < ARRAY_SIZE(rules); i++) {
        fill();
        was[2].guard = rules[i];
        was[2].skipped = true;
        expect(REPLAY_UNKNOWN, 11, "guard");
        now[2].grad_norm = 9; /* the gradient is of before the rule */
        expect(REPLAY_DIFFERS, 11, "norm");
        fill();
        was[3].guard = rules[i];
        was[3].skipped = true;
        EXPECT_EQ(judge(&state).verdict, REPLAY_AGREES);
        EXPECT(!state);
        now[3].grad_norm = 9;
        EXPECT_EQ(judge(&state).verdict, REPLAY_DIFFERS);
    }
}

TEST(no_steps_say_nothing_of_the_state)
{
    bool state = true;
    EXPECT_EQ(replay_judge(was, now, 0, &state).verdict, REPLAY_AGREES);
    EXPECT(!state);
}

TEST(each_bit_counts_in_a_hash)
{
    float values[3] = { 0, -1, 2 };
    const uint64_t before = replay_hash(values, 3);
    for (uint32_t i = 0; i < 96; i++) {
        uint32_t bits[3];
        float other[3];
        memcpy(bits, values, sizeof bits);
        bits[i / 32] ^= UINT32_C(1) << (i % 32);
        memcpy(other, bits, sizeof other);
        EXPECT(replay_hash(other, 3) != before);
    }
    EXPECT(replay_hash(values, 2) != before);
}

TEST_MAIN()
