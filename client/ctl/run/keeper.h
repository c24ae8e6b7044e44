/* The manager's side of sd_notify: what daemons tell us, and the open files they hand us to keep.
 */
#ifndef SHD_CTL_KEEPER_H
#define SHD_CTL_KEEPER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/base/status.h"

/* A datagram socket on which daemons say READY=1 and hand over
 * descriptors to keep (FDSTORE=1, FDSTOREREMOVE=1, FDNAME=).
 *
 * The kernel's credentials name the sender of a message; its text never does. BARRIER=1 needs
 * no case of its own: its descriptor is closed with its message, which comes after all before it.
 * Other messages (STATUS=, STOPPING=1, FDPOLL=0) are read and let go.
 */
#define NOTIFY_BYTES_MAX 4096u
#define NOTIFY_FDS_MAX   253u /* what the kernel lets through in one message */

struct notify_message {
    pid_t pid;
    bool ready, store, remove;
    bool alive;       /* WATCHDOG=1: it is well */
    bool drained;     /* it ends because it was told to go out of service */
    uint64_t more_us; /* EXTEND_TIMEOUT_USEC: it works, and is not ready yet; 0: did not say */
    bool fds_lost;    /* some did not arrive: our limit of open files */
    const char *name; /* FDNAME, inside text; NULL: none given */
    uint32_t fd_count;
    int fds[NOTIFY_FDS_MAX]; /* owned; -1: taken */
    char text[NOTIFY_BYTES_MAX + 1];
};

/* Bind dir/notify. Non-blocking, CLOEXEC. Errors: SHD_ERANGE path too long, SHD_EIO. */
int notify_listen(const char *dir, int *ret_fd, struct shd_err *e);

/* What notify_take() returns. */
enum notify_result {
    NOTIFY_USELESS, /* it took one that says nothing */
    NOTIFY_TAKEN,   /* *ret_message holds one: end it with notify_close() */
    NOTIFY_NONE,    /* none is waiting */
    NOTIFY_LATER,   /* one is, and we lack the descriptors for those in it */
};

/* Take one message. lossy: also one whose descriptors are lost thereby, which fds_lost says. Else
 * it stays where it is: its sender waits until we have it. */
enum notify_result notify_take(int fd, bool lossy, struct notify_message *ret_message);

/* Close the descriptors that nobody took. */
void notify_close(struct notify_message *message);

/* The open files that a daemon stored with us, its service manager, and gets back when it is
 * started again: by name, as systemd's fd store has them (sd_notify(3), FDSTORE=1).
 *
 * Several may have one name; removing a name removes all of them. The same file stored again under
 * the same name counts once, so that a daemon may store what it was handed back. All limits are
 * per daemon. FDPOLL is taken as 0: nothing is removed but by the daemon.
 */
#define KEPT_FDS_MAX        4096u
#define KEPT_NAME_BYTES_MAX 255u
/* All names with their separators: they travel in one environment variable, which Linux limits to
 * 128 KiB. */
#define KEPT_NAMES_BYTES_MAX (127u * 1024u)

struct kept {
    int *fds;     /* owned, [count], each owned; NULL: none yet */
    char **names; /* owned, [count], each owned */
    uint32_t count;
    size_t names_bytes;
};

/* Do what a message of the daemon asks: keep its descriptors or drop a name. What is refused is
 * said on stderr, naming the daemon, and closed with the message. */
void keeper_take(struct kept *kept, struct notify_message *message, const char *daemon);

/* The names in order, separated by ':'. *ret_names is the caller's to free. Errors: SHD_ENOMEM. */
int keeper_names(const struct kept *kept, char **ret_names, struct shd_err *e);

/* Close all; leaves it empty. */
void keeper_free(struct kept *kept);

#endif
