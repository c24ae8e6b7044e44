/* The in-process path ("local:"): the owner is this process itself.
 *
 * An implementation of its own, simple on purpose: whole units, one operation at a time, no
 * daemon, no messages. It gives the same bits because it runs the same kernels (kernels/kern.h)
 * on the same runs (kernels/runs.h) in the same order, so the two check each other. All arrays are
 * in the memory of the worker's device, the host or a GPU.
 *
 * Happy path: a returned gradient is added as soon as those of lower micro-batches are in; commit
 * sums the squares, decides as any worker would, updates unit by unit. Nothing ever waits: what
 * is missing can only come from the caller, so it is an error at once. A kernel that fails leaves
 * the state half changed: that is the model's fault from then on. */
#ifndef SHD_LOCAL_STEP_H
#define SHD_LOCAL_STEP_H

#include <stdbool.h>
#include <stdint.h>

#include "client/paths/path.h"
#include "kernels/kern.h"
#include "kernels/runs.h"

enum arrival { ARRIVED_NOT, ARRIVED_NONE, ARRIVED_GRAD };

struct local_unit { /* arrays are fp32 [elems of the unit] */
    void *memory;   /* owned, of the worker's device: all of them */
    uint64_t memory_bytes;
    float *param, *m, *v;  /* v: AdamW only, else NULL; frozen units have param alone */
    float *acc;            /* gradient sum of the open step; NULL: frozen */
    void *publish;         /* what workers read, in the model's dtype */
    struct kern_run *runs; /* owned */
    uint32_t run_count;
    uint32_t next_group; /* gradients of groups below it are summed */
    bool summed;         /* acc holds a gradient of this step */
    uint8_t *arrived;    /* [spec_returns()] in the model's block, enum arrival */
};

struct local_model {
    struct local_unit *units;                        /* owned, [units] */
    uint8_t *arrived;                                /* owned, [units * spec_returns()] */
    struct kern_hyper *hypers;                       /* owned, [groups] */
    float *slots;                                    /* owned, [slot_count * slot_elems] */
    uint64_t slot_elems;                             /* of the largest unit */
    uint64_t updates;                                /* steps that were not skipped */
    double metrics[SHD_MICROS_MAX][SHD_METRICS_MAX]; /* of the open step */
    uint32_t metric_counts[SHD_MICROS_MAX];
    uint8_t *blob; /* owned */
    size_t blob_bytes;
};

/* What a step needs of the two tables in local.h. */
int local_fill_slot(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
                    enum shd_dtype dtype, struct shd_err *e);
int local_wait_slot(struct shd_model *m, struct shd_err *e);
float *local_slot_array(const struct shd_model *m, uint32_t slot, uint32_t unit);
int local_give(struct shd_model *m, const struct path_return *ret, struct shd_err *e);
int local_commit(struct shd_model *m, const struct decide_args *args, const struct wire_bytes *blob,
                 struct decided *ret_decided, struct shd_err *e);
int local_lease(struct shd_model *m, uint32_t owner, struct wire_leased *ret_leased,
                struct shd_err *e);

#endif
