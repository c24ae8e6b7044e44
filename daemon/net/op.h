/* One request being served: its frame comes, the table says which handler it has and who may send
 * it. Taken from a fixed pool when its frame arrives, given back when its
 * reply is sent. A handler either finishes it at once or returns SHD_PENDING and finishes it
 * later (op_finish), exactly once either way. */
#ifndef SHD_OP_H
#define SHD_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/wire/wire.h"

struct daemon;
struct inbox;
struct model;
struct op;
struct session;

#define OP_POOL_COUNT  40960u
#define OPS_SHARE      7u    /* of these that each session can count on */
#define OPS_SHARED_MAX 8192u /* for what sessions have beyond their share; all of them together */
#define OPS_RETRY_MS   5u
#define OPS_RANGES_MAX 16u /* copies of ranges of elements under way, of all sessions */
#define OPS_RANGES_OWN 2u  /* of a session */

#define REQUEST_ROLE(role) (1u << (role))

struct request {
    int (*fn)(struct op *op); /* loop thread; a status, or SHD_PENDING with op_finish() to come */
    unsigned roles;           /* who may send it; 0: no session needed */
};

struct op {
    struct daemon *daemon;
    int (*handler)(struct op *op);
    struct session *session; /* borrowed; held by its op count; NULL before Hello */
    struct shd_err err;      /* why, when the status is not SHD_OK */
    struct model *model;     /* borrowed: it waits for op, should it be dropped (remains.h) */
    struct inbox *inbox;     /* RETURN: counted reference while its slot is read */
    char *text;              /* owned: what is kept of a request that waits, or a reply's text */
    void *work;              /* owned, the handler's own: buffers */
    char *spec;              /* owned: the request's, with a NUL (spec_in.h); NULL: it has none */
    uint64_t spec_bytes;     /* of it, without the NUL */
    uint64_t passed_bytes;   /* of it, where it came in a segment: of those of all requests */
    struct op *next;         /* free list, or the list the op waits in */
    uint64_t conn;           /* that it came by (conn.h) */
    uint32_t index;          /* in the pool; step_ref = index + 1 */
    uint64_t serial;         /* of this use of it; 0: free */
    uint64_t arrived_ns;
    bool by_ring;  /* of its session, it came: so goes its answer */
    bool received; /* RETURN: its bytes came by a link, and are in the slot */
    bool hashing;  /* RETURN: so it is, in its slot (model/verified.h) */
    bool once;     /* counted by the session's replies: keep what it is answered */
    bool repeated; /* served before, its long reply was not kept */
    bool shared;   /* beyond its session's share */
    bool again;    /* LEASE: another one of its session waits so in this step already */

    /* Cleared up to their bodies, which are large and of which a request uses one each. */
    struct wire_request req; /* pointers in it are valid until the handler returns */
    struct wire_reply reply; /* filled by the handler; pointers must outlive op_finish() */
};

struct op_pool {
    struct op *items; /* owned, [OP_POOL_COUNT] */
    struct op *free;
    uint32_t made; /* of items: the rest were never used, nor touched */
    uint32_t used, shared;
    uint64_t passed_bytes;                        /* of specs that came in segments */
    const struct session *ranges[OPS_RANGES_MAX]; /* whose are under way; NULL: a place is free */
    uint64_t serial;                              /* uses ever */
};

int op_pool_init(struct op_pool *pool, struct shd_err *e);
void op_pool_deinit(struct op_pool *pool);

struct op *op_at(struct op_pool *pool, uint32_t index);

/* Requests that copy a range of elements (some MiB each) have a place while they are under way. No
 * place: SHD_EBUSY, to be asked again; then nothing is to be given back. */
int op_range_begin(struct op *op);
void op_range_end(struct op *op);

/* Serve one frame that came by connection conn, or by the ring of the session that has it; it is
 * the caller's again afterwards. Loop thread; never blocks. */
void op_serve_frame(struct daemon *d, uint64_t conn, bool by_ring, const void *frame, size_t bytes);

/* malloc(), for op->text or op->work. NULL: op->err says so (SHD_ENOMEM). */
void *op_memory(struct op *op, size_t bytes);

/* For a wait: op->text becomes a copy of what lies in the request's frame, which will be gone. One
 * that was made before stays. Errors: SHD_ENOMEM. */
int op_keep(struct op *op, const void *data, size_t bytes);

/* Send the reply with this status and give the op back. status is what a handler would return;
 * never SHD_PENDING. Nothing is sent when the session has gone. */
void op_finish(struct op *op, int status);

/* Pack op->reply and send it the way that its request came, without giving the op back: for who is
 * to lose the right to a reply by what follows. Never blocks: a peer that has gone or does not read
 * loses its reply, and in the second case its session. */
void op_reply(const struct op *op);

/* An OPEN_MODEL that is sent to owner 0, and to no replica of it. */
bool op_asks_first(const struct op *op);

/* Call the handlers of those in *list again: they waited for something that has happened. Who must
 * wait on joins a new list. */
void op_again(struct op **list);

#endif
