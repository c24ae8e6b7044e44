/* Connecting to all daemons of a session, and leaving them. */
#ifndef SHD_HUB_OPEN_H
#define SHD_HUB_OPEN_H

#include "client/session/address.h"
#include "client/session/hub.h"

/* Connect to every daemon at address (not local). name: shown by daemons. A daemon that is named
 * but not there yet is waited for, up to 10 s. Errors as shd_connect(). */
int hub_new(const struct address *address, const char *name, uint64_t timeout_ns,
            struct hub **ret_hub, struct shd_err *e);

/* Say goodbye (Detach, a short wait) and free. NULL is a no-op. */
void hub_free(struct hub *hub);

#endif
