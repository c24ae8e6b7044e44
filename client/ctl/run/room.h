/* Whether the directory of --checkpoint can be saved in, asked before there is anything to lose. */
#ifndef SHD_CTL_ROOM_H
#define SHD_CTL_ROOM_H

#include "client/ctl/run/run_state.h"

/* Write some bytes there as a save does, and remove them; the directory is made when missing. Does
 * nothing without options->checkpoint. Errors: SHD_EBUSY another process saves there, SHD_EIO,
 * SHD_ENOENT, SHD_EAUTH, SHD_ERANGE. */
int room_probe(const struct run_options *options, struct shd_err *e);

/* A daemon has stored something under this name (NULL: none). While that is a part of the run's
 * first model, which has not trained: SHD_ENOMEM when a checkpoint of what is kept certainly has no
 * room there. One that may have none is said. Later daemons store other things, and a disk that is
 * full by then ends nothing. */
int room_check(struct run *r, const char *name, struct shd_err *e);

#endif
