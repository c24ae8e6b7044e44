/* See plan_source.h. */
#include "client/ctl/plan/plan_source.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/verb.h"
#include "client/ctl/plan/plan_safetensors.h"
#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/spec/spec_json.h"

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

static int from_daemons(const struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl plan" };
    shd_session *s;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    shd_model *m = NULL;
    r = shd_model_attach(s, ask->model, &m, e);
    if (r == SHD_OK) {
        const char *json = shd_model_spec(m);
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
    const uint32_t a = spec->accumulate, share = a * ask->workers;
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
