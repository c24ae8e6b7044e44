/* Filling one model of a host that comes back (refill.h). */
#ifndef SHD_CHECKPOINT_REFILL_MODEL_H
#define SHD_CHECKPOINT_REFILL_MODEL_H

#include <stdint.h>

#include "client/session/session.h"
#include "proto/base/status.h"
#include "proto/spec/layout.h"
#include "proto/spec/settings.h"

struct hub;

struct refill_model {
    struct refill_model *next;
    struct shd_model *model;          /* borrowed: at the others */
    struct hub *there;                /* borrowed: the host's daemons, with seats */
    uint64_t step;                    /* that is saved, and kept by all */
    uint64_t known, consent;          /* of the rewind: as struct rewind_ask has them */
    bool keep_settings;               /* the same, from the first hold on */
    uint32_t handles[SHD_OWNERS_MAX]; /* of the model, at each link of `there` */
    struct settings_kept was;         /* when all went back: */
    uint64_t puts;
};

/* Keep a snapshot of some step at the others, which stays until the rewind, and write a checkpoint
 * of the same into path, for which both are asked ahead. Errors: SHD_ETIMEDOUT the step that was to
 * come does not. */
int refill_model_save(struct refill_model *m, const char *path, struct shd_err *e);

/* Have the host restore it, and keep a snapshot, too. */
int refill_model_restore(struct refill_model *m, const char *path, struct shd_err *e);

/* Have all of them go back to it, once the view is claimed. Errors: SHD_ESTEP somebody has rewound
 * the model to an earlier step, or does. */
int refill_model_go_back(struct refill_model *m, struct shd_err *e);

/* Behind that: what snapshots are kept by themselves is told the host anew. What was set while the
 * host was filled is there; *ret_lost: a daemon is of an older build, and it went with the steps.
 */
int refill_model_settle(struct refill_model *m, bool *ret_lost, struct shd_err *e);

/* Values that were put meanwhile went, too, and nobody has put any since. */
bool refill_model_lost_puts(const struct refill_model *m);

#endif
