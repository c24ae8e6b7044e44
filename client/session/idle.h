/* Breaking off waits: shd_options.idle, asked again and again on the thread that waits.
 *
 * Who waits calls idle_stops() before each short sleep. Once it said true it stays so until the
 * wait's error is made, by idle_take(): what is deep inside a wait need only come to an end.
 */
#ifndef SHD_IDLE_H
#define SHD_IDLE_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/clock.h"
#include "proto/base/status.h"

#define IDLE_NS (50 * NS_PER_MS) /* between two calls of it; no sleep of a wait is longer */

struct idle {
    int (*fn)(void *ctx); /* NULL: nothing breaks a wait off */
    void *ctx;
    uint64_t asked_ns; /* last; 0: a signal came, ask at once */
    bool stops;
};

/* Is the wait to be broken off? Asks if it is time to. */
bool idle_stops(struct idle *idle);

/* How long a wait may sleep that would sleep for sleep_ns. */
uint64_t idle_sleep_ns(const struct idle *idle, uint64_t sleep_ns);

/* SHD_ECANCELED, once, when it stops; else SHD_OK. */
int idle_take(struct idle *idle, struct shd_err *e);

#endif
