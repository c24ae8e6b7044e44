/* See plan_source.h. */
#include "client/ctl/plan/plan_source.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/verb.h"
#include "client/plan/wrap.h"
#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/base/dtype.h"
#include "proto/files/safetensors.h"
#include "proto/spec/spec_json.h"

/* -- Safetensors ------------------------------------------------------------------------------ */

struct header {
    const struct plan_ask *ask;  /* borrowed */
    struct safetensors *file;    /* owned */
    struct wrap_tensor *tensors; /* owned; names borrowed from file or ask */
    uint32_t tensor_count;
    uint64_t elems_of[SHD_F16 + 1]; /* by publish dtype: the largest decides */
    char *alias;                    /* owned: name in --tie */
    struct shd_err *e;
};

/* The dtype that workers would read it in; 0: an integer, of tables and buffers that nobody trains.
 */
static enum shd_dtype publish_dtype(enum safetensors_dtype dtype)
{
    switch (dtype) {
    case SAFETENSORS_F64:
    case SAFETENSORS_F32:
        return SHD_F32;
    case SAFETENSORS_F16:
        return SHD_F16;
    case SAFETENSORS_BF16:
    case SAFETENSORS_F8_E4M3:
    case SAFETENSORS_F8_E5M2:
        return SHD_BF16;
    default:
        return (enum shd_dtype)0;
    }
}

static int take_tensors(struct header *h)
{
    CHECK(h->file != NULL);
    h->tensors = calloc((size_t)h->file->count + 1, sizeof *h->tensors);
    if (h->tensors == NULL)
        return err_set(h->e, SHD_ENOMEM, "no memory for %" PRIu32 " tensors", h->file->count);
    for (uint32_t i = 0; i < h->file->count; i++) {
        const struct safetensors_tensor *from = &h->file->tensors[i];
        const enum shd_dtype publish = publish_dtype(from->dtype);
        struct wrap_tensor t = { .name = from->name, .rank = from->rank, .tied_to = WRAP_UNTIED };
        static_assert(sizeof t.shape == sizeof from->shape, "both take the same ranks");
        if (publish == 0)
            continue;
        if (from->elems == 0)
            return err_set(h->e, SHD_EINVAL,
                           "tensor '%.120s': shape has a size of 0: nothing to train", from->name);
        memcpy(t.shape, from->shape, sizeof t.shape);
        h->elems_of[publish] += from->elems;
        h->tensors[h->tensor_count++] = t;
    }
    return SHD_OK;
}

static int read_file(struct header *h)
{
    const int fd = open(h->ask->safetensors, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(h->e, SHD_ENOENT, "open '%s'", h->ask->safetensors);
    const int r = safetensors_read(fd, &h->file, h->e);
    close(fd);
    return r == SHD_OK ? r : err_prefix(h->e, "%s", h->ask->safetensors);
}

/* --tie ALIAS=TENSOR: files hold tied tensors once. */
static int add_alias(struct header *h)
{
    const char *tie = h->ask->tie, *equals = strchr(tie, '=');
    if (equals == NULL || equals == tie)
        return err_set(h->e, SHD_EINVAL, "--tie is '%.100s', takes ALIAS=TENSOR", tie);
    for (uint32_t i = 0; i < h->tensor_count; i++) {
        CHECK(h->tensors[i].name != NULL);
        if (strcmp(h->tensors[i].name, equals + 1) != 0)
            continue;
        h->alias = strndup(tie, (size_t)(equals - tie));
        if (h->alias == NULL)
            return err_set(h->e, SHD_ENOMEM, "no memory for --tie");
        struct wrap_tensor alias = h->tensors[i];
        alias.name = h->alias;
        alias.tied_to = i;
        h->tensors[h->tensor_count++] = alias;
        return SHD_OK;
    }
    return err_set(h->e, SHD_ENOENT, "--tie: there is no tensor '%.100s' to tie to", equals + 1);
}

static int mark_frozen(struct header *h)
{
    regex_t regex;
    if (regcomp(&regex, h->ask->frozen, REG_EXTENDED | REG_NOSUB) != 0)
        return err_set(h->e, SHD_EINVAL, "--frozen '%.100s' is no POSIX extended expression",
                       h->ask->frozen);
    uint32_t trainable = 0;
    for (uint32_t i = 0; i < h->tensor_count; i++) {
        h->tensors[i].frozen = regexec(&regex, h->tensors[i].name, 0, NULL, 0) == 0;
        trainable += !h->tensors[i].frozen;
    }
    regfree(&regex);
    if (trainable == 0)
        return err_set(h->e, SHD_EINVAL, "--frozen '%.100s' leaves nothing to train",
                       h->ask->frozen);
    return SHD_OK;
}

static int make_spec(struct header *h, struct spec **ret_spec)
{
    const struct plan_ask *ask = h->ask;
    int r = ask->frozen != NULL ? mark_frozen(h) : SHD_OK;
    if (r == SHD_OK && ask->tie != NULL)
        r = add_alias(h);
    struct wrap wrap = { 0 };
    const struct wrap_rule rule = { .patterns = &ask->wrap,
                                    .pattern_count = ask->wrap != NULL,
                                    .unit_elems_min = ask->unit_elems_min,
                                    .sort = true };
    if (r == SHD_OK)
        r = wrap_build(h->tensors, h->tensor_count, &rule, &wrap, h->e);
    const char *slash = strrchr(ask->safetensors, '/');
    struct wrap_model model = { .name = slash != NULL ? slash + 1 : ask->safetensors,
                                .accumulate = ask->accumulate > 0 ? ask->accumulate : 1,
                                .publish = SHD_F32 };
    for (int d = SHD_F32; d <= SHD_F16; d++)
        if (h->elems_of[d] > h->elems_of[model.publish])
            model.publish = (enum shd_dtype)d;
    const uint64_t micros = (ask->micros > 0 ? ask->micros : (uint64_t)model.accumulate) *
                            ask->workers;
    model.micro_batches = (uint32_t)micros;
    if (r == SHD_OK && micros > SHD_MICROS_MAX)
        r = err_set(h->e, SHD_ERANGE, "%" PRIu64 " micro-batches a step, at most %u", micros,
                    SHD_MICROS_MAX);
    if (r == SHD_OK)
        r = wrap_spec(h->tensors, h->tensor_count, &wrap, &model, ret_spec, h->e);
    wrap_deinit(&wrap);
    return r;
}

int plan_safetensors(const struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e)
{
    struct header h = { .ask = ask, .e = e };
    int r = read_file(&h);
    if (r == SHD_OK) {
        r = take_tensors(&h);
        if (r == SHD_OK)
            r = make_spec(&h, ret_spec);
        if (r != SHD_OK)
            err_prefix(e, "%s", ask->safetensors);
    }
    free(h.tensors);
    free(h.alias);
    safetensors_free(h.file);
    return r;
}

/* -- Any source ------------------------------------------------------------------------------- */

static int from_spec_file(const struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e)
{
    char *text = NULL;
    size_t bytes = 0;
    int r = verb_file(ask->spec, SPEC_JSON_BYTES_MAX, &text, &bytes, e);
    if (r != SHD_OK)
        return r;
    r = spec_parse(text, bytes, ret_spec, e);
    free(text);
    return r == SHD_OK ? r : err_prefix(e, "%s", ask->spec);
}

static int from_daemons(struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl plan",
                                         .timeout_ms = VERB_TIMEOUT_MS };
    shd_session *s;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    shd_model *m = NULL;
    r = shd_model_attach(s, ask->model, &m, e);
    if (r == SHD_OK) {
        const char *json = shd_model_spec(m);
        if (ask->daemons == 0)
            ask->daemons = shd_owners(s); /* as many as hold it */
        if (ask->hosts.count > 0 && ask->daemons != shd_owners(s))
            r = err_set(e, SHD_EINVAL, "--host: %" PRIu32 " daemons, the model has %" PRIu32,
                        ask->daemons, shd_owners(s));
        else
            r = json != NULL ? spec_parse(json, strlen(json), ret_spec, e)
                             : err_set(e, SHD_ENOMEM, "no memory for the model's spec");
    }
    shd_model_close(m);
    shd_close(s);
    return r;
}

/* Change what flags say otherwise. */
static int override(struct plan_ask *ask, struct spec *spec, struct shd_err *e)
{
    CHECK(spec != NULL);
    if (ask->param_dtype != NULL) {
        spec->publish = dtype_parse(ask->param_dtype);
        if (!dtype_valid(spec->publish))
            return err_set(e, SHD_EINVAL, "--param-dtype is '%s', must be f32, bf16 or f16",
                           ask->param_dtype);
    }
    if (ask->accumulate > 0)
        spec->accumulate = ask->accumulate;
    const uint32_t a = ask->policy.shares_sums ? 1 : spec->accumulate, share = a * ask->workers;
    if (ask->micros == 0) /* the worker that gets most */
        ask->micros = (uint32_t)(((uint64_t)spec->micro_batches + share - 1) / share * a);
    if (ask->micros > SHD_MICROS_MAX)
        return err_set(e, SHD_ERANGE,
                       "--accumulate %" PRIu32 " makes %" PRIu32 " micro-batches a worker, at "
                       "most %u",
                       a, ask->micros, SHD_MICROS_MAX);
    if (ask->micros % a != 0)
        return err_set(e, SHD_EINVAL,
                       "--micro-batches-per-worker is %" PRIu32 ", must be a multiple of "
                       "accumulate (%" PRIu32 "): gradients are returned in groups",
                       ask->micros, a);
    return SHD_OK;
}

int plan_source(struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e)
{
    const bool wraps = ask->wrap != NULL || ask->tie != NULL || ask->frozen != NULL ||
                       ask->unit_elems_min > 0;
    if (ask->spec != NULL && ask->safetensors != NULL)
        return err_set(e, SHD_EINVAL, "--spec and --safetensors: one model at a time");
    if ((ask->spec != NULL || ask->safetensors != NULL) &&
        (ask->address != NULL || ask->model != NULL))
        return err_set(e, SHD_EINVAL,
                       "--address and --model name an open model, %s a file: one "
                       "or the other",
                       ask->spec != NULL ? "--spec" : "--safetensors");
    if (wraps && ask->safetensors == NULL)
        return err_set(e, SHD_EINVAL,
                       "--units, --unit-elems-min, --tie and --frozen group the "
                       "tensors of --safetensors; other models have units already");
    struct spec *spec = NULL;
    int r;
    if (ask->safetensors != NULL)
        r = plan_safetensors(ask, &spec, e);
    else if (ask->spec != NULL)
        r = from_spec_file(ask, &spec, e);
    else
        r = from_daemons(ask, &spec, e);
    if (r == SHD_OK)
        r = override(ask, spec, e);
    if (r == SHD_OK)
        *ret_spec = spec;
    else
        spec_free(spec);
    return r;
}
