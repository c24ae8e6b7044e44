/* Counts of what happens, made by the loop thread, in plain structs, where it happens.
 * take.c copies them for whoever looks. The hooks also write the trace (trace.h). */
#ifndef SHD_METRICS_H
#define SHD_METRICS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/share/activity.h"

struct daemon;
struct inbox;
struct model;
struct model_unit;
struct op;
struct session;

#define METRICS_BUCKETS    ACTIVITY_BUCKETS /* bounds: activity_bounds_ns */
#define METRICS_RATE_S     10u
#define METRICS_NAME_BYTES 64u

struct metrics_hist { /* of durations */
    uint64_t bucket[METRICS_BUCKETS + 1];
    uint64_t sum_ns;
};

struct metrics_flow { /* of one second */
    uint64_t second;
    uint64_t steps, returns, bytes;
};

/* The worker that returned a micro-batch last. Where shares are fixed the next one is its too. */
struct metrics_sender {
    uint64_t session; /* 0: nobody yet */
    pid_t pid;
    uint64_t start_time; /* of the process: tells a pid's next user from it */
    char name[METRICS_NAME_BYTES];
};

struct metrics_model {
    uint64_t returns, return_bytes, stale_returns;
    uint64_t steps, skipped_steps, backup_leases, checkpoints;
    struct metrics_hist returned; /* arrival to credit */
    struct metrics_hist applied;  /* a unit's update */
    struct metrics_hist step;     /* from one opening to the next */
    struct metrics_hist collect, decide;
    struct metrics_hist fetch_wait; /* as workers say */
    struct metrics_flow flow[METRICS_RATE_S + 2];
    uint64_t opened_ns, sealed_ns, committed_ns; /* of the step at hand; 0: not seen */
    uint64_t collect_ns, decide_ns, apply_ns;    /* of the last step */
    bool has_collect, has_decide, has_apply;     /* these were seen */
    struct metrics_sender *senders;              /* owned, [groups]; NULL: none yet */
};

struct metrics_rates {
    double steps_per_s, returns_per_s, bytes_per_s;
};

struct metrics_daemon {
    uint64_t sessions, session_deaths;
    uint64_t kernels_free_ns; /* when the last finished piece of kernel work was done */
};

void metrics_model_deinit(struct metrics_model *m);
struct metrics_rates metrics_model_rates(const struct metrics_model *m, uint64_t age_ns,
                                         uint64_t now_ns);

/* Hooks; loop thread. op->arrived_ns is set by dispatch. */
void metrics_return_arrived(const struct op *op); /* checked, before the core sees it */
void metrics_credited(const struct op *op, bool stale);
void metrics_prepare_asked(const struct op *op);
void metrics_leased(const struct op *op, uint32_t group);
void metrics_work_done(const struct model_unit *mu);
void metrics_published(const struct model *m, uint32_t unit, uint64_t version);
void metrics_sealed(struct model *m);
void metrics_committed(struct model *m, uint64_t step, bool skip);
void metrics_opened(struct model *m, uint64_t step);
void metrics_session_open(const struct session *s);
void metrics_session_ended(const struct session *s);

/* Take over what the worker has counted since the last time. */
void metrics_take_waits(struct inbox *inbox);

#endif
