/* The manager's side of sd_notify: a datagram socket on which daemons say READY=1 and hand over
 * descriptors to keep (FDSTORE=1, FDSTOREREMOVE=1, FDNAME=).
 *
 * Who sent a message is taken from the kernel's credentials, never from its text. BARRIER=1 needs
 * no case of its own: its descriptor is closed with its message, which comes after all before it.
 * Other messages (STATUS=, STOPPING=1, WATCHDOG=1, FDPOLL=0) are read and let go.
 */
#ifndef SHD_CTL_NOTIFY_H
#define SHD_CTL_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/base/status.h"

#define NOTIFY_BYTES_MAX 4096u
#define NOTIFY_FDS_MAX   253u /* what the kernel lets through in one message */

struct notify_message {
    pid_t pid;
    bool ready, store, remove;
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

/* Take one message. 1: *ret_message holds it, end it with notify_close(). 0: one that is of no
 * use. -1: none is waiting. */
int notify_take(int fd, struct notify_message *ret_message);

/* Close the descriptors that nobody took. */
void notify_close(struct notify_message *message);

#endif
