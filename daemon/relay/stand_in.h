/* The relay in a daemon's stead: a worker's session.
 *
 * The worker attaches as to the daemon: its side channel comes first (stand_in_side), which dials
 * the other host and gets the daemon's welcome; then its connection of requests, whose Hello has
 * the token of that welcome (stand_in_requests) and from then on the session. */
#ifndef SHD_RELAY_STAND_IN_H
#define SHD_RELAY_STAND_IN_H

#include <stdint.h>

struct relay;

struct stand_in_door { /* of a heap; the thread frees it */
    int fd;            /* owned: accepted */
    char device[64];
    const char *host; /* that has it; lives as long as the relay */
};

/* Threads; arg: a struct stand_in_door. */
void stand_in_side(struct relay *relay, void *arg);
void stand_in_requests(struct relay *relay, void *arg);

/* End sessions whose worker has said no Hello for 5 s. */
void stand_in_sweep(struct relay *relay);

#endif
