/* A state on a file (daemon/base/homes.h), unit by unit: which of its pages are in memory, and in
 * what order others come.
 *
 * What a unit has there comes in two parts: its gradients' sum, which a Return adds to, and what is
 * kept of it (parameters, moments, average), which an update reads and writes with the sum. A part
 * is in memory from when work on it is begun, or when it is read ahead for an update in forward
 * order, until it is written back and given up: first those that an update is done with, then those
 * that were not used the longest. Parts in memory and those that are still being written have at
 * most owner_window_bytes() (proto/share/owner_bytes.h) together: work beyond that waits, in the
 * model's backlog, as it does for room in the kernel queue. A part that is larger than all of that
 * goes alone.
 *
 * What passes over all of a state (initial values, a restore, a copy for a checkpoint, a snapshot,
 * a digest) is not counted: it goes through the page cache, is written back behind itself, and is
 * given up as memory is wanted.
 *
 * m->use.paged_bytes says how much is in memory or being written, as counted here.
 *
 * Nothing here is needed for a result, and nothing outlives the process: stores to mapped pages are
 * the file's at once, in the order in which they were made, as those to memory are. Loop thread. */
#ifndef SHD_PAGING_H
#define SHD_PAGING_H

#include <stdbool.h>
#include <stdint.h>

struct model;
struct shd_err;

/* m->kept.paging, of a model whose state is mapped; nothing where that is in memory. Any thread.
 * Errors: SHD_ENOMEM. */
int paging_new(struct model *m, struct shd_err *e);
void paging_free(struct model *m);

/* Work on a unit is about to be queued: on all that it has, or on the sum alone. SHD_OK: it may be,
 * and paging_done() follows. Errors: SHD_EBUSY, not yet: apply_retry() comes when it may. */
int paging_begin(struct model *m, uint32_t unit, bool all, struct shd_err *e);

/* The work is done (over: an update was, so nothing needs the unit soon), or was not queued. */
void paging_done(struct model *m, uint32_t unit, bool all, bool over);

/* So many bytes of the state were passed over, outside of these. Any thread. */
void paging_passed(struct model *m, uint64_t bytes);

/* No completion of it is to come. */
bool paging_is_idle(const struct model *m);

#endif
