/* A link: one daemon, with its side channel (descriptors, liveness), its DEALER socket and its ring
 * (requests, by either).
 *
 * Requests have ascending numbers per connection and are matched to replies through a fixed table
 * of *calls*, so that replies may come in any order and nothing is allocated per request. A call
 * packs its request by its make() function each time it is sent: handles may have changed since.
 *
 * A daemon that dies: the link goes down, and its calls stay, marked to be sent again. hub.h looks
 * after all links of a session and has those that are down connected anew.
 *
 * A replica holds the same slice as an owner: links owner_count + i and i. A daemon whose host is
 * out (replicas.h) is gone for good. A replica that is gone is asked nothing more; an owner's place
 * is taken by its replica, with its connection.
 *
 * Failure: a fault is sticky: the link is of no use any more. One thread.
 */
#ifndef SHD_LINK_H
#define SHD_LINK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include <zmq.h>

#include "client/session/event.h"
#include "client/session/idle.h"
#include "client/session/link_ring.h"
#include "proto/spec/layout.h"
#include "proto/wire/wire.h"

#define HUB_CALLS_MAX 120u /* requests outstanding per link; a daemon takes 128 of a session */

struct blame;
struct hub;
struct link;
struct membership;

/* One outstanding request. */
struct call {
    bool used;
    uint64_t seq;     /* on this connection; 0: it is still to be sent, or to be sent again */
    uint64_t sent_ns; /* last time */
    bool by_ring;     /* so it went */
    bool can_wait;    /* a daemon that sleeps need not be woken for it alone */
    bool stays; /* not asked of the replica that takes over: that was asked the same, or it is of
                 * the connection */
    /* Fill in type and body; *ret_request is zeroed. Sends nothing itself. */
    int (*make)(struct link *link, const struct call *call, struct wire_request *ret_request,
                struct shd_err *e);
    /* Gets every reply, also refusals; reply is valid during the call. A link that is LINK_GONE
     * has none: status SHD_OK, type WIRE_REPLY_NONE. */
    void (*fn)(struct link *link, const struct call *call, const struct wire_reply *reply);
    void *ctx;                   /* NULL: nobody waits any more, the reply is dropped */
    uint64_t arg, step, attempt; /* the caller's */
};

enum link_state {
    LINK_DOWN,  /* nobody there: tried again and again */
    LINK_TOKEN, /* side channel is up, its welcome is to come */
    LINK_HELLO, /* DEALER too; the answer to Hello is to come */
    LINK_UP,
    LINK_GONE, /* its host is out: nobody is connected to, and none of its calls is in the table */
};

struct link_busy {               /* it had no place for a request: none is sent until then */
    uint64_t until_ns, pause_ns; /* pause_ns 0: it has places */
};

struct link_peer {     /* what the daemon's version has */
    uint32_t requests; /* types it knows */
    uint32_t level;    /* of the features it knows: enum wire_level, or a later build's */
};

struct link {
    struct hub *hub; /* borrowed: its owner */
    uint32_t index;  /* below owner_count: of the owner; others are replicas */
    char *device;    /* owned: "cpu0" */
    char *path;      /* owned: of the side socket */
    char *endpoint;  /* owned: of the DEALER */
    pid_t pid;
    enum link_state state;
    uint32_t epoch;  /* connections lost: what was learned in an earlier one may not hold */
    bool known;      /* was up once */
    bool kept;       /* a service manager has its memory */
    bool has_notify; /* that listens in its directory */
    bool proven;     /* has answered something since it came up */
    bool missed;     /* SHD_EVENT_GONE was said */
    struct link_peer peer;
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
    uint32_t call_count; /* in use */
    uint32_t unsent;     /* of them: with seq 0 */
    struct link_busy busy;
    struct link_ring ring;
    struct shd_err fault; /* code 0: none; else why this link is of no use any more */
};

struct hub_wakes {
    bool waits;          /* somebody waits, and will poll next */
    bool several;        /* who waits has use for several replies, and little for the next one */
    uint64_t put_off_ns; /* for how long that of a daemon may be put off, where requests follow each
                          * other as quickly */
};

/* Where a session has some owners alone. */
struct hub_seats {
    uint32_t owners;                /* of the models, all of them */
    uint32_t owner[SHD_OWNERS_MAX]; /* of each link: which one of them */
};

struct hub_members {               /* owners and their replicas, and who is out */
    const struct hub_seats *seats; /* borrowed; NULL: the links are those of all owners, in order */
    struct membership *membership; /* owned: who is out; NULL: there are no replicas */
    void (*look)(struct hub *hub); /* with that: in each hub_poll() */
    /* The owner's place is to be taken by its replica, which may be down but is not gone (false: it
     * cannot yet); or (gone) the replica is gone. May be NULL. */
    bool (*succeed)(void *ctx, uint32_t owner, bool gone);
    uint32_t successions; /* owners that were lost, ever; */
    uint32_t losses;      /* and replicas, too */
    uint64_t told;        /* the view's number plus 1, as Hello says it; 0: there are no replicas */
    bool stays;           /* a model that moves to other owners is not gone along with */
    bool joining;         /* hosts that are in again are being taken in; no step is worked on */
    bool returned; /* one is to be taken in now: what it has is nowhere else, for this session */
    bool tells;    /* all daemons have to know it: more than two hosts have some */
};

struct hub_times {
    uint64_t back_ns;      /* a link came up last, or this process went on */
    uint64_t looked_ns;    /* hub_deadline_ns() was asked last */
    uint64_t waited_ns;    /* of the wait at hand, then */
    uint64_t polled_ns;    /* sockets were, last */
    uint64_t repeat_at_ns; /* the next look for requests without an answer */
    uint64_t first_ns;     /* how long for a daemon that was never there; 0: as usual */
};

/* All links of a session; see hub.h. */
struct hub {
    void *zmq;          /* owned context */
    struct link *links; /* owned, [link_count] */
    uint32_t link_count;
    uint32_t owner_count; /* == link_count, or half of it: there are replicas */
    uint32_t down_count;  /* links that are not UP, nor gone */
    char *name;           /* owned: shown by daemons */
    enum wire_role role;
    uint32_t rank;              /* $RANK, plus 1; 0: there is none */
    zmq_pollitem_t *poll_items; /* owned, [2 * link_count]: dealers, then side channels */
    struct pollfd *sides;       /* owned, [link_count]: side channels alone */
    bool no_ring;               /* the environment has it so */
    uint8_t *frame;             /* owned, [WIRE_FRAME_BYTES_MAX]: requests are packed here */
    uint8_t *arena_memory;      /* owned, [WIRE_ARENA_BYTES]: replies are unpacked here */
    uint64_t timeout_ns;        /* of each wait, unless: */
    bool patient;               /* the time counts only while a daemon is gone, and not kept */
    uint64_t requests;          /* sent */
    struct hub_times at;
    bool leaving; /* nothing is connected any more */
    struct hub_wakes wakes;
    struct idle idle; /* may break that off */
    struct event_sink events;
    /* A link is up again: open on it what is open (by link_exchange() and link_claim() only).
     * SHD_EGONE, SHD_ETIMEDOUT, SHD_EBUSY, SHD_ECANCELED: it is tried again; other errors are
     * final. May be NULL.
     */
    int (*reopen)(void *ctx, struct link *link, struct shd_err *e);
    /* In each hub_poll(): what else belongs to a connection may have broken: link_down(), and all
     * of it is made anew. May be NULL. */
    void (*look)(void *ctx);
    void *reopen_ctx; /* of both, and members.succeed */
    struct hub_members members;
    /* Called again and again while a wait that began at start_ns goes on; may ask. May be NULL. */
    void (*on_wait)(struct hub *hub, uint64_t start_ns, uint64_t now_ns);
    /* The same in link_exchange() and link_claim(), in which no other link is heard: may not ask.
     * May be NULL. */
    void (*on_exchange)(const struct link *link, uint64_t start_ns, uint64_t now_ns);
    struct blame *blame;                  /* borrowed: of both */
    char held_up[SHD_ERR_TEXT_BYTES / 2]; /* who the wait is for, cut; "": not known (yet) */
};

/* A fault of link as an error for its users: "daemon cpu1 (pid 42) at /run/...: <text>". */
int link_err(const struct link *link, int code, struct shd_err *e, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* The owner whose slice it holds, of so many. */
uint32_t link_owner(const struct link *link);

/* What other owners know owner 0's model by, of its answer: that of the owner it was a replica of
 * (first; 0: of none), in a session with replicas; else its own. */
uint64_t link_goes_by(const struct link *link, uint64_t first, uint64_t instance);
uint32_t link_owners(const struct link *link);
bool link_is_replica(const struct link *link);

/* The link is of no use any more, for this reason. The first one counts. */
void link_fault(struct link *link, const struct shd_err *why);

/* Put a call in the table, to be sent; NULL: the table is full. */
struct call *link_add_call(struct link *link, const struct call *call);
void link_drop_call(struct link *link, struct call *call);

/* Its daemon has gone, or must be greeted anew: close, mark all calls as to be sent. */
void link_down(struct link *link, const struct shd_err *why);

/* Nobody is asked there any more: LINK_GONE. Its calls are answered by nothing, but for those that
 * do not stay: ret_moved[HUB_CALLS_MAX] gets them (NULL: there are none). Returns their number. */
uint32_t link_retire(struct link *link, const struct shd_err *why, struct call *ret_moved);

/* The daemon had no place for this call: it is sent again, after a pause that doubles. */
void link_busy(struct link *link, struct call *call, uint32_t retry_ms);

/* Send what is to be sent, as far as the socket takes it. */
int link_flush(struct link *link, struct shd_err *e);

/* Send a call of the table that was not sent on this connection. SHD_EBUSY: the pipe is full. */
int link_send_call(struct link *link, struct call *call, struct shd_err *e);

/* Pack and send under the next number, by the connection. SHD_EBUSY: the pipe is full. */
int link_send(struct link *link, struct wire_request *request, uint64_t seq, struct shd_err *e);

/* The reply to this call, with number seq, came by the ring or the connection: by the second it
 * says which of what went there the daemon has read. */
void link_heard(struct link *link, const struct call *call, uint64_t seq, bool by_ring);

/* Exchange a ticket for the descriptor of its segment, checked for kind, size and seals
 * (a GPU's for kind alone).
 * SHD_EGONE: the connection is lost, with SHD_ECANCELED and SHD_ETIMEDOUT it is given up. */
int link_claim(struct link *link, const struct wire_segment *segment, int *ret_fd,
               struct shd_err *e);

struct link_ask { /* what is done in link_exchange(); NULL: nothing */
    int (*take)(void *ctx, struct link *link, const struct wire_reply *reply, struct shd_err *e);
    int (*look)(void *ctx, struct link *link, struct shd_err *e); /* is it of any use? */
    void *ctx;
};

/* For reopen(): ask and wait for the answer, which is taken; nothing else is sent. A refusal is its
 * status, with its text. */
int link_exchange(struct link *link, struct wire_request *request, const struct link_ask *ask,
                  struct shd_err *e);

#endif
