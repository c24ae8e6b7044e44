/* Sessions and fork(). A child has its parent's memory and descriptors, and neither its threads nor
 * its place with the daemons. So in a child each of its parent's sessions is marked, and all calls
 * refuse it (session_check()); its side channels are closed there, that daemons see the parent's
 * death while the child lives; gradients in an inbox are not mapped there at all.
 *
 * ZeroMQ's sockets are left alone: closing them would end the parent's connection.
 *
 * Any thread may fork, also while another is in a call: what the child runs only reads pointers
 * and closes descriptors. One that was being made just then stays open there; the daemon, which
 * watches the process itself, does not mind.
 */
#ifndef SHD_FORK_H
#define SHD_FORK_H

struct shd_err;
struct shd_session;

/* Errors: SHD_ENOMEM. */
int fork_add(struct shd_session *s, struct shd_err *e);
void fork_drop(struct shd_session *s); /* one that was not added: a no-op */

/* The sessions of this process, by their `next`: for handlers of signals, which take no lock. */
const struct shd_session *fork_sessions(void);

#endif
