/* See show.h. Names come from a spec, whose characters are printable ASCII: they go to a terminal
 * as they are. */
#include "client/ctl/watch/show.h"

#include <fnmatch.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/watch/show_draw.h"
#include "client/ctl/watch/show_slice.h"
#include "client/ctl/watch/show_units.h"
#include "client/shd.h"
#include "proto/share/deal.h"
#include "proto/spec/spec_json.h"

static const char show_about[] =
    "Look at the tensors of a model while it is trained: without TENSOR a table of them, with one\n"
    "what its values come to (least, largest, mean, quantiles, a histogram by powers of two), "
    "with\n"
    "a pattern a line for each that matches. The owners count, beside training; no worker waits,\n"
    "and all is of one step.";

static const char show_more[] =
    "arrays: param; m, v: the optimizer's moments; grad: the sum of gradients as the owners hold\n"
    "it, of the open step so far, or of the last one until the next one's first is in; update: by\n"
    "how much the last step changed the parameters, for AdamW, Adam and SGD with momentum; ema: "
    "the\n"
    "parameters' moving average, of a model that has one\n"
    "\nexamples:\n"
    "  shardctl show                                  the tensors of the only model\n"
    "  shardctl show gpt h.0.mlp.c_fc.weight          one of them, and its last update\n"
    "  shardctl show gpt 'h.*.weight' --array grad    a line for each that matches\n"
    "  shardctl show wte --slice 0:2,0:8              values: of each dimension A:B\n"
    "  shardctl show gpt --units                      gradient norm and update of each unit\n"
    "\n" VERB_WHERE "\n"
    "exit code 1: no daemon, no such model or tensor, or an array that is not there now\n";

struct options {
    const char *address, *model, *tensor; /* one word alone may be either, and is `model` first */
    const char *array_name, *slice;
    enum shd_array array;
    bool stats, hist, json, units;
    uint32_t last; /* steps; 0: not given */
};

struct shown {
    const struct options *o;
    shd_session *session; /* owned, with the model */
    shd_model *model;
    struct spec *spec;      /* owned */
    uint32_t *whole_owners; /* owned: deal.h */
};

static const char *const array_names[] = { "param", "m", "v", "grad", "update", "ema" };

/* -- A table of all ------------------------------------------------------------------------------
 */

/* In shape's own form: "[768, 2304]". */
static const char *shape_text(const struct spec_tensor *t, char *buf, size_t bytes)
{
    size_t used = (size_t)snprintf(buf, bytes, "[");
    for (uint32_t d = 0; d < t->rank && used < bytes; d++)
        used += (size_t)snprintf(buf + used, bytes - used, "%s%" PRIu64, d > 0 ? ", " : "",
                                 t->shape[d]);
    if (used < bytes)
        snprintf(buf + used, bytes - used, "]");
    return buf;
}

/* Of its arrays at an owner: parameters, moments, their average, and the sum of gradients. */
static uint64_t bytes_at(const struct shown *s, const struct spec_tensor *t, uint32_t owner)
{
    const struct spec_unit *unit = &s->spec->units[t->unit];
    const uint64_t arrays = spec_unit_arrays(s->spec, t->unit) + !unit->frozen;
    const uint64_t int8 = s->spec->int8 ? spec_unit_moments(s->spec, t->unit) : 0;
    uint64_t first;
    const struct slice slice = deal_slice(unit->elems, s->whole_owners[t->unit], owner,
                                          shd_owners(s->session));
    const uint64_t elems = layout_intersect(slice, t->offset_elems, t->elems, &first);
    const uint64_t blocks = (elems + QUANT_BLOCK_ELEMS - 1) / QUANT_BLOCK_ELEMS;
    return (arrays - int8) * sizeof(float) * elems +
           int8 * blocks * (QUANT_BLOCK_ELEMS + sizeof(float));
}

#define SHAPE_BYTES 192u

static void print_tensor(const struct shown *s, const struct spec_tensor *t, int width)
{
    char shape[SHAPE_BYTES], size[TEXT_BYTES];
    printf("%-*s  %-18s  %-5s  %-12s ", width, t->name, shape_text(t, shape, sizeof shape),
           dtype_name(s->spec->publish), s->spec->units[t->unit].name);
    for (uint32_t i = 0; i < shd_owners(s->session); i++)
        printf(" %s", text_size(bytes_at(s, t, i), size));
    printf("\n");
}

static json_t *tensor_json(const struct shown *s, const struct spec_tensor *t)
{
    json_t *shape = json_array(), *bytes = json_array();
    for (uint32_t d = 0; d < t->rank; d++)
        json_array_append_new(shape, json_integer((json_int_t)t->shape[d]));
    for (uint32_t i = 0; i < shd_owners(s->session); i++)
        json_array_append_new(bytes, json_integer((json_int_t)bytes_at(s, t, i)));
    return json_pack("{s:s, s:o, s:s, s:s, s:o}", "name", t->name, "shape", shape, "dtype",
                     dtype_name(s->spec->publish), "unit", s->spec->units[t->unit].name,
                     "owner_bytes", bytes);
}

static int print_all(const struct shown *s)
{
    json_t *tensors = json_array();
    size_t width = strlen("tensor");
    for (uint32_t i = 0; i < s->spec->tensor_count; i++)
        if (strlen(s->spec->tensors[i].name) > width)
            width = strlen(s->spec->tensors[i].name);
    if (!s->o->json)
        printf("model %s, step %" PRIu64 "\n%-*s  %-18s  %-5s  %-12s  bytes at each owner\n",
               s->spec->name, shd_step(s->model), (int)width, "tensor", "shape", "dtype", "unit");
    for (uint32_t i = 0; i < s->spec->tensor_count; i++) {
        if (s->o->json)
            json_array_append_new(tensors, tensor_json(s, &s->spec->tensors[i]));
        else
            print_tensor(s, &s->spec->tensors[i], (int)width);
    }
    if (s->o->json)
        verb_json(json_pack("{s:s, s:I, s:O}", "model", s->spec->name, "step",
                            (json_int_t)shd_step(s->model), "tensors", tensors),
                  JSON_COMPACT, stdout);
    json_decref(tensors);
    return SHD_OK;
}

/* -- One -----------------------------------------------------------------------------------------
 */

/* What the numbers are as of. */
static void print_heading(const struct shown *s, const char *name, enum shd_array array,
                          const struct shd_tensor_stats *stats)
{
    printf("%s  %s  step %" PRIu64 "  %" PRIu64 " elements", name, array_names[array], stats->step,
           stats->elems);
    if (array == SHD_GRADIENT)
        printf("  sum of micro-batches 0 to %" PRIu64 " of %" PRIu32 " of %s step %" PRIu64,
               stats->micro_batches - 1, shd_micro_batches(s->model),
               stats->of_step == stats->step ? "the open" : "the last", stats->of_step);
    printf("\n");
}

static json_t *stats_json(const struct shown *s, const char *name, enum shd_array array,
                          const struct shd_tensor_stats *stats)
{
    json_t *o = json_pack("{s:s, s:s, s:s, s:I, s:I}", "model", s->spec->name, "tensor", name,
                          "array", array_names[array], "step", (json_int_t)stats->step, "updates",
                          (json_int_t)stats->updates);
    if (array == SHD_GRADIENT) {
        json_object_set_new(o, "of_step", json_integer((json_int_t)stats->of_step));
        json_object_set_new(o, "micro_batches", json_integer((json_int_t)stats->micro_batches));
    }
    if (array == SHD_UPDATE)
        json_object_set_new(o, "update_ratio", draw_json_number(stats->update_ratio));
    draw_json(stats, o);
    return o;
}

/* Beside the parameters: how large the last update was, or why that is not known. */
static void add_update(const struct shown *s, const char *name, json_t *o)
{
    struct shd_tensor_stats update = { .size = sizeof update };
    struct shd_err e;
    char number[DRAW_NUMBER_BYTES];
    const int r = shd_tensor_stats(s->model, name, SHD_UPDATE, &update, &e);
    if (o != NULL)
        json_object_set_new(o, "update_ratio",
                            r == SHD_OK ? draw_json_number(update.update_ratio) : json_null());
    else if (r == SHD_OK)
        printf("  update/weight %s, of step %" PRIu64 "\n",
               draw_number(update.update_ratio, number), update.step - 1);
    else
        printf("  update/weight: not known: %s\n", e.text);
}

static int print_one(const struct shown *s, const char *name, struct shd_err *e)
{
    const struct options *o = s->o;
    struct shd_tensor_stats stats = { .size = sizeof stats };
    char number[DRAW_NUMBER_BYTES];
    const int r = shd_tensor_stats(s->model, name, o->array, &stats, e);
    if (r != SHD_OK)
        return r;
    if (o->json) {
        json_t *answer = stats_json(s, name, o->array, &stats);
        if (o->array == SHD_PARAMS)
            add_update(s, name, answer);
        verb_json(answer, JSON_COMPACT, stdout);
        return r;
    }
    print_heading(s, name, o->array, &stats);
    if (!o->hist || o->stats) {
        draw_stats(&stats, stdout);
        if (o->array == SHD_PARAMS)
            add_update(s, name, NULL);
        else if (o->array == SHD_UPDATE)
            printf("  update/weight %s\n", draw_number(stats.update_ratio, number));
    }
    if (!o->stats || o->hist)
        draw_histogram(&stats, stdout);
    return r;
}

static int print_slice(const struct shown *s, const char *name, struct shd_err *e)
{
    const struct options *o = s->o;
    struct show_slice slice;
    uint32_t index;
    uint64_t step = 0;
    struct shd_tensor tensor = { .size = sizeof tensor };
    int r = shd_tensor_find(s->model, name, &tensor, e);
    if (r != SHD_OK || !spec_find_tensor(s->spec, name, &index))
        return r;
    r = slice_parse(o->slice, &s->spec->tensors[index], &slice, e);
    if (r != SHD_OK)
        return r;
    if (slice.elems > SHD_VALUES_MAX)
        return err_set(e, SHD_ERANGE,
                       "slice '%.60s': %" PRIu64
                       " elements from its first to its last, at most %d are sent",
                       o->slice, slice.elems, SHD_VALUES_MAX);
    float *values = malloc(slice.elems * sizeof *values);
    if (values == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu64 " values", slice.elems);
    r = shd_tensor_values(s->model, name, o->array, slice.first, slice.elems, values, &step, e);
    if (r == SHD_OK && o->json) {
        verb_json(json_pack("{s:s, s:s, s:s, s:I, s:o}", "model", s->spec->name, "tensor", name,
                            "array", array_names[o->array], "step", (json_int_t)step, "rows",
                            slice_json(&slice, values)),
                  JSON_COMPACT, stdout);
    } else if (r == SHD_OK) {
        printf("%s  %s  step %" PRIu64 "\n", name, array_names[o->array], step);
        slice_print(&slice, values, stdout);
    }
    free(values);
    return r;
}

/* -- Several, by a pattern -----------------------------------------------------------------------
 */

static bool is_pattern(const char *text)
{
    return strpbrk(text, "*?[") != NULL;
}

static void print_row(const struct shown *s, const char *name, int width,
                      const struct shd_tensor_stats *stats)
{
    char min[DRAW_NUMBER_BYTES], max[DRAW_NUMBER_BYTES], mean[DRAW_NUMBER_BYTES],
        rms[DRAW_NUMBER_BYTES];
    if (s->o->json)
        verb_json(stats_json(s, name, s->o->array, stats), JSON_COMPACT, stdout);
    else
        printf("%-*s  %7" PRIu64 "  %12s %12s %12s %12s  %8" PRIu64 " %8" PRIu64 "\n", width, name,
               stats->step, draw_number(stats->min, min), draw_number(stats->max, max),
               draw_number(stats->mean, mean), draw_number(stats->rms, rms), stats->zeros,
               stats->nans + stats->infs);
}

/* What a tensor has not (an optimizer's moments, of a frozen one) is said in its line, and no
 * failure of the others. */
static int print_match(const struct shown *s, const char *name, int width, struct shd_err *e)
{
    struct shd_tensor_stats stats = { .size = sizeof stats };
    const int r = shd_tensor_stats(s->model, name, s->o->array, &stats, e);
    const bool none = r == SHD_EINVAL || r == SHD_ENOENT || r == SHD_ENOTSUP;
    if (r == SHD_OK)
        print_row(s, name, width, &stats);
    else if (none && s->o->json)
        verb_json(json_pack("{s:s, s:s, s:s, s:s}", "model", s->spec->name, "tensor", name, "array",
                            array_names[s->o->array], "why", e->text),
                  JSON_COMPACT, stdout);
    else if (none)
        printf("%-*s  %s\n", width, name, e->text);
    return none ? SHD_OK : r;
}

static int print_matches(const struct shown *s, const char *pattern, struct shd_err *e)
{
    size_t width = strlen("tensor");
    uint32_t matches = 0;
    for (uint32_t i = 0; i < s->spec->tensor_count; i++) {
        const char *name = s->spec->tensors[i].name;
        if (fnmatch(pattern, name, 0) == 0 && ++matches > 0 && strlen(name) > width)
            width = strlen(name);
    }
    if (matches == 0)
        return err_set(e, SHD_ENOENT, "model '%.60s' has no tensor that matches '%.80s'",
                       s->spec->name, pattern);
    if (!s->o->json)
        printf("%-*s  %7s  %12s %12s %12s %12s  %8s %8s\n", (int)width, "tensor", "step", "min",
               "max", "mean", "rms", "zeros", "nan, inf");
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < s->spec->tensor_count; i++)
        if (fnmatch(pattern, s->spec->tensors[i].name, 0) == 0)
            r = print_match(s, s->spec->tensors[i].name, (int)width, e);
    return r;
}

/* -- The verb ------------------------------------------------------------------------------------
 */

/* A single word that names no model is a tensor of the only one. */
static int attach(struct shown *s, const char **ret_tensor, struct shd_err *e)
{
    const struct options *o = s->o;
    *ret_tensor = o->tensor;
    int r = shd_model_attach(s->session, o->model, &s->model, e);
    if (r == SHD_ENOENT && o->model != NULL && o->tensor == NULL &&
        shd_model_attach(s->session, NULL, &s->model, NULL) == SHD_OK) {
        *ret_tensor = o->model;
        r = SHD_OK;
    }
    if (r != SHD_OK)
        return r;
    const char *json = shd_model_spec(s->model);
    if (json == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the model's spec");
    r = spec_parse(json, strlen(json), &s->spec, e);
    return r == SHD_OK ? deal_units(s->spec, shd_owners(s->session), &s->whole_owners, e) : r;
}

static int show(const struct options *o, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = o->address,
                                         .name = "shardctl show",
                                         .timeout_ms = VERB_TIMEOUT_MS };
    struct shown s = { .o = o };
    const char *tensor = NULL;
    int r = shd_connect(&options, &s.session, e);
    if (r == SHD_OK)
        r = attach(&s, &tensor, e);
    if (r == SHD_OK && tensor == NULL)
        r = o->slice != NULL ? err_set(e, SHD_EINVAL, "--slice of which tensor?") : print_all(&s);
    else if (r == SHD_OK && o->slice != NULL)
        r = print_slice(&s, tensor, e);
    else if (r == SHD_OK)
        r = is_pattern(tensor) ? print_matches(&s, tensor, e) : print_one(&s, tensor, e);
    spec_free(s.spec);
    free(s.whole_owners);
    shd_model_close(s.model);
    shd_close(s.session);
    return r;
}

static int find_array(struct options *o, struct shd_err *e)
{
    char near[128];
    for (uint32_t i = 0; i < ARRAY_SIZE(array_names); i++)
        if (strcmp(o->array_name, array_names[i]) == 0) {
            o->array = (enum shd_array)i;
            return SHD_OK;
        }
    return err_set(
        e, SHD_EINVAL, "unknown array '%.40s'%s", o->array_name,
        suggest(o->array_name, array_names, ARRAY_SIZE(array_names), "", near, sizeof near));
}

int verb_show(int argc, char **argv)
{
    struct options o = { .array_name = array_names[0] };
    struct shd_err e = { 0 };
    int words = 0;
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(o.address),
        { "array", 0, FLAG_STRING, "NAME", "param, m, v, grad, update or ema (param)",
          &o.array_name, 0, 0 },
        { "stats", 's', FLAG_BOOL, NULL, "numbers without the histogram", &o.stats, 0, 0 },
        { "hist", 0, FLAG_BOOL, NULL, "the histogram without the numbers", &o.hist, 0, 0 },
        { "slice", 0, FLAG_STRING, "A:B,...", "values instead: of each dimension from A up to B",
          &o.slice, 0, 0 },
        { "units", 'u', FLAG_BOOL, NULL,
          "of each unit instead: norm of its last gradient, how large its update was", &o.units, 0,
          0 },
        { "last", 'n', FLAG_U32, "N", "with --units: the last N steps (1)", &o.last, 1,
          SHOW_UNITS_STEPS_MAX },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object; with a pattern or --last one a line",
          &o.json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(show, "shardctl show [MODEL] [TENSOR] [FLAGS]", table);
    const int code = verb_start_words(&flags, argc, argv, &words);
    if (code >= 0)
        return code;
    if (words > 2)
        return ctl_usage("a model and a tensor, or a pattern in quotes: got '%s' as well", argv[3]);
    o.model = words > 0 ? argv[1] : NULL;
    o.tensor = words > 1 ? argv[2] : NULL;
    if (find_array(&o, &e) != SHD_OK)
        return ctl_usage("%s", e.text);
    if (o.last > 0 && !o.units)
        return ctl_usage("--last goes with --units; the history of steps is shardctl log");
    if (o.units && (o.tensor != NULL || o.slice != NULL || o.stats || o.hist))
        return ctl_usage("--units is of a whole model: no tensor, --slice, --stats or --hist");
    if (o.units)
        return show_units(&(struct show_units){ o.address, o.model, o.last, o.json });
    if (show(&o, &e) == SHD_OK)
        return CTL_OK;
    return ctl_fail("%s", e.text);
}
