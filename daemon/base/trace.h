/* The trace: the last 65,536 events of the loop, in a fixed ring that the loop writes and the
 * HTTP thread reads at the same time. Writing is a few stores. A reader copies a stretch and then
 * looks how far the writer has come: what may have been written over is dropped. */
#ifndef SHD_TRACE_H
#define SHD_TRACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define TRACE_EVENTS 65536u
#define TRACE_NOBODY UINT32_C(0xffff)
#define TRACE_NONE   UINT32_C(0xffff) /* no unit, no gradient */

enum trace_what {
    TRACE_ARRIVED, /* a gradient, or word that there is none */
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
    uint32_t model;   /* handle; 0: none */
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

int trace_new(struct trace **ret_trace, struct shd_err *e);
void trace_free(struct trace *t); /* NULL is a no-op */

/* Loop thread. */
void trace_add(struct trace *t, const struct trace_event *event);

/* Any thread: copy the events that ended after since_ns, oldest first, into ret_events
 * [TRACE_EVENTS]; how many. */
uint32_t trace_copy(const struct trace *t, uint64_t since_ns, struct trace_event *ret_events);

#endif
