/* A worker's page about itself: a fixed struct at the end of each inbox segment. Workers write the
 * one of owner 0 as they go; the daemon looks when somebody asks. In the others' they only say
 * whether they wait for a slot: who holds one has to know. No message is sent.
 *
 * One writer (the worker's thread), readers that map the same pages. What the worker does *now* is
 * under a sequence number (odd while it is written); what it has done lies in a ring of spans, the
 * newest over the oldest. Times are CLOCK_MONOTONIC, the same for all processes of a host.
 *
 * A reader trusts nothing: it copies once, then checks every number against limits of its own. A
 * worker that writes nonsense is shown as saying nothing.
 */
#ifndef SHD_ACTIVITY_H
#define SHD_ACTIVITY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define ACTIVITY_MAGIC   UINT64_C(0x3176697463616873) /* "shactiv1" */
#define ACTIVITY_SPANS   1024u
#define ACTIVITY_BUCKETS 20u                /* bounds of activity_bounds_ns; one more is above */
#define ACTIVITY_BYTES   UINT64_C(0x9000)   /* of the struct: whole pages */
#define ACTIVITY_NONE    UINT32_C(0xffffff) /* no unit, no micro-batch */

enum activity_what {
    ACTIVITY_SILENT, /* nothing was written yet */
    ACTIVITY_FORWARD,
    ACTIVITY_BACKWARD,
    ACTIVITY_WAIT_UNIT,
    ACTIVITY_WAIT_SLOT,
    ACTIVITY_RETURN,
    ACTIVITY_PREPARE,
    ACTIVITY_COMMIT,
    ACTIVITY_LEASE,
    ACTIVITY_RECONNECT,
    ACTIVITY_IDLE,
    ACTIVITY_WHATS,
};

struct activity_span {
    enum activity_what what;
    uint32_t unit, micro; /* ACTIVITY_NONE: of none. micro: the micro-batch, not its group */
    uint64_t step;
    uint64_t begin_ns, duration_ns; /* duration 0: it goes on */
};

struct activity_words { /* a span as it lies in shared memory */
    _Atomic uint64_t begin_ns, duration_ns;
    _Atomic uint64_t place; /* what << 48 | unit << 24 | micro */
    _Atomic uint64_t step;
};

/* Upper bounds of the buckets, as the daemon's own histograms have them: 50 us to 100 s. */
extern const uint64_t activity_bounds_ns[ACTIVITY_BUCKETS];

struct activity_waits { /* for parameters: how often how long */
    uint64_t bucket[ACTIVITY_BUCKETS + 1];
    uint64_t sum_ns;
};

enum activity_path {
    ACTIVITY_PATH_NONE,
    ACTIVITY_PATH_MAP,
    ACTIVITY_PATH_COPY,
    ACTIVITY_PATH_NCCL,
    ACTIVITY_PATHS,
};

struct activity {
    _Atomic uint64_t magic;
    _Atomic uint64_t path; /* by which the worker reads parameters */
    /* 0: it does not say; 1: it waits for no gradient slot; else: since when it waits for one. In
     * every owner's page. */
    _Atomic uint64_t slot_wait;
    _Alignas(64) _Atomic uint64_t now_seq;
    struct activity_words now;
    _Alignas(64) _Atomic uint64_t bucket[ACTIVITY_BUCKETS + 1];
    _Atomic uint64_t sum_ns;
    _Alignas(64) _Atomic uint64_t spans; /* ever written */
    _Alignas(64) struct activity_words ring[ACTIVITY_SPANS];
};
_Static_assert(sizeof(struct activity) <= ACTIVITY_BYTES, "fits its pages");

/* "forward", "wait unit", ...; NULL: nothing to be said. */
const char *activity_name(enum activity_what what);

/* -- The worker ---------------------------------------------------------------------------------
 */

void activity_init(struct activity *a, enum activity_path path);
void activity_set_now(struct activity *a, const struct activity_span *now);
void activity_add_span(struct activity *a, const struct activity_span *span);
void activity_add_wait(struct activity *a, uint64_t duration_ns);

/* It waits for a slot since since_ns; 0: it does not. Of any owner's page, also one that was not
 * initialized. */
void activity_set_slot_wait(struct activity *a, uint64_t since_ns);

/* -- The daemon ---------------------------------------------------------------------------------
 */

struct activity_limits { /* of the model it is about */
    uint32_t units, micros;
    uint64_t now_ns; /* nothing began later */
};

/* "map", "copy", "nccl" or NULL. */
const char *activity_path_name(const struct activity *a);

/* The span that the worker is in now. False: it says nothing, or nothing that can be so. */
bool activity_now(const struct activity *a, const struct activity_limits *limits,
                  struct activity_span *ret_now);

/* False: no page, or sums that cannot be so. */
bool activity_waits(const struct activity *a, struct activity_waits *ret_waits);

/* Since when the worker waits for a slot; 0: it does not. False: it does not say (it is of an
 * older libshd). */
bool activity_slot_wait(const struct activity *a, uint64_t now_ns, uint64_t *ret_since_ns);

/* Copy the spans that ended after since_ns, oldest first, at most ACTIVITY_SPANS; how many. Those
 * that were overwritten meanwhile, or cannot be so, are left out. */
uint32_t activity_spans(const struct activity *a, const struct activity_limits *limits,
                        uint64_t since_ns, struct activity_span ret_spans[ACTIVITY_SPANS]);

#endif
