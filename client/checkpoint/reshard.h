/* Giving a model other owners, while it is trained.
 *
 * Happy path: the owners that have it write a checkpoint of a step S, and train on. The others read
 * it and keep it aside, unseen. Then the owners are told where the model will be, and have it held
 * and dropped (daemon/model/drop.h, moved.h): the store by which owner 0 drops it decides. From
 * then on it is at the others as of S, which open it. Workers go along without a restart, and
 * compute again what came after S (client/run/move.h), to the same bits.
 *
 *     owners   … S ───────────────────────▶ S+9   dropped: "moved to cpu0,cpu1,cpu2"
 *     others       read S, keep it aside ─────────────────────────────────────── open ─ S ─▶
 *
 * A daemon that is in both has both for a while: the memory is asked for before anything is
 * decided.
 *
 * Failure: before owner 0's store nothing has changed for anybody, and what was read is given up
 * with this session. After it the move comes to its end: who does it again finds the word at owner
 * 0, and has the others open the model, reading the checkpoint again where that was lost. That is
 * in the directory until all have it. Nothing else but an owner's process may die: a machine that
 * is lost in between takes what it had, as ever. */
#ifndef SHD_CHECKPOINT_RESHARD_H
#define SHD_CHECKPOINT_RESHARD_H

#include <stdint.h>

#include "proto/base/status.h"

struct reshard {
    const char *address; /* of the daemons that have it, in their order */
    const char *to;      /* names of those that are to have it, with commas between them */
    const char *dir;     /* that all of their hosts have, to write to and to read */
    const char *model;   /* NULL: the only one */
    void (*say)(void *ctx, const char *line); /* what it does; may be NULL */
    void *ctx;
};

struct resharded {
    uint64_t step;
    char model[128]; /* its name */
};

/* Errors: SHD_EEXIST they have it; SHD_ENOENT no such model, or daemon; SHD_EMOVED it has moved to
 * others before; SHD_ENOTSUP replicas, GPUs, or a worker that cannot go along, with its name;
 * SHD_EBUSY another one moves or drops it; those of a checkpoint and a restore. */
int reshard_model(const struct reshard *r, struct resharded *ret_resharded, struct shd_err *e);

#endif
