/* See decide.h. */
#include "client/paths/decide.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/spec/guard.h"
#include "proto/spec/settings.h"

/* Keeps the quotient finite for a norm of 0, as torch.nn.utils.clip_grad_norm_ does. */
#define CLIP_EPS 1e-6

double loss_scale_next(const struct decision *last, uint32_t *ret_good_steps)
{
    *ret_good_steps = 1;
    const bool overflowed = last != NULL && last->skip && last->guard.what == GUARD_NONE;
    if (last != NULL && last->put != 0) {
        *ret_good_steps = last->good_steps;
        return last->loss_scale;
    }
    if (last == NULL || (!overflowed && last->good_steps == 0))
        return LOSS_SCALE_START;
    if (overflowed)
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

/* What the update divides by: the sum of one of the step's metrics, which are owner 0's; 0: M.
 * *ret_none: by that nothing can be divided, as no sample of the step counts. */
static int find_divisor(const struct decide_args *args, double *ret_divisor, bool *ret_none,
                        struct shd_err *e)
{
    const struct wire_prepared *p = &args->prepared[0];
    *ret_divisor = 0;
    *ret_none = false;
    if (args->divide_by == 0)
        return SHD_OK;
    const uint32_t i = args->divide_by - 1;
    if (i >= p->metric_count)
        return err_set(e, SHD_EINVAL,
                       "divide_by is %" PRIu32 ": metric %" PRIu32
                       ", and the micro-batches of step "
                       "%" PRIu64 " reported %" PRIu32,
                       args->divide_by, i, p->step, p->metric_count);
    *ret_none = !isfinite(p->metrics[i]) || p->metrics[i] <= 0;
    *ret_divisor = *ret_none ? 0 : p->metrics[i];
    return SHD_OK;
}

static double count_of(const struct decide_args *args, double divisor)
{
    return divisor > 0 ? divisor : args->micro_batches;
}

/* sqrt(sum of squares) / M or divisor / loss_scale; the sum is exact, so this is the same for any
 * N. */
static double mean_norm(const struct decide_args *args, double divisor, double loss_scale)
{
    struct fixsum total;
    fixsum_init(&total);
    for (uint32_t i = 0; i < args->owners; i++) {
        if (!args->prepared[i].finite)
            return INFINITY;
        fixsum_merge(&total, &args->prepared[i].sum);
    }
    return sqrt(fixsum_value(&total)) / count_of(args, divisor) / loss_scale;
}

static double set_number(const struct decide_args *args, uint32_t group, enum setting_rate rate)
{
    return args->settings != NULL ? setting_get(args->settings, setting_of(group, rate))
                                  : (double)NAN;
}

static double or_else(double set, double given)
{
    return isnan(set) ? given : set;
}

/* Rates of a group: the update's, and what is set. */
static struct decision_rates rates_of(const struct decide_args *args, uint32_t g)
{
    struct decision_rates r = { NAN, NAN, NAN, NAN };
    if (g < args->group_count)
        r = args->groups[g];
    const double scale = set_number(args, g, SETTING_LR_SCALE);
    if (!isnan(scale))
        r.lr = or_else(r.lr, args->lr) * scale;
    r.weight_decay = or_else(set_number(args, g, SETTING_WEIGHT_DECAY), r.weight_decay);
    r.beta1 = or_else(set_number(args, g, SETTING_BETA1), r.beta1);
    r.beta2 = or_else(set_number(args, g, SETTING_BETA2), r.beta2);
    return r;
}

/* Groups that a decision has rates of: those of the update or, where it has none, those that
 * something is set of. */
static uint32_t rated_groups(const struct decide_args *args)
{
    const uint32_t count = args->settings != NULL ? args->settings->count : 0;
    bool any = false;
    for (uint32_t i = 1; i < settings_old_count(count); i++)
        any = any || !isnan(args->settings->numbers[i]);
    return args->group_count == 0 && any ? settings_groups(count) : args->group_count;
}

/* Those that are set; none at all where none is. */
static void give_eps(const struct decide_args *args, struct decision *d)
{
    const uint32_t groups = args->settings != NULL ? settings_groups(args->settings->count) : 0;
    bool any = false;
    for (uint32_t g = 0; g < groups; g++) {
        const double eps = setting_get(args->settings, setting_eps(groups, g));
        d->eps[g] = isnan(eps) ? (double)NAN : eps;
        any = any || !isnan(eps);
    }
    d->eps_count = any ? groups : 0;
}

/* What the update says, and what is set, and is not computed. */
static struct decision given(const struct decide_args *args, double divisor, double loss_scale)
{
    const uint32_t groups = rated_groups(args);
    struct decision d = { .lr = args->lr,
                          .loss_scale = loss_scale,
                          .divisor = divisor,
                          .puts = args->puts,
                          .rate_count = groups * DECISION_RATES };
    for (uint32_t g = 0; g < groups; g++) {
        const struct decision_rates r = rates_of(args, g);
        const double numbers[DECISION_RATES] = { r.lr, r.weight_decay, r.beta1, r.beta2 };
        for (uint32_t i = 0; i < DECISION_RATES; i++) /* there are many NaNs: one of them */
            d.rates[g * DECISION_RATES + i] = isnan(numbers[i]) ? (double)NAN : numbers[i];
    }
    give_eps(args, &d);
    return d;
}

/* Metrics are owner 0's, as the history has them. */
static struct decision_guard judge(const struct decide_args *args, double norm)
{
    const struct wire_prepared *p = &args->prepared[0];
    struct guard_step step = { .norm = norm, .has_loss = p->metric_count > 0 && p->reported > 0 };
    if (step.has_loss)
        step.loss = p->metrics[0] / p->reported;
    return args->guard != NULL ? guard_judge(args->guard, &step) : (struct decision_guard){ 0 };
}

static int derive(const struct decide_args *args, double norm, struct decision *d,
                  struct shd_err *e)
{
    if (!isfinite(norm)) {
        d->skip = true;
        return SHD_OK;
    }
    d->guard = judge(args, norm);
    if (d->guard.what != GUARD_NONE) {
        d->skip = true;
        d->good_steps = args->good_steps; /* nothing overflowed */
        return SHD_OK;
    }
    double factor = 1;
    const double set = args->settings != NULL ? setting_get(args->settings, SETTINGS_CLIP_NORM)
                                              : (double)NAN;
    const double clip_norm = or_else(set, args->clip_norm);
    if (clip_norm > 0 && clip_norm / (norm + CLIP_EPS) < 1)
        factor = clip_norm / (norm + CLIP_EPS);
    d->scale = (float)(1.0 / count_of(args, d->divisor) / d->loss_scale * factor);
    d->good_steps = args->good_steps;
    if (isfinite(d->scale))
        return SHD_OK;
    if (d->divisor > 0)
        return err_set(e, SHD_ERANGE,
                       "metric %" PRIu32 " sums to %g, too little to divide by with loss_scale %g: "
                       "gradients would be multiplied by more than fp32 holds",
                       args->divide_by - 1, d->divisor, args->loss_scale);
    return err_set(e, SHD_ERANGE,
                   "loss_scale %g is too small: gradients would be multiplied "
                   "by more than fp32 holds",
                   args->loss_scale);
}

static enum decide_cause cause_of(const struct decide_args *args, const struct decision *d)
{
    for (uint32_t i = 0; i < args->owners; i++)
        if (!args->prepared[i].finite)
            return DECIDE_CAUSE_INFINITE;
    return d->guard.what == GUARD_NORM_ABOVE || d->guard.what == GUARD_NORM_ZSCORE
               ? DECIDE_CAUSE_LARGEST
               : DECIDE_CAUSE_NONE;
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
    double divisor = record != NULL ? record->divisor : 0;
    bool none = false;
    if (record == NULL)
        r = find_divisor(args, &divisor, &none, e);
    if (r != SHD_OK)
        return r;
    struct decided decided = { .grad_norm = mean_norm(args, divisor, loss_scale) };
    decided.decision = record != NULL ? *record : given(args, divisor, loss_scale);
    if (record == NULL)
        r = derive(args, none ? (double)NAN : decided.grad_norm, &decided.decision, e);
    if (r != SHD_OK)
        return r;
    if (record == NULL && decided.decision.skip)
        decided.cause = cause_of(args, &decided.decision);
    decided.metric_count = args->prepared[0].metric_count;
    decided.reported = args->prepared[0].reported;
    memcpy(decided.metrics, args->prepared[0].metrics, sizeof decided.metrics);
    *ret_decided = decided;
    return SHD_OK;
}
