/* batch.c: see batch.h. */
#include "examples/gpt/batch.h"

#include <inttypes.h>

#include "examples/gpt/model.h"
#include "proto/base/memory.h"

#define WAIT_MS     60000u /* for rank 0 to make the model */
#define STATE_BYTES 24u    /* of a parameter, with the owners on this host: docs/memory.md */
#define SPARE_PARTS 8u     /* one of them stays free */
#define SHARE_TEXT  "workers and --accumulate share it out in"

uint64_t batch_fewest(uint64_t sequences, uint64_t share, uint64_t most)
{
    for (uint64_t m = share; m <= sequences; m += share)
        if (sequences % m == 0 && sequences / m <= most)
            return m;
    return 0;
}

uint64_t batch_most(const struct options *o, uint64_t bytes)
{
    const struct gpt_shape shape = options_shape(o);
    uint64_t most = 0, over = GPT_BATCH_MAX + 1;
    while (over - most > 1) {
        const uint64_t batch = most + (over - most) / 2;
        const uint64_t wanted = gpt_bytes(&shape, (uint32_t)batch, o->layer.recompute,
                                          (uint32_t)o->threads);
        *(wanted > 0 && wanted <= bytes ? &most : &over) = batch;
    }
    return most;
}

/* What a step is shared out in: each worker, or all of a host, gets as many groups as the next. */
static uint64_t share_of(const struct options *o)
{
    const uint64_t groups = o->elastic ? 1 : o->world / o->chosen.host_workers;
    return groups * o->chosen.accumulate;
}

/* For each of this host's workers, when there is a model. */
static uint64_t room_of(const struct options *o)
{
    const struct gpt_shape shape = options_shape(o);
    const uint64_t bytes = memory_room().bytes, state = gpt_parameters(&shape) * STATE_BYTES;
    const uint64_t left = bytes > state ? bytes - state : 0;
    return (left - left / SPARE_PARTS) / o->chosen.local_world;
}

static int choose_anew(struct options *o, struct shd_err *e)
{
    const uint64_t room = room_of(o), most = batch_most(o, room);
    const uint64_t m = most > 0 ? batch_fewest(o->chosen.sequences, share_of(o), most) : 0;
    if (m == 0)
        return err_set(
            e, SHD_ENOMEM,
            "--batch auto: there is no room for the activations of one sequence (%" PRIu64
            " MiB for each of %" PRIu32 " workers of this host): lower --seq%s",
            room >> 20, o->chosen.local_world,
            o->layer.recompute || o->layer.tiles > 1 ? "" : ", or add --recompute");
    o->micro_batches = m;
    return SHD_OK;
}

static int take_models(struct options *o, const shd_model *model, struct shd_err *e)
{
    const uint32_t m = shd_micro_batches(model);
    if (o->chosen.sequences % m != 0)
        return err_set(e, SHD_ESPEC,
                       "--batch auto:%" PRIu32 ": model '%s' has steps of %" PRIu32
                       " micro-batches, which %" PRIu32 " sequences cannot be shared out to",
                       o->chosen.sequences, shd_model_name(model), m, o->chosen.sequences);
    o->micro_batches = m;
    return SHD_OK;
}

static int choose(struct options *o, struct shd_err *e)
{
    const struct shd_options options = {
        .size = sizeof options, .address = o->address, .name = "shd-gpt", .reader = true
    };
    const struct shd_open_options open = { .size = sizeof open,
                                           .name = GPT_MODEL_NAME,
                                           .wait_ms = o->rank > 0 ? WAIT_MS : 0 };
    shd_session *session;
    shd_model *model;
    if (o->standalone)
        return choose_anew(o, e);
    int r = shd_connect(&options, &session, e);
    if (r != SHD_OK)
        return r;
    r = shd_model_open_with(session, &open, &model, NULL, e);
    if (r == SHD_OK)
        r = take_models(o, model, e);
    else if (r == SHD_ENOENT && o->rank == 0)
        r = choose_anew(o, e);
    shd_close(session);
    return r;
}

int batch_choose(struct options *o, struct shd_err *e)
{
    if (o->chosen.sequences == 0)
        return SHD_OK;
    const int r = choose(o, e);
    if (r == SHD_OK)
        o->batch = o->chosen.sequences / o->micro_batches;
    return r;
}
