/* The manager's side of sd_notify: a datagram socket on which daemons say READY=1.
 *
 * Who sent a message is taken from the kernel's credentials, never from its text. Messages other
 * than READY=1 are read and let go; descriptors that come along are closed.
 */
#ifndef SHD_CTL_NOTIFY_H
#define SHD_CTL_NOTIFY_H

#include <sys/types.h>

#include "proto/status.h"

#define NOTIFY_FILE "notify" /* not *.sock: those are daemons */

/* Bind dir/notify. Non-blocking, CLOEXEC. Errors: SHD_ERANGE path too long, SHD_EIO. */
int notify_listen(const char *dir, int *ret_fd, struct shd_err *e);

/* Take one message. 1: *ret_pid said READY=1. 0: some other message. -1: none is waiting. */
int notify_take(int fd, pid_t *ret_pid);

#endif
