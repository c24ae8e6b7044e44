/* The hub: one session's connections to all its daemons (link.h), and every wait on them.
 *
 * Happy path: hub_ask() packs and sends, hub_poll() receives and hands each reply to its call.
 *
 * A daemon that dies. Its side channel hangs up and its link goes down. Every hub_poll() then tries
 * to connect anew (link.h): side channel, token, DEALER, Hello, then the session's reopen()
 * function, which opens the models on the successor, then all calls. What is asked meanwhile waits
 * in the table.
 *
 * Failure: a daemon that does not come back within the session's timeout, that refuses us or talks
 * nonsense leaves a fault on its link; it is sticky and every later call of the session reports it.
 * Every wait ends by its deadline and says who did not answer what. A request without an answer is
 * sent again after 2 s under its old number: the daemon knows repeats. One thread.
 */
#ifndef SHD_HUB_H
#define SHD_HUB_H

#include "client/session/address.h"
#include "client/session/link.h"

struct hub_options {
    const char *name;    /* shown by daemons */
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

/* When a wait that began at start_ns has lasted too long. While a daemon is away its own bound
 * counts, and a wait that goes on after its return has the full time again; so it has after this
 * process was stopped (Ctrl-Z). UINT64_MAX where the session is patient: nobody it needs is gone
 * then, only slow, and is named (blame.h). Ask before each short sleep of a wait. */
uint64_t hub_deadline_ns(struct hub *hub, uint64_t start_ns);

/* How long a wait that began at start_ns may sleep now: max_ns at most; 0: its time is over. */
uint64_t hub_left_ns(struct hub *hub, uint64_t start_ns, uint64_t max_ns);

/* A call that was broken off may have left something with the daemons that nobody will take, as
 * tickets for segments: begin all connections anew. */
void hub_renew(struct hub *hub);

/* The first link's fault, or SHD_OK. */
int hub_check(const struct hub *hub, struct shd_err *e);

/* Take in what has arrived; wait up to timeout_ns (rounded up to ms) for something. Looks after
 * links that are down. Returns hub_check(), and in a wait SHD_ECANCELED if it is to be broken off.
 * A poll is part of a wait when it may sleep, or when its deadline was asked for before it. */
int hub_poll(struct hub *hub, uint64_t timeout_ns, struct shd_err *e);

/* Ask: call->make, fn, ctx, arg and step are the caller's; fn(link, call, reply) follows from a
 * later hub_poll(). Waits, within the hub's timeout, for room in the table. Where the link is down
 * the request is sent when it is up again. */
int hub_ask(struct link *link, const struct call *call, struct shd_err *e);

/* Forget whoever waits with this ctx: its replies will be dropped. */
void hub_forget(struct hub *hub, const void *ctx);

/* A round: one request to several links, and the wait for all their replies. */
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
    bool to_the_end;    /* an error ends it once no daemon has a request of it: these make things */
    void *ctx;          /* make's and take's, with the next */
    uint64_t arg;       /* round_ask()'s, of the request at hand */
    uint32_t waiting;   /* answers still to come */
    struct shd_err err; /* first error; code 0: none */
};

/* Ask one link as part of the round. */
int round_ask(struct round *round, struct link *link, uint64_t arg, struct shd_err *e);

/* Ask one link, or every link, once, and wait for the answers: a whole round. */
int round_one(struct round *round, struct link *link, uint64_t arg, struct shd_err *e);
int round_all(struct round *round, struct hub *hub, uint64_t arg, struct shd_err *e);

/* Wait for all answers and end the round (always call it once anything was asked). asked: the
 * status of the last round_ask(); not SHD_OK: only end it. */
int round_finish(struct round *round, struct hub *hub, int asked, struct shd_err *e);

/* As round_finish(), but return as soon as no answer is missing or something was answered. For
 * rounds that ask more as answers come in; end it by round_finish(). */
int round_wait(struct round *round, struct hub *hub, uint64_t start_ns, struct shd_err *e);

#endif
