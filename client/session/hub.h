/* The hub: one session's connections to all its daemons, and every wait on them.
 *
 * A *link* is one daemon: its side channel (descriptors, liveness) and one DEALER socket
 * (requests). Requests have ascending numbers per connection and are matched to replies through a
 * fixed table of *calls*, so that replies may come in any order and nothing is allocated per
 * request. A call packs its request by its make() function each time it is sent: handles may have
 * changed since.
 *
 * Happy path: hub_ask() packs and sends, hub_poll() receives and hands each reply to its call.
 * A *round* is one request to several links and the wait for all their replies.
 *
 * A daemon that dies. Its side channel hangs up and the link goes down; its calls stay, marked to
 * be sent again. Every hub_poll() then tries to connect anew (hub_connect.c): side channel, token,
 * DEALER, Hello, then the session's reopen() function, which opens the models on the successor,
 * then all calls. What is asked meanwhile waits in the table.
 *
 * Failure: a daemon that does not come back within the session's timeout, that refuses us or talks
 * nonsense leaves a fault on its link; it is sticky and every later call of the session reports it.
 * Every wait ends by its deadline and says who did not answer what. A request without an answer is
 * sent again after 2 s under its old number: the daemon knows repeats. One thread.
 */
#ifndef SHD_HUB_H
#define SHD_HUB_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include <zmq.h>

#include "client/session/address.h"
#include "proto/wire/wire.h"

#define HUB_CALLS_MAX 120u /* requests outstanding per link; a daemon takes 128 of a session */

struct hub;
struct link;

/* One outstanding request. */
struct call {
    bool used;
    uint64_t seq;     /* on this connection; 0: it is still to be sent, or to be sent again */
    uint64_t sent_ns; /* last time */
    /* Fill in type and body; *ret_request is zeroed. Sends nothing itself. */
    int (*make)(struct link *link, const struct call *call, struct wire_request *ret_request,
                struct shd_err *e);
    /* Gets every reply, also refusals; reply is valid during the call. */
    void (*fn)(struct link *link, const struct call *call, const struct wire_reply *reply);
    void *ctx;          /* NULL: nobody waits any more, the reply is dropped */
    uint64_t arg, step; /* the caller's */
};

enum link_state {
    LINK_DOWN,  /* nobody there: tried again and again */
    LINK_TOKEN, /* side channel is up, its welcome is to come */
    LINK_HELLO, /* DEALER too; the answer to Hello is to come */
    LINK_UP,
};

struct link {
    struct hub *hub; /* borrowed: its owner */
    uint32_t index;  /* owner index */
    char *device;    /* owned: "cpu0" */
    char *path;      /* owned: of the side socket */
    char *endpoint;  /* owned: of the DEALER */
    pid_t pid;
    enum link_state state;
    uint32_t epoch;    /* connections lost: what was learned in an earlier one may not hold */
    bool known;        /* was up once */
    bool proven;       /* has answered something since it came up */
    uint64_t since_ns; /* not up: since then (a short, useless return does not count) */
    time_t since;      /* the same for people */
    uint64_t state_ns; /* this state since then */
    uint64_t retry_at_ns, retry_ns; /* DOWN: the next attempt; the pause after it */
    struct shd_err last;            /* why the last attempt failed */
    int side_fd;                    /* owned; -1: closed */
    void *dealer;                   /* owned ZeroMQ socket, or NULL */
    uint64_t session;               /* id the daemon gave us */
    uint64_t seq_last;
    struct call calls[HUB_CALLS_MAX];
    uint32_t call_count;  /* in use */
    uint32_t unsent;      /* of them: with seq 0 */
    struct shd_err fault; /* code 0: none; else why this link is of no use any more */
};

struct hub {
    void *zmq;          /* owned context */
    struct link *links; /* owned, [link_count] */
    uint32_t link_count;
    uint32_t down_count;        /* links that are not UP */
    char *name;                 /* owned: shown by daemons */
    zmq_pollitem_t *poll_items; /* owned, [2 * link_count]: dealers, then side channels */
    uint8_t *frame;             /* owned, [WIRE_FRAME_BYTES_MAX]: requests are packed here */
    uint8_t *arena_memory;      /* owned, [WIRE_ARENA_BYTES]: replies are unpacked here */
    uint64_t timeout_ns;        /* of each wait */
    uint64_t requests;          /* sent */
    uint64_t back_ns;           /* a link came up last, or this process went on */
    uint64_t looked_ns;         /* hub_deadline_ns() was asked last */
    uint64_t repeat_at_ns;      /* the next look for requests without an answer */
    bool leaving;               /* nothing is connected any more */
    /* A link is up again: open on it what is open (by link_exchange() and hub_claim() only).
     * SHD_EGONE, SHD_ETIMEDOUT, SHD_EBUSY: it is tried again; other errors are final. May be NULL.
     */
    int (*reopen)(void *ctx, struct link *link, struct shd_err *e);
    /* In each hub_poll(): what else belongs to a connection may have broken: link_down(), and all
     * of it is made anew. May be NULL. */
    void (*look)(void *ctx);
    void *reopen_ctx; /* of both */
};

/* Connect to every daemon at address (not local). name: shown by daemons. A daemon that is named
 * but not there yet is waited for, up to 10 s. Errors as shd_connect(). */
int hub_new(const struct address *address, const char *name, uint64_t timeout_ns,
            struct hub **ret_hub, struct shd_err *e);

/* Say goodbye (Detach, a short wait) and free. NULL is a no-op. */
void hub_free(struct hub *hub);

/* When a wait that began at start_ns has lasted too long. While a daemon is away its own bound
 * counts, and a wait that goes on after its return has the full time again; so it has after this
 * process was stopped (Ctrl-Z). Ask before each short sleep of a wait. */
uint64_t hub_deadline_ns(struct hub *hub, uint64_t start_ns);

/* The first link's fault, or SHD_OK. */
int hub_check(const struct hub *hub, struct shd_err *e);

/* Take in what has arrived; wait up to timeout_ns (rounded up to ms) for something. Looks after
 * links that are down. Returns hub_check(). */
int hub_poll(struct hub *hub, uint64_t timeout_ns, struct shd_err *e);

/* Ask: call->make, fn, ctx, arg and step are the caller's; fn(link, call, reply) follows from a
 * later hub_poll(). Waits, within the hub's timeout, for room in the table. Where the link is down
 * the request is sent when it is up again. */
int hub_ask(struct link *link, const struct call *call, struct shd_err *e);

/* Forget whoever waits with this ctx: its replies will be dropped. */
void hub_forget(struct hub *hub, const void *ctx);

/* Exchange a ticket for the descriptor of its segment, checked for kind, size and seals
 * (a GPU's for kind alone).
 * SHD_EGONE: the connection is lost. */
int hub_claim(struct link *link, const struct wire_segment *segment, int *ret_fd,
              struct shd_err *e);

/* A fault of link as an error for its users: "daemon cpu1 (pid 42) at /run/...: <text>". */
int link_err(const struct link *link, int code, struct shd_err *e, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

struct link_ask {
    int (*take)(void *ctx, struct link *link, const struct wire_reply *reply, struct shd_err *e);
    int (*look)(void *ctx, struct link *link, struct shd_err *e); /* is it of any use? or NULL */
    void *ctx;
};

/* For reopen(): ask and wait for the answer, which is taken; nothing else is sent. A refusal is its
 * status, with its text. */
int link_exchange(struct link *link, struct wire_request *request, const struct link_ask *ask,
                  struct shd_err *e);

/* Its daemon has gone, or must be greeted anew: close, mark all calls as to be sent. */
void link_down(struct link *link, const struct shd_err *why);

/* -- Between hub.c and hub_connect.c ----------------------------------------------------------- */

/* Do what can be done now for a link that is not up, without waiting. */
void link_advance(struct link *link, uint64_t now_ns);

/* The answer to Hello. */
int link_welcome(struct link *link, const struct wire_reply *reply, struct shd_err *e);

void link_fault(struct link *link, const struct shd_err *why);

/* Send what is to be sent, as far as the socket takes it. */
int link_flush(struct link *link, struct shd_err *e);

/* Pack and send under the next number. SHD_EBUSY: the pipe is full. */
int link_send(struct link *link, struct wire_request *request, uint64_t seq, struct shd_err *e);

/* -- Rounds ----------------------------------------------------------------------------------- */

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
