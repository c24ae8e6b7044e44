/* Restoring by some of a model's owners, and looking at what was saved. */
#ifndef SHD_CHECKPOINT_RESTORE_H
#define SHD_CHECKPOINT_RESTORE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/spec/spec.h"

/* What is in the checkpoint: sizes of files, tensors, leaves and digest are checked; without
 * daemons. Errors name the first thing that is not as it was saved. */
struct checkpoint_verified {
    uint64_t step, updates, bytes;
    bool summed; /* shardd.json has a checksum: no bit of it can have changed */
    char digest[65];
    char model[SPEC_NAME_BYTES_MAX];
};
int checkpoint_verify(const char *path, struct checkpoint_verified *ret_verified,
                      struct shd_err *e);

struct hub;

struct restore_as {
    uint64_t id;    /* of the restore, not 0: a model there that knows it is taken for this one */
    bool one_count; /* of updates, as the others have it */
    const uint64_t *beside; /* borrowed, [links]: the instance of its name that each may have open
                             * while it reads, 0: none; NULL: none anywhere */
};

/* Have the daemons of hub open the model of the checkpoint at path, each its own slice, as
 * hub->members.seats says: the others have it already. *ret_step: its step. Errors: as
 * shd_restore(). */
int restore_seats(struct hub *hub, const char *path, const struct restore_as *as,
                  uint64_t *ret_step, struct shd_err *e);

/* Of all daemons of hub, in two: have them read it and keep it aside, as long as this session
 * lasts; and have them open it, once nobody has one of that name, what was lost meanwhile being
 * read again. *ret_step: its step. Errors: as shd_restore(). */
int restore_read(struct hub *hub, const char *path, const struct restore_as *as, uint64_t *ret_step,
                 struct shd_err *e);
int restore_ready(struct hub *hub, const char *path, const struct restore_as *as,
                  uint64_t *ret_step, struct shd_err *e);

#endif
