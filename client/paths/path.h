/* A data path: how parameters get to the worker and gradients back. One fully filled table per
 * path; the public functions (session.c, model.c, train.c) do what all paths have in common, such
 * as checking arguments and keeping the slots, and call down here for the rest.
 */
#ifndef SHD_PATH_H
#define SHD_PATH_H

#include <stdint.h>

#include "client/paths/decide.h"
#include "client/paths/digest.h"
#include "client/session/session.h"

struct path_return {
    uint32_t group, unit;
    struct grad_slot *slot; /* SLOT_HELD; NULL: the unit took no part */
};

struct path_ops {
    const char *name;
    enum shd_path kind; /* as shd_path() reports it */

    /* Daemons behind the session. */
    uint32_t (*owners)(const struct shd_session *s);
    /* Let go of the daemons; models are closed already. */
    void (*disconnect)(struct shd_session *s);
    int (*status)(struct shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e);

    /* Open (m->spec is set) or attach to `name` (m->spec is NULL: set it by model_set_spec()).
     * Sets m->step. After a failure close() is called. */
    int (*open)(struct shd_model *m, const char *name, struct shd_err *e);
    void (*close)(struct shd_model *m);
    /* Make m->slot_count gradient slots. Called once, before the first is used. */
    int (*open_slots)(struct shd_model *m, struct shd_err *e);

    /* Units are fetched once, waited for any number of times, let go once (hold.c sees to that).
     * fetch() asks for unit at m->step and does not wait; SHD_EBUSY: no room for it. */
    int (*fetch)(struct shd_model *m, uint32_t unit, struct shd_err *e);
    /* Wait until it can be read. After an error it is still fetched. */
    int (*wait_unit)(struct shd_model *m, uint32_t unit, struct shd_err *e);
    void (*let_go)(struct shd_model *m, uint32_t unit);
    /* Its array, once waited for. */
    const void *(*params)(const struct shd_model *m, uint32_t unit);
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

    /* Wait for all micro-batches, decide, commit m->step. The caller moves m->step on. */
    int (*commit)(struct shd_model *m, const struct shd_update *update, struct decided *ret_decided,
                  struct shd_err *e);
    /* The step is over, and nothing else is known: set m->step to the owners' open step, and the
     * decision before it. */
    int (*catch_up)(struct shd_model *m, struct shd_err *e);
    /* Ask an owner what to do for m->step, and wait for the answer. NULL: there is nobody else. */
    int (*lease)(struct shd_model *m, uint32_t owner, struct wire_leased *ret_leased,
                 struct shd_err *e);
    int (*blob)(struct shd_model *m, void *buf, size_t capacity, size_t *ret_bytes,
                struct shd_err *e);
    /* digest_leaves_fn with the model as ctx. */
    int (*leaves)(void *ctx, const struct digest_part *part, uint8_t (*ret_leaves)[32],
                  struct digest_stamp *stamp, struct shd_err *e);
};

extern const struct path_ops path_map;   /* daemons on this host: read and written in place */
extern const struct path_ops path_copy;  /* the same daemons, through slots of this process */
extern const struct path_ops path_nccl;  /* from and to other GPUs by NCCL, else as path_copy */
extern const struct path_ops path_local; /* owners inside this process */

/* What decide() takes for this update. */
struct decide_args model_decide_args(const struct shd_model *m, const struct shd_update *update,
                                     const struct wire_prepared *prepared, uint32_t owners);

#endif
