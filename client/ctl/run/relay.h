/* Copies the output of children to our stderr, a line at a time, each behind its child's prefix.
 *
 * A line goes out in one write of at most PIPE_BUF bytes, so lines of several writers stay whole;
 * longer lines are cut into several. When stderr takes no more, the children's pipes are left
 * alone until it does: they wait, we do not (signals are still served).
 *
 * Happy path: relay_open() per child, its pipe's write end goes to the child, relay_close() when
 * it has exited. A process that outlives its child and keeps the pipe is not waited for.
 */
#ifndef SHD_CTL_RELAY_H
#define SHD_CTL_RELAY_H

#include <stdbool.h>
#include <stddef.h>
#include <uv.h>

#include "proto/base/status.h"

#define RELAY_PREFIX_BYTES   24u
#define RELAY_LINE_BYTES_MAX (4096u - RELAY_PREFIX_BYTES - 1u)
#define RELAY_LAST_BYTES     120u

struct relay {
    uv_poll_t poll;
    uv_timer_t retry; /* runs while stderr is full */
    int fd;           /* owned read end; -1: not open */
    unsigned handles; /* that the loop still knows: see relay_idle() */
    size_t used;
    char prefix[RELAY_PREFIX_BYTES]; /* "[rank 1] " */
    char last[RELAY_LAST_BYTES];     /* the latest line, for error messages */
    char buf[RELAY_LINE_BYTES_MAX];
};

/* Start relaying; name is put in brackets. *ret_write_fd is the caller's to give and close. The
 * relay must be idle, and stays where it is in memory until it is so again.
 * Errors: SHD_ENOMEM, SHD_EIO. */
int relay_open(struct relay *relay, uv_loop_t *loop, const char *name, int *ret_write_fd,
               struct shd_err *e);

/* Relay what is in the pipe now, then close. No-op when not open. */
void relay_close(struct relay *relay);

/* True when it was never opened (zeroed, fd -1) or the loop has let go of it after its close. */
bool relay_idle(const struct relay *relay);

#endif
