/* minimal.c: a whole worker, a linear regression. As many as you like may run at a time, and come
 * and go: the daemons hand out the work, and the result has the same bits.
 *
 *   cc minimal.c $(pkg-config --cflags --libs libshd) -o minimal
 *   SHARDD_ADDRESS=local: ./minimal                       # in one process, no daemon
 *   shardctl run --daemons 2 --workers 2 -- ./minimal     # state in two daemons
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <shd.h>

enum { INPUTS = 8, ROWS = 32, STEPS = 200 };

/* One unit of two tensors; a step is the mean over four micro-batches. */
static const char spec[] =
    "{ \"name\": \"minimal\", \"micro_batches\": 4,"
    "  \"optimizer\": { \"kind\": \"adamw\", \"beta1\": 0.9, \"beta2\": 0.99, \"eps\": 1e-8 },"
    "  \"units\": [ { \"name\": \"linear\", \"tensors\": ["
    "    { \"name\": \"weight\", \"shape\": [8], \"init\": [\"normal\", 0, 0.1] },"
    "    { \"name\": \"bias\", \"shape\": [1] } ] } ] }";

struct worker {
    shd_model *model;
    struct shd_tensor weight, bias; /* where they are in the unit's array */
    float x[ROWS][INPUTS];          /* the inputs of the micro-batch at hand, */
    float error[ROWS];              /* prediction - y, */
    double loss;                    /* and the mean of its squares */
};

/* In [-1, 1): data that whoever gets the micro-batch makes alike. */
static float noise(uint64_t step, uint32_t micro, uint32_t i)
{
    uint64_t z = ((step * 4 + micro) * ROWS * INPUTS + i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    return (float)(int32_t)(z >> 32) / 2147483648.0f;
}

static int forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    struct worker *w = ctx;
    const float *weight = (const float *)params + w->weight.offset_elems;
    const float *bias = (const float *)params + w->bias.offset_elems;
    (void)unit; /* there is one */
    w->loss = 0;
    for (uint32_t r = 0; r < ROWS; r++) {
        float y = 0.5f, prediction = *bias; /* what it learns: bias 0.5, weights 1, 2, … 8 */
        for (uint32_t i = 0; i < INPUTS; i++) {
            w->x[r][i] = noise(shd_step(w->model), micro, r * INPUTS + i);
            y += (float)(i + 1) * w->x[r][i];
            prediction += weight[i] * w->x[r][i];
        }
        w->error[r] = prediction - y;
        w->loss += (double)(w->error[r] * w->error[r]) / ROWS;
    }
    return 0;
}

/* Writes every element of every tensor: the array is not cleared before. */
static int backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    const struct worker *w = ctx;
    float *weight = grad + w->weight.offset_elems;
    float *bias = grad + w->bias.offset_elems;
    (void)micro, (void)unit, (void)params;
    memset(weight, 0, INPUTS * sizeof *weight);
    *bias = 0;
    for (uint32_t r = 0; r < ROWS; r++) {
        *bias += 2.0f / ROWS * w->error[r];
        for (uint32_t i = 0; i < INPUTS; i++)
            weight[i] += 2.0f / ROWS * w->error[r] * w->x[r][i];
    }
    return 0;
}

static uint32_t metrics(void *ctx, uint32_t micro, double *ret_metrics)
{
    (void)micro;
    ret_metrics[0] = ((const struct worker *)ctx)->loss;
    return 1;
}

static int train(struct worker *w, shd_session *s, struct shd_err *e)
{
    const struct shd_compute compute = { sizeof compute, w, forward, backward, metrics, NULL };
    const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    struct shd_result result = { .size = sizeof result };
    char digest[65];
    w->weight.size = w->bias.size = sizeof(struct shd_tensor);
    if (shd_model_open(s, spec, &w->model, e) ||
        shd_tensor_find(w->model, "weight", &w->weight, e) ||
        shd_tensor_find(w->model, "bias", &w->bias, e))
        return e->code;
    while (shd_step(w->model) < STEPS) {
        if (shd_run_step_elastic(w->model, &compute, &update, &result, e))
            return e->code;
        if (!result.over && (result.step + 1) % 50 == 0) /* over: others did it without this one */
            printf("step %" PRIu64 " loss %.6f\n", result.step + 1, result.metrics[0] / 4);
    }
    if (shd_digest(w->model, digest, NULL, e))
        return e->code;
    printf("digest sha256:%s\n", digest);
    return SHD_OK;
}

int main(void)
{
    struct worker w = { 0 };
    struct shd_err e;
    shd_session *s = NULL; /* at $SHARDD_ADDRESS */
    int r = shd_connect(&(struct shd_options){ .size = sizeof(struct shd_options) }, &s, &e);
    if (r == SHD_OK)
        r = train(&w, s, &e);
    if (r != SHD_OK)
        fprintf(stderr, "minimal: %s\n", e.text);
    shd_close(s); /* and the model */
    return r != SHD_OK;
}
