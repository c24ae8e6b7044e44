/* Rounds: one request to several links, and the wait for all their replies. */
#ifndef SHD_ROUND_H
#define SHD_ROUND_H

#include "client/session/hub.h"

struct round {
    const char *what;          /* for errors: "Prepare of step 3"; borrowed */
    const char *hint;          /* why an answer may be missing; NULL: none */
    enum wire_reply_type type; /* what an answer must be */
    /* Fill in the request to link, as call.make. */
    int (*make)(struct round *round, struct link *link, uint64_t arg,
                struct wire_request *ret_request, struct shd_err *e);
    /* Take an answer of the right type; a status other than SHD_OK ends the round with *e. May be
     * NULL. */
    int (*take)(struct round *round, struct link *link, uint64_t arg,
                const struct wire_reply *reply, struct shd_err *e);
    void *ctx;          /* make's and take's */
    uint32_t waiting;   /* answers still to come */
    struct shd_err err; /* first error; code 0: none */
};

/* Ask one link as part of the round. */
int round_ask(struct round *round, struct link *link, uint64_t arg, struct shd_err *e);

/* Wait for all answers and end the round (always call it once anything was asked). asked: the
 * status of the last round_ask(); not SHD_OK: only end it. */
int round_finish(struct round *round, struct hub *hub, int asked, struct shd_err *e);

/* As round_finish(), but return as soon as no answer is missing or something was answered. For
 * rounds that ask more as answers come in; end it by round_finish(). */
int round_wait(struct round *round, struct hub *hub, uint64_t start_ns, struct shd_err *e);

#endif
