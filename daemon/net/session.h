/* Sessions: one per attached client, born with its side-channel connection and dead with it.
 *
 * The side channel proves who the peer is and shows its death within milliseconds, as does the
 * process itself, should others have its end of the channel (its children); its token
 * admits one connection of requests (Hello). When a session dies its claims die: tickets, waiting
 * requests, slots. Gradients it had handed over stay valid: their inbox lives until summed.
 */
#ifndef SHD_SESSION_H
#define SHD_SESSION_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <uv.h>

#include "daemon/net/op.h"
#include "proto/wire/wire.h"

#define SESSION_MODELS_MAX  8u
#define SESSION_TICKETS_MAX 16u
#define SESSION_OPS_MAX     128u /* requests of one session that may be pending */
#define SESSIONS_PASSED_MAX 64u  /* segments of all; one more takes the place of the oldest */

struct daemon;
struct inbox;
struct links;
struct replies;
struct side_peer;
struct stage;

struct session_ticket {
    uint64_t ticket; /* 0: unused */
    int fd;          /* borrowed from a segment that lives as long as the session, or: */
    uint64_t given;  /* > 0: owned, closed when it is claimed; ascending in this process */
    enum segment_kind kind;
    uint64_t bytes;
};

struct session_tickets {
    struct session_ticket items[SESSION_TICKETS_MAX];
    uint64_t last;
};

struct session_models { /* a bit for each place of a model (model.h) */
    uint64_t bits[4];
};

struct session_passed { /* a segment that the client has passed, and no request has named yet */
    int fd;             /* owned; -1: none */
    uint64_t ticket;
    uint64_t number; /* of all that were ever passed to this process */
    bool lost;       /* it is no more: its place was needed */
};

struct session_prepared {
    uint32_t model; /* handle; 0: it has not asked Prepare yet, else the last time of */
    uint64_t step;
};

struct session_said { /* in its Hello */
    uint32_t level;   /* of the features that its library knows: enum wire_level */
    uint64_t view;    /* of hosts with replicas, as wire_hello has it; 0: it has none */
};

enum session_state { SESSION_FREE, SESSION_NEW, SESSION_OPEN, SESSION_DEAD };

struct session {
    enum session_state state;
    struct daemon *daemon;
    uint64_t id; /* never reused while the daemon runs; % SESSIONS_MAX: the table index */
    uint64_t since_ns;
    uint64_t start_time; /* of its process; 0: not known */
    uv_poll_t poll;      /* on side_fd */
    int side_fd;         /* owned; -1 when closed */
    uv_poll_t life;      /* on life_fd */
    int life_fd;         /* owned: its process; -1: not watched */
    uint32_t closing;    /* handles of which uv_close() is under way: the place must wait */
    pid_t pid;           /* of its process, and its user */
    uid_t uid;
    uint8_t token[WIRE_TOKEN_BYTES];
    enum wire_role role;
    char name[WIRE_NAME_BYTES_MAX];
    uint32_t rank;                             /* of its process, plus 1; 0: it has none */
    uint64_t conn;                             /* of an open session: its requests come by it */
    struct replies *replies;                   /* owned; of an open session */
    uint32_t ops;                              /* pending requests: the place must wait for them */
    struct inbox *inboxes[SESSION_MODELS_MAX]; /* counted references */
    uint32_t inbox_count;
    struct stage *stage; /* stage.h; NULL: it has had none */
    struct links *links; /* owned, [SESSION_MODELS_MAX]; NULL: it has had none */
    uint32_t link_count;
    struct session_tickets tickets;
    struct session_models opened;
    struct session_passed passed;
    bool detached; /* it has said goodbye */
    struct session_said said;
    struct session_prepared prepared;
};

struct session_table {
    struct session *items; /* owned, [SESSIONS_MAX] */
    uint32_t made;         /* of items: the rest were never used, nor touched */
    uint32_t used;
    uint64_t epoch; /* counts sessions ever made; starts at random: */
    uint64_t epoch_first;
    uint64_t view;        /* the newest that a session has said; 0: none has */
    uint32_t passed;      /* sessions with a segment that was passed */
    uint64_t passed_last; /* number */
    uint32_t given;       /* descriptors that wait to be claimed, and are of no other use */
    uint64_t given_last;  /* number */
};

int session_table_init(struct session_table *table, struct shd_err *e);
void session_table_deinit(struct session_table *table);

/* A client connected: take over fd (on SHD_OK only), send it the welcome with a fresh token.
 * Errors: SHD_EBUSY table full; SHD_EIO, SHD_EGONE. */
int session_new(struct daemon *d, int fd, const struct side_peer *peer, struct shd_err *e);

/* Make room for one more of user uid: a session waits 5 s for its Hello, at most 512 of a user do,
 * and where places are few the oldest of them goes first. False: all have said Hello. */
bool session_make_room(struct daemon *d, uid_t uid);

/* End the one that waits longest for its Hello: its descriptor is needed. False: none waits. */
bool session_push_out(struct daemon *d);

/* End those that have waited too long for their Hello. Whether more of them wait. */
bool session_sweep(struct daemon *d);

/* The refusal: SHD_EBUSY with the numbers and what to do. */
int session_too_many(struct daemon *d, struct shd_err *e);

/* A session is to be of this view of the replicas' hosts (wire_hello). With a newer one than any
 * before those of older ones end, and come again once they have read it: whoever acts by it has
 * told it to all daemons that are in, so nobody acts by an older one there. Errors: SHD_EBUSY an
 * older one than another session has said, with both numbers. */
int session_take_view(struct daemon *d, uint64_t view, struct shd_err *e);

/* Was there a session of this id, made by this process, which has ended? */
bool session_has_ended(const struct session_table *table, uint64_t id);

/* The open session whose requests come by this connection, else NULL. */
struct session *session_by_conn(struct daemon *d, uint64_t conn);

/* The new session with this token (compared in constant time), else NULL. */
struct session *session_by_token(struct daemon *d, const uint8_t *token);

/* Whose process it is, and in which group, as the kernel had it when it connected. Errors:
 * SHD_EGONE it has ended; SHD_EIO. */
int session_user(const struct session *s, uint32_t *ret_uid, uint32_t *ret_gid, struct shd_err *e);

/* End a session: close its side channel, drop its claims. Its place is reused when its pending
 * requests are done. `why` is for the log. */
void session_end(struct session *s, const char *why);

/* The place of a dead session, once nothing refers to it: requests, or the closing poll handle. */
void session_reuse(struct session *s);

/* Make a ticket for fd; 0 when the session has too many unclaimed. */
uint64_t session_ticket_new(struct session *s, int fd, enum segment_kind kind, uint64_t bytes);

/* The same of a descriptor that is of no other use: it is taken over, unless 0 is returned. Of all
 * sessions a quarter of those that are kept for all else (door.h) may wait to be claimed; a further
 * one takes the place of the oldest, whose ticket is void. */
uint64_t session_ticket_give(struct session *s, int fd, enum segment_kind kind, uint64_t bytes);

/* Take over the segment that the client has passed under this ticket, which it did before it sent
 * the request that names it; -1: it has not, or has ended. */
int session_take_passed(struct session *s, uint64_t ticket);

/* Whether its client is there still, now: not by what the loop has seen, but by the side channel. A
 * request that was read late may be one that nobody waits for any more. */
bool session_is_there(struct session *s);

/* Whether what was passed under this ticket had to make room for what others pass; said once. */
bool session_lost_passed(struct session *s, uint64_t ticket);

/* It has opened the model with this place, or had; and that goes. */
void session_opened(struct session *s, uint32_t place);
bool session_has_opened(const struct session *s, uint32_t place);
void session_closed(struct session *s, uint32_t place);

/* Tell its client why it ends, with a sentence, and end it. */
void session_dismiss(struct session *s, const struct shd_err *why);

/* A segment goes before session `id` does, if that is open still: unclaimed tickets for it, too. */
void session_ticket_forget(struct daemon *d, uint64_t id, int fd);

const char *session_role_name(enum wire_role role);

#endif
