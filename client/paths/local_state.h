/* The fields of a model whose owner is in this process, for local.c and what belongs to it alone.
 */
#ifndef SHD_LOCAL_STATE_H
#define SHD_LOCAL_STATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kern.h"
#include "proto/base/decision.h"
#include "proto/share/audit.h"
#include "proto/share/history.h"
#include "proto/spec/layout.h"
#include "proto/spec/settings.h"
#include "proto/spec/spec.h"

struct kern_hyper;
struct kern_run;
struct kern_whole;
struct parts;

enum arrival { ARRIVED_NOT, ARRIVED_NONE, ARRIVED_GRAD };

struct local_unit { /* arrays are fp32 [elems of the unit], but for moments in 8 bits */
    void *memory;   /* owned, of the worker's device: all of them */
    uint64_t memory_bytes;
    float *param, *m, *v;  /* v: AdamW only, else NULL; frozen units have param alone */
    float *ema;            /* the parameters' moving average; NULL: there is none */
    float *acc;            /* gradient sum of the open step; NULL: frozen */
    void *publish;         /* what workers read, in the model's dtype, */
    void *codes;           /* and what that was decoded from; NULL: no codec */
    struct kern_run *runs; /* owned */
    uint32_t run_count;
    struct kern_whole *whole; /* owned: its matrices; NULL: none */
    uint32_t next_group;      /* gradients of groups below it are summed */
    bool summed;              /* acc holds a gradient of this step */
    uint64_t updates;         /* as the model's, but for steps that it was idle in and skipped */
    uint64_t summed_step;     /* 1 + the committed step that acc still has the sum of; 0: none */
    uint64_t updated_step;    /* 1 + the step that updated it last, by its gradient; 0: none */
    uint8_t *arrived;         /* [spec_returns()] in the model's block, enum arrival */
};

/* An array of those that spec_arrays() counts; NULL: the unit has no such one. */
static inline float *local_array(const struct spec *spec, const struct local_unit *u,
                                 uint32_t array)
{
    float *const arrays[] = { u->param, u->m, u->v };
    if (array == spec_ema_array(spec))
        return u->ema;
    return array < sizeof arrays / sizeof *arrays ? arrays[array] : NULL;
}

/* The same, in fp32 or not. */
static inline struct kern_array local_state(const struct spec *spec, const struct local_unit *u,
                                            uint32_t array)
{
    return (struct kern_array){ local_array(spec, u, array), spec_array_quant(spec, array) };
}

struct local_stopped {        /* training, by a guard */
    struct decision_guard by; /* what 0: it is not */
    uint64_t step;
};

struct local_model {
    struct local_unit *units;  /* owned, [units] */
    uint8_t *arrived;          /* owned, [units * spec_returns()] */
    struct kern_hyper *hypers; /* owned, [groups] */
    float *slots;              /* owned, [slot_count * slot_elems] */
    void *scratch;             /* owned, of the device: for matrices */
    uint64_t scratch_bytes;
    uint64_t slot_elems;                             /* of the largest unit */
    uint64_t updates;                                /* steps that were not skipped */
    double metrics[SHD_MICROS_MAX][SHD_METRICS_MAX]; /* of the open step */
    uint32_t metric_counts[SHD_MICROS_MAX];
    uint8_t *blob; /* owned */
    size_t blob_bytes;
    struct history_slot *history; /* owned, [HISTORY_SLOTS] */
    struct audit_slot *audit;     /* owned, [AUDIT_SLOTS] */
    struct parts *parts;          /* owned; NULL: the model has no guard_audit */
    void *window;                 /* owned: unit_window's; NULL: no rule needs one */
    double *unit_norms;           /* owned, [guard.columns], of the open step; NULL: likewise */
    struct settings_kept settings;
    struct local_stopped stopped;
    uint32_t returns_before; /* of the last committed step */
};

#endif
