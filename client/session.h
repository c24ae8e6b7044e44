/* A session and its models, as the parts of the client see them (client/shd.h has them opaque). */
#ifndef SHD_CLIENT_SESSION_H
#define SHD_CLIENT_SESSION_H

#include <assert.h>

#include "proto/dtype.h"
#include "proto/status.h"

/* After the two above: it repeats parts of them for those who have nothing else. */
#include "client/shd.h"

#include "client/plan.h"
#include "proto/spec.h"
#include "proto/wire.h"

static_assert(sizeof(double[SHD_METRICS_MAX]) == sizeof(((struct wire_return *)NULL)->metrics),
              "shd.h and the messages agree");
/* NOLINTNEXTLINE(misc-redundant-expression): two definitions, held together here */
static_assert(SHD_BLOB_BYTES_MAX == WIRE_BLOB_BYTES_MAX, "shd.h and the messages agree");

struct hub;
struct kern;
struct local_model;
struct map_model;
struct path_ops;

struct shd_session {
    const struct path_ops *path;
    struct hub *hub;     /* owned; NULL on the in-process path */
    struct kern *kern;   /* owned; in-process path only */
    uint64_t timeout_ns; /* of each wait */
    uint32_t slots;      /* asked for; 0: as the plan needs */
    uint64_t wait_ns;    /* counters of struct shd_stats */
    uint64_t bytes_mapped;
    uint64_t bytes_copied;
    uint64_t units_acquired;
    uint64_t units_returned;
    struct shd_model *models; /* owned list */
};

enum slot_state {
    SLOT_FREE,
    SLOT_HELD, /* handed out by shd_grad() */
    SLOT_SENT, /* returned; its owners have not all let go */
};

/* One array of the inbox. */
struct grad_slot {
    enum slot_state state;
    uint32_t micro, unit;
    uint32_t sent;         /* owners that were told: a broken-off return goes on from there */
    uint32_t credits_left; /* owners that still read it */
};

struct report { /* shd_report() of one micro-batch */
    double metrics[SHD_METRICS_MAX];
    uint32_t count;
};

struct shd_model {
    struct shd_session *session; /* borrowed */
    struct shd_model *next;
    struct spec *spec;      /* owned */
    uint64_t step;          /* open step */
    uint32_t *holds;        /* owned, [units]: acquires without release */
    struct report *reports; /* owned, [micro_batches], of the open step */
    struct grad_slot slots[SHD_SLOTS_MAX];
    uint32_t slot_count;       /* 0: no inbox yet */
    struct plan plan;          /* the last one run; op_count 0: none */
    struct shd_err fault;      /* a pipelined return failed; sticky; code 0: none */
    struct map_model *map;     /* owned by the mapped path */
    struct local_model *local; /* owned by the in-process path */
};

/* Give the model its spec (taken on SHD_OK only) and the tables that depend on it. */
int model_set_spec(struct shd_model *m, struct spec *spec, struct shd_err *e);

/* Gradient slots this model needs: as asked for, else by its plan. */
int model_slots_needed(const struct shd_model *m, uint32_t *ret_slots, struct shd_err *e);

#endif
