/* A toy training for tests of policies: like client_toy.h's, with options. Seven units: embed
 * (tied: head uses it), h0, a tower h1 (may be frozen), three experts, head. Gradients are
 * multiplied by the loss scale; experts run as a routing function says. */
#ifndef SHD_POLICY_TOY_H
#define SHD_POLICY_TOY_H

#include "tests/lib/client_toy.h"

#define PT_UNITS  7u
#define PT_EXPERT 3u /* first of three */

struct pt_model {
    const char *name; /* of the model: one per run on the same daemons */
    const char *publish;
    uint32_t accumulate;
    bool frozen; /* h1 */
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
