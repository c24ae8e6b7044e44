/* The private directory of one `shardctl run`: its daemons' sockets and nothing else. (That of
 * `shardctl up`, which has a name that people know, is updir.h.)
 *
 * Made 0700 under $XDG_RUNTIME_DIR, else under /run (root), else under ~/.cache/shardd; never
 * under a directory that others may write to (/tmp). A file "lock" in it is flock()ed for as long
 * as its owner lives, so a directory whose lock can be had is a leftover of a killed run:
 * rundir_new() removes those beside the new one.
 *
 * Failure modes: no base directory is usable (the error names each with its reason); the path is
 * too long for a socket address.
 */
#ifndef SHD_CTL_RUNDIR_H
#define SHD_CTL_RUNDIR_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

/* Longest path that leaves room for a socket's name in sockaddr_un (108 with NUL). */
#define RUNDIR_FILE_BYTES_MAX 24u
#define RUNDIR_PATH_BYTES     (108u - RUNDIR_FILE_BYTES_MAX)

#define NOTIFY_FILE "notify" /* our socket as service manager; not *.sock: those are daemons */

struct rundir {
    char path[RUNDIR_PATH_BYTES];
    int lock_fd; /* owned */
};

/* Errors: SHD_ENOENT no usable base; SHD_ERANGE path too long; SHD_EIO. */
int rundir_new(struct rundir *ret_dir, struct shd_err *e);

/* The directories of our `shardctl run`s that go on, where rundir_new() would make one: at most
 * max; returns how many there are. */
uint32_t rundir_live(char (*ret_paths)[RUNDIR_PATH_BYTES], uint32_t max);

/* Whether base, a directory, is one to put sockets in: ours, nobody else can write to it or to what
 * it is in (/tmp). make: make it (0700) and its parents where they are missing.
 * Errors: SHD_EINVAL, SHD_EAUTH, SHD_EIO. */
int rundir_check(const char *base, bool make, struct shd_err *e);

/* Remove the directory with everything in it. */
int rundir_remove(struct rundir *dir, struct shd_err *e);

#endif
