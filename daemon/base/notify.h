/* The service manager's watchdog, fed after each self-probe that came back (loop,
 * kernel queue, and the loop again), and its STATUS= line. Nothing here ever blocks: a manager that
 * does not read loses what it would have been told, but for READY=1. */
#ifndef SHD_NOTIFY_H
#define SHD_NOTIFY_H

#include <stdbool.h>

struct daemon;
struct notify;
struct shd_err;

int notify_new(struct daemon *d, struct notify **ret_notify, struct shd_err *e);
void notify_free(struct daemon *d, struct notify *n); /* NULL is a no-op; the loop is closed */

/* The daemon can be reached: READY=1 is told in the loop, as soon as the manager has room for it.
 */
void notify_ready(struct notify *n);

/* The next two do nothing when n is NULL. */

/* A step went on: say so, once a second at most. */
void notify_step(struct notify *n, bool draining, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* It drains, or does not any more. */
void notify_drain(const struct notify *n, bool draining);

#endif
