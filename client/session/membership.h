/* Which hosts' daemons a session with replicas goes on without. The arbiter's view says who is out
 * (proto/files/arbiter.h); this session acts on it, and asks for another one where daemons of a
 * host it has met stay away.
 *
 * Why an arbiter: two sides of a cut cable each see the other one gone. Whoever changes the view
 * first goes on, the other side reads that it is out, and waits. A step is committed at all members
 * of the view, so nobody goes on by an older one: its daemons are not all there.
 *
 * Happy path: no link is down, and the view is looked at once a second of a wait, else every five.
 * A link that is down for the patience (three times that, if it was never up) has its host put out
 * by a claim, if all slices have a member elsewhere that is up. What is out is then let go of
 * (hub_lose()), as soon as its replica has come as far.
 *
 * A host that comes back is behind the others (arbiter_view.h): who connects then finds it in its
 * place. A session that has let go of it goes on without it, until it asks (membership_refresh())
 * and joins it (membership_join()): that is once a model was opened, and when it has gone back
 * (client/paths/rejoin.h), for who filled the host then has the models go back to the step that it
 * has them at. Where the other one of a slice is lost before a trainer has asked, the host that is
 * in again is the only one that has the slice: hub->members.returned, and its waits end
 * (hub_poll()).
 *
 * Failure: without the arbiter everything goes on in the view that is known. Where both members of
 * a slice are out the link has a fault. A host that went out and came back unseen is lost, and may
 * be joined then. One thread.
 */
#ifndef SHD_MEMBERSHIP_H
#define SHD_MEMBERSHIP_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct hub;
struct link;
struct membership;

/* Of the sessions to a runtime directory with pairs; its replicas.json is read. Errors: what
 * replicas_read() and arbiter_open() have; SHD_ENOENT: it has none, and nobody could be put out. */
int membership_open(const char *dir, struct membership **ret_membership, struct shd_err *e);
void membership_close(struct membership *m); /* NULL is a no-op */

/* Before anybody is connected to: who is out already? Errors: the arbiter's; SHD_EINVAL: a device
 * of no host, or a pair on one; SHD_EGONE: both members of a slice are out. */
int membership_begin(struct hub *hub, struct shd_err *e);

/* hub->members.look of one with hub->members.membership. */
void membership_look(struct hub *hub);

/* Read the view: what anybody has claimed before this call is known after it, and who is out is let
 * go of. Waits for an arbiter that cannot be reached, and says so once. Errors: those of
 * hub_poll(); SHD_ETIMEDOUT the arbiter was away for the hub's timeout, of one that is not patient.
 */
int membership_refresh(struct hub *hub, struct shd_err *e);

/* Can the arbiter be reached now? One try; membership_refresh() is to follow where it can. */
bool membership_reaches(struct hub *hub);

/* Let go of all that the view at hand has out, where that could not be done before: the replica
 * comes as far by itself. Errors: those of hub_poll(). */
int membership_settle(struct hub *hub, struct shd_err *e);

/* Connect to hosts that are in again (hub_return()); none has to be waited for that was
 * hub->members.returned. False: there is none. */
bool membership_join(struct hub *hub);

/* Is the link's host being filled: may it lack what others of its slices have? */
bool membership_fills(const struct hub *hub, const struct link *link);

/* Who fills the link's host does not come to an end: put it out, once that has lasted for some
 * times the patience, since start_ns. */
void membership_give_up(struct hub *hub, const struct link *link, uint64_t start_ns);

/* What daemons say does not fit together: is one of them out, as a view says that was not known? It
 * is read now. True: some are let go of, or are to be: look again. False also without replicas, and
 * where the arbiter cannot be asked. */
bool membership_news(struct hub *hub);

/* Is the link's host out, or anew in its place, by the newest view? It is read for that, if the
 * arbiter can be asked, and nobody is let go of. False also without replicas. */
bool membership_lost(struct hub *hub, const struct link *link);

/* -- Judging: pure ------------------------------------------------------------------------------
 */

struct membership_link {
    uint32_t slice, host;
    bool up;     /* and has all steps: its host is not being filled */
    bool out;    /* its host is, already: it may be up, and counts no more */
    bool missed; /* was up, and is down for longer than the patience */
};

/* The hosts that are to be out: of links that are missed. None, where a slice had no member left
 * that is up. ret_out[hosts]: set where one is to be out, and is not yet. Returns how many. */
uint32_t membership_judge(const struct membership_link *links, uint32_t count, uint32_t hosts,
                          bool *ret_out);

#endif
