/* A session's NCCL links: for workers on a GPU that cannot map this device's memory. Per model two
 * communicators of two ranks, the worker's being 0: `down` brings parameters to it, `up` brings
 * gradients into its inbox, which it does not map. Both are served in the worker's turns
 * (proto/comm.h), by the daemon's one communicator thread.
 *
 * A link ends with its session, and by itself when its peer dies or NCCL fails: what was under way
 * on it is answered with that status, or dropped with its session. Other links notice nothing.
 *
 * There is no deadline here on a turn: a worker that is stopped or slow holds up its own links
 * alone. The worker has deadlines, and a session ends with its process.
 *
 * Loop thread.
 */
#ifndef SHD_LINKS_H
#define SHD_LINKS_H

#include "proto/comm.h"
#include "proto/status.h"

struct daemon;
struct model;
struct op;
struct session;

struct links {
    const struct model *model; /* borrowed */
    struct comm_link *down, *up;
};

/* Of the session; or NULL. */
struct links *links_find(struct session *s, const struct model *model);

/* Make a turn for op (whose op->work it takes); done(op, job) follows on the loop. *job: way,
 * memory, bytes, turn, gate are the caller's. Errors: SHD_ENOMEM. */
int links_transfer(struct op *op, struct comm_link *link, const struct comm_job *job,
                   void (*done)(struct op *op, const struct comm_job *job));

/* A session ended. */
void links_end(struct session *s);

/* The daemon ends: all links, then the thread. What was under way never comes back. */
void links_stop(struct daemon *d);

#endif
