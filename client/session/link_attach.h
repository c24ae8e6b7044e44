/* Attaching a link to its daemon, and again to the successor of one that died. */
#ifndef SHD_LINK_ATTACH_H
#define SHD_LINK_ATTACH_H

#include "client/session/link.h"

/* Do what can be done now for a link that is not up, without waiting. */
void link_advance(struct link *link, uint64_t now_ns);

/* It is for more than a look: ask for a ring (link_ring.h), once on each connection. Whether there
 * will be one, and when, makes no difference but in time. */
void link_want_ring(struct link *link);

/* The answer to Hello. */
int link_welcome(struct link *link, const struct wire_reply *reply, struct shd_err *e);

#endif
