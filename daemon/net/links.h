/* A session's NCCL links: for workers on a GPU that cannot map this device's memory. Per model two
 * communicators of two ranks, the worker's being 0: `down` brings parameters to it, `up` brings
 * gradients into its inbox, which it does not map. Both are served in the order of the
 * worker's transfers (proto/gpu/comm.h), by the daemon's one communicator thread.
 *
 * A link ends with its session. The other way round too: when a transfer fails, because the peer
 * died, NCCL failed or it took longer than the worker's own timeout (it is stopped, or hangs), the
 * session is ended, as if its process had died: its requests are dropped, its leases are free. A
 * worker that lives sees its connection lost, and comes back with new links and with everything
 * that was not answered. Other sessions notice nothing.
 *
 * Loop thread.
 */
#ifndef SHD_LINKS_H
#define SHD_LINKS_H

#include <stdbool.h>
#include <stdint.h>

struct comm_job;
struct comm_link;
struct daemon;
struct model;
struct op;
struct session;

struct links {
    const struct model *model; /* borrowed */
    struct comm_link *down, *up;
    uint64_t timeout_ns; /* of a transfer, from its beginning */
};

/* The links of the session and model; NULL: there are none. */
struct links *links_find(struct session *s, const struct model *model);

/* Connect the two links of op's session and model. Happy path: both are begun here, the
 * communicator thread connects them while the worker's does, and op is finished when they stand. A
 * second JOIN of the same session and model replaces the first one's links. */
int links_join(struct op *op);

/* Begin a transfer for op (whose op->work it takes); done(op, job) follows on the loop, its session
 * may have ended by then. *job: way, memory, bytes, turn, gate, timeout_ns are the caller's.
 * Errors: SHD_ENOMEM. */
int links_transfer(struct op *op, struct comm_link *link, const struct comm_job *job,
                   void (*done)(struct op *op, const struct comm_job *job));

/* True: op has a transfer, or (JOIN) links that are being made. *ret_begun_ns: since when it is
 * under way; 0: it waits for its turn, for the step it is gated by, or for the communicator thread.
 */
bool links_waiting(const struct op *op, uint64_t *ret_begun_ns);
bool links_joining(const struct op *op, uint64_t *ret_begun_ns);

/* The session's links of a model end. */
void links_let_go(struct session *s, const struct model *model);

/* A session ended. */
void links_end(struct session *s);

/* The daemon ends: all links, then the thread. What was under way never comes back. */
void links_stop(struct daemon *d);

#endif
