/* See spec_write.h.
 *
 * Keys in the order set here, every default spelt out, reals with 17 digits: the same struct gives
 * the same bytes, and parsing them gives the same struct. One default is not spelt out: builds
 * without "grad_dtype" read the specs, and write the checkpoints, of models with fp32 gradients.
 * Units are written here, for there may be many, and the rest by jansson; all of it as jansson
 * writes with JSON_COMPACT and 17 digits. Names need no escapes: spec.h says which they are. */
#include "proto/spec/spec_write.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/spec/ramp.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_guard.h"
#include "proto/spec/spec_muon.h"
#include "proto/spec/spec_optimizer.h"
#include "proto/spec/spec_ramp.h"

#define ROOM_MIN   ((size_t)4096)
#define REAL_BYTES 32u

struct text {
    char *at; /* owned; NULL: nothing yet, or no memory */
    size_t used, room;
    bool failed;
    bool untiled; /* tiles are left out */
};

static void put_bytes(struct text *t, const char *from, size_t bytes)
{
    if (t->failed)
        return;
    if (t->room - t->used < bytes + 1) {
        const size_t room = 2 * (t->room + bytes) + ROOM_MIN;
        char *at = sys_realloc(t->at, room);
        t->failed = at == NULL;
        if (t->failed)
            return;
        t->at = at;
        t->room = room;
    }
    memcpy(t->at + t->used, from, bytes);
    t->used += bytes;
    t->at[t->used] = '\0';
}

static void put(struct text *t, const char *text)
{
    put_bytes(t, text, strlen(text));
}

static void put_named(struct text *t, const char *before, const char *name)
{
    put(t, before);
    put(t, "\"");
    put(t, name);
    put(t, "\"");
}

static void put_integer(struct text *t, uint64_t x)
{
    char digits[24];
    size_t first = sizeof digits;
    do
        digits[--first] = (char)('0' + x % 10);
    while ((x /= 10) > 0);
    put_bytes(t, digits + first, sizeof digits - first);
}

/* A real is told from an integer, its exponent has neither '+' nor zeros in front. */
static void put_real(struct text *t, double x)
{
    char digits[REAL_BYTES];
    snprintf(digits, sizeof digits, "%.17g", x);
    char *exponent = strchr(digits, 'e');
    char *point = digits + strspn(digits, "-0123456789");
    if (*point != '\0' && *point != 'e')
        *point = '.'; /* whatever the locale has */
    if (exponent == NULL) {
        put(t, digits);
        if (*point == '\0')
            put(t, ".0");
        return;
    }
    const bool minus = exponent[1] == '-';
    put_bytes(t, digits, (size_t)(exponent - digits) + 1);
    put(t, minus ? "-" : "");
    put(t, exponent + 2 + strspn(exponent + 2, "0"));
}

static void put_tensor(struct text *t, const struct spec *spec, const struct spec_tensor *tensor)
{
    put_named(t, "{\"name\":", spec_whole_name(tensor));
    put(t, ",\"shape\":[");
    for (uint32_t i = 0; i < tensor->rank; i++) {
        put(t, i > 0 ? "," : "");
        put_integer(t, spec_whole_size(tensor, i));
    }
    put_named(t, "],\"group\":", spec->groups[tensor->group].name);
    put_named(t, ",\"init\":[", spec_init_rows[tensor->init].kind);
    put(t, ",");
    put_real(t, tensor->init_a);
    if (spec_init_rows[tensor->init].numbers == 2) {
        put(t, ",");
        put_real(t, tensor->init_b);
    }
    put(t, tensor->trainable ? "],\"trainable\":true}" : "],\"trainable\":false}");
}

/* The first of its tiles stands for a unit, here and where it is used. */
static void put_uses(struct text *t, const struct spec *spec, const struct spec_unit *unit)
{
    char name[SPEC_NAME_BYTES_MAX];
    for (uint32_t i = 0; i < unit->uses_count; i++) {
        const struct spec_unit *used = &spec->units[unit->uses[i]];
        spec_unit_whole_name(used, name);
        if (used->tile == 0)
            put_named(t, i > 0 ? "," : "", name);
    }
}

static void put_unit(struct text *t, const struct spec *spec, const struct spec_unit *unit)
{
    char name[SPEC_NAME_BYTES_MAX];
    spec_unit_whole_name(unit, name);
    put_named(t, "{\"name\":", name);
    if (unit->tiles > 0 && !t->untiled) { /* as "grad_dtype" */
        put(t, ",\"tiles\":");
        put_integer(t, unit->tiles);
    }
    put(t, ",\"uses\":[");
    put_uses(t, spec, unit);
    put(t, "],\"tensors\":[");
    for (uint32_t i = 0; i < unit->tensor_count; i++) {
        if (spec->tensors[unit->first_tensor + i].statistics)
            break; /* the last one: it follows from the others */
        put(t, i > 0 ? "," : "");
        put_tensor(t, spec, &spec->tensors[unit->first_tensor + i]);
    }
    put(t, unit->whole ? "],\"place\":\"whole\"}" : "]}"); /* as "grad_dtype" */
}

/* NULL: no memory. */
static char *units_text(const struct spec *spec, bool untiled, size_t *ret_bytes)
{
    struct text t = { .untiled = untiled };
    put(&t, "[");
    for (uint32_t i = 0; i < spec->unit_count; i++) {
        if (spec->units[i].tile > 0)
            continue;
        put(&t, i > 0 ? "," : "");
        put_unit(&t, spec, &spec->units[i]);
    }
    put(&t, "]");
    if (t.failed) {
        free(t.at);
        return NULL;
    }
    *ret_bytes = t.used;
    return t.at;
}

/* -- The rest, as a tree of values --------------------------------------------------------------
 */

/* json_pack() gives NULL when memory is short, and takes over what it was given all the same; no
 * array or object takes a NULL: one that is missing anywhere makes all of it NULL. */
static json_t *append(json_t *array, json_t *value)
{
    if (json_array_append_new(array, value) == 0)
        return array;
    json_decref(array);
    return NULL;
}

static json_t *groups_json(const struct spec *spec)
{
    json_t *array = json_array();
    for (uint32_t i = 0; i < spec->group_count; i++) {
        const struct spec_group *g = &spec->groups[i];
        json_t *o = json_pack("{s:s, s:f, s:f}", "name", g->name, "lr_scale", g->lr_scale,
                              "weight_decay", g->weight_decay);
        if (g->skips_idle) /* as "grad_dtype" */
            o = spec_json_with(o, "idle", json_string("skip"));
        if (g->mean)
            o = spec_json_with(o, "optimizer",
                               json_pack("{s:s}", "kind", spec_optimizer_rows[SPEC_MEAN].kind));
        if (g->muon != NULL)
            o = spec_json_with(o, "optimizer", spec_muon_json(g->muon));
        if (g->lamb != NULL)
            o = spec_json_with(o, "optimizer", spec_lamb_json(g->lamb));
        if (g->adafactor != NULL)
            o = spec_json_with(o, "optimizer", spec_adafactor_json(g->adafactor));
        array = append(array, o);
    }
    return array;
}

/* All but the units, whose array is empty: of those there may be many. */
static char *dump_head(const struct spec *spec)
{
    json_t *root = json_pack("{s:s, s:I, s:o, s:I, s:s, s:o, s:o, s:[]}", "name", spec->name,
                             "seed", (json_int_t)spec->seed, "micro_batches", spec_ramp_json(spec),
                             "accumulate", (json_int_t)spec->accumulate, "publish",
                             dtype_name(spec->publish), "optimizer", spec_optimizer_json(spec),
                             "groups", groups_json(spec), "units");
    if (spec->grad_dtype != SHD_F32)
        root = spec_json_with(root, "grad_dtype", json_string(dtype_name(spec->grad_dtype)));
    if (spec->codec != CODEC_NONE) /* likewise */
        root = spec_json_with(root, "codec", json_string(codec_name(spec->codec)));
    if (spec->grad_codec != CODEC_NONE) /* likewise */
        root = spec_json_with(root, "grad_codec", json_string(codec_name(spec->grad_codec)));
    if (spec->ramp != NULL && spec->micro_batches > ramp_max(spec->ramp)) /* likewise */
        root = spec_json_with(root, "micro_batches_max",
                              json_integer((json_int_t)spec->micro_batches));
    if (spec->ema > 0) /* likewise */
        root = spec_json_with(root, "ema", json_real(spec->ema));
    if (spec->ema_warmup)
        root = spec_json_with(root, "ema_warmup", json_true());
    if (spec->guard != NULL) /* likewise */
        root = spec_json_with(root, "guard", spec_guard_json(spec->guard));
    if (spec->guard_audit) /* likewise */
        root = spec_json_with(root, "guard_audit", json_true());
    if (spec->verify_every > 0) /* as "grad_dtype" */
        root = spec_json_with(root, "verify_every", json_integer((json_int_t)spec->verify_every));
    char *text = root != NULL ? json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17)) : NULL;
    json_decref(root);
    return text;
}

/* head with the units in their place; no name has the quotation marks of a key. */
static char *put_units(const char *head, const char *units, size_t units_bytes)
{
    static const char key[] = "\"units\":";
    const char *at = strstr(head, key);
    CHECK(at != NULL);
    const size_t before = (size_t)(at - head) + strlen(key);
    const char *after = at + strlen(key) + strlen("[]");
    const size_t after_bytes = strlen(after);
    char *text = sys_malloc(before + units_bytes + after_bytes + 1);
    if (text == NULL)
        return NULL;
    memcpy(text, head, before);
    memcpy(text + before, units, units_bytes);
    memcpy(text + before + units_bytes, after, after_bytes);
    text[before + units_bytes + after_bytes] = '\0';
    return text;
}

static char *write_spec(const struct spec *spec, bool untiled)
{
    size_t units_bytes = 0;
    char *head = dump_head(spec), *units = units_text(spec, untiled, &units_bytes);
    char *text = head != NULL && units != NULL ? put_units(head, units, units_bytes) : NULL;
    free(head);
    free(units);
    return text;
}

char *spec_write(const struct spec *spec)
{
    return write_spec(spec, /* untiled= */ false);
}

char *spec_write_untiled(const struct spec *spec)
{
    return write_spec(spec, /* untiled= */ true);
}
