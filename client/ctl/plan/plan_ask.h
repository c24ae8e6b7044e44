/* What the flags of `shardctl plan` ask for. */
#ifndef SHD_CTL_PLAN_ASK_H
#define SHD_CTL_PLAN_ASK_H

#include <stdbool.h>
#include <stdint.h>

#include "client/plan/plan.h"

/* Strings are borrowed from argv. */
struct plan_ask {
    const char *address, *model;     /* an open model */
    const char *spec, *safetensors;  /* or a file */
    const char *wrap, *tie, *frozen; /* how a safetensors file becomes units; NULL: not given */
    uint32_t unit_elems_min;
    const char *param_dtype; /* NULL: as the source has it */
    uint32_t accumulate;     /* 0: as the source has it */
    uint32_t micros;         /* per worker and step; 0: the model's, spread over the workers */
    uint32_t workers, daemons;
    struct plan_policy policy;
    uint64_t device_bytes, activation_bytes;
    bool offload;
    bool timeline_only;
};

#endif
