/* Replicas in the simulator: hosts, what comes between them, the arbiter, and what a worker knows
 * of all that.
 *
 * Daemon owners + i has the slice of owner i, on another of two or three hosts; workers are placed
 * on hosts, too. Real are turn.c, which is told of owners that are lost, and membership_judge().
 * Modelled are the arbiter (a number and a set, changed by compare-and-swap), who looks at it when
 * and claims what (membership.c), the change of places (hub_lose(), replica.c), that gradients go
 * to replicas first (slots.c), and whom leases are asked of (lease.c).
 *
 * Daemons are named as they were at first; a worker's *members* are in its view's places: at[i] is
 * who is owner i to it, at[owners + i] the other one of that slice, which may be gone.
 *
 * Of three hosts two may be cut off from each other while the third reaches both. So a worker tells
 * daemons its view as it attaches, and attaches anew for a newer one; a daemon takes in none that
 * is older than the newest it was told. Its successor does not know that one: whoever has an older
 * view is turned away by the others, and no step is all its own.
 *
 * Faults: a host dies for good; what is sent between two hosts is lost, one way or both, for less
 * or more than the patience, or for ever; the arbiter cannot be reached from some host, or from
 * any. Both sides of what is broken notice it some time later, each by itself. Somebody looks after
 * hosts: starts the workers of dead ones elsewhere, or not, and puts out what no worker can.
 *
 * What must be: R1 a step is done for a worker only when all members of its view, and of the newest
 * one, have recorded the same decision; R2 nobody who is out is asked to prepare or to commit by
 * who knows it, and decides no two steps by itself; R3 what a survivor has recorded is what all
 * record; R4 the run ends with all steps, whoever is lost; R5 both members of a pair are at the
 * same parameters after each step, those of the undisturbed run. What only those have recorded that
 * are out since counts for nobody, and another decision may come in its place.
 *
 * Left out (replicate() of sim_run.c), for what there is does not hold there:
 *   settings       whoever changes them here tells owner 0 alone, and not its replica;
 *   rewinds, guests  owner 0 goes alone, and guests ask owners only.
 */
#ifndef SHD_SIM_REPLICA_H
#define SHD_SIM_REPLICA_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/decision.h"

#define SIM_HOSTS   3u
#define SIM_MEMBERS 8u /* 2 * SIM_DAEMONS */
#define SIM_EVER    UINT64_MAX

struct sim;
struct sim_daemon;
struct sim_event;
struct sim_msg;
struct sim_worker;

struct sim_cluster {
    uint64_t number; /* of the view */
    uint32_t out;    /* a bit per host: what it says */
    uint32_t dead;   /* likewise: for good */
    uint64_t dead_ns;
    bool for_good;                               /* a host is dead, or a link cut for ever */
    uint64_t cut_until_ns[SIM_HOSTS][SIM_HOSTS]; /* from, to */
    uint64_t away_until_ns[SIM_HOSTS];           /* the arbiter, for this one */
    uint64_t cut_rest_ns, away_rest_ns;          /* hardly another one before then */
};

struct sim_view { /* a worker's */
    uint32_t host;
    uint64_t number; /* the newest that it has read, */
    uint32_t out;    /* and what that says */
    uint64_t told;   /* daemons, as it attaches */
    uint32_t gone;   /* a bit per daemon: nobody is asked there any more */
    uint32_t met;    /* likewise: was up in this life */
    uint32_t at[SIM_MEMBERS];
    uint64_t down_ns[SIM_MEMBERS]; /* of a daemon: since then */
    uint64_t claim, claim_number;  /* the one that counts; what it would make */
    uint32_t claim_out;
    bool early;                  /* COMPUTING: what it reads is not there yet */
    uint32_t give_unit, give_at; /* RETURNING: + 1; the next to be told of it */
};

struct sim_stray { /* a daemon's that is out: */
    bool is;       /* its last decision is nobody else's, as far as is known */
    bool wrong;    /* its parameters are of no step */
    struct decision decision;
};

/* -- Hosts: sim_host.c --------------------------------------------------------------------------
 */

uint32_t sim_host_of(const struct sim *s, uint32_t daemon);
bool sim_is_out(const struct sim *s, uint32_t daemon); /* as the arbiter has it */
bool sim_is_dead(const struct sim *s, uint32_t daemon);
void sim_hosts_begin(struct sim *s);
void sim_host_fault(struct sim *s);
void sim_cut_fault(struct sim *s);
void sim_arbiter_fault(struct sim *s);
void sim_hosts_event(struct sim *s); /* EV_HOSTS */
void sim_hosts_claim(struct sim *s, uint64_t number, uint32_t out);
/* Where a worker is to be started; false: nowhere. */
bool sim_hosts_place(struct sim *s, struct sim_worker *w);
/* True: it is lost. Else so much later than usual. */
bool sim_hosts_lose(struct sim *s, const struct sim_msg *msg, bool side, uint64_t *ret_delay_ns);
/* It waits for somebody it cannot reach. */
bool sim_hosts_cut_off(const struct sim *s, const struct sim_worker *w);

/* -- A worker's view: sim_replica.c -------------------------------------------------------------
 */

/* Owner, or member, of its view; all who are not gone. */
struct sim_daemon *sim_member(struct sim *s, const struct sim_worker *w, uint32_t member);
uint32_t sim_member_of(const struct sim *s, const struct sim_worker *w, uint32_t daemon);
bool sim_is_gone(const struct sim_worker *w, uint32_t daemon);
uint32_t sim_next_member(const struct sim *s, const struct sim_worker *w, uint32_t member);
uint32_t sim_all(const struct sim *s, const struct sim_worker *w);

/* As it begins: false: the arbiter cannot be asked. */
bool sim_view_begin(struct sim *s, struct sim_worker *w);
void sim_view_start(struct sim *s, struct sim_worker *w); /* with a turn */
void sim_view_event(struct sim *s, struct sim_worker *w, const struct sim_event *event);
/* Hand over, replicas first; true: everything. */
bool sim_view_give(struct sim *s, struct sim_worker *w);
void sim_view_down(struct sim *s, struct sim_worker *w, uint32_t daemon);
/* Is there a newer view than its own? Then it takes that, or ends where it cannot. */
bool sim_view_news(struct sim *s, struct sim_worker *w);
/* Members contradict each other: one of them may be out, as a view says that it does not know. */
bool sim_view_contradicts(const struct sim *s, const struct sim_worker *w, int status);

/* Checks */
void sim_view_check_done(struct sim *s, const struct sim_worker *w, uint64_t step,
                         const struct decision *decision);
void sim_view_check_asked(struct sim *s, const struct sim_worker *w, uint32_t daemon);
/* True: it is no decision of the line of states. */
bool sim_stray_decides(struct sim *s, struct sim_daemon *d, uint64_t step,
                       const struct decision *decision);

#endif
