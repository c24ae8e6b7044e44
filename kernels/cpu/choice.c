/* See choice.h. */
#include "kernels/cpu/choice.h"

#include <stdlib.h>

#include "proto/base/check.h"

#define SAMPLES (CHOICE_SIDES * CHOICE_PAIRS)

enum choice_side choice_turn(const struct choice *c)
{
    return (c->samples + c->samples / 2) % CHOICE_SIDES == 0 ? CHOICE_WIDEST : CHOICE_OTHER;
}

void choice_add(struct choice *c, uint64_t ns)
{
    CHECK(!choice_over(c));
    c->ns[choice_turn(c)][c->samples / CHOICE_SIDES] = (float)ns;
    c->samples++;
}

void choice_spoil(struct choice *c)
{
    CHECK(!choice_over(c));
    c->spoilt++;
}

bool choice_over(const struct choice *c)
{
    return c->samples == SAMPLES || c->spoilt == CHOICE_SPOILT_MAX;
}

static int ascending(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double median(const float x[CHOICE_PAIRS])
{
    float sorted[CHOICE_PAIRS];
    for (uint32_t i = 0; i < CHOICE_PAIRS; i++)
        sorted[i] = x[i];
    qsort(sorted, CHOICE_PAIRS, sizeof *sorted, ascending);
    return ((double)sorted[CHOICE_PAIRS / 2 - 1] + (double)sorted[CHOICE_PAIRS / 2]) / 2;
}

bool choice_judge(const struct choice *c, struct choice_verdict *ret)
{
    CHECK(choice_over(c));
    if (c->samples < SAMPLES)
        return false;
    float ratio[CHOICE_PAIRS];
    uint32_t quicker = 0;
    for (uint32_t i = 0; i < CHOICE_PAIRS; i++) {
        const float widest = c->ns[CHOICE_WIDEST][i], other = c->ns[CHOICE_OTHER][i];
        quicker += other < widest;
        ratio[i] = widest > 0 ? other / widest : 1; /* a clock that stands still says nothing */
    }
    struct choice_verdict v = { .taken = CHOICE_WIDEST, .ratio = median(ratio) };
    for (unsigned i = 0; i < CHOICE_SIDES; i++)
        v.ns[i] = median(c->ns[i]);
    if (v.ratio < CHOICE_RATIO_MAX && quicker >= CHOICE_PAIRS_MIN)
        v.taken = CHOICE_OTHER;
    *ret = v;
    return true;
}
