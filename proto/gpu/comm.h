/* The communicator thread: one per device and process makes all NCCL calls, so that neither an
 * event loop nor a worker's own thread ever does.
 *
 * A *link* is a communicator of two ranks and carries bytes one way or both, in *turns*: what is
 * queued with turn n on one side meets what is queued with turn n on the other, whenever either was
 * queued. A turn may be *gated*: it begins when a board says that a unit has reached a step. Both
 * sides gate by the same board, so that no kernel of NCCL waits for long on either GPU.
 *
 * Happy path: comm_link_new() on both sides with one id, comm_queue() of equal turns, done() of
 * each. One turn of a link is under way at a time, all links at once, each on a stream of its own.
 *
 * Failure: what fails, or takes longer than its own deadline, aborts this communicator alone, and
 * every job of the link ends with that status, now and later. comm_link_end() does the same from
 * outside. When done() was called nothing reads or writes the job's memory any more. Time in which
 * this process was stopped does not count: the peer could do nothing about it.
 *
 * NCCL's abort is the only way out that never waits for the peer, so links end by it, always.
 */
#ifndef SHD_COMM_H
#define SHD_COMM_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/gpu/nccl.h"
#include "proto/share/board.h"

enum comm_way { COMM_SEND, COMM_RECV };

struct comm_gate {
    const struct board *board; /* borrowed until done; NULL: open */
    uint32_t unit;
    uint64_t step;
};

/* Caller's memory; the thread's from comm_queue() until done(). */
struct comm_job {
    void (*done)(
        struct comm_job *job); /* on the thread, which touches *job no more; not to block */
    enum comm_way way;
    void *memory;   /* of the device, [bytes]; borrowed */
    uint64_t bytes; /* > 0 */
    uint64_t turn;  /* from 1 */
    struct comm_gate gate;
    uint64_t timeout_ns; /* from its beginning; 0: none */
    /* The thread's: */
    _Atomic uint64_t begun_ns; /* CLOCK_MONOTONIC; 0: not yet. Any thread may look */
    int status;
    bool ended;         /* not SHD_OK: for comm_link_end(), not for what happened to the link */
    bool remote;        /* not SHD_OK: for the peer's end of the link, which knows why */
    struct shd_err why; /* when status is not SHD_OK */
    uint64_t version;   /* of the gate's unit when it began */
    struct comm_job *next;
};

struct comm;      /* opaque: the thread */
struct comm_link; /* opaque */

/* The thread for the device of that ordinal, which this process uses already (proto/gpu/cuda.h):
 * started, or shared with who has it. NCCL is loaded by its first link. Errors: SHD_ENOMEM. Any
 * thread. */
int comm_new(uint32_t ordinal, struct comm **ret_comm, struct shd_err *e);

/* Let go of it; the links made by it have ended. The last one to do so ends the thread, when all
 * jobs are done. NULL is a no-op. */
void comm_free(struct comm *c);

/* Make ids for links: on the side that has rank 0. Waits for the thread; loads NCCL. Errors:
 * SHD_ENOTSUP, SHD_EIO. */
int comm_make_ids(struct comm *c, struct nccl_id *ids, uint32_t count, struct shd_err *e);

/* Begin to connect; opened->done() says what came of it (the other members are the thread's;
 * timeout_ns: 0 is none). Never blocks. Errors: SHD_ENOMEM, and opened->done() is not called. */
int comm_link_new(struct comm *c, const struct nccl_id *id, uint32_t rank, struct comm_job *opened,
                  struct comm_link **ret_link, struct shd_err *e);

/* Queue a turn; each once. Never blocks. Any thread but in done(). */
void comm_queue(struct comm_link *link, struct comm_job *job);

/* Abort it: its jobs end with SHD_EGONE, soon; *link is the thread's from now on. NULL is a no-op.
 * Never blocks. */
void comm_link_end(struct comm_link *link);

#endif
