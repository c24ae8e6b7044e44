/* one_request.c ADDRESS: a worker that does one thing at a time, for measure.py: before each
 * request it waits until the daemon is done with the one before. */
#include <stdio.h>
#include <time.h>

#include "client/shd.h"

enum { MICROS = 4, STEPS = 4, ELEMS = 4096 };

static const char spec[] =
    "{ \"name\": \"one\", \"seed\": 1, \"micro_batches\": 4, \"publish\": \"f32\","
    "  \"optimizer\": { \"kind\": \"adamw\", \"beta1\": 0.9, \"beta2\": 0.95, \"eps\": 1e-8 },"
    "  \"groups\": [ { \"name\": \"plain\" } ],"
    "  \"units\": ["
    "    { \"name\": \"u0\", \"tensors\": [ { \"name\": \"w0\", \"shape\": [4096], \"group\": "
    "\"plain\" } ] },"
    "    { \"name\": \"u1\", \"tensors\": [ { \"name\": \"w1\", \"shape\": [4096], \"group\": "
    "\"plain\" } ] }"
    "  ] }";

static void rest(void)
{
    nanosleep(&(struct timespec){ .tv_nsec = 30 * 1000 * 1000 }, NULL);
}

static int one_gradient(shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e)
{
    const void *params;
    float *grad;
    rest();
    int r = shd_acquire(m, unit, &params, e);
    if (r == SHD_OK)
        r = shd_grad(m, micro, unit, &grad, e);
    if (r != SHD_OK)
        return r;
    for (uint32_t i = 0; i < ELEMS; i++)
        grad[i] = (float)i;
    r = shd_return(m, micro, unit, e);
    shd_release(m, unit);
    return r;
}

int main(int argc, char **argv)
{
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    shd_model *m;
    const struct shd_options options = { .size = sizeof options,
                                         .address = argc > 1 ? argv[1] : NULL };
    const struct shd_update update = { .size = sizeof update, .lr = 0.01 };
    int r = shd_connect(&options, &s, &e);
    if (r == SHD_OK)
        r = shd_model_open(s, spec, &m, &e);
    for (uint32_t i = 0; r == SHD_OK && i < STEPS * MICROS * 2; i++) {
        struct shd_result result = { .size = sizeof result };
        r = one_gradient(m, i / 2 % MICROS, i % 2, &e);
        if (r == SHD_OK && i % (MICROS * 2) == MICROS * 2 - 1)
            r = shd_commit(m, &update, &result, &e);
    }
    rest();
    shd_close(s);
    if (r != SHD_OK)
        fprintf(stderr, "one_request: %s\n", e.text);
    return r != SHD_OK;
}
