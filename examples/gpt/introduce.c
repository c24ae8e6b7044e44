/* introduce.c: see introduce.h. */
#include "examples/gpt/introduce.h"

#include <stdint.h>
#include <stdio.h>

#include "examples/gpt/backend.h"
#include "examples/gpt/data.h"
#include "examples/gpt/gemm.h"
#include "examples/gpt/options.h"
#include "examples/gpt/shape.h"

void introduce_model(struct progress *p, const struct compute *c)
{
    const struct options *o = c->options;
    const struct gpt_shape *shape = &c->shape;
    progress_note(p,
                  "shd-gpt: %.2f M parameters (%ju layers, dim %ju, %ju heads, seq %ju), %.2f MB "
                  "of text in %u files",
                  (double)gpt_parameters(shape) * 1e-6, (uintmax_t)o->layers, (uintmax_t)o->dim,
                  (uintmax_t)o->heads, (uintmax_t)o->seq, (double)data_bytes(c->data) * 1e-6,
                  data_files(c->data));
    if (o->experts > 0)
        progress_note(p, "%ju experts per layer, one for each token", (uintmax_t)o->experts);
    if (o->layer.tiles > 1)
        progress_note(p, "matrices in %ju tiles each: %u units", (uintmax_t)o->layer.tiles,
                      gpt_units(shape));
    if (o->adapters > 0)
        progress_note(p, "adapters of rank %ju: %.3f M parameters are trained, the rest is frozen",
                      (uintmax_t)o->adapters, (double)gpt_parameters_trained(shape) * 1e-6);
}

static void introduce_schedule(struct progress *p, const struct compute *c)
{
    static const char *const paths[] = {
        [SHD_PATH_MAP] = "map", [SHD_PATH_COPY] = "copy", [SHD_PATH_NCCL] = "nccl"
    };
    const struct options *o = c->options;
    char schedule[160];
    if (o->plan != NULL)
        snprintf(schedule, sizeof schedule, "of %.120s", o->plan);
    else
        snprintf(schedule, sizeof schedule, "%s, forward prefetch %ju, backward prefetch %s",
                 o->strategy, (uintmax_t)o->forward_prefetch, o->prefetch);
    progress_note(p, "schedule %s, path %s; parameters %s, gradients %s, accumulation %s", schedule,
                  paths[shd_path(c->model)], o->types.precision, o->types.grad_precision,
                  o->accumulate);
    const struct backend *b = c->backend;
    progress_note(p, "activations %.1f MB (%.1f MB %s --recompute)",
                  (double)b->activation_bytes[o->layer.recompute] * 1e-6,
                  (double)b->activation_bytes[!o->layer.recompute] * 1e-6,
                  o->layer.recompute ? "without" : "with");
    if (b->describe[0] != '\0')
        progress_note(p, "computed on %s", b->describe);
    if (c->gemm != GEMM_FULL)
        progress_note(p, "%s GEMM: %s", o->types.precision, gemm_describe(c->gemm));
    if (!(o->chosen.loss_scale > 0))
        progress_note(p, "loss scale dynamic, now %.0f", shd_loss_scale(c->model));
    else if (o->chosen.loss_scale > 1)
        progress_note(p, "loss scale %.0f, static", o->chosen.loss_scale);
}

void introduce(struct progress *p, const struct compute *c, const shd_session *session)
{
    const struct options *o = c->options;
    char where[48];
    introduce_model(p, c);
    if (o->standalone)
        snprintf(where, sizeof where, "in this process, without daemons");
    else
        snprintf(where, sizeof where, "in %u daemon%s", shd_owners(session),
                 shd_owners(session) == 1 ? "" : "s");
    progress_note(
        p,
        "state %s; %u worker%s%s x %ju thread%s; a step is %ju micro-batches of %ju x %ju "
        "bytes",
        where, o->world, o->world == 1 ? "" : "s", o->elastic ? " (elastic)" : "",
        (uintmax_t)o->threads, o->threads == 1 ? "" : "s", (uintmax_t)o->micro_batches,
        (uintmax_t)o->batch, (uintmax_t)o->seq);
    introduce_schedule(p, c);
}
