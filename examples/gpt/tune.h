/* tune.h: the policies that `shardctl plan --tune --json` found the quickest by prediction, each
 * taken some real steps by. Results do not depend on the policy: they are steps of the training. */
#ifndef GPT_TUNE_H
#define GPT_TUNE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/shd.h"

#define TUNE_TRIES      4u
#define TUNE_STEPS      6u /* by each; the first is not counted, it attaches and maps */
#define TUNE_NAME_BYTES 64u

struct tune {
    struct tune_try {
        struct shd_policy policy;
        double predicted_s, measured_s; /* the median; 0: not measured */
    } tries[TUNE_TRIES];                /* the best distance of each strategy and prefetch */
    uint32_t count;                     /* 0: nothing is tried */
    uint32_t at;                        /* whose steps these are */
    uint32_t steps;                     /* that it has had */
    double seconds[TUNE_STEPS];
    bool done; /* at: the quickest */
};

/* The document that the text is, over the policy that the options give. ret_tune->count 0: it is
 * another, a plan. Errors: SHD_EINVAL the text names what is wrong. */
int tune_read(const char *text, const struct shd_policy *given, struct tune *ret_tune,
              struct shd_err *e);

/* A step took so long. True: from here on it is another one's turn, tries[at]. */
bool tune_step(struct tune *t, double seconds);

/* "zero3, forward prefetch 1, backward prefetch pre" */
const char *tune_name(const struct tune_try *try, char buf[TUNE_NAME_BYTES]);

#endif
