/* See delta.h. */
#include "kernels/delta.h"

#include <math.h>
#include <stddef.h>

#include "kernels/runs.h"
#include "proto/base/check.h"
#include "proto/share/tally.h"

/* NULL: it can be told. */
static const char *unknown(const struct delta_rule *rule)
{
    switch (rule->kind) {
    case SPEC_ADAMW:
    case SPEC_ADAMW_TORCH:
    case SPEC_SGD:
        break;
    case SPEC_SGD_TORCH:
        if ((rule->rates.flags & KERN_MOMENTUM) == 0)
            return "SGD without momentum keeps nothing of the gradient it went by";
        if ((rule->rates.flags & KERN_NESTEROV) != 0)
            return "Nesterov's momentum goes by the gradient as well, which is not kept";
        break;
    case SPEC_LION:
        return "Lion goes by the sign of a mixture that is not kept";
    case SPEC_MUON:
        return "Muon goes by a matrix that is not kept";
    case SPEC_LAMB:
        return "LAMB goes by the parameters of before as well, which are not kept";
    case SPEC_ADAFACTOR:
        return "Adafactor goes by the gradient, which is not kept";
    case SPEC_MEAN:
        return "a mean is not updated by an optimizer";
    }
    return rule->rates.keep > 0 ? NULL : "its weight decay left nothing of the values before";
}

int delta_rule_of(const struct spec *spec, uint32_t tensor, const struct decision *decision,
                  uint64_t updates, struct delta_rule *ret_rule, struct shd_err *e)
{
    const struct spec_tensor *t = &spec->tensors[tensor];
    struct kern_hyper hypers[SHD_GROUPS_MAX];
    struct delta_rule rule = { .kind = spec_group_optimizer(spec, t->group) };
    CHECK(!decision->skip && decision->put == 0);
    if (spec->int8)
        return err_set(e, SHD_ENOTSUP,
                       "the last update of '%.100s' cannot be told: its moments are in 8 bits, "
                       "rounded after the parameters were changed by them",
                       t->name);
    runs_hypers(spec, decision, updates, hypers);
    rule.rates = kern_rates_of(rule.kind, &hypers[t->group], 1);
    const char *why = unknown(&rule);
    if (why != NULL)
        return err_set(e, SHD_ENOTSUP, "the last update of '%.100s' cannot be told: %s", t->name,
                       why);
    *ret_rule = rule;
    return SHD_OK;
}

static double step_of(const struct delta *d, uint64_t i)
{
    const struct kern_rates *c = &d->rule->rates;
    const double m = (double)d->m[i], rate = (double)c->rate;
    const double root = d->v != NULL ? sqrt((double)d->v[i]) : 0; /* who uses it has v */
    switch (d->rule->kind) {
    case SPEC_ADAMW:
        return -rate * (m / (root * (double)c->unbias + (double)c->eps));
    case SPEC_ADAMW_TORCH:
        return rate * (m / (root / (double)c->unbias + (double)c->eps));
    case SPEC_SGD:
        return -rate * m;
    case SPEC_SGD_TORCH:
        return rate * m;
    case SPEC_LION:
    case SPEC_MEAN:
    case SPEC_MUON:
    case SPEC_LAMB:
    case SPEC_ADAFACTOR:
        break;
    }
    CHECK(false); /* unknown() */
    return (double)NAN;
}

void delta_of(const struct delta *d, float *out)
{
    const double keep = (double)d->rule->rates.keep;
    for (uint64_t i = 0; i < d->elems; i++)
        out[i] = (float)((step_of(d, i) - (1 - keep) * (double)d->p[i]) / keep);
}

void delta_tally(const struct delta *d, uint64_t head_elems, struct tally *t)
{
    float out[SHD_BLOCK_ELEMS];
    uint64_t count = head_elems;
    for (uint64_t i = 0; i < d->elems; i += count, count = SHD_BLOCK_ELEMS) {
        struct delta part = *d;
        if (count > d->elems - i)
            count = d->elems - i;
        part.p += i;
        part.m += i;
        part.v = d->v != NULL ? d->v + i : NULL;
        part.elems = count;
        delta_of(&part, out);
        tally_add(t, out, count, count);
        tally_add_weights(t, part.p, count, count);
    }
}
