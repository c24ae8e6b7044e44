/* The directory of daemons that stay (`shardctl up`): who keeps it, and what is in it.
 *
 * A lock on DIR/up.lock says that it is kept, and by which process: fcntl's kind, which the kernel
 * answers with the owner's pid (so that one is never stale) and drops with the process. The file's
 * text is only for messages. Below it are the sockets and locks of the daemons (DEVICE.*), the
 * notify socket and the keeper's log (say.h).
 *
 * A keeper that was killed leaves its files: the next updir_take() removes the sockets, since all
 * *.sock in a directory are what its address means.
 */
#ifndef SHD_CTL_UPDIR_H
#define SHD_CTL_UPDIR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/ctl/base/devices.h"
#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "proto/base/status.h"

#define UPDIR_LOG     "up.log"
#define UPDIR_LOG_OLD UPDIR_LOG SAY_LOG_OLD

struct updir {
    char path[RUNDIR_PATH_BYTES];  /* absolute */
    int lock_fd;                   /* owned */
    const struct devices *devices; /* borrowed: of its daemons */
    bool made;                     /* by a keeper: it goes with the last one */
};

/* The directory meant by wanted (NULL: the default). Errors: SHD_ENOENT no default, SHD_ERANGE. */
int updir_path(const char *wanted, char path[RUNDIR_PATH_BYTES], struct shd_err *e);

/* Take path for this process, making it when missing. Errors: SHD_EBUSY kept already, or a daemon
 * runs there; those of rundir_check(). */
int updir_take(const char *path, const struct devices *devices, struct updir *ret_dir,
               struct shd_err *e);

/* Remove what is ours in it, and the directory if it was made for this. keep_log: but its log. */
void updir_release(struct updir *dir, bool keep_log);

/* The process that keeps path, and how many daemons it has; 0: none; -1: one whose pid has no
 * meaning here (another pid namespace). */
pid_t updir_keeper(const char *path, uint32_t *ret_daemons);

#endif
