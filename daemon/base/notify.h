/* The service manager's watchdog, fed after each self-probe that came back (loop,
 * kernel queue, and the loop again), and its STATUS= line. Nothing here ever blocks: a manager that
 * does not read loses what it would have been told. */
#ifndef SHD_NOTIFY_H
#define SHD_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "daemon/base/task.h"
#include "proto/base/status.h"

struct daemon;

struct notify {
    uv_timer_t timer; /* of the watchdog; runs where one is wanted */
    struct task probe;
    float *scratch;     /* owned, the device's: written by the probe, read by nobody */
    bool probing;       /* the last one has not come back */
    uint64_t status_ns; /* when STATUS= was sent last */
    int fd;             /* owned socket; -1: no manager */
};
int notify_init(struct daemon *d, struct shd_err *e);
void notify_deinit(struct daemon *d);

/* A step went on: say so, once a second at most. */
void notify_step(struct notify *n, bool draining, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* It drains, or does not any more. */
void notify_drain(const struct notify *n, bool draining);

#endif
