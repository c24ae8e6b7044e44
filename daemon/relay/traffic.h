/* What has crossed between this host and others, by host and model, for the relay's /status. Any
 * thread; counts are as old as the relay's process. */
#ifndef SHD_RELAY_TRAFFIC_H
#define SHD_RELAY_TRAFFIC_H

#include <stdint.h>

struct bulk_count;
struct relay;
struct traffic; /* of a host, and perhaps of a model; lives as long as the relay */

enum traffic_live {
    TRAFFIC_SESSIONS, /* of workers here, at daemons there */
    TRAFFIC_SERVED,   /* of workers there, at daemons here */
    TRAFFIC_MIRRORS,  /* of daemons there, here */
    TRAFFIC_FED,      /* of daemons here, there */
    TRAFFIC_LIVE,
};

enum traffic_bytes {
    TRAFFIC_PARAMETERS_IN,
    TRAFFIC_PARAMETERS_OUT,
    TRAFFIC_GRADIENTS_IN,
    TRAFFIC_GRADIENTS_OUT,
    TRAFFIC_BYTES,
};

/* model "": of the host in all. NULL: there are too many, or no memory; then nothing is counted. */
struct traffic *traffic_of(struct relay *relay, const char *host, const char *model);

/* No-ops where t is NULL. by: 1 or -1. */
void traffic_count(struct traffic *t, enum traffic_live what, int by);
void traffic_add(struct traffic *t, enum traffic_bytes what, uint64_t bytes);

/* For bulk_set_count(): of all frames. NULL where t is. */
struct bulk_count *traffic_frames(struct traffic *t);

/* The counts of a host, or of a model of it; the relay's lock is held. t: NULL: the first. */
struct traffic_view {
    const char *host, *model; /* borrowed */
    uint32_t live[TRAFFIC_LIVE];
    uint64_t bytes[TRAFFIC_BYTES], in, out;
};
struct traffic *traffic_next(const struct relay *relay, const struct traffic *t,
                             struct traffic_view *ret_view);

#endif
