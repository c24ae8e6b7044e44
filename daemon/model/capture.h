/* Captures, and pages: those that copy a model's arrays as of one step before the next one changes
 * them: a checkpoint that is being written (checkpoint.h), readers' pins (pin.h), snapshots
 * (snapshots.h). What happens to the model is told to all of them here. Loop thread. */
#ifndef SHD_CAPTURE_H
#define SHD_CAPTURE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct model;
struct session;

/* unit is about to be updated: capture what is left of it. Errors: SHD_EBUSY, the kernel queue is
 * full: not yet. */
int capture_before_update(struct model *m, uint32_t unit, struct shd_err *e);

/* A kernel that works on a unit is about to be queued (updates: it is updated; all: it touches more
 * than its gradients' sum): capture what is left of it, and have its pages (paging.h).
 * capture_worked() follows when the kernel is done (over: the unit was updated), or was not queued.
 * Errors: SHD_EBUSY: not yet; kernel_room() comes. */
int capture_before_work(struct model *m, uint32_t unit, bool updates, bool all, struct shd_err *e);
void capture_worked(struct model *m, uint32_t unit, bool all, bool over);

/* A unit's new parameters are published: of those on a file what was changed is written. */
void capture_published(struct model *m, uint32_t unit);

/* The model's phase has changed. */
void capture_moved(struct model *m);

/* Go on when the kernel queue may have room again. */
void capture_retry(struct model *m);

void capture_forget_session(struct model *m, const struct session *s);

/* Nothing is captured, and nobody has what was. */
bool capture_is_idle(const struct model *m);

/* At shutdown, or when it is idle: when no work runs any more. */
void capture_free(struct model *m);

#endif
