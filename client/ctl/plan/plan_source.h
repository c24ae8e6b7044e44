/* The model of `shardctl plan`: an open model on daemons, a spec file, or the header of a
 * safetensors file. */
#ifndef SHD_CTL_PLAN_SOURCE_H
#define SHD_CTL_PLAN_SOURCE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/plan/plan.h"
#include "proto/base/flags.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"

struct plan_hosts;

/* Of --hosts, --gpus, --bandwidth and --latency; 0: not given. */
struct plan_scale_ask {
    uint32_t hosts, gpus;
    double gbit; /* a second, of each host and direction */
    double latency_us;
};

/* The flags of `shardctl plan`. Strings are borrowed from argv. */
struct plan_ask {
    const char *address, *model;     /* an open model */
    const char *spec, *safetensors;  /* or a file */
    const char *wrap, *tie, *frozen; /* how a safetensors file becomes units; NULL: not given */
    uint32_t unit_elems_min;
    const char *param_dtype;   /* NULL: as the source has it */
    uint32_t accumulate;       /* 0: as the source has it */
    uint32_t micros;           /* per worker and step; 0: the model's, spread over the workers */
    uint32_t workers, daemons; /* daemons that hold a slice of their own */
    struct plan_policy policy;
    uint64_t device_bytes, activation_bytes;
    uint64_t context_bytes; /* of each process on a GPU */
    bool offload;
    bool state_on_file, publish_on_file;
    bool on_gpu;       /* what device_bytes are of */
    const char *rates; /* a file of rates.h; NULL: the usual one */
    double compute_s;  /* of a micro-batch, all units; 0: not given */
    uint32_t threads;  /* of each daemon; 0: as `shardctl run` gives */
    bool copies;       /* path copy */
    bool timeline_only;
    struct flag_list hosts; /* NAME:DAEMONS:WORKERS */
    uint32_t replicas;      /* of each slice, on as many hosts: 1 or 2 */
    struct plan_scale_ask scale;
    const struct plan_hosts *across; /* borrowed: these, parsed; NULL: all is on one */
};

/* The model as asked for: what --param-dtype and --accumulate change is changed, micros is filled
 * in. Errors name the file or flag. */
int plan_source(struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e);

/* The spec in a safetensors file's header: its tensors wrapped into units. The file is not
 * trusted. */
int plan_safetensors(const struct plan_ask *ask, struct spec **ret_spec, struct shd_err *e);

#endif
