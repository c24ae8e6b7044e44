/* How parameters get to the worker and gradients back: three tables, every slot of each filled. The
 * public functions (client/run/) do what all have in common, such as checking arguments and keeping
 * the slots, and call down here for the rest.
 *
 *   control_ops   what is asked of the owners             remote | local
 *   reader_ops    how a unit's parameters are read        mapped | copy | nccl | local
 *   mover_ops     how one owner's slices get there and    place | whole | nccl
 *                 back (remote owners only)
 *
 * A session has its control for good, a model its reader, which the policy picks
 * (client/run/policy.h), an owner its mover: by where its memory is, and nccl where the policy says
 * so.
 */
#ifndef SHD_PATH_H
#define SHD_PATH_H

#include <stdint.h>

#include "client/paths/decide.h"
#include "client/paths/digest.h"
#include "client/session/session.h"
#include "proto/share/audit.h"
#include "proto/share/history.h"
#include "proto/share/tally.h"
#include "proto/wire/wire.h"

struct map_owner;
struct settings;

struct path_return {
    uint32_t group, unit;
    struct grad_slot *slot; /* SLOT_HELD; NULL: the unit took no part */
};

struct path_get {
    uint32_t unit;
    uint32_t array; /* that it has: its number in the state, spec_arrays() */
    float *values;
    uint64_t *ret_step, *ret_updates;
};

struct path_show { /* a range of a tensor's elements, inside of it, of an array */
    uint32_t tensor;
    enum wire_show_array array;
    uint64_t first, elems;
    float *values; /* [elems], filled as well: at most WIRE_VALUES_MAX; NULL: not asked for */
};

struct path_shown {
    uint64_t step, updates; /* updates: of the unit */
    uint64_t of_step;       /* of gradients, with the next */
    uint32_t groups;
    struct tally tally; /* of all owners */
};

struct path_put {
    const uint8_t *arrays; /* [units]: of each a bit for each array that is put, by its number in
                            * the state; as putmap_check() */
    int (*fill)(void *ctx, uint32_t unit, enum shd_array array, float *values);
    void *ctx;
    uint64_t updates;             /* 1 + those that count as applied; 0: as many as before */
    const uint64_t *unit_updates; /* [units]: likewise, 0: as `updates` says; NULL: of all */
};

struct path_history {         /* what steps from `from` on came to, ascending */
    uint64_t from;            /* becomes the step to go on with */
    struct history_row *rows; /* [room] */
    struct audit_row *audits; /* [AUDIT_SLOTS]: of those of them that have one */
    uint32_t room;            /* at most WIRE_ROWS_MAX */
    uint32_t count, audit_count;
};

struct path_unit {                   /* NaN: not known; infinite: not finite */
    double gradient, update, weight; /* roots of sums of squares */
};

struct path_units { /* [first, first + count) in a step */
    uint64_t step;  /* UINT64_MAX: the last one that all owners have; becomes that */
    uint32_t first, count;
    struct path_unit *units; /* [count] */
    double divisor;          /* of `gradient`, for the mean's */
    uint32_t skipped;        /* history_skipped() */
};

struct path_set {
    const struct settings *change; /* NULL: only look */
    bool go_on;                    /* instead: train on what a guard has stopped */
    uint64_t from;                 /* the step to change it from; 0: the first that can be */
    uint64_t *ret_from;            /* of a change; may be NULL */
    char **ret_json;               /* settings_json(), the caller's to free; may be NULL */
};

struct control_ops {
    int (*status)(struct shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e);

    /* Open (m->spec is set) or attach to `name` (m->spec is NULL: set it by model_set_spec()), with
     * so many gradient slots (0: by open_slots()). Sets m->step. After a failure close() is
     * called. */
    int (*open)(struct shd_model *m, const char *name, uint32_t slots, struct shd_err *e);
    void (*close)(struct shd_model *m);
    /* Make m->slot_count gradient slots. Called once, before the first is used. */
    int (*open_slots)(struct shd_model *m, struct shd_err *e);

    /* Wait until a slot is SLOT_FREE; one at least is SLOT_SENT now. */
    int (*wait_slot)(struct shd_model *m, struct shd_err *e);
    /* Make a SLOT_FREE slot ready to be written to. */
    int (*ready_slot)(struct shd_model *m, uint32_t slot, struct shd_err *e);
    /* The array of a slot, shaped for unit. */
    float *(*slot_array)(const struct shd_model *m, uint32_t slot, uint32_t unit);
    /* Copy grad [unit elements] into a slot, cast to dtype (m->session->kern does it). */
    int (*fill_slot)(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
                     enum shd_dtype dtype, struct shd_err *e);
    /* Hand over; on SHD_OK the slot is SLOT_SENT or, already, SLOT_FREE. */
    int (*give)(struct shd_model *m, const struct path_return *ret, struct shd_err *e);
    /* Take in what has arrived meanwhile, without waiting. */
    int (*poll)(struct shd_model *m, struct shd_err *e);

    /* Wait for all micro-batches, decide (args: without prepared and owners), commit m->step with
     * the blob (NULL: none). The caller moves m->step on. */
    int (*commit)(struct shd_model *m, const struct decide_args *args,
                  const struct wire_bytes *blob, struct decided *ret_decided, struct shd_err *e);
    /* At which attempt the owners are at m->step, or m->in.attempt, if that is later. */
    uint64_t (*attempt)(const struct shd_model *m);
    /* Have all owners give up what they have of m->step; *ret_attempt: the one that begins. Errors:
     * SHD_ESTEP its commit has begun. */
    int (*reset)(struct shd_model *m, uint64_t *ret_attempt, struct shd_err *e);
    /* The step is over, and nothing else is known: set m->step to the owners' open step, and the
     * decision before it. */
    int (*catch_up)(struct shd_model *m, struct shd_err *e);
    /* Ask an owner what to do for m->step, and wait for the answer; now: it may be nothing. Broken
     * off, the same question goes on waiting. */
    int (*lease)(struct shd_model *m, uint32_t owner, bool now, struct wire_leased *ret_leased,
                 struct shd_err *e);
    /* Wait until so many workers wait so in m->step, or it has begun or is over. Broken off, the
     * same question goes on waiting. */
    int (*meet)(struct shd_model *m, uint32_t workers, struct shd_err *e);
    /* Tell all owners that the group will not be computed here; waits for no answer. */
    int (*unlease)(struct shd_model *m, uint32_t group, struct shd_err *e);
    int (*blob)(struct shd_model *m, uint32_t owner, void *buf, size_t capacity, size_t *ret_bytes,
                struct shd_err *e);
    int (*history)(struct shd_model *m, struct path_history *history, struct shd_err *e);
    /* NULL: nobody keeps that. SHD_ENOENT: not of this step. */
    int (*units)(struct shd_model *m, struct path_units *units, struct shd_err *e);
    /* An array of a unit as of *ret_step, all of it: values[unit elements], host memory. */
    int (*get)(struct shd_model *m, const struct path_get *get, struct shd_err *e);
    /* What a range comes to at all owners, of one step. Errors: SHD_ENOENT, SHD_EINVAL, SHD_ENOTSUP
     * there is no such array (now), or it cannot be told; SHD_EBUSY the model is always quicker. */
    int (*show)(struct shd_model *m, const struct path_show *show, struct path_shown *ret_shown,
                struct shd_err *e);
    /* Put in the place of m->step, and go on to the open step, with the decision before it. Not
     * *ret_counts: another worker's put was first. SHD_ESTEP: another decision was. */
    int (*put)(struct shd_model *m, const struct path_put *put, bool *ret_counts,
               struct shd_err *e);
    /* Change settings, or look at them. */
    int (*set)(struct shd_model *m, const struct path_set *set, struct shd_err *e);
    /* digest_leaves_fn with the model as ctx. */
    int (*leaves)(void *ctx, const struct digest_part *part, uint8_t (*ret_leaves)[32],
                  struct digest_stamp *stamp, struct shd_err *e);
    uint32_t (*range_units)(const struct shd_model *m); /* digest_source.units_max */
};

/* Units are fetched once, waited for any number of times, let go once (client/run/hold.h sees to
 * that). */
struct reader_ops {
    enum shd_path kind;       /* as shd_path() reports it */
    enum activity_path shown; /* the same for who looks */
    /* Ask for unit at m->step, without waiting; SHD_EBUSY: no room for it. */
    int (*fetch)(struct shd_model *m, uint32_t unit, struct shd_err *e);
    /* Can a fetched unit be read at m->step without a wait? False, too, where only wait_unit() can
     * tell. */
    bool (*readable)(const struct shd_model *m, uint32_t unit);
    /* Wait until it can be read. After an error it is still fetched. */
    int (*wait_unit)(struct shd_model *m, uint32_t unit, struct shd_err *e);
    void (*let_go)(struct shd_model *m, uint32_t unit);
    /* Its array, once waited for. */
    const void *(*params)(const struct shd_model *m, uint32_t unit);
};

struct mover_ops {
    /* A claimed publish or inbox segment, over what there was. *fd: taken where it is set to -1. */
    int (*take)(struct shd_model *m, struct map_owner *owner, const struct wire_segment *segment,
                int *fd, struct shd_err *e);
    /* Have mapped what take() put off. */
    int (*ready)(struct shd_model *m, struct map_owner *owner, struct shd_err *e);
    /* Where the owner publishes its slice of unit, to be copied from; NULL: it is sent. */
    const uint8_t *(*published)(const struct shd_model *m, const struct map_owner *owner,
                                uint32_t unit);
    /* Make the owner's part of a SLOT_FREE slot ready to be written to. */
    int (*ready_slot)(struct shd_model *m, struct map_owner *owner, uint32_t slot,
                      struct shd_err *e);
    /* Where its slice of unit, in dtype, is to be written for that slot. */
    int (*slice_at)(struct shd_model *m, const struct map_owner *owner, uint32_t slot,
                    uint32_t unit, enum shd_dtype dtype, void **ret_at, struct shd_err *e);
    /* Before the owner is told (for the first time on this connection: first) of a slot's contents:
     * see to it that they get to its inbox of today. *ret_turn: by which turn they are sent; 0:
     * they are there. */
    int (*bring)(struct shd_model *m, struct map_owner *owner, uint32_t slot, bool first,
                 uint64_t *ret_turn, struct shd_err *e);
};

#endif
