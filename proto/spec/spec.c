/* See spec.h. Parsing is in spec_json.c, writing in spec_dump.c. */
#include "proto/spec/spec.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/sha.h>

#include "proto/base/check.h"
#include "proto/spec/spec_tables.h"

void spec_free(struct spec *spec)
{
    if (spec == NULL)
        return;
    for (uint32_t i = 0; spec->groups != NULL && i < spec->group_count; i++)
        free(spec->groups[i].name);
    for (uint32_t i = 0; spec->units != NULL && i < spec->unit_count; i++)
        free(spec->units[i].name);
    for (uint32_t i = 0; spec->tensors != NULL && i < spec->tensor_count; i++)
        free(spec->tensors[i].name);
    free(spec->groups);
    free(spec->units);
    free(spec->tensors);
    free(spec->name);
    free(spec);
}

uint32_t spec_returns(const struct spec *spec)
{
    return spec->micro_batches / spec->accumulate;
}

uint32_t spec_moments(const struct spec *spec)
{
    return spec_optimizer_rows[spec->optimizer].moments;
}

uint64_t spec_tensor_key(const struct spec *spec, const struct spec_tensor *tensor)
{
    uint8_t text[8 + SPEC_NAME_BYTES_MAX];
    const size_t name_bytes = strlen(tensor->name);
    CHECK(name_bytes < SPEC_NAME_BYTES_MAX);
    for (int i = 0; i < 8; i++)
        text[i] = (uint8_t)(spec->seed >> (8 * i));
    memcpy(text + 8, tensor->name, name_bytes);
    uint8_t sha[SHA256_DIGEST_LENGTH];
    const uint8_t *done = SHA256(text, 8 + name_bytes, sha);
    CHECK(done != NULL); /* fails only where libcrypto was built without SHA-256 */
    uint64_t key = 0;
    for (int i = 0; i < 8; i++)
        key |= (uint64_t)sha[i] << (8 * i);
    return key;
}

/* -- Comparison: `field` is what differs, asked's value comes first ------------------------- */

#define FIELD_BYTES 176 /* "tensor '<127 bytes>': shape[7]" */

static int same_u64(const char *field, uint64_t open, uint64_t asked, struct shd_err *e)
{
    if (open == asked)
        return SHD_OK;
    return err_set(e, SHD_ESPEC, "%s is %" PRIu64 ", the open model has %" PRIu64, field, asked,
                   open);
}

static int same_text(const char *field, const char *open, const char *asked, struct shd_err *e)
{
    if (strcmp(open, asked) == 0)
        return SHD_OK;
    return err_set(e, SHD_ESPEC, "%.100s is '%.50s', the open model has '%.50s'", field, asked,
                   open);
}

static int same_real(const char *field, double open, double asked, struct shd_err *e)
{
    if (open == asked)
        return SHD_OK;
    char a[32], o[32];
    spec_real_text(asked, a);
    spec_real_text(open, o);
    return err_set(e, SHD_ESPEC, "%s is %s, the open model has %s", field, a, o);
}

static int compare_optimizer(const struct spec *open, const struct spec *asked, struct shd_err *e)
{
    const struct spec_optimizer_row *row = &spec_optimizer_rows[open->optimizer];
    int r = same_text("optimizer.kind", row->kind, spec_optimizer_rows[asked->optimizer].kind, e);
    if (r != SHD_OK)
        return r;
    const struct {
        const char *key;
        double open, asked;
    } fields[] = {
        { row->beta1_key, open->beta1, asked->beta1 },
        { row->beta2_key, open->beta2, asked->beta2 },
        { row->eps_key, open->eps, asked->eps },
    };
    for (size_t i = 0; r == SHD_OK && i < ARRAY_SIZE(fields); i++) {
        char field[FIELD_BYTES];
        snprintf(field, sizeof field, "optimizer.%s", fields[i].key != NULL ? fields[i].key : "");
        r = same_real(field, fields[i].open, fields[i].asked, e);
    }
    return r;
}

static int compare_groups(const struct spec *open, const struct spec *asked, struct shd_err *e)
{
    int r = same_u64("number of groups", open->group_count, asked->group_count, e);
    for (uint32_t i = 0; r == SHD_OK && i < open->group_count; i++) {
        const struct spec_group *o = &open->groups[i], *a = &asked->groups[i];
        char field[FIELD_BYTES];
        snprintf(field, sizeof field, "groups[%" PRIu32 "].name", i);
        r = same_text(field, o->name, a->name, e);
        snprintf(field, sizeof field, "group '%s': lr_scale", o->name);
        if (r == SHD_OK)
            r = same_real(field, o->lr_scale, a->lr_scale, e);
        snprintf(field, sizeof field, "group '%s': weight_decay", o->name);
        if (r == SHD_OK)
            r = same_real(field, o->weight_decay, a->weight_decay, e);
    }
    return r;
}

static int compare_shape(const struct spec_tensor *open, const struct spec_tensor *asked,
                         struct shd_err *e)
{
    char field[FIELD_BYTES];
    snprintf(field, sizeof field, "tensor '%s': rank", open->name);
    int r = same_u64(field, open->rank, asked->rank, e);
    for (uint32_t d = 0; r == SHD_OK && d < open->rank; d++) {
        snprintf(field, sizeof field, "tensor '%s': shape[%" PRIu32 "]", open->name, d);
        r = same_u64(field, open->shape[d], asked->shape[d], e);
    }
    return r;
}

static int compare_init(const struct spec_tensor *open, const struct spec_tensor *asked,
                        struct shd_err *e)
{
    char field[FIELD_BYTES];
    snprintf(field, sizeof field, "tensor '%s': init", open->name);
    int r = same_text(field, spec_init_rows[open->init].kind, spec_init_rows[asked->init].kind, e);
    snprintf(field, sizeof field, "tensor '%s': init[1]", open->name);
    if (r == SHD_OK)
        r = same_real(field, open->init_a, asked->init_a, e);
    snprintf(field, sizeof field, "tensor '%s': init[2]", open->name);
    if (r == SHD_OK)
        r = same_real(field, open->init_b, asked->init_b, e);
    return r;
}

/* Tensor i of both; groups are known to be the same. */
static int compare_tensor(const struct spec *open, const struct spec *asked, uint32_t i,
                          struct shd_err *e)
{
    const struct spec_tensor *o = &open->tensors[i], *a = &asked->tensors[i];
    const struct spec_unit *unit = &open->units[o->unit];
    char field[FIELD_BYTES];
    snprintf(field, sizeof field, "unit '%s': tensors[%" PRIu32 "].name", unit->name,
             i - unit->first_tensor);
    int r = same_text(field, o->name, a->name, e);
    if (r == SHD_OK)
        r = compare_shape(o, a, e);
    snprintf(field, sizeof field, "tensor '%s': group", o->name);
    if (r == SHD_OK)
        r = same_text(field, open->groups[o->group].name, asked->groups[a->group].name, e);
    snprintf(field, sizeof field, "tensor '%s': trainable", open->tensors[i].name);
    if (r == SHD_OK)
        r = same_text(field, o->trainable ? "true" : "false", a->trainable ? "true" : "false", e);
    return r == SHD_OK ? compare_init(o, a, e) : r;
}

static int compare_unit(const struct spec *open, const struct spec *asked, uint32_t i,
                        struct shd_err *e)
{
    const struct spec_unit *o = &open->units[i], *a = &asked->units[i];
    char field[FIELD_BYTES];
    snprintf(field, sizeof field, "units[%" PRIu32 "].name", i);
    int r = same_text(field, o->name, a->name, e);
    snprintf(field, sizeof field, "unit '%s': number of tensors", o->name);
    if (r == SHD_OK)
        r = same_u64(field, o->tensor_count, a->tensor_count, e);
    for (uint32_t t = 0; r == SHD_OK && t < o->tensor_count; t++)
        r = compare_tensor(open, asked, o->first_tensor + t, e);
    return r;
}

/* After all units: these are names of units, which are known to be the same. */
static int compare_uses(const struct spec *open, const struct spec *asked, uint32_t i,
                        struct shd_err *e)
{
    const struct spec_unit *o = &open->units[i], *a = &asked->units[i];
    char field[FIELD_BYTES];
    snprintf(field, sizeof field, "unit '%s': number of uses", o->name);
    int r = same_u64(field, o->uses_count, a->uses_count, e);
    for (uint32_t k = 0; r == SHD_OK && k < o->uses_count; k++) {
        snprintf(field, sizeof field, "unit '%s': uses[%" PRIu32 "]", o->name, k);
        r = same_text(field, open->units[o->uses[k]].name, asked->units[a->uses[k]].name, e);
    }
    return r;
}

int spec_compare(const struct spec *open, const struct spec *asked, struct shd_err *e)
{
    int r = same_text("name", open->name, asked->name, e);
    if (r == SHD_OK)
        r = same_u64("seed", open->seed, asked->seed, e);
    if (r == SHD_OK)
        r = same_u64("micro_batches", open->micro_batches, asked->micro_batches, e);
    if (r == SHD_OK)
        r = same_u64("accumulate", open->accumulate, asked->accumulate, e);
    if (r == SHD_OK)
        r = same_text("publish", dtype_name(open->publish), dtype_name(asked->publish), e);
    if (r == SHD_OK)
        r = compare_optimizer(open, asked, e);
    if (r == SHD_OK)
        r = compare_groups(open, asked, e);
    if (r == SHD_OK)
        r = same_u64("number of units", open->unit_count, asked->unit_count, e);
    for (uint32_t i = 0; r == SHD_OK && i < open->unit_count; i++)
        r = compare_unit(open, asked, i, e);
    for (uint32_t i = 0; r == SHD_OK && i < open->unit_count; i++)
        r = compare_uses(open, asked, i, e);
    return r;
}
