/* Saving a model: the coordinator's side. See shd.h for what it promises, docs/checkpoints.md for
 * the format.
 *
 * Happy path: lock the directory, make all files, ask every owner for its part of one step, the
 * furthest one of all owners; when all have answered compute the digest, write shardd.json, give
 * the directory its name. An owner whose step has moved on meanwhile says so: then all are asked
 * for a step a little ahead of the furthest, further each time. A step ahead that nobody reaches is
 * given up for the one that is open.
 *
 * Replies come in whenever the hub is polled; everything else is done by save_advance().
 */
#ifndef SHD_CHECKPOINT_SAVE_H
#define SHD_CHECKPOINT_SAVE_H

#include "client/session/session.h"

struct save;

void save_free(struct save *s); /* breaks it off; NULL is a no-op */

/* The step that the furthest of the model's owners is at, now. On daemons only. */
uint64_t save_step(const struct shd_model *m);

#endif
