/* Who computes what, when workers take work as they come: the step's gradients are handed out by
 * group (of micro-batches), to whoever asks. Advisory: that each counts once is the core's doing
 * (step.h). Pure: time comes in with each call.
 *
 * A group is handed out when it is not in and nobody alive has it. What a dead session had goes
 * back. When nothing is left and a session asks, it gets the oldest outstanding group of somebody
 * who takes much longer than is usual (a backup: the first to return counts); until then it waits.
 *
 * An owner that did not hand out everything itself is *cautious*: after a restart, and where
 * another owner is the one that is asked first, what is missing here may be on its way. It hands
 * such groups out only when they have not come within a grace period. This ends with the first
 * later step that it is asked for before anything of it is in: then nobody else handed any out.
 *
 * What is usual: the median time from hand-out to arrival of the last few groups with one holder.
 * One that has arrived and only waits for lower ones needs no backup while its session lives.
 */
#ifndef SHD_LEASE_H
#define SHD_LEASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/step.h"

enum lease_answer {
    LEASE_GROUP,  /* compute *ret_group */
    LEASE_WAIT,   /* ask again when the core or the sessions change, or at lease_next_ns() */
    LEASE_ALL_IN, /* nothing is missing in this step */
    LEASE_OVER,   /* the step was committed */
};

struct lease; /* lives in caller's memory */

#define LEASE_UNKNOWN_NS UINT64_C(1000000000) /* taken as usual until a group has come in */
#define LEASE_OVERDUE_NS UINT64_C(20000000)   /* over twice the usual time: a backup may start */
#define LEASE_GRACE_NS   UINT64_C(100000000)  /* least grace period */

size_t lease_bytes(uint32_t groups); /* groups: the core's micros, > 0 */

/* In memory of lease_bytes() aligned to 16. */
struct lease *lease_init(void *memory, uint32_t groups, bool cautious);

/* session > 0 asks for work of `step`. A session may hold several groups; it is never handed one
 * that it has already. (Two holders are kept: where the backup is overdue as well, the next one
 * takes its place.) Errors of the caller (a step not begun) are LEASE_WAIT. */
enum lease_answer lease_ask(struct lease *l, const struct step *core, uint64_t step,
                            uint64_t session, uint64_t now_ns, uint32_t *ret_group);

/* The session is gone: what it had can be handed out again. */
void lease_forget(struct lease *l, uint64_t session);

/* When, after now_ns, a waiting session may get a group although nothing has changed; UINT64_MAX:
 * never. Right only when all waiting sessions were told to wait at this now_ns (what was due then
 * is not named again, so that a timer cannot spin on what nobody can be given). */
uint64_t lease_next_ns(const struct lease *l, const struct step *core, uint64_t now_ns);

/* Looking: who has a group now (0: nobody; [0] first, [1] the backup), since when. */
void lease_holders(const struct lease *l, uint32_t group, uint64_t ret_session[2],
                   uint64_t ret_since_ns[2]);

#endif
