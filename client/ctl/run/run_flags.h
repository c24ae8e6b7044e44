/* What `run`, `up` and `host` have in common on their command lines: how the daemons are that they
 * start, and how they are kept. */
#ifndef SHD_CTL_RUN_FLAGS_H
#define SHD_CTL_RUN_FLAGS_H

#include "client/ctl/run/run_state.h"
#include "client/ctl/run/watchdog.h"
#include "proto/base/flags.h"

struct run_words {
    const char *level, *format; /* of lines; NULL: not given */
};

/* Of a struct run_options. */
#define RUN_DEFAULTS                                                                      \
    .timeout_s = 60, .grace_s = 10, .max_restarts = 20, .watchdog_s = WATCHDOG_S_DEFAULT, \
    .state = "memory", .publish = "memory", .snapshots = "memory"

void run_flags_add(struct flag_table *table, struct run_options *o, struct run_words *words);

/* Take the words, and look at what else the flags of all have found. Errors: SHD_EINVAL, with the
 * flag. */
int run_flags_take(const struct run_options *o, const struct run_words *words, struct shd_err *e);

#endif
