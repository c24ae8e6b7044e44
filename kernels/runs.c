/* See runs.h. */
#include "kernels/runs.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/adafactor.h"
#include "proto/spec/muon.h"

int runs_new(const struct spec *spec, uint32_t unit, struct slice slice, struct kern_run **ret_runs,
             uint32_t *ret_count, struct shd_err *e)
{
    CHECK(unit < spec->unit_count);
    const struct spec_unit *su = &spec->units[unit];
    struct kern_run *runs = sys_calloc(su->tensor_count, sizeof *runs);
    if (runs == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " runs of unit '%s'",
                       su->tensor_count, su->name);
    uint32_t count = 0;
    for (uint32_t t = su->first_tensor; t < su->first_tensor + su->tensor_count; t++) {
        const struct spec_tensor *st = &spec->tensors[t];
        uint64_t first;
        const uint64_t elems = layout_intersect(slice, st->offset_elems, st->elems, &first);
        if (elems == 0 || spec_is_whole(spec, st) || st->statistics)
            continue;
        first -= slice.first_elem;
        struct kern_run *last = count > 0 ? &runs[count - 1] : NULL;
        if (last != NULL && last->hyper == st->group && last->first_elem + last->elems == first)
            last->elems += elems;
        else
            runs[count++] = (struct kern_run){ first, elems, st->group };
    }
    if (count == 0) {
        free(runs);
        runs = NULL;
    }
    *ret_runs = runs;
    *ret_count = count;
    return SHD_OK;
}

static struct kern_matrix matrix_of(const struct spec *spec, const struct spec_tensor *st)
{
    const struct spec_group *group = &spec->groups[st->group];
    if (group->muon != NULL)
        return (struct kern_matrix){ .kind = SPEC_MUON,
                                     .rows = st->shape[0],
                                     .cols = st->shape[1],
                                     .ratio = muon_ratio(group->muon->adjust, st->shape[0],
                                                         st->shape[1]) };
    if (group->adafactor == NULL)
        return (struct kern_matrix){ .kind = SPEC_LAMB, .rows = 1, .cols = st->elems, .ratio = 1 };
    const struct adafactor_shape shape = adafactor_shape(st);
    return (struct kern_matrix){
        .kind = SPEC_ADAFACTOR, .rows = shape.rows, .cols = shape.cols, .batch = shape.batch
    };
}

/* Those of tensor index of the unit, in it. */
static struct kern_run statistics_of(const struct spec *spec, uint32_t unit, uint32_t index)
{
    const struct spec_unit *su = &spec->units[unit];
    const struct spec_tensor *st = &spec->tensors[su->first_tensor + index];
    const struct spec_tensor *all = &spec->tensors[su->first_tensor + su->tensor_count - 1];
    const struct adafactor_shape shape = adafactor_shape(st);
    return (struct kern_run){ all->offset_elems + adafactor_offset_elems(spec, unit, index),
                              adafactor_elems(&shape), st->group };
}

int runs_matrices(const struct spec *spec, uint32_t unit, struct slice slice,
                  struct kern_whole **ret_whole, struct shd_err *e)
{
    const struct spec_unit *su = &spec->units[unit];
    *ret_whole = NULL;
    if (!su->wholes || slice.elems == 0)
        return SHD_OK;
    CHECK(slice.first_elem == 0 && slice.elems == su->elems);
    const size_t each = sizeof(struct kern_matrix) + 2 * sizeof(struct kern_run);
    struct kern_whole *whole = sys_calloc(1, sizeof *whole + su->tensor_count * each);
    if (whole == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " matrices of unit '%s'",
                       su->tensor_count, su->name);
    struct kern_matrix *matrices = (void *)(whole + 1);
    struct kern_run *runs = (void *)(matrices + su->tensor_count);
    struct kern_run *statistics = runs + su->tensor_count;
    uint32_t count = 0;
    for (uint32_t t = su->first_tensor; t < su->first_tensor + su->tensor_count; t++) {
        const struct spec_tensor *st = &spec->tensors[t];
        if (!spec_is_whole(spec, st))
            continue;
        matrices[count] = matrix_of(spec, st);
        if (su->adafactor)
            statistics[count] = statistics_of(spec, unit, t - su->first_tensor);
        runs[count++] = (struct kern_run){ st->offset_elems, st->elems, st->group };
    }
    *whole = (struct kern_whole){ .runs = runs,
                                  .matrices = matrices,
                                  .count = count,
                                  .statistics = su->adafactor ? statistics : NULL };
    *ret_whole = whole;
    return SHD_OK;
}

/* x^n by squaring: the same bits with any libm. */
static double power(double x, uint64_t n)
{
    double result = 1;
    for (; n > 0; n /= 2) {
        if (n % 2 == 1)
            result *= x;
        x *= x;
    }
    return result;
}

_Static_assert(DECISION_GROUPS_MAX == SHD_GROUPS_MAX, "a decision has room for every group");

/* A rate that one kind of optimizer has and another has not. */
struct rate_rule {
    const char *name; /* NULL: the group's optimizer has none */
    double max;
};

static int check_rate(const struct spec *spec, uint32_t g, struct rate_rule rule, double x,
                      struct shd_err *e)
{
    const char *group = spec->groups[g].name;
    const enum spec_optimizer kind = spec_group_optimizer(spec, g);
    if (isnan(x))
        return SHD_OK;
    if (rule.name == NULL)
        return err_set(e, SHD_EINVAL,
                       "group '%.60s': %g is given for a rate that its optimizer, %s, does not "
                       "have: leave it NaN",
                       group, x, spec_optimizer_rows[kind].kind);
    if (x >= 0 && x <= rule.max)
        return SHD_OK;
    return err_set(e, SHD_ERANGE, "group '%.60s': %s is %g, must be NaN (the spec's) or 0 to %.8g",
                   group, rule.name, x, rule.max);
}

int runs_check_rates(const struct spec *spec, const double *rates, uint32_t count,
                     struct shd_err *e)
{
    static const struct rate_rule none = { NULL, 0 }; /* a mean has none */
    if (count != 0 && count != spec->group_count * DECISION_RATES)
        return err_set(e, SHD_EINVAL,
                       "rates of %" PRIu32 " groups are given, model '%.60s' has %" PRIu32
                       ": give those of each, NaN where the spec's are meant, or none",
                       count / DECISION_RATES, spec->name, spec->group_count);
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < count; i++) {
        const uint32_t g = i / DECISION_RATES;
        const struct spec_optimizer_row *row = &spec_optimizer_rows[spec_group_optimizer(spec, g)];
        const struct rate_rule rules[DECISION_RATES] = {
            { "lr", (double)FLT_MAX },
            { "weight_decay", (double)FLT_MAX },
            { row->beta1_key, SPEC_BETA_MAX },
            { row->beta2_key, SPEC_BETA_MAX },
        };
        r = check_rate(spec, g, spec->groups[g].mean ? none : rules[i % DECISION_RATES], rates[i],
                       e);
    }
    return r;
}

static int check_eps(const struct spec *spec, const struct decision *d, struct shd_err *e)
{
    if (d->eps_count != 0 && d->eps_count != spec->group_count)
        return err_set(e, SHD_EINVAL,
                       "eps of %" PRIu32 " groups is given, model '%.60s' has %" PRIu32,
                       d->eps_count, spec->name, spec->group_count);
    for (uint32_t g = 0; g < d->eps_count; g++) {
        const double x = d->eps[g];
        const char *key = spec_optimizer_rows[spec_group_optimizer(spec, g)].eps_key;
        if (!isnan(x) && key == NULL)
            return err_set(e, SHD_EINVAL,
                           "group '%.60s': %g is given for an eps that its optimizer does not have",
                           spec->groups[g].name, x);
        if (!isnan(x) && !(x >= (double)FLT_MIN && x <= (double)FLT_MAX))
            return err_set(e, SHD_ERANGE,
                           "group '%.60s': eps is %g, must be NaN (the spec's) or %.8g to %.8g",
                           spec->groups[g].name, x, (double)FLT_MIN, (double)FLT_MAX);
    }
    return SHD_OK;
}

int runs_check_decision(const struct spec *spec, const struct decision *decision, struct shd_err *e)
{
    const uint32_t next = decision->micro_batches;
    int r = runs_check_rates(spec, decision->rates, decision->rate_count, e);
    if (r == SHD_OK)
        r = check_eps(spec, decision, e);
    if (r == SHD_OK && (next > spec->micro_batches || next % spec->accumulate != 0))
        r = err_set(e, SHD_ERANGE,
                    "a next step of %" PRIu32 " micro-batches, model '%.60s' has at most %" PRIu32
                    ", multiples of %" PRIu32,
                    next, spec->name, spec->micro_batches, spec->accumulate);
    return r;
}

static double or_else(double rate, double of_spec)
{
    return isnan(rate) ? of_spec : rate;
}

/* As power(), in extended precision: off from the true value by less than an fp64 rounding of
 * 1 - x^n, as libm's pow() is; so both come to the same fp32. */
static double rest_of_power(double x, uint64_t n)
{
    long double result = 1, square = x;
    for (; n > 0; n /= 2) {
        if (n % 2 == 1)
            result *= square;
        square *= square;
    }
    return 1 - (double)result;
}

/* torch's rates, in fp64 as Python computes them, each rounded to fp32 where its kernels take it.
 */
static struct kern_rates torch_rates(const struct spec *spec, const struct decision *decision,
                                     uint32_t g, uint64_t update)
{
    const struct decision_rates r = decision_rates_of(decision, g);
    const struct spec_group *group = &spec->groups[g];
    const double lr = or_else(r.lr, decision->lr * group->lr_scale);
    const double decay = or_else(r.weight_decay, group->weight_decay);
    const double beta1 = or_else(r.beta1, spec->beta1), beta2 = or_else(r.beta2, spec->beta2);
    struct kern_rates c = { .keep = spec->torch.coupled_decay ? 1 : (float)(1 - lr * decay),
                            .decay = spec->torch.coupled_decay ? (float)decay : 0,
                            .rate = (float)-lr,
                            .beta1 = (float)beta1,
                            .beta2 = (float)beta2,
                            .rest1 = (float)(1 - spec->torch.dampening),
                            .eps = (float)or_else(decision_eps_of(decision, g), spec->eps) };
    if (spec->optimizer == SPEC_SGD_TORCH) {
        c.flags = (beta1 != 0 ? KERN_MOMENTUM : 0) | (update == 1 ? KERN_FIRST : 0) |
                  (spec->torch.nesterov ? KERN_NESTEROV : 0);
        return c;
    }
    c.rate = (float)-(lr / rest_of_power(beta1, update));
    c.rest1 = (float)(1 - beta1);
    c.rest2 = (float)(1 - beta2);
    c.unbias = (float)sqrt(rest_of_power(beta2, update));
    return c;
}

/* Likewise. What a matrix's shape does to its learning rate is of the matrix (kern_muon_rates()).
 */
static void muon_hyper(const struct spec *spec, const struct decision *decision, uint32_t g,
                       struct kern_hyper *h)
{
    const struct decision_rates r = decision_rates_of(decision, g);
    const struct spec_group *group = &spec->groups[g];
    const struct muon_rule *rule = group->muon;
    const double lr = or_else(r.lr, decision->lr * group->lr_scale);
    const double decay = or_else(r.weight_decay, group->weight_decay);
    const double momentum = or_else(r.beta1, rule->momentum);
    h->torch = (struct kern_rates){ .rest1 = (float)(1 - momentum), .flags = KERN_MOMENTUM };
    h->muon = (struct kern_muon){ .lr = lr,
                                  .keep = (float)(1 - lr * decay),
                                  .eps = (float)or_else(decision_eps_of(decision, g), rule->eps),
                                  .momentum = (float)momentum,
                                  .steps = rule->steps,
                                  .nesterov = rule->nesterov };
    for (uint32_t i = 0; i < ARRAY_SIZE(rule->coefficients); i++)
        h->muon.coefficients[i] = (float)rule->coefficients[i];
}

/* Likewise. Extended precision: no processor's own pow() shows in what is rounded to fp32. */
static void adafactor_hyper(const struct spec *spec, const struct decision *decision, uint32_t g,
                            uint64_t update, struct kern_hyper *h)
{
    const struct decision_rates r = decision_rates_of(decision, g);
    const struct spec_group *group = &spec->groups[g];
    const struct adafactor_rule *rule = group->adafactor;
    const double lr = or_else(r.lr, decision->lr * group->lr_scale);
    const double decay = or_else(r.weight_decay, group->weight_decay);
    const double relative = 1 / sqrt((double)update);
    const double fresh = (double)powl((long double)update, (long double)rule->beta2_decay);
    h->torch = (struct kern_rates){ .rest1 = (float)fresh, .flags = KERN_MOMENTUM };
    h->adafactor = (struct kern_adafactor){ .rho = lr < relative ? lr : relative,
                                            .eps2 = rule->eps2,
                                            .d = rule->d,
                                            .keep = (float)(1 - lr * decay),
                                            .eps1 = (float)rule->eps1,
                                            .eps1_square = (float)(rule->eps1 * rule->eps1) };
}

/* The group's, or the model's. */
static struct spec_lamb own_lamb(const struct spec *spec, uint32_t g)
{
    if (spec->groups[g].lamb != NULL)
        return *spec->groups[g].lamb;
    return (struct spec_lamb){ spec->beta1, spec->beta2, spec->eps };
}

void runs_hypers(const struct spec *spec, const struct decision *decision, uint64_t update,
                 struct kern_hyper *ret_hypers)
{
    CHECK(update > 0);
    for (uint32_t g = 0; g < spec->group_count; g++) {
        const struct spec_group *group = &spec->groups[g];
        const struct decision_rates r = decision_rates_of(decision, g);
        /* Kernels average with the betas in fp32: the correction must be for those. */
        const struct spec_lamb own = own_lamb(spec, g);
        const float beta1 = (float)or_else(r.beta1, own.beta1);
        const float beta2 = (float)or_else(r.beta2, own.beta2);
        ret_hypers[g] = (struct kern_hyper){
            .lr = (float)or_else(r.lr, decision->lr * group->lr_scale),
            .weight_decay = (float)or_else(r.weight_decay, group->weight_decay),
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = (float)or_else(decision_eps_of(decision, g), own.eps),
            .bias1 = (float)(1 - power((double)beta1, update)),
            .bias2 = (float)(1 - power((double)beta2, update)),
        };
        if (spec_optimizer_rows[spec->optimizer].in_torch_order)
            ret_hypers[g].torch = torch_rates(spec, decision, g, update);
        if (group->muon != NULL)
            muon_hyper(spec, decision, g, &ret_hypers[g]);
        if (group->adafactor != NULL)
            adafactor_hyper(spec, decision, g, update, &ret_hypers[g]);
    }
}

/* The warm-up is that of TensorFlow's ExponentialMovingAverage(num_updates=n), which others have
 * taken over. The first update is a copy, as in torch.optim.swa_utils.AveragedModel. */
float runs_ema_rest(const struct spec *spec, uint64_t update)
{
    CHECK(update > 0 && spec->ema > 0);
    const double n = (double)(update - 1), warm = (1 + n) / (10 + n);
    if (update == 1)
        return 1;
    return (float)(1 - (spec->ema_warmup && warm < spec->ema ? warm : spec->ema));
}

static enum kern_fill_kind fill_kind(enum spec_init init)
{
    switch (init) {
    case SPEC_INIT_CONST:
        return KERN_FILL_CONST;
    case SPEC_INIT_NORMAL:
        return KERN_FILL_NORMAL;
    case SPEC_INIT_UNIFORM:
        return KERN_FILL_UNIFORM;
    }
    CHECK(false); /* a parsed spec has a known init */
    return KERN_FILL_CONST;
}

/* NOLINTNEXTLINE(readability-non-const-parameter): the fill writes there */
bool runs_fill(const struct spec *spec, uint32_t tensor, struct slice slice, float *param,
               struct kern_fill *ret_fill)
{
    CHECK(tensor < spec->tensor_count);
    const struct spec_tensor *st = &spec->tensors[tensor];
    uint64_t first;
    const uint64_t elems = layout_intersect(slice, st->offset_elems, st->elems, &first);
    if (elems == 0)
        return false;
    *ret_fill = (struct kern_fill){
        .out = &param[first - slice.first_elem],
        .elems = elems,
        .first_index = spec_whole_first(st) + first - st->offset_elems,
        .key = spec_tensor_key(spec, st),
        .kind = fill_kind(st->init),
        .a = (float)st->init_a,
        .b = (float)st->init_b,
    };
    return true;
}
