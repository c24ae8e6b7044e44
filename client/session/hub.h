/* The hub: one session's connections to all its daemons (link.h), and every wait on them.
 *
 * Happy path: hub_ask() packs and sends, hub_poll() receives and hands each reply to its call.
 *
 * A daemon that dies. Its side channel hangs up and its link goes down. Every hub_poll() then tries
 * to connect anew (link.h): side channel, token, DEALER, Hello, then the session's reopen()
 * function, which opens the models on the successor, then all calls. What is asked meanwhile waits
 * in the table.
 *
 * Failure: a daemon that does not come back within the session's timeout, that refuses us or talks
 * nonsense leaves a fault on its link; it is sticky and every later call of the session reports it.
 * Every wait ends by its deadline and says who did not answer what. A request without an answer is
 * sent again after 2 s under its old number: the daemon knows repeats. One thread.
 */
#ifndef SHD_HUB_H
#define SHD_HUB_H

#include "client/session/link.h"

/* When a wait that began at start_ns has lasted too long. While a daemon is away its own bound
 * counts, and a wait that goes on after its return has the full time again; so it has after this
 * process was stopped (Ctrl-Z). UINT64_MAX where the session is patient: nobody it needs is gone
 * then, only slow, and is named (blame.h). Ask before each short sleep of a wait. */
uint64_t hub_deadline_ns(struct hub *hub, uint64_t start_ns);

/* How long a wait that began at start_ns may sleep now: max_ns at most; 0: its time is over. */
uint64_t hub_left_ns(struct hub *hub, uint64_t start_ns, uint64_t max_ns);

/* A call that was broken off may have left something with the daemons that nobody will take, as
 * tickets for segments: begin all connections anew. */
void hub_renew(struct hub *hub);

/* The daemon of links[index] is gone for good, and the other one of its slice is not. A replica's
 * link is retired. An owner's is too, once its replica's has become links[index]: what the owner
 * alone was asked is asked there. Not while a reply is taken in. False: not yet. */
bool hub_lose(struct hub *hub, uint32_t index, const struct shd_err *why);

/* Has it lost that one? */
bool hub_lost(const struct hub *hub, uint32_t index);

/* links[index], a replica's, is gone, and its host is in again: it is connected to anew, as one
 * that was there and is away. */
void hub_return(struct hub *hub, uint32_t index);

/* The first link's fault, or SHD_OK. */
int hub_check(const struct hub *hub, struct shd_err *e);

/* Whether a daemon's build is older than this level of features (enum wire_level). */
bool hub_has_older(const struct hub *hub, uint32_t level);

/* Take in what has arrived; wait up to timeout_ns (rounded up to ms) for something. Looks after
 * links that are down. Returns hub_check(), and in a wait SHD_ECANCELED if it is to be broken off,
 * SHD_ERESET where a host has to be taken in again first (members.returned: client/paths/rejoin.h).
 * A poll is part of a wait when it may sleep, or when its deadline was asked for before it. */
int hub_poll(struct hub *hub, uint64_t timeout_ns, struct shd_err *e);

/* Ask: call->make, fn, ctx, arg and step are the caller's; fn(link, call, reply) follows from a
 * later hub_poll(). Waits, within the hub's timeout, for room in the table. Where the link is down
 * the request is sent when it is up again. */
int hub_ask(struct link *link, const struct call *call, struct shd_err *e);

/* Forget whoever waits with this ctx: its replies will be dropped. */
void hub_forget(struct hub *hub, const void *ctx);

#endif
