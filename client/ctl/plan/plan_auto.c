/* shardctl plan --auto: the decision tree of the field, asked in order with the figures of this
 * model. The first yes decides: each further step holds less in a worker and moves more bytes.
 *
 *   1. everything on one device             a single owner and a whole copy: zero1
 *   2. optimizer state shared out           the worker holds parameters and all gradients: zero1
 *   3. gradients handed over as they come   the worker holds parameters and one gradient: zero1
 *   4. parameters freed as they come        as backward goes on, gradients replace them: zero2
 *   5. parameters shared out as well        zero3 with one unit ahead, then without
 *   6. not one unit                         refused, with what would do
 *
 * ddp is never the answer: with optimizer state at the owners in any case, zero1 moves as much and
 * holds no more.
 */
#include "client/ctl/plan/plan_auto.h"

#include <inttypes.h>
#include <stdlib.h>

#include "client/ctl/base/text.h"
#include "client/ctl/plan/plan_show.h"
#include "client/plan/plan.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"

struct question {
    const char *text;
    enum plan_strategy held; /* what a worker would hold is taken from a plan of this */
    bool one_owner;
    struct plan_policy choice;
};

static const struct question questions[] = {
    { "everything on one device: state, parameters, gradients",
      PLAN_DDP,
      true,
      { .strategy = PLAN_ZERO1, .forward_prefetch = 1 } },
    { "optimizer state shared out, parameters and gradients whole",
      PLAN_DDP,
      false,
      { .strategy = PLAN_ZERO1, .forward_prefetch = 1 } },
    { "gradients handed over unit by unit, parameters whole",
      PLAN_ZERO1,
      false,
      { .strategy = PLAN_ZERO1, .forward_prefetch = 1 } },
    { "each unit's parameters freed after its backward",
      PLAN_ZERO2,
      false,
      { .strategy = PLAN_ZERO2, .forward_prefetch = 1 } },
    { "parameters shared out as well, one unit ahead",
      PLAN_ZERO3,
      false,
      { .strategy = PLAN_ZERO3, .forward_prefetch = 1 } },
    { "the same without prefetch",
      PLAN_ZERO3,
      false,
      { .strategy = PLAN_ZERO3, .backward_prefetch = PLAN_PREFETCH_NONE } },
};

struct answer {
    uint64_t worker_bytes, owner_bytes, need_bytes;
    bool fits;
};

static uint64_t owner_bytes(const struct plan_owners *o)
{
    return o->state_bytes_max + o->publish_bytes_max;
}

static int answer(const struct spec *spec, const struct plan_ask *ask, const struct question *q,
                  struct answer *ret_answer, struct shd_err *e)
{
    struct plan_policy held = q->choice;
    held.strategy = q->held;
    struct plan_owners owners = { 0 };
    struct plan plan;
    int r = SHD_OK;
    if (!ask->offload || q->one_owner)
        r = plan_owners(spec, q->one_owner ? 1 : ask->daemons, &owners, e);
    if (r == SHD_OK)
        r = plan_build(spec, &held, /* trace= */ NULL, ask->micros, &plan, e);
    if (r != SHD_OK)
        return r;
    struct answer a = { .worker_bytes = plan.cost.live_bytes_max,
                        .owner_bytes = owner_bytes(&owners) };
    plan_free(&plan);
    a.need_bytes = a.worker_bytes + a.owner_bytes + ask->activation_bytes;
    a.fits = a.need_bytes <= ask->device_bytes;
    *ret_answer = a;
    return SHD_OK;
}

static void say(const struct plan_ask *ask, const struct question *q, const struct answer *a,
                FILE *out)
{
    char worker[TEXT_BYTES], owner[TEXT_BYTES], rest[TEXT_BYTES];
    char need[TEXT_BYTES];
    if (out == NULL)
        return;
    fprintf(out, "  %-4s %s?\n       worker %s + owner %s", a->fits ? "yes" : "no", q->text,
            text_size(a->worker_bytes, worker), text_size(a->owner_bytes, owner));
    if (ask->activation_bytes > 0)
        fprintf(out, " + activations %s", text_size(ask->activation_bytes, rest));
    fprintf(out, " = %s\n", text_size(a->need_bytes, need));
}

static json_t *json_answer(const struct question *q, const struct answer *a)
{
    return json_pack("{s:s, s:I, s:I, s:I, s:b}", "question", q->text, "worker_bytes",
                     (json_int_t)a->worker_bytes, "owner_bytes", (json_int_t)a->owner_bytes,
                     "need_bytes", (json_int_t)a->need_bytes, "fits", (int)a->fits);
}

/* The fewest daemons with which the last question gets a yes; 0: no number will do. */
static int enough_daemons(const struct spec *spec, const struct plan_ask *ask,
                          const struct answer *last, uint32_t *ret_daemons, struct shd_err *e)
{
    const uint64_t others = last->worker_bytes + ask->activation_bytes;
    uint32_t low = ask->daemons, high = SHD_OWNERS_MAX;
    *ret_daemons = 0;
    if (others > ask->device_bytes || ask->offload)
        return SHD_OK;
    while (low <= high) { /* an owner's share shrinks as daemons are added */
        const uint32_t middle = low + (high - low) / 2;
        struct plan_owners o;
        const int r = plan_owners(spec, middle, &o, e);
        if (r != SHD_OK)
            return r;
        const bool fits = others + owner_bytes(&o) <= ask->device_bytes;
        *ret_daemons = fits ? middle : *ret_daemons;
        low = fits ? low : middle + 1;
        high = fits ? middle - 1 : high;
    }
    return SHD_OK;
}

/* Of the unit that needs most by itself. */
static uint32_t largest_unit(const struct spec *spec)
{
    uint32_t largest = 0;
    for (uint32_t u = 1; u < spec->unit_count; u++)
        if (plan_unit_param_bytes(spec, u) > plan_unit_param_bytes(spec, largest))
            largest = u;
    return largest;
}

static int refuse(const struct spec *spec, const struct plan_ask *ask, const struct answer *last,
                  struct shd_err *e)
{
    char need[TEXT_BYTES], have[TEXT_BYTES], unit[TEXT_BYTES];
    uint32_t daemons;
    const int r = enough_daemons(spec, ask, last, &daemons, e);
    if (r != SHD_OK)
        return r;
    const uint32_t largest = largest_unit(spec);
    text_size(last->need_bytes, need);
    text_size(ask->device_bytes, have);
    if (daemons > 0)
        return err_set(e, SHD_ERANGE,
                       "a device of %s is too small: zero3 without prefetch needs %s; %" PRIu32
                       " daemons instead of %" PRIu32 " would do, or --offload (owners in host "
                       "memory)",
                       have, need, daemons, ask->daemons);
    return err_set(e, SHD_ERANGE,
                   "a device of %s is too small: zero3 without prefetch needs %s whatever the "
                   "number of daemons; the largest unit, %" PRIu32 " '%.40s', has %s: cut it into "
                   "smaller ones",
                   have, need, largest, spec->units[largest].name,
                   text_size(plan_unit_param_bytes(spec, largest), unit));
}

static void adopt(struct plan_ask *ask, const struct plan_policy *choice, FILE *out)
{
    ask->policy.strategy = choice->strategy;
    ask->policy.forward_prefetch = choice->forward_prefetch;
    ask->policy.backward_prefetch = choice->backward_prefetch;
    if (out != NULL)
        fprintf(out, "\n  so: --strategy %s --prefetch %s --forward-prefetch %" PRIu32 "\n\n",
                plan_strategy_name(choice->strategy), plan_prefetch_name(choice->backward_prefetch),
                choice->forward_prefetch);
}

int plan_auto(const struct spec *spec, struct plan_ask *ask, FILE *out, json_t **ret_json,
              struct shd_err *e)
{
    char have[TEXT_BYTES];
    json_t *steps = json_array();
    struct answer a = { 0 };
    int r = SHD_OK;
    size_t i = 0;
    if (out != NULL)
        fprintf(out,
                "which strategy fits %s a device, %" PRIu32 " worker%s, %" PRIu32 " daemon%s%s?\n",
                text_size(ask->device_bytes, have), ask->workers, ask->workers == 1 ? "" : "s",
                ask->daemons, ask->daemons == 1 ? "" : "s",
                ask->offload ? " in host memory" : " on the same devices");
    for (; i < ARRAY_SIZE(questions); i++) {
        r = answer(spec, ask, &questions[i], &a, e);
        if (r != SHD_OK)
            break;
        say(ask, &questions[i], &a, out);
        json_array_append_new(steps, json_answer(&questions[i], &a));
        if (a.fits)
            break;
    }
    if (r == SHD_OK && !a.fits)
        r = refuse(spec, ask, &a, e);
    if (r != SHD_OK) {
        json_decref(steps);
        return r;
    }
    if (out != NULL && ask->activation_bytes == 0)
        fprintf(out, "       activations are not counted: --activations\n");
    adopt(ask, &questions[i].choice, out);
    *ret_json = json_pack("{s:I, s:I, s:o}", "device_bytes", (json_int_t)ask->device_bytes,
                          "activation_bytes", (json_int_t)ask->activation_bytes, "steps", steps);
    return SHD_OK;
}
