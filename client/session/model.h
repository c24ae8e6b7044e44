/* A model of a session, as the parts of the client see it (client/shd.h has it opaque). */
#ifndef SHD_CLIENT_MODEL_H
#define SHD_CLIENT_MODEL_H

#include <assert.h>

#include "client/plan/plan.h"
#include "client/session/activity.h"
#include "client/session/session.h"
#include "proto/base/decision.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

static_assert(sizeof(double[SHD_METRICS_MAX]) == sizeof(((struct wire_return *)NULL)->metrics),
              "shd.h and the messages agree");
/* NOLINTNEXTLINE(misc-redundant-expression): two definitions, held together here */
static_assert(SHD_BLOB_BYTES_MAX == WIRE_BLOB_BYTES_MAX, "shd.h and the messages agree");

static_assert((int)SHD_ZERO3 == (int)PLAN_ZERO3 && (int)SHD_ZERO2 == (int)PLAN_ZERO2 &&
                  (int)SHD_ZERO1 == (int)PLAN_ZERO1 && (int)SHD_DDP == (int)PLAN_DDP,
              "shd.h and the planner agree");
static_assert((int)SHD_PREFETCH_PRE == (int)PLAN_PREFETCH_PRE &&
                  (int)SHD_PREFETCH_POST == (int)PLAN_PREFETCH_POST &&
                  (int)SHD_PREFETCH_NONE == (int)PLAN_PREFETCH_NONE,
              "shd.h and the planner agree");

struct copy_model;
struct exec;
struct grads;
struct local_model;
struct map_model;
struct nccl_model;
struct save;

enum slot_state {
    SLOT_FREE,
    SLOT_HELD, /* handed out by shd_grad(), or being returned */
    SLOT_SENT, /* returned; its owners have not all let go */
};

/* One array of the inbox. */
struct grad_slot {
    enum slot_state state;
    uint32_t group, unit;  /* group: of micro-batches; the micro-batch where accumulate is 1 */
    uint32_t sent;         /* owners that were told: a broken-off return goes on from there */
    uint32_t credits_left; /* owners that still read it */
    enum shd_dtype dtype;  /* of its contents */
};

#define MODEL_IN_BYTES (SHD_MICROS_MAX / 8)

/* What was in at the owners when the model was opened. */
struct groups_in {
    uint64_t step;
    uint8_t groups[MODEL_IN_BYTES]; /* a bit per group */
};

struct report { /* shd_report() of one micro-batch */
    double metrics[SHD_METRICS_MAX];
    uint32_t count;
    uint32_t given; /* of the first one of a group: units whose return has been handed over */
};

struct unit_hold {
    uint64_t bytes;    /* of its parameters, as fetched */
    uint32_t acquired; /* acquires without release */
    bool fetched;      /* counts as live: asked for, and not let go since */
    uint64_t misses;   /* shd_unit_misses() */
};

/* What shd_set_policy() set. */
struct policy {
    struct plan_policy plan;
    enum shd_dtype grad_dtype; /* of returned gradients */
    uint64_t fetch_delay_ns;   /* bench.h's, not the policy's */
    bool set;                  /* not the default */
};

struct shd_model {
    struct shd_session *session; /* borrowed */
    struct shd_model *next;
    const struct reader_ops *reader; /* borrowed: the session's, or what its policy picked */
    struct spec *spec;               /* owned */
    char *spec_json;                 /* owned; made by the first shd_model_spec() */
    uint64_t step;                   /* open step */
    struct policy policy;
    bool leaving;            /* shd_leave() */
    bool started;            /* a gradient was asked for: the policy stays */
    struct unit_hold *holds; /* owned, [units] */
    uint32_t live_units;     /* held now */
    uint64_t live_param_bytes;
    bool sealed;  /* all micro-batches of the open step are in, but its commit broke off */
    bool decided; /* a step was, by `decision`: the last one */
    struct decision decision;
    struct groups_in in;
    struct report *reports; /* owned, [micro_batches], of the open step */
    struct grad_slot slots[SHD_SLOTS_MAX];
    uint32_t slot_count;  /* 0: no inbox yet */
    struct grads *grads;  /* owned; NULL: gradients are written in the slots themselves */
    struct exec *exec;    /* owned; NULL: no plan was run yet */
    struct shd_err fault; /* a pipelined return failed; sticky; code 0: none */
    struct save *saving;  /* owned: shd_checkpoint_begin(); NULL: none */
    void (*save_free)(struct save *saving);
    struct activity_writer activity;
    struct map_model *map;           /* owned by remote.c; NULL: the owner is in this process */
    struct copy_model *copy;         /* owned by remote.c; NULL: read in place, or not made yet */
    struct nccl_model *nccl_joining; /* borrowed: the next one, in the making; or NULL */
    struct nccl_model *nccl;         /* owned by remote.c, beside copy; NULL: none is far */
    struct local_model *local;       /* owned by local.c */
};

/* Give the model its spec (taken on SHD_OK only) and the tables that depend on it. */
int model_set_spec(struct shd_model *m, struct spec *spec, struct shd_err *e);

/* Take over the decision of the step before the open one. */
void model_decided(struct shd_model *m, const struct decision *decision);

/* What the micro-batches of a group reported, added up in ascending order. */
struct report model_report(const struct shd_model *m, uint32_t group);

#endif
