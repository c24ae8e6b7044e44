/* One picture of a node from what its daemons say: a worker has a session with each daemon, and
 * each daemon reports its own side of a wait. Here they are one worker, and one wait. Pure. */
#ifndef SHD_CTL_STATUS_JOIN_H
#define SHD_CTL_STATUS_JOIN_H

#include <stdbool.h>
#include <stdint.h>

#include "client/ctl/base/status_doc.h"
#include "client/ctl/watch/status_node.h"
#include "proto/base/headline.h"

#define JOIN_WORKERS_MAX 4096u
#define JOIN_WAITS_MAX   256u

struct join_worker {
    struct doc_session s; /* slots, slots_waiting: sums; the rest as the latest word has it */
    uint32_t daemons;     /* it has sessions with */
    double told_ns;       /* when that was so */
    double waited_for;    /* workers that wait for it */
    double waited_s;      /* the longest of these waits */
};
struct join_wait {
    struct doc_wait w;
    uint32_t daemons; /* that report it */
};

struct join {
    struct join_worker *workers; /* owned, by pid */
    struct join_wait *waits;     /* owned, the longest first */
    uint32_t worker_count, wait_count;
    bool held_up;
    struct headline headline; /* by whom; empty: nobody is */
};

/* Workers and waits beyond the limits, or beyond memory, are left out. */
void join_make(const struct node *n, struct join *ret_join);
void join_free(struct join *j);

/* "backward blk.3, micro-batch 2". buf[bytes]; returns buf. */
const char *join_now(const struct doc_now *s, char *buf, size_t bytes);

enum join_sort { JOIN_WORST, JOIN_PID, JOIN_NAME, JOIN_SINCE, JOIN_SORTS };
const char *join_sort_name(enum join_sort sort);
void join_sort(struct join *j, enum join_sort sort);

#endif
