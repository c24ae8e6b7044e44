/* The transfer thread of the copy path: brings units from where their owners publish them into
 * slots of this process, one after the other, while the session's thread computes. Between host
 * memory and host memory it copies itself; where a GPU is at one end it feeds that one's copy
 * engines.
 *
 * Happy path: transfer_start() queues a job, transfer_wait() learns that it is done. A job waits
 * for the program's own work on the memory it is to fill, for each owner's board word, copies that
 * owner's slice, and, where a slow link is to be stood for, sleeps. Copies by a GPU are in flight
 * while the next owner is looked at; they have ended before a wait for one begins.
 *
 * Failure: a job ends with a status (and the owner it is about) instead. transfer_cancel() takes a
 * job back, wherever it is; when it returns, the thread has let go of the job's memory. The
 * thread knows neither sockets nor deadlines: those are its caller's.
 *
 * Host memory may be placed anew (a daemon's successor) while the thread reads it: it finds the
 * same bytes. What a GPU reads or writes must not move meanwhile: transfer_hold().
 */
#ifndef SHD_TRANSFER_H
#define SHD_TRANSFER_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/dtype.h"
#include "proto/base/status.h"
#include "proto/share/board.h"

struct CUevent_st;
struct kern;

enum transfer_state { TRANSFER_IDLE, TRANSFER_QUEUED, TRANSFER_RUNNING, TRANSFER_DONE };

/* A piece of a unit: one owner's slice. */
struct transfer_piece {
    const struct board *board; /* borrowed, with the next two */
    const uint8_t *from;
    struct kern *gpu;             /* copies it; NULL: from and to are host memory */
    uint64_t offset_bytes, bytes; /* within the unit; of codes so many there, not here */
    enum codec codec;             /* of what is there: decoded here, in host memory, */
    enum shd_dtype dtype;         /* to so many of this */
    uint64_t elems;
};

/* Caller's memory; the thread reads and writes it from start until done or cancelled. */
struct transfer_job {
    uint8_t *to;                         /* borrowed, with the next three */
    struct kern *gpu;                    /* of `behind` */
    struct CUevent_st *behind;           /* what still uses *to, by then; NULL: nothing does */
    const struct transfer_piece *pieces; /* [piece_count]; those without bytes are passed over */
    uint32_t piece_count;
    uint32_t unit;
    uint64_t step; /* the version to wait for */
    /* The thread's: */
    enum transfer_state state;
    bool cancelled;
    int status;     /* when DONE: SHD_OK; SHD_ESTEP: the owner is past that step; else the GPU's */
    uint32_t piece; /* which one it is at, or failed at */
    bool waits;     /* not at any yet: for `behind` */
    uint64_t version;   /* SHD_ESTEP: that owner's */
    struct shd_err why; /* other failures */
    uint64_t bytes_copied;
    struct transfer_job *next; /* in the queue */
};

struct transfer; /* opaque: the thread and its queue */

/* Start a thread. delay_ns is added to each job. Errors: SHD_ENOMEM. */
int transfer_new(uint64_t delay_ns, struct transfer **ret_transfer, struct shd_err *e);

/* End the thread; jobs that are not done are dropped. NULL is a no-op. */
void transfer_free(struct transfer *t);

void transfer_start(struct transfer *t, struct transfer_job *job);

/* Wait at most timeout_ns (0: only look); true: job is DONE (look at its status). */
bool transfer_wait(struct transfer *t, struct transfer_job *job, uint64_t timeout_ns);

/* Is it `behind` that the job waits for? */
bool transfer_waits(struct transfer *t, const struct transfer_job *job);

/* Take the job back: IDLE afterwards. Takes as long as the copies in flight, at most. */
void transfer_cancel(struct transfer *t, struct transfer_job *job);

/* Boards were placed anew: a thread that sleeps at a word of before is not woken by its store. */
void transfer_look(struct transfer *t);

/* Wait until no GPU copies, and keep it so until transfer_go(). */
void transfer_hold(struct transfer *t);
void transfer_go(struct transfer *t);

#endif
