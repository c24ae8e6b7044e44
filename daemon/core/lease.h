/* Leases: workers without a fixed share take work as they come. The step's gradients are handed out
 * by group (of micro-batches), to whoever asks. A lease is advice: the core (step.h) sees to it
 * that each gradient counts once. Pure: time comes in with each call.
 *
 * A group is handed out when it is not in and nobody alive has it. What a dead session had goes
 * back. When nothing is left and a session asks, it may get a group that somebody has (a backup:
 * the first to return counts); until then it waits. It gets the one that has been late for longest,
 * or else the one that is expected to come last, if that is much later than the session would have
 * it. Late: out for longer than its holder takes, and the usual time beside.
 *
 * A slow session must not make the others wait. How long each takes is known from its last groups.
 * While those that are clearly faster would have computed all that is left before it had computed
 * one, it gets nothing; else it gets the highest one, so that what the others return is summed at
 * once, and only its own waits for its turn. In the ninth step in which it got nothing it is tried
 * again, at little cost: whoever is idle at the end of the step takes what it has at once.
 *
 * An owner that did not hand out everything itself is *cautious*: after a restart, and where
 * another owner is the one that is asked first, what is missing here may be on its way. It hands
 * such groups out only when they have not come within a grace period. This ends with the first
 * later step that it is asked for before anything of it is in: then nobody else handed any out.
 *
 * How long a session takes: the shorter of its last two groups, from hand-out to the question that
 * follows, so one stall does not count; of a group it had to drop, at least the time until then.
 * Of several that it has at once one is looked at, from its hand-out on: so long takes the next
 * one. The usual time: the median of everybody's last few. A session that nothing is known of takes
 * that. One that has arrived and only waits for lower ones needs no backup while its session lives.
 *
 * The group that is verified in a step (verify.h) goes to two sessions, or three, before all else:
 * those that were looked at the longest time ago, among who is there. All are in when their copies
 * are, too; what a second one takes too long for is not waited for any longer.
 */
#ifndef SHD_LEASE_H
#define SHD_LEASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct step;
struct verify;

enum lease_answer {
    LEASE_GROUP,  /* compute *ret_group */
    LEASE_WAIT,   /* ask again when the core or the sessions change, or at lease_next_ns() */
    LEASE_ALL_IN, /* nothing is missing in this step */
    LEASE_OVER,   /* the step was committed */
};

struct lease; /* lives in caller's memory */

#define LEASE_UNKNOWN_NS UINT64_C(1000000000) /* taken as usual until a group has come in */
#define LEASE_OVERDUE_NS UINT64_C(20000000)   /* longer than that still is not late */
#define LEASE_GRACE_NS   UINT64_C(100000000)  /* least grace period */
#define LEASE_TRIAL      8u                   /* so many steps without work, then a trial */
#define LEASE_VERIFY_NS  UINT64_C(1000000000) /* beside usual times, for a copy that is awaited */
#define LEASE_WORKERS    1024u                /* so many sessions are known apart */

size_t lease_bytes(uint32_t groups); /* groups: the most of a step, > 0 */

/* In memory of lease_bytes() aligned to 16. */
struct lease *lease_init(void *memory, uint32_t groups, bool cautious);

/* Have groups verified; borrowed. */
void lease_set_verify(struct lease *l, struct verify *verify);
struct verify *lease_verify(const struct lease *l); /* NULL: none are */

/* session > 0 asks for work of `step`. A session may hold several groups; it is never handed one
 * that it has already. (Two holders are kept: where the backup is overdue as well, the next one
 * takes its place.) Errors of the caller (a step not begun) are LEASE_WAIT. */
enum lease_answer lease_ask(struct lease *l, const struct step *core, uint64_t step,
                            uint64_t session, uint64_t now_ns, uint32_t *ret_group);

/* The step's gradients were given up (step_reset.h): all groups can be handed out again. */
void lease_begin_again(struct lease *l);

/* The session gives a group back that it was handed: it will not compute it. */
void lease_give_back(struct lease *l, uint64_t session, uint32_t group);

/* The session is gone: what it had can be handed out again. */
void lease_forget(struct lease *l, uint64_t session);

/* When, after now_ns, one that was told to wait may get a group although nothing has changed;
 * UINT64_MAX: never. It may be named too early. Right only when all who wait were asked again at
 * the last time named (what was due then is not named again, so that a timer cannot spin on what
 * nobody can be given). */
uint64_t lease_next_ns(const struct lease *l, const struct step *core, uint64_t now_ns);

/* Looking: who has a group now (0: nobody; [0] first, [1] the backup), since when. */
void lease_holders(const struct lease *l, uint32_t group, uint64_t ret_session[2],
                   uint64_t ret_since_ns[2]);

#endif
