/* The hub: one session's connections to all its daemons, and every wait on them.
 *
 * A *link* is one daemon: its side channel (descriptors, liveness) and one DEALER socket
 * (requests). Requests have ascending numbers per link and are matched to replies through a fixed
 * table of *calls*, so that replies may come in any order and nothing is allocated per request.
 *
 * Happy path: hub_ask() packs and sends, hub_poll() receives and hands each reply to its call.
 * A *round* is one request to several links and the wait for all their replies.
 *
 * Failure: a daemon that hangs up or talks nonsense leaves a fault on its link; it is sticky and
 * every later call of the session reports it. Every wait ends by its deadline and says who did
 * not answer what. One thread.
 */
#ifndef SHD_HUB_H
#define SHD_HUB_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <zmq.h>

#include "client/address.h"
#include "proto/wire.h"

#define HUB_CALLS_MAX 120u /* requests outstanding per link; a daemon takes 128 of a session */

struct hub;
struct link;

/* One outstanding request. fn gets every reply, also refusals; reply is valid during the call. */
struct call {
    uint64_t seq; /* 0: free */
    void (*fn)(struct link *link, const struct call *call, const struct wire_reply *reply);
    void *ctx;    /* NULL: nobody waits any more, the reply is dropped */
    uint64_t arg; /* the caller's */
};

struct link {
    struct hub *hub; /* borrowed: its owner */
    uint32_t index;  /* owner index */
    char *device;    /* owned: "cpu0" */
    char *path;      /* owned: of the side socket */
    pid_t pid;
    int side_fd;      /* owned; -1: closed */
    void *dealer;     /* owned ZeroMQ socket, or NULL */
    uint64_t session; /* id the daemon gave us */
    uint64_t seq_last;
    struct call calls[HUB_CALLS_MAX];
    uint32_t call_count;  /* in use */
    struct shd_err fault; /* code 0: none; else why this link is of no use any more */
};

struct hub {
    void *zmq;          /* owned context */
    struct link *links; /* owned, [link_count] */
    uint32_t link_count;
    zmq_pollitem_t *poll_items; /* owned, [2 * link_count]: dealers, then side channels */
    uint8_t *frame;             /* owned, [WIRE_FRAME_BYTES_MAX]: requests are packed here */
    uint8_t *arena_memory;      /* owned, [WIRE_ARENA_BYTES]: replies are unpacked here */
    uint64_t timeout_ns;        /* of each wait */
    uint64_t requests;          /* sent */
};

/* Connect to every daemon at address (not local). name: shown by daemons. Errors as
 * shd_connect(). */
int hub_new(const struct address *address, const char *name, uint64_t timeout_ns,
            struct hub **ret_hub, struct shd_err *e);

/* Say goodbye (Detach, a short wait) and free. NULL is a no-op. */
void hub_free(struct hub *hub);

/* CLOCK_MONOTONIC. */
uint64_t hub_clock_ns(void);

/* The first link's fault, or SHD_OK. */
int hub_check(const struct hub *hub, struct shd_err *e);

/* Take in what has arrived; wait up to timeout_ns (rounded up to ms) for something. Returns
 * hub_check(). */
int hub_poll(struct hub *hub, uint64_t timeout_ns, struct shd_err *e);

/* Send a request; fn(link, call, reply) follows from a later hub_poll(). request's seq and session
 * are filled in. Waits, within the hub's timeout, for room in the table or the socket. */
int hub_ask(struct link *link, struct wire_request *request, const struct call *call,
            struct shd_err *e);

/* Forget whoever waits with this ctx: its replies will be dropped. */
void hub_forget(struct hub *hub, const void *ctx);

/* Exchange a ticket for the descriptor of its segment, checked for kind, size and seals. */
int hub_claim(struct link *link, const struct wire_segment *segment, int *ret_fd,
              struct shd_err *e);

/* A fault of link as an error for its users: "daemon cpu1 (pid 42) at /run/...: <text>". */
int link_err(const struct link *link, int code, struct shd_err *e, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* -- Rounds ----------------------------------------------------------------------------------- */

struct round {
    const char *what;          /* for errors: "Prepare of step 3"; borrowed */
    const char *hint;          /* why an answer may be missing; NULL: none */
    enum wire_reply_type type; /* what an answer must be */
    /* Take an answer of the right type; a status other than SHD_OK ends the round with *e. */
    int (*take)(struct round *round, struct link *link, uint64_t arg,
                const struct wire_reply *reply, struct shd_err *e);
    void *ctx;          /* take's */
    uint32_t waiting;   /* answers still to come */
    struct shd_err err; /* first error; code 0: none */
};

/* Ask one link as part of the round. */
int round_ask(struct round *round, struct link *link, struct wire_request *request, uint64_t arg,
              struct shd_err *e);

/* Wait for all answers and end the round (always call it once anything was asked). asked: the
 * status of the last round_ask(); not SHD_OK: only end it. */
int round_finish(struct round *round, struct hub *hub, int asked, struct shd_err *e);

#endif
