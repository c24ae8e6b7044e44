/* Directories of daemons: the private one of a `shardctl run` (rundir), and the one of `shardctl
 * up`, which has a name that people know (updir).
 *
 * The private directory has the sockets of the run's daemons and nothing else. It is made 0700
 * where where_base() says. The run flock()s a file "lock" in it for as long as it lives. So a
 * directory whose lock is free was left by a killed run: rundir_new() removes those beside the new
 * one. The keeper of an `up` has such a directory, too: by it where_find() knows that it goes on.
 *
 * Failure modes: no base directory is usable (the error names each with its reason); the path is
 * too long for a socket address.
 */
#ifndef SHD_CTL_RUNDIR_H
#define SHD_CTL_RUNDIR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/ctl/base/devices.h"
#include "client/ctl/base/say.h"
#include "client/session/address.h"
#include "proto/base/status.h"

/* Longest path that leaves room for a socket's name in sockaddr_un (108 with NUL). */
#define RUNDIR_FILE_BYTES_MAX 24u
#define RUNDIR_PATH_BYTES     (108u - RUNDIR_FILE_BYTES_MAX)

#define NOTIFY_FILE ADDRESS_NOTIFY /* our socket as service manager */

struct rundir {
    char path[RUNDIR_PATH_BYTES];
    int lock_fd; /* owned */
};

/* prefix: WHERE_RUN_PREFIX or WHERE_UP_PREFIX (where.h). Errors: SHD_ENOENT no usable base;
 * SHD_ERANGE path too long; SHD_EIO. */
int rundir_new(const char *prefix, struct rundir *ret_dir, struct shd_err *e);

/* Write down the address at which where_find() finds the daemons: that of devices at path, or any.
 */
void rundir_note_address(const struct rundir *dir, const struct devices *devices, const char *path);
void rundir_note(const struct rundir *dir, const char *address);

/* Check that base is a directory to put sockets in: it is ours, nobody else can write to it, nor
 * put another in its place. A directory of our own below /tmp is fine, for in a directory with the
 * sticky bit nobody else can move it. make: make it (0700) and its parents where they are missing.
 * Errors: SHD_EINVAL, SHD_EAUTH, SHD_EIO. */
int rundir_check(const char *base, bool make, struct shd_err *e);

/* Each directory that a `shardctl run` or `up` of ours has made and not removed, wherever it may
 * be.
 */
void rundir_each(void (*fn)(const char *path, void *arg), void *arg);

/* Remove the directory with everything in it. */
int rundir_remove(struct rundir *dir, struct shd_err *e);

/* -- Of `shardctl up` ---------------------------------------------------------------------------
 */

/* The directory of daemons that stay has their sockets and locks (DEVICE.*), the notify socket and
 * the keeper's log (say.h).
 *
 * Its keeper, one process, has a lock on DIR/up.lock. It is a lock of fcntl(): the kernel names the
 * owner's pid, so that it is never stale, and drops the lock with the process. The file's text is
 * only for messages.
 *
 * A keeper that was killed leaves its files. The next updir_take() removes the sockets that nobody
 * listens at, since the address of a directory means all *.sock in it.
 */
#define UPDIR_LOG     "up.log"
#define UPDIR_LOG_OLD UPDIR_LOG SAY_LOG_OLD

struct updir {
    char path[RUNDIR_PATH_BYTES];  /* absolute */
    int lock_fd;                   /* owned */
    const struct devices *devices; /* borrowed: of its daemons */
    struct rundir record; /* by which where_find() finds it; lock_fd -1: no place for one */
    bool made;            /* by a keeper: it goes with the last one */
};

/* Where `up` is to start daemons when wanted was given (NULL: the default). Errors: SHD_ENOENT no
 * default, SHD_ERANGE. */
int updir_path(const char *wanted, char path[RUNDIR_PATH_BYTES], struct shd_err *e);

/* The directory of the daemons that where_find(given) means. Errors also: SHD_ENOTSUP none, for
 * the owners are inside a process. */
int updir_find(const char *given, char path[RUNDIR_PATH_BYTES], struct shd_err *e);

/* Take path for this process, making it when missing. Errors: SHD_EBUSY kept already, or a daemon
 * runs there; those of rundir_check(). */
int updir_take(const char *path, const struct devices *devices, struct updir *ret_dir,
               struct shd_err *e);

/* Remove what is ours in it, and the directory if it was made for this. keep_log: but its log. */
void updir_release(struct updir *dir, bool keep_log);

/* The process that keeps path, a `shardctl up` or `run`, and how many daemons it has (0 for a run);
 * 0: none; -1: one whose pid has no meaning here (another pid namespace). */
pid_t updir_keeper(const char *path, uint32_t *ret_daemons);

#endif
