/* A session and its models, as the parts of the client see them (client/shd.h has both opaque). */
#ifndef SHD_CLIENT_SESSION_H
#define SHD_CLIENT_SESSION_H

#include <assert.h>
#include <sys/types.h>

#include "client/plan/plan.h"
#include "client/session/activity.h"
#include "client/session/idle.h"
#include "proto/base/decision.h"
#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/spec/spec.h"
#include "proto/wire/wire.h"

/* After the others: it repeats parts of them for those who have nothing else. */
#include "client/shd.h"

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

struct blame;
struct control_ops;
struct copy_model;
struct exec;
struct grads;
struct hub;
struct kern;
struct link;
struct local_model;
struct map_model;
struct nccl_model;
struct order;
struct owner_gpu;
struct reader_ops;
struct save;

struct shd_session {
    const struct control_ops *control; /* borrowed: who its owners are, remote or local */
    const struct reader_ops *reader;   /* borrowed: of its models, unless policy says otherwise */
    struct hub *hub;                   /* owned; NULL: the owner is in this process */
    struct blame *blame;               /* owned, with it */
    struct kern *kern; /* owned; the worker's device. Host: NULL until something is summed here */
    bool on_gpu;       /* the worker's arrays are in the memory of GPU `ordinal` */
    uint32_t ordinal;
    struct owner_gpu *gpus; /* owned, [gpu_count]: a host worker's, for what GPU owners have */
    uint32_t gpu_count;
    struct idle idle;    /* of waits without a hub */
    uint64_t timeout_ns; /* of each wait */
    uint32_t slots;      /* asked for; 0: as the plan needs */
    bool reads;          /* shd_options.reader */
    uint64_t wait_ns;    /* counters of struct shd_stats */
    uint64_t bytes_mapped;
    uint64_t bytes_copied;
    uint64_t bytes_unpinned;
    uint64_t units_acquired;
    uint64_t units_returned;
    uint64_t bytes_fetched;
    uint64_t bytes_returned;
    uint64_t live_bytes; /* now, of all models; its maximum is next */
    uint64_t live_bytes_max;
    uint64_t plan_misses;
    struct shd_session *next;  /* of the process: client/run/fork.h */
    pid_t pid;                 /* the process */
    bool left;                 /* this is a child of it */
    struct shd_model *models;  /* owned list */
    struct shd_model *opening; /* borrowed: not in the list yet */
    struct starts *starts;     /* borrowed: what it begins with; NULL: what its spec says */
};

/* Start values of a model that is being opened, from this program. */
struct starts {
    int (*fill)(void *ctx, uint32_t unit, float *values);
    void *ctx;
    bool created;                  /* here, with them */
    const struct shd_model *from;  /* instead of fill: a model at the same owners; or NULL */
    uint64_t step;                 /* of that one, once it was created; or exact: */
    bool exact;                    /* as of `step` and no other */
    const struct settings *change; /* of what is set of that one; NULL: none */
};

/* The unit's start values into values[unit elements], gaps zeroed. SHD_EINTERNAL: fill gave up. */
int starts_fill(const struct starts *starts, const struct spec *spec, uint32_t unit, float *values,
                struct shd_err *e);

/* Zero what is of no tensor in values[unit elements]. */
void unit_zero_gaps(const struct spec *spec, uint32_t unit, float *values);

/* Errors: SHD_EINVAL in a child of the session's process. */
int session_check(const struct shd_session *s, struct shd_err *e);

/* Errors: SHD_EBUSY this session has a model of that name open. */
int session_check_closed(const struct shd_session *s, const char *name, struct shd_err *e);

/* Its owners, and their replicas. */
uint32_t session_members(const struct shd_session *s);

/* Its models, with the one that is being opened: first, and the one after m; NULL: no more. */
struct shd_model *session_first(const struct shd_session *s);
struct shd_model *session_next(const struct shd_session *s, const struct shd_model *m);

/* session->kern, started on first use. */
int session_kern(struct shd_session *s, uint32_t threads, struct shd_err *e);

/* Where the worker's arrays are: its GPU; NULL: host memory. */
struct kern *session_gpu(const struct shd_session *s);

/* Held bytes came (or went, when not more). */
void session_live(struct shd_session *s, uint64_t bytes, bool more);

/* -- Models ------------------------------------------------------------------------------------ */

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

/* What the owners have of the open step, as far as this worker cares. */
struct groups_in {
    uint64_t step;
    uint8_t groups[MODEL_IN_BYTES]; /* a bit per group: in at all owners when it was opened */
    uint64_t attempt;               /* at the step: what is returned is of it; 0: none is known */
    bool handed;                    /* something was returned */
};

struct leases { /* of step */
    bool began;
    bool leaving; /* shd_leave() */
    uint64_t step;
    uint32_t owner; /* those before it have all groups in */
    uint8_t groups[MODEL_IN_BYTES];
};

struct report { /* shd_report() of one micro-batch */
    double metrics[SHD_METRICS_MAX];
    uint32_t count;
    uint32_t given; /* of the first one of a group: units whose return has been handed over */
    char names[WIRE_NAME_BYTES_MAX]; /* of metrics; "": not said */
};

struct unit_hold {
    uint64_t bytes; /* of its parameters, as held */
    uint64_t fetched_bytes;
    uint32_t acquired; /* acquires without release */
    bool fetched;      /* counts as live: asked for, and not let go since */
    uint64_t misses;   /* shd_unit_misses() */
};

struct plan_own;

struct units_held {
    uint32_t units;
    uint64_t bytes; /* of their parameters */
};

/* The policy, as shd_set_policy() and shd_set_plan() set it. */
struct policy {
    struct plan_policy plan;   /* with `own`: what plans are built by where its order is not kept */
    struct plan_own *own;      /* owned; NULL: plans are built */
    enum shd_path path;        /* as asked for */
    enum shd_dtype grad_dtype; /* of returned gradients */
    uint64_t fetch_delay_ns;   /* bench.h's, not the policy's */
    bool set;                  /* not the default */
};

struct shd_model {
    struct shd_session *session; /* borrowed */
    struct shd_model *next;
    const struct reader_ops *reader; /* borrowed: the session's, or what its policy picked */
    struct spec *spec;               /* owned */
    char *spec_json;                 /* owned: canonical; NULL: shd_model_spec() makes it */
    uint64_t step;                   /* open step */
    struct policy policy;
    bool started;            /* a gradient was asked for: the policy stays */
    struct unit_hold *holds; /* owned, [units] */
    struct units_held held;  /* now, of all */
    bool sealed;  /* all micro-batches of the open step are in, but its commit broke off */
    bool decided; /* a step was, by `decision`: the last one */
    struct decision decision;
    struct groups_in in;
    struct leases leases;
    struct report *reports; /* owned, [micro_batches], of the open step */
    struct grad_slot slots[SHD_SLOTS_MAX];
    uint32_t slot_count;  /* 0: no inbox yet */
    struct grads *grads;  /* owned; NULL: gradients are written in the slots themselves */
    struct order *order;  /* owned by order.c; NULL: no stream was named */
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

/* m->step is another one than before: nothing of that is in yet. */
void model_step_over(struct shd_model *m);

struct shd_tensor model_tensor(const struct shd_model *m, uint32_t index);

/* Micro-batches of the open step, as the decision before it or the spec says, and groups of them.
 */
uint32_t model_micro_batches(const struct shd_model *m);
uint32_t model_returns(const struct shd_model *m);

/* Units that are returned for each group: those with a gradient. */
uint32_t model_returned_units(const struct shd_model *m);

/* Is the group leased by this worker, and not all returned? */
bool model_leased(const struct shd_model *m, uint32_t group);
bool model_leased_any(const struct shd_model *m);

/* What the micro-batches of a group reported, added up in ascending order. Nothing (count 0) while
 * it may not be all of it: before each has reported, until the group's last unit is returned. So
 * what the owners keep does not depend on which units are returned how early. */
struct report model_report(const struct shd_model *m, uint32_t group);

/* The model cannot go on: why, as its fault, and as the error of the call that noticed. */
int model_broken(struct shd_model *m, const struct shd_err *why, struct shd_err *e);

/* Why a fetched unit cannot be read: an owner is past the open step, or does not get to it in time.
 */
int model_err_past(const struct shd_model *m, const struct link *link, uint32_t unit,
                   uint64_t version, struct shd_err *e);
int model_err_unpublished(const struct shd_model *m, const struct link *link, uint32_t unit,
                          struct shd_err *e);

/* A gradient slot in this state, or NULL. */
struct grad_slot *model_find_slot(struct shd_model *m, enum slot_state state);

/* Take over one of shd.h's structs that begin with their size; *to [bytes] is zeroed. The caller
 * may have been compiled with a smaller one, of `least` bytes at least: what it lacks stays 0.
 * Errors: SHD_EINVAL names both sizes. */
int sized_take(void *to, size_t bytes, const void *from, size_t least, const char *name,
               struct shd_err *e);

/* The same of one that is to be filled, before anything is done: may it be? NULL: it may. Then fill
 * it, as far as the caller's goes; from: the library's, to: NULL, or checked. */
int sized_check(const void *to, size_t bytes, const char *name, struct shd_err *e);
void sized_give(void *to, const void *from);

#endif
