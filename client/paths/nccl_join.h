/* The NCCL path: a worker on a GPU whose owners are on other GPUs. It is the copy path
 * (copy.h), with one difference: from and to owners that are *far*, on another GPU, bytes move
 * by NCCL instead of by mapped memory. Owners that are near (on the worker's own GPU, or on the
 * host) are copied from and to as ever.
 *
 * Per far owner there are two communicators of two ranks, `down` and `up`, joined by the message
 * Join and used in turns (proto/gpu/comm.h). A unit's fetch is one Fetch to each far owner and a
 * receive of each slice into the unit's slot: an all-gather. A return is one Return to each and a
 * send of each slice from a buffer of the gradient slot, which stays as it is until the owner's
 * credit: a reduce-scatter, for owners add. A worker's death or slowness concerns its own links
 * only, and so does an owner's.
 *
 * What this thread asks the communicator thread to receive waits there for the owner's board, so
 * that neither GPU waits in a kernel for the other, and prefetched units come while this thread
 * computes.
 *
 * A daemon's successor: on the link that comes up again there are new ids, Join, and then, by the
 * hub, every request that was not answered, with new turns. What was answered and not received is
 * asked for once more by whoever waits for it.
 *
 * A link of NCCL that breaks while both live: the connection to that owner is given up, by whoever
 * notices, and made anew as for a successor. The owner notices too when this process takes no part
 * in a turn for as long as its timeout (Ctrl-Z). Where no turn is done between NCCL_MENDS_MAX of
 * these, it is an error.
 */
#ifndef SHD_NCCL_JOIN_H
#define SHD_NCCL_JOIN_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "client/paths/buffer.h"
#include "client/paths/path.h"
#include "proto/gpu/comm.h"

struct link;

struct nccl_owner;

struct nccl_transfer {
    struct comm_job job;
    struct nccl_model *of; /* borrowed, with the next */
    struct nccl_owner *owner;
    bool busy;      /* under of->lock: the communicator thread has it */
    uint32_t epoch; /* the owner's when it was queued; 0: it was not */
};

struct nccl_piece { /* a far owner's slice of what a slot is to hold */
    struct nccl_transfer in;
    uint32_t unit;
    uint64_t step;
    bool used;    /* there is one */
    bool asked;   /* Fetch was not answered yet */
    bool counted; /* in bytes_copied */
    int status;   /* of the answer */
    uint64_t version;
    struct shd_err why;
};

struct nccl_slot {             /* beside the copy path's */
    struct nccl_piece *pieces; /* owned, [owners] */
    bool leaving;              /* let go of while something was still to come into it */
};

struct nccl_owner {
    bool far;
    struct comm_link *down, *up;
    struct nccl_transfer down_open, up_open;
    struct nccl_id ids[2];
    uint32_t epoch;              /* joins */
    uint64_t connection;         /* which one of the link's they are of; 0: none */
    bool asked, stands;          /* at first: Join was not answered yet; both do */
    struct shd_err refusal;      /* what it was answered; code 0: they stand there */
    uint64_t down_turn, up_turn; /* the last ones */
    pid_t pid;                   /* of the daemon that it joined last */
    uint32_t mends;              /* how often again with that one, without a turn in between */
    bool turned;                 /* under the model's lock, with the next: a turn was done */
    bool broken;                 /* one was not, for which nobody here has ended the link */
    struct shd_err why;          /* of that */
};

struct nccl_model {
    struct shd_model *model; /* borrowed */
    struct comm *comm;       /* owned */
    pthread_mutex_t lock;
    pthread_cond_t change; /* a transfer is done */
    atomic_bool broken;    /* some owner's link */
    uint32_t owner_count;
    struct nccl_owner *owners; /* owned, [owner_count] */
    struct nccl_slot *slots;   /* owned, [slot_count], as the copy path's */
    uint32_t slot_count;
    struct nccl_transfer *sends;      /* owned, [SHD_SLOTS_MAX * owner_count] */
    struct buffer out[SHD_SLOTS_MAX]; /* gradients on their way, by slot */
    struct buffers in;                /* where they are made */
};

/* Can the path be taken? Errors: SHD_ENOTSUP names the owner that cannot, or says why not. */
int nccl_check(const struct shd_model *m, struct shd_err *e);

/* Must the path be taken, because this GPU cannot reach the memory of some owner's? */
bool nccl_needed(const struct shd_model *m);

/* For a model that is open: join with all far owners. Errors: SHD_ENOTSUP no NCCL; SHD_ETIMEDOUT
 * names the owner; SHD_ENOMEM. */
int nccl_new(struct shd_model *m, struct nccl_model **ret_nccl, struct shd_err *e);
void nccl_free(struct nccl_model *n); /* NULL is a no-op */

#define NCCL_MENDS_MAX 3u

/* Give up the connections to owners whose links of NCCL broke. */
void nccl_look(struct shd_model *m);

/* On a link that comes up again: join anew. No-op for near owners. Errors: SHD_EIO: it was mended
 * too often. */
int nccl_reopen(struct shd_model *m, struct link *link, struct shd_err *e);

/* Take note of how a job of the owner's links ended; under the model's lock. True: a link broke,
 * for owner->why. A reason stays until a turn is done: the peer's end of a link that is made anew
 * (job->remote) comes of it, and does not replace it. */
bool nccl_ended(struct nccl_owner *owner, const struct comm_job *job);

/* Hand a transfer to the communicator thread; t->of and its job are made already. */
void nccl_queue(struct nccl_owner *owner, struct comm_link *link, struct nccl_transfer *t);

/* Is the transfer done, or was it never queued? Waits at most timeout_ns. */
bool nccl_wait(struct nccl_model *n, const struct nccl_transfer *t, uint64_t timeout_ns);

#endif
