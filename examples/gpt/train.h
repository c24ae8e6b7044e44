/* train.h: the worker: shd-gpt's run from attaching to the digest. */
#ifndef GPT_TRAIN_H
#define GPT_TRAIN_H

#include "client/shd.h"
#include "examples/gpt/options.h"

struct train_end {
    int signal;   /* the one that ended the run early, after a whole step; 0: none */
    bool refused; /* the error is about the options: what they ask for cannot be had */
};

/* The spec of the model the options describe, as JSON; free() it. NULL: no memory. */
char *train_spec(const struct options *options);

/* Train as the options say, print to stdout (rank 0). Errors: those of the parts, with what was
 * being done. */
int train_run(const struct options *options, struct train_end *ret_end, struct shd_err *e);

#endif
