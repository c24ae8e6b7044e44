/* A directory of checkpoints: who may write to it, what is complete in it, and how something new
 * becomes complete.
 *
 *   DIR/step-000000000100/   complete; a directory gets this name when everything in it is on disk
 *   DIR/LATEST               the name of the one saved last, and a newline
 *   DIR/.step-PID.partial/   being written, or left by one who died
 *   DIR/.step-000000000100.old/  being replaced, where the file system cannot exchange two names
 *   DIR/.lock                flock()ed by the one process that saves
 */
#ifndef SHD_CHECKPOINT_DIR_H
#define SHD_CHECKPOINT_DIR_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/base/status.h"

#define CHECKPOINT_NAME_BYTES 32u                /* "step-000000000100", with NUL */
#define CHECKPOINT_PARTIAL    ".step-%d.partial" /* of the process that saves */

struct checkpoint_dir {
    char *path;                          /* owned: absolute, no symbolic links */
    int fd;                              /* owned */
    int lock_fd;                         /* owned; -1: only looked at */
    uid_t uid;                           /* checkpoint_dir_lock()'s */
    char partial[CHECKPOINT_NAME_BYTES]; /* "": none */
    int partial_fd;                      /* owned; -1: none */
};

#define CHECKPOINT_DIR_CLOSED \
    ((struct checkpoint_dir){ .fd = -1, .lock_fd = -1, .uid = (uid_t)-1, .partial_fd = -1 })

/* Give what we have just made to its owner; (uid_t)-1: it stays ours. fd must be of our own making:
 * in a directory of another user a name may be a link to anything. */
int checkpoint_give(int fd, uid_t uid, const char *name, struct shd_err *e);

/* A new file of so many bytes, which are not written yet, given to uid. Errors: SHD_EIO. */
int checkpoint_create(int dir_fd, const char *name, uint64_t bytes, uid_t uid, int *ret_fd,
                      struct shd_err *e);

/* The same with a text in it, synced. */
int checkpoint_write(int dir_fd, const char *name, const char *text, uid_t uid, struct shd_err *e);

/* Open DIR to save in: made when missing, locked; what dead savers left is removed. uid: whose all
 * that is made here and by the calls below is to be, because they write and read it ((uid_t)-1:
 * ours). Errors: SHD_EBUSY another process saves there; SHD_EIO, SHD_ENOENT. */
int checkpoint_dir_lock(struct checkpoint_dir *d, const char *path, uid_t uid, struct shd_err *e);

/* Make an empty partial one. */
int checkpoint_dir_begin(struct checkpoint_dir *d, struct shd_err *e);

/* Everything in the partial one is on disk: give it its name, point LATEST to it. */
int checkpoint_dir_publish(struct checkpoint_dir *d, uint64_t step,
                           char ret_name[CHECKPOINT_NAME_BYTES], struct shd_err *e);

/* Remove complete ones, the oldest first, until `keep` are left; never the latest. */
int checkpoint_dir_retain(const struct checkpoint_dir *d, uint32_t keep, struct shd_err *e);

/* A partial one goes; unlock, close. */
void checkpoint_dir_close(struct checkpoint_dir *d);

/* -- Looking ----------------------------------------------------------------------------------- */

struct checkpoint_entry {
    char name[CHECKPOINT_NAME_BYTES];
    uint64_t step;
    int64_t saved_ns; /* modification time of shardd.json */
};

/* Complete ones, the oldest first; *ret_entries is the caller's to free. */
int checkpoint_dir_list(int fd, struct checkpoint_entry **ret_entries, uint32_t *ret_count,
                        struct shd_err *e);

/* What LATEST says. SHD_ENOENT: there is none; SHD_EINVAL: it says nothing sensible. */
int checkpoint_dir_latest(int fd, char ret_name[CHECKPOINT_NAME_BYTES], struct shd_err *e);

/* The one to go on from: what LATEST says, unless a saver completed a later step and died before it
 * wrote LATEST. Errors as checkpoint_dir_latest(). */
int checkpoint_dir_newest(int fd, char ret_name[CHECKPOINT_NAME_BYTES], struct shd_err *e);

/* SHD_EEXIST when the directory, of that path, holds later steps than the one a model is at:
 * whoever saves there would mix two runs, and --keep remove the older one's. */
int checkpoint_dir_check_begin(int fd, const char *path, uint64_t step, struct shd_err *e);

/* The checkpoint that path means: itself, or the latest in it. *ret_path is the caller's to free.
 */
int checkpoint_dir_resolve(const char *path, char **ret_path, struct shd_err *e);

#endif
