/* A round: one request to several links, and the wait for all their replies. */
#ifndef SHD_ROUND_H
#define SHD_ROUND_H

#include "client/session/hub.h"

struct spec_out;

struct round {
    const char *what; /* for errors: "Prepare of step 3"; borrowed */
    const char *hint; /* why an answer may be missing; NULL: none */
    enum wire_request_type asks;
    enum wire_reply_type type; /* what an answer must be */
    /* Fill in the body of the request to link, as often as it is sent. NULL: it has none. */
    void (*make)(const struct round *round, const struct link *link,
                 struct wire_request *ret_request);
    /* Take an answer of the right type; a status other than SHD_OK ends the round with *e. May be
     * NULL. */
    int (*take)(const struct round *round, const struct link *link, const struct wire_reply *reply,
                struct shd_err *e);
    const struct spec_out *spec; /* what it names, brought along each time; NULL: none */
    const struct shd_err *fault; /* NULL, or what ends a wait once it is set; borrowed */
    /* Between polls of a wait, which ends by an error. May be NULL. */
    int (*look)(const struct round *round, struct shd_err *e);
    bool replicated; /* replicas are asked the same; else an owner's, that takes over, is asked anew
                      */
    bool follows; /* with that: who asks follows what is lost; else it is an error of the round */
    bool to_the_end;    /* an error ends it once no daemon has a request of it: these make things.
                         * Who is silent for a second after it is hung up on, and does nothing for
                         * a session that has ended */
    bool lets_go;       /* of these, what a busy daemon is to be asked again counts as well */
    void *ctx;          /* make's, take's and look's, with the next */
    uint64_t arg;       /* round_ask()'s, of the request at hand */
    uint32_t waiting;   /* answers still to come */
    struct shd_err err; /* first error; code 0: none */
    uint64_t err_ns;    /* since then */
};

/* Ask one link as part of the round. */
int round_ask(struct round *round, struct link *link, uint64_t arg, struct shd_err *e);

/* Ask one link, or every link, once, and wait for the answers: a whole round. */
int round_one(struct round *round, struct link *link, uint64_t arg, struct shd_err *e);
int round_all(struct round *round, struct hub *hub, uint64_t arg, struct shd_err *e);

/* Answers that are missing are not wanted any more; the round may go on with others. */
void round_forget(struct round *round, struct hub *hub);

/* Ask every link to let go of something, which ends with the session as well: those that are silent
 * for a second are hung up on. */
void round_let_go(struct round *round, struct hub *hub);

/* Wait for all answers and end the round (always call it once anything was asked). asked: the
 * status of the last round_ask(); not SHD_OK: only end it. */
int round_finish(struct round *round, struct hub *hub, int asked, struct shd_err *e);

/* As round_finish(), but return as soon as no answer is missing or something was answered. For
 * rounds that ask more as answers come in; end it by round_finish(). */
int round_wait(struct round *round, struct hub *hub, uint64_t start_ns, struct shd_err *e);

#endif
