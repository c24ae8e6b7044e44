/* A toy training for client tests: a small model whose gradients are a pure function of
 * parameters, step, micro-batch and element, so that every way of running it must give the same
 * bits. Unit 0 "embed" is tied: the last unit uses it, writes its gradient, and embed adds. */
#ifndef SHD_CLIENT_TOY_H
#define SHD_CLIENT_TOY_H

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

/* The digest after `steps` undisturbed steps in this process ("local:"). */
void toy_reference(const char *spec, uint32_t steps, char ret_hex[65]);

#endif
