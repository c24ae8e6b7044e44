/* options.h: the command line and the environment of shd-gpt. */
#ifndef GPT_OPTIONS_H
#define GPT_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "client/shd.h"

#define OPTIONS_DATA_MAX 64

struct options {
    const char *data[OPTIONS_DATA_MAX];
    uint32_t data_count;
    uint64_t layers, dim, heads, seq;
    uint64_t batch;         /* sequences of a micro-batch */
    uint64_t micro_batches; /* of a step, over all workers */
    uint64_t steps;
    const char *optimizer;
    double lr, min_lr, weight_decay, clip;
    uint64_t warmup;
    uint64_t seed;
    uint64_t eval_every; /* 0: at the end only */
    uint64_t log_every;
    uint64_t sample; /* bytes; 0: none */
    double temperature;
    uint64_t threads;
    bool standalone, help, version;
    const char *address; /* NULL: the environment's */
    const char *json;    /* NULL: none */
    /* From the environment. */
    uint32_t rank, world;
};

/* Parse argv over the defaults, RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. Strings are borrowed from
 * argv. Errors: SHD_EINVAL, SHD_ERANGE; the text names option, value and limits. With --help
 * or --version nothing else is checked. */
int options_parse(int argc, char **argv, struct options *ret_options, struct shd_err *e);

void options_help(FILE *out);

#endif
