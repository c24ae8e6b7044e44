/* What this process tells its service manager (sd_notify(3)): datagrams to the socket that
 * NOTIFY_SOCKET names. A manager that is stopped reads none, and the socket is soon full. The calls
 * of libsystemd then wait without end; these wait as long as they are told to. Any thread. */
#ifndef SHD_MANAGER_H
#define SHD_MANAGER_H

#include <stdbool.h>
#include <stdint.h>

bool manager_is_there(void); /* NOTIFY_SOCKET is set */

/* Send text, with a descriptor (fd; -1: none) that stays the caller's, and wait so long for room;
 * 0: not at all. Returns 0, or an errno; EAGAIN: there is no room. Without a manager it is 0. */
int manager_tell(const char *text, int fd, uint64_t wait_us);
int manager_tell_by(int sock, const char *text, int fd, uint64_t wait_us); /* a socket there is */

/* Wait until the manager has read all that was told before; as sd_notify_barrier(3). Returns 0, or
 * an errno; EAGAIN, ETIMEDOUT: it has not, in that time. */
int manager_barrier(uint64_t wait_us);

#endif
