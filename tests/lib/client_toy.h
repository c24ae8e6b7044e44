/* A toy training for client tests: a small model whose gradients are a pure function of
 * parameters, step, micro-batch and element, so that every way of running it must give the same
 * bits. Unit 0 "embed" is tied: the last unit uses it, writes its gradient, and embed adds. */
#ifndef SHD_TESTS_CLIENT_TOY_H
#define SHD_TESTS_CLIENT_TOY_H

#include "client/shd.h"
#include "tests/lib/test.h"

#define TOY_MICROS 4u

/* Sizes straddle blocks and owners' slices; gaps lie between tensors of odd sizes. Not const: the
 * publish dtype and optimizer are filled in. */
const char *toy_spec(const char *publish, const char *optimizer);

/* The toy's default spec with 4099, the size of h0.w, changed in its last digit. */
const char *toy_other_spec(char last_digit);

#define TOY_ADAMW "\"kind\": \"adamw\", \"beta1\": 0.9, \"beta2\": 0.95, \"eps\": 1e-8"
#define TOY_SGD   "\"kind\": \"sgd\", \"momentum\": 0.9"
#define TOY_LION  "\"kind\": \"lion\", \"beta1\": 0.9, \"beta2\": 0.99"

struct toy {
    shd_model *m;
    int fail_micro; /* this micro-batch's backward of unit 1 returns an error; -1: none */
    uint32_t forwards, backwards;
};

/* In [-1, 1), exact in fp32. */
float toy_noise(uint64_t step, uint32_t micro, uint32_t unit, uint64_t i);

/* grad = or += noise + 0.1 param, on elements of tensors only. */
void toy_write(const shd_model *m, uint32_t micro, uint32_t unit, uint32_t salt, const void *params,
               bool add, float *grad);

int toy_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params);

int toy_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad);

uint32_t toy_metrics(void *ctx, uint32_t micro, double *ret_metrics);

struct shd_update toy_update(uint64_t step);

/* One step of micro-batches micros[count]. */
int toy_step(shd_model *m, const uint32_t *micros, uint32_t count, struct shd_result *ret_result,
             struct shd_err *e);

static const uint32_t toy_all_micros[TOY_MICROS] = { 0, 1, 2, 3 };

/* Bounds what follows alone. A test of a wait that ends attaches and opens with PATIENT_MS, since a
 * busy machine may need it, and limits that wait here. */
void limit_waits(shd_session *s, uint64_t ms);

/* The digest after `steps` undisturbed steps in this process ("local:"). */
void toy_reference(const char *spec, uint32_t steps, char ret_hex[65]);

/* A second toy training, for tests of policies: like the first, with options. Seven units: embed
 * (tied: head uses it), h0, a tower h1 (may be frozen), three experts, head. Gradients are
 * multiplied by the loss scale; experts run as a routing function says. */

#define PT_UNITS  7u
#define PT_EXPERT 3u /* first of three */

struct pt_model {
    const char *name; /* of the model: one per run on the same daemons */
    const char *publish;
    uint32_t accumulate;
    bool frozen;               /* h1 */
    bool mean;                 /* h1, and e1, an expert, are means */
    bool ema;                  /* with a warm-up */
    bool int8;                 /* moments in 8 bits */
    const char *codec;         /* of what is published; NULL: none */
    bool placed;               /* h1 and e0 are whole, at an owner each */
    const char *whole;         /* "muon", "lamb": updates h0.w and the experts, matrices */
    enum shd_dtype grad_dtype; /* 0: fp32 */
};

const char *pt_spec(const struct pt_model *p);

struct pt {
    shd_model *m;
    double loss_scale;       /* 0: 1 */
    uint64_t overflow_step;  /* an infinity in its micro-batch 1; UINT64_MAX: never */
    long compute_ms;         /* each forward and backward sleeps */
    uint64_t live_units_max; /* seen in callbacks */
    bool early;              /* stops after h0 in odd micro-batches */
};

int pt_forward(void *ctx, uint32_t micro, uint32_t unit, const void *params);

int pt_backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad);

struct pt_run {
    struct shd_policy policy; /* size 0: leave the default */
    uint64_t fetch_delay_ns;  /* of the copy path */
    uint32_t steps;
    bool routed;              /* with next() */
    struct pt t;              /* m is filled in */
    struct shd_update update; /* size 0: default */
};

int pt_step(shd_model *m, struct pt_run *run, const uint32_t *micros, uint32_t count,
            struct shd_result *ret_result, struct shd_err *e);

/* Open (or attach), set the policy, run all steps with these micro-batches, take the digest. */
int pt_train(shd_session *s, const char *spec, struct pt_run *run, const uint32_t *micros,
             uint32_t count, char hex[65], struct shd_err *e);

/* The digest of the same run in this process. */
void pt_reference(const char *spec, const struct pt_run *like, char hex[65]);

#endif
