/* The traces of several daemons as one, and how much of the workers' waiting is hidden.
 *
 * A process keeps its pid, so each daemon and worker is one process of the merged trace. What
 * several daemons say about the same worker is taken once; ids of flow events, which each daemon
 * counts for itself, get the daemon's name in front.
 */
#ifndef SHD_CTL_TRACE_MERGE_H
#define SHD_CTL_TRACE_MERGE_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "proto/base/status.h"

#define MERGE_WORKERS_MAX 1024u
#define MERGE_NAME_BYTES  40u

/* A set of time as a list of spans, in microseconds. */
struct span {
    double begin, end;
};
struct spans {
    struct span *items; /* owned */
    size_t count, capacity;
};

struct merge_worker {
    double pid;
    char name[MERGE_NAME_BYTES];
    double begin, end;          /* of what is known of it: it remembers less than daemons do */
    struct spans compute;       /* forward, backward */
    struct spans fetch, giving; /* parameters under way to it; gradients under way from it */
};

struct merge {
    json_t *events;               /* owned: the array */
    json_t *seen, *flows;         /* owned: workers' events; beginnings of flows */
    json_t *daemons;              /* owned: their pids, as keys */
    struct spans updates;         /* daemons that update and publish units */
    struct merge_worker *workers; /* owned */
    uint32_t worker_count;
    uint64_t repeated; /* events left out */
};

int merge_init(struct merge *m, struct shd_err *e);
void merge_deinit(struct merge *m);

/* Before the first merge_add(): a daemon's pid. */
void merge_daemon(struct merge *m, double pid);

/* One daemon's trace. Errors: SHD_EPROTO it is none. */
int merge_add(struct merge *m, const char *device, const char *text, size_t bytes,
              struct shd_err *e);

/* After the last: a share is hidden when the worker computed meanwhile. NAN: there was nothing. */
struct merge_overlap {
    double compute_ms, fetch_ms, fetch_hidden, return_ms, return_hidden;
};
void merge_end(struct merge *m);
struct merge_overlap merge_overlap(const struct merge_worker *w);

#endif
