/* See plan_auto.h. */
#include "client/ctl/plan/plan_auto.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"
#include "client/ctl/plan/plan_show.h"
#include "client/plan/plan_cost.h"
#include "proto/base/check.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec_json.h"

/* --auto: the decision tree of the field, asked in order with the figures of this
 * model. The first yes decides: each further step holds less in a worker and moves more bytes.
 *
 *   1. everything on one device             a single owner and a whole copy: zero1
 *   2. optimizer state shared out           the worker holds parameters and all gradients: zero1
 *   3. gradients handed over as they come   the worker holds parameters and one gradient: zero1
 *   4. parameters freed as they come        as backward goes on, gradients replace them: zero2
 *   5. parameters shared out as well        zero3 with one unit ahead, then without
 *   6. not one unit                         refused, with what would do
 *
 * Then what would do instead is asked of the last question, one at a time: owners in host memory,
 * moments in 8 bits, state on files, tiles, more daemons. The user's to choose: they change where a
 * model is, or its bits.
 *
 * ddp is never the answer: with optimizer state at the owners in any case, zero1 moves as much and
 * holds no more.
 */

static const struct question {
    const char *text;
    enum plan_strategy held; /* what a worker would hold is taken from a plan of this */
    bool one_owner;
    enum plan_strategy strategy; /* chosen when the answer is yes, with so many units ahead */
    uint32_t ahead;
} questions[] = {
    { "everything on one device: state, parameters, gradients", PLAN_DDP, true, PLAN_ZERO1, 1 },
    { "optimizer state shared out, parameters and gradients whole", PLAN_DDP, false, PLAN_ZERO1,
      1 },
    { "gradients handed over unit by unit, parameters whole", PLAN_ZERO1, false, PLAN_ZERO1, 1 },
    { "each unit's parameters freed after its backward", PLAN_ZERO2, false, PLAN_ZERO2, 1 },
    { "parameters shared out as well, one unit ahead", PLAN_ZERO3, false, PLAN_ZERO3, 1 },
    { "the same without prefetch", PLAN_ZERO3, false, PLAN_ZERO3, 0 },
};

static enum plan_backward_prefetch prefetch_of(const struct question *q)
{
    return q->ahead > 0 ? PLAN_PREFETCH_PRE : PLAN_PREFETCH_NONE;
}

struct answer {
    uint64_t worker_bytes, owner_bytes, gpu_bytes, need_bytes;
    uint32_t slots; /* that each worker has at each owner */
    bool fits;
};

/* What each process on a GPU takes there before anything is trained. A worker that reads in place
 * opens the GPU once, one that copies a second time, for its transfer thread. */
static uint64_t gpu_bytes(const struct plan_ask *ask, bool one_owner)
{
    if (!ask->on_gpu)
        return 0;
    const bool has_owner = one_owner || !ask->offload;
    const uint64_t worker = ask->context_bytes + (one_owner ? 1 : 2) * GPU_STAGING_BYTES;
    return worker + (has_owner ? ask->context_bytes + GPU_STAGING_BYTES : 0);
}

/* Of the owner that holds most, on the device: its staging is with the context. */
static uint64_t owner_bytes_of(const struct plan_ask *ask, const struct plan_owners *o)
{
    return ask->on_gpu ? o->gpu_max.all - o->gpu_max.staging : o->max.all;
}

static int try_question(const struct spec *spec, const struct plan_ask *ask,
                        const struct question *q, struct answer *ret_answer, struct shd_err *e)
{
    const struct plan_policy held = { .strategy = q->held,
                                      .forward_prefetch = q->ahead,
                                      .backward_prefetch = prefetch_of(q) };
    struct plan_owners owners = { .total_bytes = 0 };
    struct plan plan;
    int r = plan_build(spec, &held, /* trace= */ NULL, ask->micros, &plan, e);
    if (r != SHD_OK)
        return r;
    struct answer a = { .worker_bytes = plan.cost.live_bytes_max,
                        .slots = plan_slots(spec, &held, &plan) };
    plan_free(&plan);
    if (!ask->offload || q->one_owner)
        r = plan_owners(spec, ask, q->one_owner ? 1 : 0, a.slots, &owners, e);
    if (r != SHD_OK)
        return r;
    a.owner_bytes = ask->offload && !q->one_owner ? 0 : owner_bytes_of(ask, &owners);
    a.gpu_bytes = gpu_bytes(ask, q->one_owner);
    a.need_bytes = a.worker_bytes + a.owner_bytes + a.gpu_bytes + ask->activation_bytes;
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
    if (a->gpu_bytes > 0)
        fprintf(out, " + contexts %s", text_size(a->gpu_bytes, rest));
    fprintf(out, " = %s\n", text_size(a->need_bytes, need));
}

static json_t *json_answer(const struct question *q, const struct answer *a)
{
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:b}", "question", q->text, "worker_bytes",
                     (json_int_t)a->worker_bytes, "owner_bytes", (json_int_t)a->owner_bytes,
                     "gpu_bytes", (json_int_t)a->gpu_bytes, "need_bytes", (json_int_t)a->need_bytes,
                     "fits", (int)a->fits);
}

/* -- What else would do ------------------------------------------------------------------------ */

/* The spec, as `change` has it. Errors: those of spec_parse(), where it cannot be so. */
static int spec_with(const struct spec *spec, void (*change)(json_t *root, void *ctx), void *ctx,
                     struct spec **ret_spec, struct shd_err *e)
{
    char *json;
    int r = spec_dump(spec, &json, e);
    if (r != SHD_OK)
        return r;
    json_t *root = json_loads(json, 0, NULL);
    free(json);
    change(root, ctx);
    char *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    r = text != NULL ? spec_parse(text, strlen(text), ret_spec, e)
                     : err_set(e, SHD_ENOMEM, "no memory for a spec");
    free(text);
    return r;
}

static void change_moments(json_t *root, void *ctx)
{
    (void)ctx;
    json_object_set_new(json_object_get(root, "optimizer"), "moments", json_string("int8"));
}

struct cutting {
    const struct spec *spec;
    uint64_t most;  /* bytes of a tile */
    uint64_t tiles; /* of the unit that is cut most */
};

/* The JSON's units are the spec's in their order, those that are cut once. */
static void change_tiles(json_t *root, void *ctx)
{
    struct cutting *c = ctx;
    json_t *units = json_object_get(root, "units"), *unit;
    uint32_t u = 0;
    size_t i;
    c->tiles = 0;
    json_array_foreach(units, i, unit)
    {
        const uint32_t end = u + (c->spec->units[u].tiles > 0 ? c->spec->units[u].tiles : 1);
        uint64_t bytes = 0;
        for (; u < end; u++)
            bytes += plan_unit_param_bytes(c->spec, u);
        const uint64_t tiles = bytes / c->most + (bytes % c->most != 0);
        if (tiles > 1)
            json_object_set_new(unit, "tiles", json_integer((json_int_t)tiles));
        c->tiles = tiles > c->tiles ? tiles : c->tiles;
    }
}

static void say_else(const struct plan_ask *ask, const char *text, const struct answer *a,
                     FILE *out)
{
    const struct question q = { .text = text };
    say(ask, &q, a, out);
}

static void else_int8(const struct spec *spec, const struct plan_ask *ask, const struct question *q,
                      FILE *out)
{
    struct spec *other = NULL;
    struct answer a;
    if (spec->int8 || spec_with(spec, change_moments, NULL, &other, NULL) != SHD_OK)
        return;
    if (try_question(other, ask, q, &a, NULL) == SHD_OK)
        say_else(ask, "moments in 8 bits (\"moments\": \"int8\" of the spec's optimizer)", &a, out);
    spec_free(other);
}

static void else_on_files(const struct spec *spec, const struct plan_ask *ask,
                          const struct question *q, FILE *out)
{
    struct plan_ask other = *ask;
    struct answer a;
    if (ask->on_gpu || ask->offload)
        return;
    other.state_on_file = true;
    if (!ask->state_on_file && try_question(spec, &other, q, &a, NULL) == SHD_OK)
        say_else(ask, "the owners' state on files (shardd --state file:DIR)", &a, out);
    other.publish_on_file = true;
    if (!ask->publish_on_file && try_question(spec, &other, q, &a, NULL) == SHD_OK)
        say_else(ask, "the owners' state and what they publish on files (and --publish file:DIR)",
                 &a, out);
}

static void else_offload(const struct spec *spec, const struct plan_ask *ask,
                         const struct question *q, FILE *out)
{
    struct plan_ask other = *ask;
    struct plan_owners memory = { .total_bytes = 0 }, files = { .total_bytes = 0 };
    struct answer a;
    char all[TEXT_BYTES], rest[TEXT_BYTES], on_files[TEXT_BYTES];
    other.offload = true;
    if (!ask->on_gpu || ask->offload || try_question(spec, &other, q, &a, NULL) != SHD_OK)
        return;
    say_else(&other, "the owners in host memory (--offload)", &a, out);
    other.state_on_file = true;
    if (plan_owners(spec, ask, 0, a.slots, &memory, NULL) == SHD_OK &&
        plan_owners(spec, &other, 0, a.slots, &files, NULL) == SHD_OK)
        fprintf(out,
                "       there they take %s or, with the state on files (shardd --state file:DIR), "
                "%s and %s of files\n",
                text_size(memory.total_bytes, all), text_size(files.total_bytes, rest),
                text_size(files.total_file_bytes, on_files));
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

/* The fewest tiles, by powers of two, with which it fits; else as many as the units can be cut to,
 * as long as that makes a difference. */
static void else_tiles(const struct spec *spec, const struct plan_ask *ask,
                       const struct question *q, uint64_t need_bytes, FILE *out)
{
    struct cutting c = { .spec = spec, .most = plan_unit_param_bytes(spec, largest_unit(spec)) };
    struct answer best = { .need_bytes = need_bytes };
    char text[100] = "", tile[TEXT_BYTES];
    while (!best.fits && c.most > 1) {
        struct spec *other = NULL;
        struct answer a;
        c.most = (c.most + 1) / 2;
        if (spec_with(spec, change_tiles, &c, &other, NULL) != SHD_OK)
            break;
        const int r = try_question(other, ask, q, &a, NULL);
        spec_free(other);
        if (r != SHD_OK || a.need_bytes >= best.need_bytes)
            break;
        best = a;
        snprintf(text, sizeof text, "units cut into tiles (\"tiles\", %" PRIu64 " at most, of %s)",
                 c.tiles, text_size(c.most, tile));
    }
    if (text[0] != '\0')
        say_else(ask, text, &best, out);
}

/* Each by itself, of the last question. */
static void say_what_else(const struct spec *spec, const struct plan_ask *ask,
                          const struct question *q, const struct answer *last, FILE *out)
{
    if (out == NULL)
        return;
    fprintf(out, "\nwhat else would do, beside that?\n");
    else_offload(spec, ask, q, out);
    else_int8(spec, ask, q, out);
    else_on_files(spec, ask, q, out);
    else_tiles(spec, ask, q, last->need_bytes, out);
    fprintf(out, "\n");
}

/* What the last question would need with so many daemons. */
static int need_with(const struct spec *spec, const struct plan_ask *ask, const struct answer *last,
                     uint32_t daemons, uint64_t *ret_bytes, struct shd_err *e)
{
    struct plan_owners o = { .total_bytes = 0 };
    const int r = ask->offload ? SHD_OK : plan_owners(spec, ask, daemons, last->slots, &o, e);
    *ret_bytes = last->worker_bytes + ask->activation_bytes + last->gpu_bytes +
                 (r == SHD_OK && !ask->offload ? owner_bytes_of(ask, &o) : 0);
    return r;
}

/* The fewest daemons with which the last question gets a yes; 0: no number will do, and *ret_floor
 * is what it needs with the most there may be. */
static int enough_daemons(const struct spec *spec, const struct plan_ask *ask,
                          const struct answer *last, uint32_t *ret_daemons, uint64_t *ret_floor,
                          struct shd_err *e)
{
    uint32_t low = ask->daemons, high = SHD_OWNERS_MAX;
    *ret_daemons = 0;
    int r = need_with(spec, ask, last, high, ret_floor, e);
    if (r != SHD_OK || *ret_floor > ask->device_bytes)
        return r;
    while (low <= high) { /* an owner's share shrinks as daemons are added */
        const uint32_t middle = low + (high - low) / 2;
        uint64_t need;
        r = need_with(spec, ask, last, middle, &need, e);
        if (r != SHD_OK)
            return r;
        const bool fits = need <= ask->device_bytes;
        *ret_daemons = fits ? middle : *ret_daemons;
        low = fits ? low : middle + 1;
        high = fits ? middle - 1 : high;
    }
    return SHD_OK;
}

static int refuse(const struct spec *spec, const struct plan_ask *ask, const struct answer *last,
                  struct shd_err *e)
{
    char need[TEXT_BYTES], have[TEXT_BYTES], unit[TEXT_BYTES], least[TEXT_BYTES];
    uint32_t daemons;
    uint64_t floor_bytes;
    const int r = enough_daemons(spec, ask, last, &daemons, &floor_bytes, e);
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
                   "a device of %s is too small: zero3 without prefetch needs %s, and %s with %u "
                   "daemons; the largest unit, %" PRIu32 " '%.40s', has %s: cut it into smaller "
                   "ones",
                   have, need, text_size(floor_bytes, least), SHD_OWNERS_MAX, largest,
                   spec->units[largest].name,
                   text_size(plan_unit_param_bytes(spec, largest), unit));
}

static void adopt(struct plan_ask *ask, const struct question *q, FILE *out)
{
    ask->policy.strategy = q->strategy;
    ask->policy.forward_prefetch = q->ahead;
    ask->policy.backward_prefetch = prefetch_of(q);
    if (out != NULL)
        fprintf(out, "\n  so: --strategy %s --prefetch %s --forward-prefetch %" PRIu32 "\n\n",
                plan_strategy_name(q->strategy), plan_prefetch_name(prefetch_of(q)), q->ahead);
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
        r = try_question(spec, ask, &questions[i], &a, e);
        if (r != SHD_OK)
            break;
        say(ask, &questions[i], &a, out);
        json_array_append_new(steps, json_answer(&questions[i], &a));
        if (a.fits)
            break;
    }
    if (r == SHD_OK && !a.fits) {
        say_what_else(spec, ask, &questions[i - 1], &a, out);
        r = refuse(spec, ask, &a, e);
    }
    if (r != SHD_OK) {
        json_decref(steps);
        return r;
    }
    if (out != NULL && ask->activation_bytes == 0)
        fprintf(out, "       activations are not counted: --activations%s\n",
                ask->on_gpu ? "; nor are NCCL's buffers: --context" : "");
    adopt(ask, &questions[i], out);
    *ret_json = json_pack("{s:I, s:I, s:o}", "device_bytes", (json_int_t)ask->device_bytes,
                          "activation_bytes", (json_int_t)ask->activation_bytes, "steps", steps);
    return SHD_OK;
}
