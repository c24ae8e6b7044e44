/* See decide.h. */
#include "client/paths/decide.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "proto/base/check.h"

/* Keeps the quotient finite for a norm of 0, as torch.nn.utils.clip_grad_norm_ does. */
#define CLIP_EPS 1e-6

static uint64_t bits(double x)
{
    uint64_t raw;
    memcpy(&raw, &x, sizeof raw);
    return raw;
}

/* A float keeps its identity as a double. */
bool decision_equal(const struct decision *a, const struct decision *b)
{
    return a->skip == b->skip && bits((double)a->scale) == bits((double)b->scale) &&
           bits(a->lr) == bits(b->lr) && bits(a->loss_scale) == bits(b->loss_scale) &&
           a->good_steps == b->good_steps;
}

double loss_scale_next(const struct decision *last, uint32_t *ret_good_steps)
{
    *ret_good_steps = 1;
    if (last == NULL || (!last->skip && last->good_steps == 0))
        return LOSS_SCALE_START;
    if (last->skip)
        return last->loss_scale > 2 ? last->loss_scale / 2 : 1;
    if (last->good_steps >= LOSS_SCALE_GROWTH)
        return last->loss_scale < LOSS_SCALE_MAX / 2 ? last->loss_scale * 2 : LOSS_SCALE_MAX;
    *ret_good_steps = last->good_steps + 1;
    return last->loss_scale;
}

static int check_number(const char *what, double x, struct shd_err *e)
{
    if (!isfinite(x) || x < 0)
        return err_set(e, SHD_ERANGE, "%s is %g: must be finite and not negative", what, x);
    return SHD_OK;
}

static int check_args(const struct decide_args *args, struct shd_err *e)
{
    int r = check_number("learning rate", args->lr, e);
    if (r == SHD_OK)
        r = check_number("clip_norm", args->clip_norm, e);
    if (r == SHD_OK)
        r = check_number("loss_scale", args->loss_scale, e);
    return r;
}

/* Owners must agree on the decision, which is not of a slice. Metrics may differ: a micro-batch
 * that a worker died in the middle of is computed again for those owners that lack it, not always
 * to the bit. Owner 0's are the step's. */
static int check_agreement(const struct decide_args *args, struct shd_err *e)
{
    const struct wire_prepared *decided = NULL;
    for (uint32_t i = 0; i < args->owners; i++) {
        const struct wire_prepared *p = &args->prepared[i];
        if (!p->has_decision)
            continue;
        if (decided != NULL && !decision_equal(&p->decision, &decided->decision))
            return err_set(e, SHD_EINTERNAL,
                           "owner %" PRIu32 " recorded another decision for step "
                           "%" PRIu64 " than an owner before it",
                           i, p->step);
        decided = p;
    }
    return SHD_OK;
}

static const struct decision *recorded(const struct decide_args *args)
{
    for (uint32_t i = 0; i < args->owners; i++)
        if (args->prepared[i].has_decision)
            return &args->prepared[i].decision;
    return NULL;
}

/* sqrt(sum of squares) / M / loss_scale; the sum is exact, so this is the same for any N. */
static double mean_norm(const struct decide_args *args, double loss_scale)
{
    struct fixsum total;
    fixsum_init(&total);
    for (uint32_t i = 0; i < args->owners; i++) {
        if (!args->prepared[i].finite)
            return INFINITY;
        fixsum_merge(&total, &args->prepared[i].sum);
    }
    return sqrt(fixsum_value(&total)) / args->micro_batches / loss_scale;
}

static int derive(const struct decide_args *args, double norm, double loss_scale,
                  struct decision *ret_decision, struct shd_err *e)
{
    if (!isfinite(norm)) {
        *ret_decision = (struct decision){ .skip = true, .lr = args->lr, .loss_scale = loss_scale };
        return SHD_OK;
    }
    double factor = 1;
    if (args->clip_norm > 0 && args->clip_norm / (norm + CLIP_EPS) < 1)
        factor = args->clip_norm / (norm + CLIP_EPS);
    const float scale = (float)(1.0 / args->micro_batches / loss_scale * factor);
    if (!isfinite(scale))
        return err_set(e, SHD_ERANGE,
                       "loss_scale %g is too small: gradients would be multiplied "
                       "by more than fp32 holds",
                       args->loss_scale);
    *ret_decision = (struct decision){
        .scale = scale, .lr = args->lr, .loss_scale = loss_scale, .good_steps = args->good_steps
    };
    return SHD_OK;
}

int decide(const struct decide_args *args, struct decided *ret_decided, struct shd_err *e)
{
    CHECK(args->owners > 0);
    CHECK(args->micro_batches > 0);
    int r = check_args(args, e);
    if (r == SHD_OK)
        r = check_agreement(args, e);
    if (r != SHD_OK)
        return r;
    const struct decision *record = recorded(args);
    const double asked = record != NULL ? record->loss_scale : args->loss_scale;
    const double loss_scale = asked > 0 ? asked : 1;
    struct decided decided = { .grad_norm = mean_norm(args, loss_scale) };
    if (record != NULL)
        decided.decision = *record;
    else
        r = derive(args, decided.grad_norm, loss_scale, &decided.decision, e);
    if (r != SHD_OK)
        return r;
    decided.metric_count = args->prepared[0].metric_count;
    memcpy(decided.metrics, args->prepared[0].metrics, sizeof decided.metrics);
    *ret_decided = decided;
    return SHD_OK;
}
