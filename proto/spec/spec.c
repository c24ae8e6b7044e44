/* See spec.h. Parsing is in spec_json.c, writing in spec_dump.c. */
#include "proto/spec/spec.h"
#include "proto/spec/adafactor.h"

#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/sha.h>

#include "proto/base/check.h"
#include "proto/spec/guard.h"
#include "proto/spec/muon.h"
#include "proto/spec/ramp.h"

const struct spec_init_row spec_init_rows[SPEC_INITS + 1] = {
    [SPEC_INIT_CONST] = { "const", 1 },
    [SPEC_INIT_NORMAL] = { "normal", 2 },
    [SPEC_INIT_UNIFORM] = { "uniform", 2 },
};

void spec_real_text(double x, char ret_text[32])
{
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(ret_text, 32, "%.*g", digits, x);
        if (strtod(ret_text, NULL) == x)
            return;
    }
}

struct spec *spec_ref(const struct spec *spec)
{
    struct spec *counted = (struct spec *)spec; /* nothing else of it changes */
    atomic_fetch_add_explicit(&counted->more, 1, memory_order_relaxed);
    return counted;
}

void spec_free(struct spec *spec)
{
    if (spec == NULL || atomic_fetch_sub_explicit(&spec->more, 1, memory_order_acq_rel) > 0)
        return;
    for (uint32_t i = 0; spec->groups != NULL && i < spec->group_count; i++) {
        free(spec->groups[i].name);
        free(spec->groups[i].muon);
        free(spec->groups[i].lamb);
        free(spec->groups[i].adafactor);
    }
    for (uint32_t i = 0; spec->units != NULL && i < spec->unit_count; i++)
        free(spec->units[i].name);
    for (uint32_t i = 0; spec->tensors != NULL && i < spec->tensor_count; i++) {
        free(spec->tensors[i].name);
        free(spec->tensors[i].of);
    }
    free(spec->groups);
    if (spec->guard != NULL) {
        free(spec->guard->watched);
        free(spec->guard->column);
    }
    free(spec->guard);
    free(spec->units);
    free(spec->tensors);
    free(spec->by_name);
    free(spec->ramp);
    free(spec->name);
    free(spec);
}

bool spec_find_tensor(const struct spec *spec, const char *name, uint32_t *ret_index)
{
    uint32_t first = 0, end = spec->tensor_count;
    CHECK(spec->by_name != NULL);
    while (first < end) {
        const uint32_t middle = first + (end - first) / 2;
        const uint32_t index = spec->by_name[middle];
        const int order = strcmp(name, spec->tensors[index].name);
        if (order == 0) {
            *ret_index = index;
            return true;
        }
        if (order < 0)
            end = middle;
        else
            first = middle + 1;
    }
    return false;
}

/* -- What is cut --------------------------------------------------------------------------------
 */

void spec_unit_whole_name(const struct spec_unit *unit, char ret_name[SPEC_NAME_BYTES_MAX])
{
    const char *end = unit->tiles > 0 ? strrchr(unit->name, '/') : NULL;
    const size_t bytes = end != NULL ? (size_t)(end - unit->name) : strlen(unit->name);
    CHECK(bytes < SPEC_NAME_BYTES_MAX);
    snprintf(ret_name, SPEC_NAME_BYTES_MAX, "%.*s", (int)bytes, unit->name);
}

const char *spec_whole_name(const struct spec_tensor *t)
{
    return t->of != NULL ? t->of : t->name;
}

uint64_t spec_whole_size(const struct spec_tensor *t, uint32_t d)
{
    CHECK(d < t->rank);
    return t->of != NULL && d == 0 ? t->of_rows : t->shape[d];
}

uint64_t spec_whole_first(const struct spec_tensor *t)
{
    return t->of != NULL ? t->first_row * (t->elems / t->shape[0]) : 0;
}

uint64_t spec_whole_elems(const struct spec_tensor *t)
{
    return t->of != NULL ? t->of_rows * (t->elems / t->shape[0]) : t->elems;
}

bool spec_whole_begins(const struct spec_tensor *t)
{
    return t->of == NULL || t->first_row == 0;
}

bool spec_whole_is(const struct spec_tensor *t, uint32_t rank, const uint64_t *shape)
{
    bool same = t->rank == rank;
    for (uint32_t d = 0; same && d < rank; d++)
        same = spec_whole_size(t, d) == shape[d];
    return same;
}

/* -- What follows -------------------------------------------------------------------------------
 */

uint32_t spec_micro_batches(const struct spec *spec, uint64_t step)
{
    return spec->ramp != NULL ? ramp_at(spec->ramp, step) : spec->micro_batches;
}

uint32_t spec_returns(const struct spec *spec)
{
    return spec->micro_batches / spec->accumulate;
}

uint32_t spec_moments(const struct spec *spec)
{
    return spec_optimizer_rows[spec->optimizer].moments;
}

uint32_t spec_unit_moments(const struct spec *spec, uint32_t unit)
{
    const struct spec_unit *u = &spec->units[unit];
    return u->frozen ? 0 : spec_optimizer_rows[spec_unit_optimizer(spec, unit)].moments;
}

enum quant spec_array_quant(const struct spec *spec, uint32_t array)
{
    if (!spec->int8 || array < 1 || array > spec_moments(spec))
        return QUANT_NONE;
    return array == 1 ? QUANT_SIGNED : QUANT_UNSIGNED;
}

uint32_t spec_tensor_align(const struct spec *spec)
{
    const bool blocks = spec->int8 || spec->codec != CODEC_NONE || spec->grad_codec != CODEC_NONE;
    return blocks ? QUANT_BLOCK_ELEMS : SHD_TENSOR_ALIGN_ELEMS;
}

uint32_t spec_ema_array(const struct spec *spec)
{
    return 1 + spec_moments(spec);
}

bool spec_unit_ema(const struct spec *spec, uint32_t unit)
{
    return spec->ema > 0 && !spec->units[unit].frozen && !spec->units[unit].mean;
}

uint32_t spec_arrays(const struct spec *spec)
{
    return spec_ema_array(spec) + (spec->ema > 0 ? 1 : 0);
}

uint32_t spec_unit_arrays(const struct spec *spec, uint32_t unit)
{
    return 1 + spec_unit_moments(spec, unit) + (spec_unit_ema(spec, unit) ? 1 : 0);
}

enum spec_optimizer spec_group_optimizer(const struct spec *spec, uint32_t group)
{
    const struct spec_group *g = &spec->groups[group];
    if (g->muon != NULL || g->lamb != NULL)
        return g->muon != NULL ? SPEC_MUON : SPEC_LAMB;
    if (g->adafactor != NULL)
        return SPEC_ADAFACTOR;
    return g->mean ? SPEC_MEAN : spec->optimizer;
}

bool spec_is_matrix(const struct spec *spec, const struct spec_tensor *tensor)
{
    return tensor->trainable && spec->groups[tensor->group].muon != NULL;
}

bool spec_is_whole(const struct spec *spec, const struct spec_tensor *tensor)
{
    const struct spec_group *g = &spec->groups[tensor->group];
    return tensor->trainable && (g->muon != NULL || g->lamb != NULL || g->adafactor != NULL);
}

bool spec_has_whole(const struct spec *spec)
{
    for (uint32_t u = 0; u < spec->unit_count; u++)
        if (spec->units[u].wholes)
            return true;
    return false;
}

enum spec_optimizer spec_unit_optimizer(const struct spec *spec, uint32_t unit)
{
    if (spec->units[unit].adafactor)
        return SPEC_ADAFACTOR;
    return spec->units[unit].mean ? SPEC_MEAN : spec->optimizer;
}

enum shd_dtype spec_unit_grad_dtype(const struct spec *spec, uint32_t unit)
{
    return spec->units[unit].mean ? SHD_F32 : spec->grad_dtype;
}

enum codec spec_unit_grad_codec(const struct spec *spec, uint32_t unit)
{
    return spec->units[unit].mean ? CODEC_NONE : spec->grad_codec;
}

uint64_t spec_tensor_key(const struct spec *spec, const struct spec_tensor *tensor)
{
    uint8_t text[8 + SPEC_NAME_BYTES_MAX];
    const char *name = spec_whole_name(tensor);
    const size_t name_bytes = strlen(name);
    CHECK(name_bytes < SPEC_NAME_BYTES_MAX);
    for (int i = 0; i < 8; i++)
        text[i] = (uint8_t)(spec->seed >> (8 * i));
    memcpy(text + 8, name, name_bytes); /* NOLINT(bugprone-not-null-terminated-result): bytes */
    uint8_t sha[SHA256_DIGEST_LENGTH];
    const uint8_t *done = SHA256(text, 8 + name_bytes, sha);
    CHECK(done != NULL); /* fails only where libcrypto was built without SHA-256 */
    uint64_t key = 0;
    for (int i = 0; i < 8; i++)
        key |= (uint64_t)sha[i] << (8 * i);
    return key;
}

/* -- Comparison ----------------------------------------------------------------------------- */

/* A comparison of two specs. After the first difference nothing is looked at any more. */
struct comparison {
    int status;
    struct shd_err *e;
};

/* Both values as text; fmt and args name what differs, of which field_chars are shown. */
static void differ(struct comparison *c, int field_chars, const char *open, const char *asked,
                   const char *fmt, va_list args)
{
    char field[176]; /* "tensor '<127 bytes>': shape[7]" */
    vsnprintf(field, sizeof field, fmt, args);
    c->status = err_set(c->e, SHD_ESPEC, "%.*s is %s, the open model has %s", field_chars, field,
                        asked, open);
}

__attribute__((format(printf, 4, 5))) static void same_u64(struct comparison *c, uint64_t open,
                                                           uint64_t asked, const char *fmt, ...)
{
    if (c->status != SHD_OK || open == asked)
        return;
    char a[32], o[32];
    snprintf(a, sizeof a, "%" PRIu64, asked);
    snprintf(o, sizeof o, "%" PRIu64, open);
    va_list args;
    va_start(args, fmt);
    differ(c, INT_MAX, o, a, fmt, args);
    va_end(args);
}

__attribute__((format(printf, 4, 5))) static void same_text(struct comparison *c, const char *open,
                                                            const char *asked, const char *fmt, ...)
{
    if (c->status != SHD_OK || strcmp(open, asked) == 0)
        return;
    char a[64], o[64];
    snprintf(a, sizeof a, "'%.50s'", asked);
    snprintf(o, sizeof o, "'%.50s'", open);
    va_list args;
    va_start(args, fmt);
    differ(c, 100, o, a, fmt, args);
    va_end(args);
}

__attribute__((format(printf, 4, 5))) static void same_real(struct comparison *c, double open,
                                                            double asked, const char *fmt, ...)
{
    if (c->status != SHD_OK || open == asked)
        return;
    char a[32], o[32];
    spec_real_text(asked, a);
    spec_real_text(open, o);
    va_list args;
    va_start(args, fmt);
    differ(c, INT_MAX, o, a, fmt, args);
    va_end(args);
}

static void compare_optimizer(struct comparison *c, const struct spec *open,
                              const struct spec *asked)
{
    const struct spec_optimizer_row *row = &spec_optimizer_rows[open->optimizer];
    same_text(c, row->kind, spec_optimizer_rows[asked->optimizer].kind, "optimizer.kind");
    if (row->beta1_key != NULL)
        same_real(c, open->beta1, asked->beta1, "optimizer.%s", row->beta1_key);
    if (row->beta2_key != NULL)
        same_real(c, open->beta2, asked->beta2, "optimizer.%s", row->beta2_key);
    if (row->eps_key != NULL)
        same_real(c, open->eps, asked->eps, "optimizer.%s", row->eps_key);
    same_text(c, row->in_torch_order ? "torch" : "shardd",
              spec_optimizer_rows[asked->optimizer].in_torch_order ? "torch" : "shardd",
              "optimizer.order");
    same_text(c, open->torch.coupled_decay ? "coupled" : "decoupled",
              asked->torch.coupled_decay ? "coupled" : "decoupled", "optimizer.decay");
    same_text(c, open->torch.nesterov ? "true" : "false", asked->torch.nesterov ? "true" : "false",
              "optimizer.nesterov");
    same_real(c, open->torch.dampening, asked->torch.dampening, "optimizer.dampening");
    same_text(c, open->int8 ? "int8" : "f32", asked->int8 ? "int8" : "f32", "optimizer.moments");
}

static void compare_micro_batches(struct comparison *c, const struct spec *open,
                                  const struct spec *asked)
{
    const struct ramp *o = open->ramp, *a = asked->ramp;
    const uint32_t rows = o != NULL ? o->count : 1, asked_rows = a != NULL ? a->count : 1;
    const bool one = rows <= 1 && asked_rows <= 1;
    if (one)
        same_u64(c, spec_micro_batches(open, 0), spec_micro_batches(asked, 0), "micro_batches");
    else
        same_u64(c, rows, asked_rows, "micro_batches: number of steps that change it");
    for (uint32_t i = 0; o != NULL && a != NULL && !one && c->status == SHD_OK && i < rows; i++) {
        same_u64(c, o->rows[i].from, a->rows[i].from, "micro_batches[%" PRIu32 "][0]", i);
        same_u64(c, o->rows[i].micro_batches, a->rows[i].micro_batches,
                 "micro_batches[%" PRIu32 "][1]", i);
    }
    same_u64(c, open->micro_batches, asked->micro_batches, "micro_batches_max");
}

static const char *own_kind(const struct spec_group *g)
{
    if (g->muon != NULL || g->lamb != NULL)
        return g->muon != NULL ? "muon" : "lamb";
    if (g->adafactor != NULL)
        return spec_optimizer_rows[SPEC_ADAFACTOR].kind;
    return g->mean ? "mean" : "the model's";
}

static void compare_muon(struct comparison *c, const char *group, const struct muon_rule *open,
                         const struct muon_rule *asked)
{
    same_real(c, open->momentum, asked->momentum, "group '%s': momentum", group);
    same_real(c, open->eps, asked->eps, "group '%s': eps", group);
    same_u64(c, open->steps, asked->steps, "group '%s': ns_steps", group);
    same_text(c, open->nesterov ? "true" : "false", asked->nesterov ? "true" : "false",
              "group '%s': nesterov", group);
    for (uint32_t i = 0; i < ARRAY_SIZE(open->coefficients); i++)
        same_real(c, open->coefficients[i], asked->coefficients[i],
                  "group '%s': ns_coefficients[%" PRIu32 "]", group, i);
    same_text(c, muon_adjust_names[open->adjust], muon_adjust_names[asked->adjust],
              "group '%s': adjust_lr_fn", group);
}

static void compare_lamb(struct comparison *c, const char *group, const struct spec_lamb *open,
                         const struct spec_lamb *asked)
{
    same_real(c, open->beta1, asked->beta1, "group '%s': beta1", group);
    same_real(c, open->beta2, asked->beta2, "group '%s': beta2", group);
    same_real(c, open->eps, asked->eps, "group '%s': eps", group);
}

static void compare_adafactor(struct comparison *c, const char *group,
                              const struct adafactor_rule *open, const struct adafactor_rule *asked)
{
    same_real(c, open->beta2_decay, asked->beta2_decay, "group '%s': beta2_decay", group);
    same_real(c, open->eps1, asked->eps1, "group '%s': eps1", group);
    same_real(c, open->eps2, asked->eps2, "group '%s': eps2", group);
    same_real(c, open->d, asked->d, "group '%s': d", group);
}

static void compare_groups(struct comparison *c, const struct spec *open, const struct spec *asked)
{
    same_u64(c, open->group_count, asked->group_count, "number of groups");
    for (uint32_t i = 0; c->status == SHD_OK && i < open->group_count; i++) {
        const struct spec_group *o = &open->groups[i], *a = &asked->groups[i];
        same_text(c, o->name, a->name, "groups[%" PRIu32 "].name", i);
        same_real(c, o->lr_scale, a->lr_scale, "group '%s': lr_scale", o->name);
        same_real(c, o->weight_decay, a->weight_decay, "group '%s': weight_decay", o->name);
        same_text(c, o->skips_idle ? "skip" : "zero", a->skips_idle ? "skip" : "zero",
                  "group '%s': idle", o->name);
        same_text(c, own_kind(o), own_kind(a), "group '%s': optimizer", o->name);
        if (c->status == SHD_OK && o->muon != NULL)
            compare_muon(c, o->name, o->muon, a->muon);
        if (c->status == SHD_OK && o->lamb != NULL)
            compare_lamb(c, o->name, o->lamb, a->lamb);
        if (c->status == SHD_OK && o->adafactor != NULL)
            compare_adafactor(c, o->name, o->adafactor, a->adafactor);
    }
}

static void compare_guard(struct comparison *c, const struct guard *open, const struct guard *asked)
{
    const uint32_t count = open != NULL ? open->count : 0;
    same_u64(c, count, asked != NULL ? asked->count : 0, "number of the guard's rules");
    for (uint32_t i = 0; c->status == SHD_OK && asked != NULL && i < count; i++) {
        const struct guard_rule *o = &open->rules[i], *a = &asked->rules[i];
        same_text(c, guard_name(o->what), guard_name(a->what), "guard[%" PRIu32 "]'s rule", i);
        same_real(c, o->threshold, a->threshold, "guard[%" PRIu32 "].%s", i, guard_name(o->what));
        same_u64(c, o->window, a->window, "guard[%" PRIu32 "].window", i);
        same_text(c, o->units, a->units, "guard[%" PRIu32 "].units", i);
        same_text(c, guard_action(o), guard_action(a), "guard[%" PRIu32 "].action", i);
    }
}

/* Tensor i of both; groups are known to be the same. */
static void compare_tensor(struct comparison *c, const struct spec *open, const struct spec *asked,
                           uint32_t i)
{
    const struct spec_tensor *o = &open->tensors[i], *a = &asked->tensors[i];
    const struct spec_unit *unit = &open->units[o->unit];
    const char *name = o->name;
    same_text(c, name, a->name, "unit '%s': tensors[%" PRIu32 "].name", unit->name,
              i - unit->first_tensor);
    same_u64(c, o->rank, a->rank, "tensor '%s': rank", name);
    for (uint32_t d = 0; c->status == SHD_OK && d < o->rank; d++)
        same_u64(c, o->shape[d], a->shape[d], "tensor '%s': shape[%" PRIu32 "]", name, d);
    same_text(c, open->groups[o->group].name, asked->groups[a->group].name, "tensor '%s': group",
              name);
    same_text(c, o->trainable ? "true" : "false", a->trainable ? "true" : "false",
              "tensor '%s': trainable", name);
    same_text(c, spec_init_rows[o->init].kind, spec_init_rows[a->init].kind, "tensor '%s': init",
              name);
    same_real(c, o->init_a, a->init_a, "tensor '%s': init[1]", name);
    same_real(c, o->init_b, a->init_b, "tensor '%s': init[2]", name);
}

/* Before units are counted: of which one the number of tiles differs. */
static void compare_tiles(struct comparison *c, const struct spec *open, const struct spec *asked)
{
    const uint32_t least = open->unit_count < asked->unit_count ? open->unit_count
                                                                : asked->unit_count;
    for (uint32_t i = 0; c->status == SHD_OK && i < least; i++) {
        const struct spec_unit *o = &open->units[i], *a = &asked->units[i];
        char name[SPEC_NAME_BYTES_MAX], asked_name[SPEC_NAME_BYTES_MAX];
        if (o->tiles == a->tiles)
            continue;
        spec_unit_whole_name(o, name);
        spec_unit_whole_name(a, asked_name);
        if (strcmp(name, asked_name) != 0)
            return; /* other units: they are compared later */
        same_u64(c, o->tiles > 0 ? o->tiles : 1, a->tiles > 0 ? a->tiles : 1, "unit '%s': tiles",
                 name);
    }
}

static void compare_unit(struct comparison *c, const struct spec *open, const struct spec *asked,
                         uint32_t i)
{
    const struct spec_unit *o = &open->units[i], *a = &asked->units[i];
    same_text(c, o->name, a->name, "units[%" PRIu32 "].name", i);
    same_u64(c, o->tensor_count, a->tensor_count, "unit '%s': number of tensors", o->name);
    same_text(c, o->whole ? "whole" : "spread", a->whole ? "whole" : "spread", "unit '%s': place",
              o->name);
    for (uint32_t t = 0; c->status == SHD_OK && t < o->tensor_count; t++)
        compare_tensor(c, open, asked, o->first_tensor + t);
}

/* After all units: these are names of units, which are known to be the same. */
static void compare_uses(struct comparison *c, const struct spec *open, const struct spec *asked,
                         uint32_t i)
{
    const struct spec_unit *o = &open->units[i], *a = &asked->units[i];
    same_u64(c, o->uses_count, a->uses_count, "unit '%s': number of uses", o->name);
    for (uint32_t k = 0; c->status == SHD_OK && k < o->uses_count; k++)
        same_text(c, open->units[o->uses[k]].name, asked->units[a->uses[k]].name,
                  "unit '%s': uses[%" PRIu32 "]", o->name, k);
}

int spec_compare(const struct spec *open, const struct spec *asked, struct shd_err *e)
{
    struct comparison c = { SHD_OK, e };
    same_text(&c, open->name, asked->name, "name");
    same_u64(&c, open->seed, asked->seed, "seed");
    compare_micro_batches(&c, open, asked);
    same_u64(&c, open->accumulate, asked->accumulate, "accumulate");
    same_u64(&c, open->verify_every, asked->verify_every, "verify_every");
    same_text(&c, dtype_name(open->publish), dtype_name(asked->publish), "publish");
    same_text(&c, codec_name(open->codec), codec_name(asked->codec), "codec");
    same_text(&c, dtype_name(open->grad_dtype), dtype_name(asked->grad_dtype), "grad_dtype");
    same_text(&c, codec_name(open->grad_codec), codec_name(asked->grad_codec), "grad_codec");
    same_real(&c, open->ema, asked->ema, "ema");
    same_text(&c, open->ema_warmup ? "true" : "false", asked->ema_warmup ? "true" : "false",
              "ema_warmup");
    compare_optimizer(&c, open, asked);
    compare_groups(&c, open, asked);
    compare_guard(&c, open->guard, asked->guard);
    same_text(&c, open->guard_audit ? "true" : "false", asked->guard_audit ? "true" : "false",
              "guard_audit");
    compare_tiles(&c, open, asked);
    same_u64(&c, open->unit_count, asked->unit_count, "number of units");
    for (uint32_t i = 0; c.status == SHD_OK && i < open->unit_count; i++)
        compare_unit(&c, open, asked, i);
    for (uint32_t i = 0; c.status == SHD_OK && i < open->unit_count; i++)
        compare_uses(&c, open, asked, i);
    return c.status;
}
