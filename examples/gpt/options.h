/* options.h: the command line and the environment of shd-gpt. */
#ifndef GPT_OPTIONS_H
#define GPT_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "client/shd.h"
#include "examples/gpt/gemm.h"
#include "examples/gpt/shape.h"
#include "proto/base/flags.h"

struct options_types { /* of parameters and gradients on their way; words */
    const char *precision, *codec, *grad_precision, *grad_codec;
};

struct options {
    struct flag_list data;
    uint64_t layers, dim, heads, seq;
    const char *batch_as;   /* as given: a number, "auto" or "auto:S" */
    uint64_t batch;         /* sequences of a micro-batch */
    uint64_t micro_batches; /* of a step, over all workers */
    uint64_t verify_every;  /* elastic: of so many steps one is verified; 0: none */
    uint64_t steps;
    struct options_optimizer {
        const char *kind, *moments;
    } optimizer;
    double lr, min_lr, weight_decay, clip, ema;
    uint64_t warmup;
    uint64_t seed;
    struct options_eval {
        uint64_t every;   /* steps; 0: at the end only */
        uint64_t windows; /* 0: never */
    } eval;
    uint64_t log_every;
    struct options_sample {
        uint64_t bytes; /* 0: none */
        double temperature;
    } sample;
    uint64_t threads;
    struct options_layer { /* what is held of one */
        bool recompute;    /* activations of one layer at a time */
        uint64_t tiles;    /* of each of its matrices; 0, 1: whole blocks */
    } layer;
    bool standalone, elastic, help, version, print_spec;
    bool evaluate, follow; /* train nothing: a reader beside those who do */
    const char *address;   /* NULL: the environment's */
    const char *json;      /* NULL: none */
    /* Schedule and precision, as given; what they mean is in `chosen`. */
    struct options_types types;
    const char *strategy, *prefetch, *path, *accumulate, *bf16_gemm;
    const char *plan;       /* a file of operations; NULL: the schedule's */
    const char *loss_scale; /* NULL: dynamic with fp16, none otherwise */
    const char *device, *math;
    uint64_t forward_prefetch;
    uint64_t max_live_units, max_live_bytes; /* 0: no bound */
    uint64_t slots;                          /* 0: as many as make sense */
    uint64_t experts, adapters;              /* 0: none */
    struct options_local {
        uint64_t steps;                         /* between two merges; 0: there are none */
        uint64_t joined;                        /* the outer model's step at this group's first */
        const char *outer, *group, *outer_name; /* as given */
        double lr, momentum;                    /* the outer optimizer's */
        bool average;
        uint32_t index, groups; /* of "--group I/N" */
    } local;
    double fetch_delay_ms;
    /* For tests. */
    uint64_t inject_overflow; /* spoil one gradient of this step, 1..; 0: never */
    struct options_slow {
        double times;  /* compute takes so many times as long; 1: as it is */
        uint64_t rank; /* of this worker only; UINT64_MAX: of all */
    } slow;
    struct options_flip {
        uint64_t bit, rank; /* from that step on, that worker computes wrongly; 0: never */
    } flip;
    struct options_stop {
        uint64_t rank, at; /* that worker leaves after so many steps; at 0: none does */
    } stop;
    /* From the environment. */
    uint32_t rank, world;
    /* Derived by options_check(). */
    struct options_chosen {
        struct shd_policy policy;
        enum shd_dtype publish;
        enum gemm_kind gemm;   /* with `gemm_auto`: the kind to try first */
        bool gemm_auto;        /* fall back to GEMM_BF16_EMULATED, and say so */
        uint32_t accumulate;   /* a of "local:a" or "host:a"; 1: the owners sum */
        uint32_t host_workers; /* that sum together; 1: each by itself */
        uint32_t local_world;  /* workers of this host */
        uint32_t sequences;    /* of a step, of "auto": batch.h has the rest; 0: as given */
        double loss_scale;     /* 1: none; 0: dynamic */
        bool cuda;             /* compute on a GPU, and the session's arrays are there */
        uint32_t device;       /* CUDA ordinal */
        bool tf32;
    } chosen;
};

/* Parse argv over the defaults, RANK, WORLD_SIZE and LOCAL_WORLD_SIZE. Strings are borrowed from
 * argv. Errors: SHD_EINVAL, SHD_ERANGE; the text names option, value and limits. With --help
 * or --version nothing else is checked. */
int options_parse(int argc, char **argv, struct options *ret_options, struct shd_err *e);

/* The model they describe. */
struct gpt_shape options_shape(const struct options *options);

void options_help(FILE *out);

#endif
