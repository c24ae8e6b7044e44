/* train.h: the worker: shd-gpt's run from attaching to the digest. */
#ifndef GPT_TRAIN_H
#define GPT_TRAIN_H

#include "client/shd.h"
#include "examples/gpt/options.h"

/* Train as the options say, print to stdout (rank 0). *ret_signal: the signal that ended the run
 * early after a whole step, 0: none. Errors: those of the parts, with what was being done. */
int train_run(const struct options *options, int *ret_signal, struct shd_err *e);

#endif
