/* Merging now and then: local SGD, DiLoCo. See client/shd.h.
 *
 * Nothing of it is kept anywhere but in the two models' steps. Of the inner model's steps each that
 * is a multiple of every + 1 is a merge: a put of what the outer model has. Merge 0 takes the start
 * values; before merge n the group's difference is returned to the outer model, in its step n - 1,
 * as its micro-batch `group`. Who begins, or begins again behind a kill at any point, looks at both
 * steps and does what is missing: a return counts once, however often it is made, and so does the
 * put, which ends its step. What is returned is a function of the two models at these steps alone:
 * whoever of the group returns it returns the same bits. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "client/run/drop.h"
#include "client/run/grads.h"
#include "client/session/blame.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/failpoint.h"
#include "proto/base/flags.h"
#include "proto/base/sys.h"
#include "proto/spec/spec_json.h"

#define LR       0.7 /* DiLoCo's, as the momentum */
#define MOMENTUM 0.9

/* So many groups can be set by shd_model_set() later on. */
#define GROUPS_ROOM 64u

/* -- What is asked for ------------------------------------------------------------------------- */

static int take(const struct shd_merge_options *options, struct shd_merge_options *ret_o,
                struct shd_err *e)
{
    struct shd_merge_options o = { 0 };
    const int r = sized_take(&o, sizeof o, options, sizeof o.size, "shd_merge_options", e);
    if (r != SHD_OK)
        return r;
    if (o.every == 0)
        return err_set(e, SHD_EINVAL, "merges every 0 steps: must be 1 or more");
    if (o.groups == 0 || o.groups > SHD_MICROS_MAX ||
        o.group >= (o.joined > 0 ? SHD_MICROS_MAX : o.groups))
        return err_set(e, SHD_ERANGE,
                       "group %" PRIu32 " of %" PRIu32 ": must be 0 to groups - 1, of at most %u; "
                       "more where it has joined",
                       o.group, o.groups, (unsigned)SHD_MICROS_MAX);
    if (!(o.lr >= 0 && isfinite(o.lr)) || !(o.momentum >= 0 && o.momentum < 1))
        return err_set(e, SHD_ERANGE,
                       "an outer learning rate of %g and momentum of %g: must be finite and not "
                       "negative, the momentum below 1",
                       o.lr, o.momentum);
    if (o.average && (o.lr != 0 || o.momentum != 0))
        return err_set(e, SHD_EINVAL, "average is set, and lr or momentum as well: leave them 0");
    if (!o.average && o.momentum == 0)
        o.momentum = MOMENTUM;
    if (o.lr == 0)
        o.lr = o.average ? 1 : LR;
    *ret_o = o;
    return SHD_OK;
}

/* -- The outer model --------------------------------------------------------------------------- */

/* Rates of groups are the inner optimizers'; what a mean is stays. */
static void strip_groups(json_t *root)
{
    static const char *const gone[] = { "lr_scale", "weight_decay", "idle" };
    size_t i;
    json_t *group;
    json_array_foreach(json_object_get(root, "groups"), i, group)
    {
        const char *kind = json_string_value(
            json_object_get(json_object_get(group, "optimizer"), "kind"));
        for (size_t g = 0; g < ARRAY_SIZE(gone); g++)
            json_object_del(group, gone[g]);
        if (kind == NULL || strcmp(kind, "mean") != 0)
            json_object_del(group, "optimizer");
    }
}

static json_t *outer_optimizer(const struct shd_merge_options *o)
{
    if (o->average)
        return json_pack("{s:s}", "kind", "sgd");
    return json_pack("{s:s, s:f, s:s, s:b}", "kind", "sgd", "momentum", o->momentum, "order",
                     "torch", "nesterov", 1);
}

static int change(json_t *root, const char *name, const struct shd_merge_options *o)
{
    static const char *const gone[] = { "accumulate", "grad_dtype",  "guard",      "guard_audit",
                                        "publish",    "ema",         "ema_warmup", "codec",
                                        "grad_codec", "verify_every" };
    const uint32_t room = o->groups > GROUPS_ROOM ? o->groups : GROUPS_ROOM;
    for (size_t i = 0; i < ARRAY_SIZE(gone); i++)
        json_object_del(root, gone[i]);
    strip_groups(root);
    return json_object_set_new(root, "name", json_string(name)) |
           json_object_set_new(root, "micro_batches", json_integer((json_int_t)o->groups)) |
           json_object_set_new(root, "micro_batches_max", json_integer((json_int_t)room)) |
           json_object_set_new(root, "optimizer", outer_optimizer(o));
}

/* The inner's tensors under the outer's optimizer; free() it. NULL: no memory. */
static char *outer_spec(const char *inner_json, const char *name, const struct shd_merge_options *o)
{
    char *json = NULL;
    json_t *root = inner_json != NULL ? json_loads(inner_json, 0, NULL) : NULL;
    if (root != NULL && change(root, name, o) == 0)
        json = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
    json_decref(root);
    return json;
}

/* Those of the unit that both models have: Adafactor's statistics, its last tensor, are the inner's
 * alone. A tensor is where its own model lays it out. */
static uint32_t tensors_of(const struct spec *s, uint32_t unit,
                           const struct spec_tensor **ret_first)
{
    const struct spec_unit *u = &s->units[unit];
    *ret_first = &s->tensors[u->first_tensor];
    return u->tensor_count - ((*ret_first)[u->tensor_count - 1].statistics ? 1 : 0);
}

static void copy_unit(const struct spec *to, const struct spec *from, uint32_t unit, float *out,
                      const float *in)
{
    const struct spec_tensor *a, *b;
    const uint32_t count = tensors_of(to, unit, &a);
    tensors_of(from, unit, &b);
    for (uint32_t t = 0; t < count; t++)
        memcpy(out + a[t].offset_elems, in + b[t].offset_elems, a[t].elems * sizeof *out);
}

static uint64_t room_elems(const struct shd_model *inner, const struct shd_model *outer)
{
    uint64_t most = 0;
    for (uint32_t u = 0; u < inner->spec->unit_count; u++) {
        const uint64_t a = inner->spec->units[u].elems;
        const uint64_t b = outer != NULL ? outer->spec->units[u].elems : 0;
        most = a > most ? a : most;
        most = b > most ? b : most;
    }
    return most;
}

struct starting {
    shd_model *inner;
    const struct spec *outer;
    float *room; /* of the inner's largest unit */
    struct shd_err err;
};

static int fill_start(void *ctx, uint32_t unit, float *values)
{
    struct starting *s = ctx;
    const int r = shd_get(s->inner, unit, SHD_PARAMS, s->room, NULL, NULL, &s->err);
    if (r == SHD_OK)
        copy_unit(s->outer, s->inner->spec, unit, values, s->room);
    return r;
}

static int open_outer(shd_session *s, shd_model *inner, const char *json, shd_model **ret_outer,
                      struct shd_err *e)
{
    struct spec *spec;
    int r = spec_parse(json, strlen(json), &spec, e);
    if (r != SHD_OK)
        return r;
    struct starting start = { .inner = inner, .outer = spec };
    const struct shd_open_options open = {
        .size = sizeof open, .spec_json = json, .fill = fill_start, .ctx = &start
    };
    start.room = sys_malloc(room_elems(inner, NULL) * sizeof *start.room);
    r = start.room != NULL ? shd_model_open_with(s, &open, ret_outer, NULL, e)
                           : err_set(e, SHD_ENOMEM, "no memory for a unit of the outer model");
    if (r == SHD_EINTERNAL && start.err.code != SHD_OK)
        r = err_copy(&start.err, e);
    free(start.room);
    spec_free(spec);
    return r;
}

int shd_outer_open(shd_session *s, shd_model *inner, const char *name,
                   const struct shd_merge_options *options, shd_model **ret_outer,
                   struct shd_err *e)
{
    struct shd_merge_options o = { 0 };
    char own[SPEC_NAME_BYTES_MAX + 8];
    int r = session_check(s, e);
    if (r == SHD_OK)
        r = take(options, &o, e);
    if (r == SHD_OK && inner->session == s)
        r = err_set(e, SHD_EINVAL,
                    "the outer model needs a session of its own: shd_connect() once more");
    if (r != SHD_OK)
        return r;
    if (s->hub != NULL)
        s->hub->rank = 0; /* ranks are of a group, and other groups have the same ones */
    snprintf(own, sizeof own, "%s.outer", inner->spec->name);
    char *json = outer_spec(shd_model_spec(inner), name != NULL ? name : own, &o);
    if (json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the outer model's spec");
    r = open_outer(s, inner, json, ret_outer, e);
    free(json);
    return r == SHD_OK ? r : err_prefix(e, "outer model");
}

/* -- One merge --------------------------------------------------------------------------------- */

struct merging {
    shd_model *inner, *outer;
    struct shd_merge_options o;
    uint64_t step;        /* the inner's, of the merge */
    uint64_t to;          /* the outer's, of which the inner takes the parameters */
    bool first;           /* merge 0: nothing is returned */
    bool over;            /* another worker of the group has made it */
    float *mine, *theirs; /* owned: of a unit */
    struct shd_err err;   /* of what a put is filled by */
};

static struct shd_update outer_update(const struct merging *m)
{
    return (struct shd_update){ .size = sizeof(struct shd_update), .lr = m->o.lr };
}

static bool units_alike(const struct spec *a, const struct spec *b, uint32_t unit)
{
    const struct spec_tensor *in, *out;
    const uint32_t count = tensors_of(a, unit, &in);
    bool alike = tensors_of(b, unit, &out) == count;
    for (uint32_t t = 0; alike && t < count; t++)
        alike = in[t].elems == out[t].elems && strcmp(in[t].name, out[t].name) == 0;
    return alike;
}

static int check_alike(const struct shd_model *inner, const struct shd_model *outer,
                       struct shd_err *e)
{
    const struct spec *a = inner->spec, *b = outer->spec;
    bool alike = a->unit_count == b->unit_count;
    for (uint32_t u = 0; alike && u < a->unit_count; u++)
        alike = units_alike(a, b, u);
    return alike ? SHD_OK
                 : err_set(e, SHD_ESPEC,
                           "models '%.60s' and '%.60s' have not the same units and tensors: make "
                           "the outer one by shd_outer_open()",
                           a->name, b->name);
}

/* The step that a model's owners are at. */
static int look(struct merging *m, shd_model *model, uint64_t *ret_step, struct shd_err *e)
{
    uint32_t least = 0;
    for (uint32_t u = 1; u < model->spec->unit_count; u++)
        if (model->spec->units[u].elems < model->spec->units[least].elems)
            least = u;
    return shd_get(model, least, SHD_PARAMS, m->theirs, ret_step, NULL, e);
}

static void warn(const struct merging *m, const char *what)
{
    char line[400];
    snprintf(line, sizeof line, "shd: WARNING: outer model '%.100s', group %" PRIu32 ": %s",
             m->outer->spec->name, m->o.group, what);
    blame_say(m->inner->session->blame, line);
}

/* Wait until the outer model is at `step`, as this session knows. */
static int await(struct merging *m, uint64_t step, struct shd_err *e)
{
    const struct shd_update update = outer_update(m);
    int r = SHD_OK;
    while (r == SHD_OK && shd_step(m->outer) < step) {
        struct shd_result result = { .size = sizeof result };
        r = shd_commit(m->outer, &update, &result, e);
        if (r == SHD_OK && result.skipped)
            warn(m,
                 "a merge has changed nothing, as its sum is not finite: what groups have learnt "
                 "since the last one is lost");
        if (r == SHD_OK && result.rewound)
            r = err_set(e, SHD_ESTEP,
                        "outer model '%.60s' went back to step %" PRIu64 ", and its groups did not",
                        m->outer->spec->name, shd_step(m->outer));
    }
    return r;
}

/* What the group has changed of a unit, the other way; of a mean its values. Whether it is finite.
 */
static bool subtract(const struct merging *m, uint32_t unit, const float *params, float *grad)
{
    const struct spec_tensor *in, *out;
    const uint32_t count = tensors_of(m->outer->spec, unit, &out);
    const bool mean = m->outer->spec->units[unit].mean;
    bool finite = true;
    tensors_of(m->inner->spec, unit, &in);
    for (uint32_t t = 0; t < count; t++) {
        const float *a = m->mine + in[t].offset_elems, *b = params + out[t].offset_elems;
        float *to = grad + out[t].offset_elems;
        for (uint64_t i = 0; i < out[t].elems; i++) {
            to[i] = mean ? a[i] : b[i] - a[i];
            finite &= isfinite(to[i]) != 0;
        }
    }
    return finite;
}

/* A group that has lost a unit's values takes the others', and theirs are not lost with it. */
static void change_nothing(const struct merging *m, uint32_t unit, const float *params, float *grad)
{
    const struct spec_unit *u = &m->outer->spec->units[unit];
    char what[300];
    if (u->mean)
        memcpy(grad, params, u->elems * sizeof *grad);
    else
        memset(grad, 0, u->elems * sizeof *grad);
    snprintf(what, sizeof what,
             "unit '%.100s' of model '%.100s' is not finite: it counts as unchanged, and takes the "
             "outer model's values",
             u->name, m->inner->spec->name);
    warn(m, what);
}

/* The unit's gradient, of torch's sign. What is published is fp32, as masters are: over a relay it
 * comes once for all. SHD_ESTEP: the outer model has gone on, with this group's part, which another
 * worker has returned. */
static int give_unit(struct merging *m, uint32_t unit, struct shd_err *e)
{
    const void *params;
    uint64_t inner_step;
    float *grad;
    int r = shd_get(m->inner, unit, SHD_PARAMS, m->mine, &inner_step, NULL, e);
    m->over = r == SHD_OK && inner_step != m->step;
    if (r == SHD_OK && !m->over)
        r = shd_acquire(m->outer, unit, &params, e);
    if (r != SHD_OK || m->over)
        return r;
    r = shd_grad(m->outer, m->o.group, unit, &grad, e);
    if (r == SHD_OK && !subtract(m, unit, params, grad))
        change_nothing(m, unit, params, grad);
    shd_release(m->outer, unit);
    return r == SHD_OK ? shd_return(m->outer, m->o.group, unit, e) : r;
}

static int give_all(struct merging *m, struct shd_err *e)
{
    struct shd_err why = { 0 };
    int r = SHD_OK;
    if (m->o.group >= shd_micro_batches(m->outer))
        return err_set(e, SHD_ERANGE,
                       "step %" PRIu64 " of outer model '%.60s' is of %" PRIu32
                       " groups, and this is group %" PRIu32 ", counted from 0",
                       shd_step(m->outer), m->outer->spec->name, shd_micro_batches(m->outer),
                       m->o.group);
    for (uint32_t u = 0; r == SHD_OK && !m->over && u < m->outer->spec->unit_count; u++) {
        if (!m->outer->spec->units[u].frozen)
            r = give_unit(m, u, &why);
        if (u == 0)
            FAIL_POINT("merge:begun");
    }
    if (r == SHD_ESTEP)
        drop_grads(m->outer, GRADS_ALL);
    return r == SHD_OK || r == SHD_ESTEP ? SHD_OK : err_copy(&why, e);
}

static int fill_put(void *ctx, uint32_t unit, enum shd_array array, float *values)
{
    struct merging *m = ctx;
    const void *params;
    (void)array;
    const int r = shd_acquire(m->outer, unit, &params, &m->err);
    if (r != SHD_OK)
        return r;
    copy_unit(m->inner->spec, m->outer->spec, unit, values, params);
    shd_release(m->outer, unit);
    return SHD_OK;
}

/* Another worker of the group has made the merge, or will: until then. */
static int wait_for_others(shd_model *inner, struct shd_err *e)
{
    const struct shd_update nothing = { .size = sizeof nothing };
    struct shd_result result = { .size = sizeof result };
    return shd_commit(inner, &nothing, &result, e);
}

static int put(struct merging *m, struct shd_err *e)
{
    const uint32_t units = m->inner->spec->unit_count;
    uint8_t *arrays = sys_calloc(units, 1);
    if (arrays == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " units", units);
    for (uint32_t u = 0; u < units; u++)
        arrays[u] = m->inner->spec->units[u].frozen ? 0 : SHD_PUT_PARAMS;
    const struct shd_put_options options = {
        .size = sizeof options, .arrays = arrays, .fill = fill_put, .ctx = m
    };
    const int r = shd_put(m->inner, &options, NULL, e);
    free(arrays);
    return r == SHD_EINTERNAL && m->err.code != SHD_OK ? err_copy(&m->err, e) : r;
}

/* The outer model is where this merge does not have it: others of the group have made it, or the
 * two models are not of one training. */
static int wrong_step(struct merging *m, uint64_t at, struct shd_err *e)
{
    uint64_t inner_step;
    const int r = look(m, m->inner, &inner_step, e);
    if (r != SHD_OK)
        return r;
    m->over = inner_step != m->step;
    if (m->over)
        return SHD_OK;
    return err_set(e, SHD_ESTEP,
                   "outer model '%.60s' is at step %" PRIu64 ", and model '%.60s' at merge %" PRIu64
                   ": they are not of one training, or one of them went back",
                   m->outer->spec->name, at, m->inner->spec->name, m->to);
}

static int merge(struct merging *m, struct shd_err *e)
{
    uint64_t at;
    int r = look(m, m->outer, &at, e);
    if (r == SHD_OK && (at > m->to || (!m->first && at + 1 < m->to)))
        r = wrong_step(m, at, e);
    if (r == SHD_OK && !m->over)
        r = await(m, at < m->to ? at : m->to, e);
    if (r == SHD_OK && !m->over && !m->first && shd_step(m->outer) + 1 == m->to)
        r = give_all(m, e);
    FAIL_POINT("merge:returned");
    if (r == SHD_OK && !m->over)
        r = await(m, m->to, e);
    FAIL_POINT("merge:outer");
    if (r == SHD_OK && !m->over) {
        r = put(m, e);
        if (r == SHD_ESTEP)
            r = wrong_step(m, shd_step(m->outer), e);
    }
    FAIL_POINT("merge:put");
    return r == SHD_OK && m->over ? wait_for_others(m->inner, e) : r;
}

static int merge_here(shd_model *inner, shd_model *outer, const struct shd_merge_options *o,
                      struct shd_err *e)
{
    CHECK(outer != NULL); /* shd_merge(): only who follows has none */
    const uint64_t step = shd_step(inner), number = step / (o->every + 1);
    struct merging m = { .inner = inner,
                         .outer = outer,
                         .o = *o,
                         .step = step,
                         .to = o->joined + number,
                         .first = number == 0 };
    int r = check_alike(inner, outer, e);
    if (r != SHD_OK)
        return r;
    const uint64_t bytes = room_elems(inner, outer) * sizeof *m.mine;
    m.mine = sys_malloc(bytes);
    m.theirs = sys_malloc(bytes);
    r = m.mine != NULL && m.theirs != NULL
            ? merge(&m, e)
            : err_set(e, SHD_ENOMEM, "no memory for a unit of %" PRIu64 " bytes", bytes);
    free(m.mine);
    free(m.theirs);
    return r;
}

int shd_merge(shd_model *inner, shd_model *outer, const struct shd_merge_options *options,
              bool *ret_merged, struct shd_err *e)
{
    struct shd_merge_options o = { 0 };
    int r = session_check(inner->session, e);
    if (r == SHD_OK)
        r = take(options, &o, e);
    if (r == SHD_OK && outer == NULL && !o.follows)
        r = err_set(e, SHD_EINVAL, "no outer model: only who follows merges without one");
    if (r != SHD_OK)
        return r;
    bool merged = false;
    while (r == SHD_OK &&
           shd_step(inner) % (o.every + 1) == 0) { /* others may be at the next one */
        r = o.follows ? wait_for_others(inner, e) : merge_here(inner, outer, &o, e);
        merged = true;
    }
    if (r == SHD_OK && ret_merged != NULL)
        *ret_merged = merged;
    return r;
}
