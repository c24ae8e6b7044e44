/* Counts of what happens, and the trace of it: note() is told of each event, in numbers, where it
 * happens. Loop thread. take.c copies the counts for whoever looks.
 *
 * The trace is the last 65,536 events of the loop, in a fixed ring that the loop writes and the
 * HTTP thread reads at the same time. Writing is a few stores. A reader copies a stretch and then
 * looks how far the writer has come: what may have been written over is dropped. */
#ifndef SHD_METRICS_H
#define SHD_METRICS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "proto/base/fixsum.h"
#include "proto/base/status.h"
#include "proto/share/activity.h"

struct norms;
struct trace;

#define METRICS_BUCKETS    ACTIVITY_BUCKETS /* bounds: activity_bounds_ns */
#define METRICS_RATE_S     10u
#define METRICS_NAME_BYTES 64u
#define METRICS_LIST_BYTES 128u

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
    uint32_t rank;       /* plus 1; 0: it has none */
    char name[METRICS_NAME_BYTES];
};

struct metrics_who {
    struct metrics_sender *senders; /* owned, [groups]; NULL: none yet */
    uint32_t groups;
    struct parts *parts; /* owned: what each brought; NULL: the model has no guard_audit */
};

/* What the micro-batches' metrics of a step are called. */
struct metrics_names {
    uint64_t step, attempt;
    uint32_t group; /* that said so first */
    char text[METRICS_LIST_BYTES];
};

struct metrics_model {
    struct metrics_daemon *daemon; /* borrowed */
    uint32_t place;                /* of the model, in the trace */
    uint64_t returns, return_bytes, stale_returns;
    uint64_t steps, backup_leases, checkpoints, failed_checkpoints;
    struct {
        uint64_t all, by_guard;
    } skipped_steps;
    struct {
        uint64_t step, ns;
    } saved;                      /* the last checkpoint; ns 0: none since we started */
    struct metrics_hist returned; /* arrival to credit */
    struct metrics_hist applied;  /* a unit's update */
    struct metrics_hist step;     /* from one opening to the next */
    struct metrics_hist collect, decide;
    struct metrics_hist fetch_wait; /* as workers say */
    struct metrics_flow flow[METRICS_RATE_S + 2];
    uint64_t opened_ns, sealed_ns, committed_ns; /* of the step at hand; 0: not seen */
    uint64_t collect_ns, decide_ns, apply_ns;    /* of the last step */
    bool has_collect, has_decide, has_apply;     /* these were seen */
    struct metrics_who who;
    struct metrics_names names; /* of the step being collected */
    struct norms *norms;        /* counted: norms.h */
};

struct metrics_rates {
    double steps_per_s, returns_per_s, bytes_per_s;
};

struct metrics_daemon {
    struct trace *trace; /* borrowed */
    uint64_t sessions, session_deaths;
    uint32_t models;          /* that have been open */
    uint64_t kernels_free_ns; /* when the last finished piece of kernel work was done */
};

/* m is zero. Errors: SHD_ENOMEM. */
int metrics_model_init(struct metrics_model *m, uint32_t units, struct shd_err *e);
void metrics_model_copy(const struct metrics_model *m, struct metrics_model *ret_copy);
void metrics_model_deinit(struct metrics_model *m); /* of a copy as well */

/* Of a model with guard_audit: keep what each gradient brings (proto/share/parts.h), from now on.
 * Errors: SHD_ENOMEM. */
int metrics_audit(struct metrics_model *m, uint32_t units, uint32_t groups, struct shd_err *e);

/* A gradient is summed. session 0: who sent the group last. sum: as parts_take(). Nothing without
 * guard_audit. */
struct metrics_part {
    uint64_t round;
    uint32_t unit, group;
    bool first;
    uint64_t session;
};
void metrics_keep_part(struct metrics_model *m, const struct metrics_part *part,
                       const struct fixsum *sum);

/* The sums behind groups from that one on, as parts_read(). False: they are not known. */
bool metrics_parts(const struct metrics_model *m, const struct metrics_part *from, uint32_t count,
                   uint8_t *ret_bytes);

/* The sender of a group, of so many. Without memory for it nobody is named. */
void metrics_remember_sender(struct metrics_model *m, uint32_t groups, uint32_t group,
                             const struct metrics_sender *sender);

/* Who sent it; NULL: not known (any more). */
const struct metrics_sender *metrics_part_sender(const struct metrics_model *m,
                                                 const struct metrics_part *part);
struct metrics_rates metrics_model_rates(const struct metrics_model *m, uint64_t age_ns,
                                         uint64_t now_ns);

/* -- Events ----------------------------------------------------------------------------------- */

#define TRACE_EVENTS 65536u
#define TRACE_NOBODY UINT32_C(0xffff)
#define TRACE_NONE   UINT32_C(0xffff) /* no unit, no gradient */

enum trace_what {
    TRACE_ARRIVED, /* a gradient, or word that there is none: checked, before the core sees it */
    TRACE_CREDIT,
    TRACE_STALE, /* the same, but it was not used */
    TRACE_SUM,   /* a gradient into the accumulator */
    TRACE_SUMSQ, /* its sum of squares alone, or clearing it */
    TRACE_APPLY, /* a unit's update */
    TRACE_PUBLISH,
    TRACE_COLLECT, /* a step: opened to sealed */
    TRACE_DECIDE,  /* sealed to committed */
    TRACE_UPDATE,  /* committed to open */
    TRACE_SESSION,
    TRACE_SESSION_END,
    TRACE_WHATS,
};

struct trace_event {
    enum trace_what what;
    uint32_t model;   /* its place (model.h); 0: none */
    uint32_t unit;    /* or TRACE_NONE */
    uint32_t group;   /* of micro-batches, as Return counts; or TRACE_NONE */
    uint32_t session; /* index in the table, or TRACE_NOBODY */
    uint64_t step;
    uint64_t begin_ns, duration_ns; /* duration 0: an instant */
};

struct trace_words {
    _Atomic uint64_t begin_ns, duration_ns;
    _Atomic uint64_t what; /* what 8 | model 8 | unit 16 | group 16 | session 16 */
    _Atomic uint64_t step;
};

struct trace {
    _Atomic uint64_t head; /* events ever written */
    struct trace_words ring[TRACE_EVENTS];
};

/* An event, as note() is told of it. */
struct note {
    enum trace_what what;
    uint32_t unit;     /* of a gradient, of work, of what is published */
    uint32_t group;    /* of a gradient or the work on it, else TRACE_NONE */
    uint64_t session;  /* who sent it; 0: nobody */
    uint64_t step;     /* that it is of */
    uint64_t since_ns; /* when the gradient arrived, the work was queued */
    uint64_t bytes;    /* of a gradient that arrived */
    bool skip;         /* a decision that changes nothing; work that is no update by it */
    bool guarded;      /* such a decision: a guard made it */
};

/* Something of a model has happened. Of a phase's end unit, group and session mean nothing. */
void note(struct metrics_model *m, const struct note *n);

/* A session has begun, or ended (died: unasked). */
void note_session(struct metrics_daemon *d, enum trace_what what, uint64_t session, bool died);

/* Take over what a worker has counted since it was `seen` last. */
void metrics_take_waits(struct metrics_model *m, const struct activity *a,
                        struct activity_waits *seen);

int trace_new(struct trace **ret_trace, struct shd_err *e);
void trace_free(struct trace *t); /* NULL is a no-op */

/* Any thread: copy the events that ended after since_ns, oldest first, into ret_events
 * [TRACE_EVENTS]; how many. */
uint32_t trace_copy(const struct trace *t, uint64_t since_ns, struct trace_event *ret_events);

uint64_t metrics_time_ns(void); /* now, since 1970 */

#endif
