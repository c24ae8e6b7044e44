/* compute.h: the model as the callbacks of shd_run_step(): what a worker computes for a unit of a
 * micro-batch.
 */
#ifndef GPT_COMPUTE_H
#define GPT_COMPUTE_H

#include <signal.h>
#include <stdint.h>

#include "client/shd.h"
#include "examples/gpt/backend.h"
#include "examples/gpt/data.h"
#include "examples/gpt/options.h"
#include "examples/gpt/pool.h"
#include "examples/gpt/shape.h"

/* The numbers that each micro-batch reports; the step's sums come back with the commit. */
enum metric { METRIC_LOSS, METRIC_SIGINT, METRIC_SIGTERM, METRICS };

struct compute {
    const struct options *options; /* borrowed, as pool, data, model and signal */
    struct gpt_shape shape;
    struct gpt_layout layout;
    struct pool *pool;
    struct data *data;
    shd_model *model;
    const volatile sig_atomic_t *signal; /* the one this process was asked to end by, or 0 */
    enum gemm_kind gemm;                 /* host: gemm_init() was called */
    int (*backend_new)(const struct backend_config *config, struct backend **ret_backend,
                       struct shd_err *e);
    struct backend *backend;                     /* owned, as what follows */
    uint8_t *windows;                            /* [batch, seq + 1] */
    uint64_t *forward_ns, *backward_ns;          /* [units] time spent, this step */
    int (*before)(void *ctx, struct shd_err *e); /* a step's first micro-batch; NULL: nothing */
    void *before_ctx;
    bool begun;             /* a micro-batch of this step */
    uint64_t injected_step; /* the last one whose gradient was spoiled, from 1 */
    struct shd_err err;     /* of a callback that stopped the run */
};

/* options, shape, layout, pool, data, model, signal, gemm and backend_new are set; make the rest.
 * Errors: SHD_ENOMEM, and those of backend_new(). */
int compute_init(struct compute *c, struct shd_err *e);
void compute_deinit(struct compute *c);

/* Go on with the same model, opened anew and with the same layout. Errors: those of
 * shd_set_stream(). */
int compute_reopen(struct compute *c, shd_model *model, struct shd_err *e);

/* Before each step: its loss scale, and times back to zero. */
void compute_begin(struct compute *c, double loss_scale);

struct shd_compute compute_callbacks(struct compute *c);

#endif
