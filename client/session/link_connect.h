/* Attaching to a daemon, and again after it died. */
#ifndef SHD_LINK_CONNECT_H
#define SHD_LINK_CONNECT_H

#include "client/session/link.h"

/* Do what can be done now for a link that is not up, without waiting. */
void link_advance(struct link *link, uint64_t now_ns);

/* The answer to Hello. */
int link_welcome(struct link *link, const struct wire_reply *reply, struct shd_err *e);

struct link_ask {
    int (*take)(void *ctx, struct link *link, const struct wire_reply *reply, struct shd_err *e);
    int (*look)(void *ctx, struct link *link, struct shd_err *e); /* is it of any use? or NULL */
    void *ctx;
};

/* For reopen(): ask and wait for the answer, which is taken; nothing else is sent. A refusal is its
 * status, with its text. */
int link_exchange(struct link *link, struct wire_request *request, const struct link_ask *ask,
                  struct shd_err *e);

#endif
