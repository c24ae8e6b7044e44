/* A session's connections: all of them made, and left in good order. */
#ifndef SHD_HUB_OPEN_H
#define SHD_HUB_OPEN_H

#include "client/session/address.h"
#include "client/session/hub.h"

struct hub_options {
    const char *name; /* shown by daemons */
    enum wire_role role;
    uint64_t timeout_ns; /* of each wait */
    bool patient;        /* hub.patient */
    struct idle idle;
    struct event_sink events;
};

/* Connect to every daemon at address (not local). A daemon that is named but not there yet is
 * waited for: as long as timeout_ns says; if patient up to 10 s where its process does not live,
 * and without end where it was there, and its keeper is. Errors as shd_connect(). */
int hub_new(const struct address *address, const struct hub_options *options, struct hub **ret_hub,
            struct shd_err *e);

/* Say goodbye (Detach, a short wait) and free. NULL is a no-op. */
void hub_free(struct hub *hub);

#endif
