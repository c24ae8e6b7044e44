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
#ifndef SHD_CLIENT_CHECKPOINT_H
#define SHD_CLIENT_CHECKPOINT_H

#include "client/session/session.h"

struct save;

void save_free(struct save *s); /* breaks it off; NULL is a no-op */

/* The step that the furthest of the model's owners is at, now. On daemons only. */
uint64_t save_step(const struct shd_model *m);

/* -- Looking at what was saved ------------------------------------------------------------------
 */

/* What is in the checkpoint: sizes of files, tensors, leaves and digest are checked; without
 * daemons. Errors name the first thing that is not as it was saved. */
struct checkpoint_verified {
    uint64_t step, updates, bytes;
    char digest[65];
    char model[SPEC_NAME_BYTES_MAX];
};
int checkpoint_verify(const char *path, struct checkpoint_verified *ret_verified,
                      struct shd_err *e);

#endif
