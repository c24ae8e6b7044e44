/* Taking memory for good: pages are there when they are first asked for, or are refused with the
 * numbers. A page that is missing later would be a page fault that ends the process: a memfd beyond
 * the limit of a cgroup by the OOM killer, beyond the host's memory likewise.
 *
 * Room is looked at (proto/base/memory.h) and then taken (fallocate()), which the next one who
 * looks sees: pages count for the cgroup and the host whichever process has them. One lock for all
 * daemons of a runtime directory makes the two one, so that of two daemons which ask for the same
 * room one is refused.
 *
 * Failure modes: others (a training process, another directory's daemons) may take the room between
 * the look and the taking. Memory is taken in pieces and looked for before each, and RESERVE_SPARED
 * is left: what others take within some ten milliseconds beyond that is the kernel's to answer, by
 * its OOM killer. A daemon that is stopped with the lock held (an flock() of the directory itself)
 * delays others by RESERVE_PATIENCE_MS; then they go on without it.
 */
#ifndef SHD_RESERVE_H
#define SHD_RESERVE_H

#include <stdint.h>

#include "proto/base/status.h"

#define RESERVE_PIECE       (UINT64_C(64) << 20)
#define RESERVE_SPARED      (UINT64_C(32) << 20) /* for all but segments: heaps, stacks, page tables */
#define RESERVE_SPARED_MIN  (UINT64_C(8) << 20) /* of what was promised before */
#define RESERVE_PATIENCE_MS 10000
#define RESERVE_HUGE        (UINT64_C(2) << 20) /* a huge page of x86-64 */

/* Share the lock of this directory (borrowed), which need not be there yet, with its other daemons.
 * Before other threads start. Without one the lock is of this process alone. */
void reserve_share(const char *dir);

/* Between these nobody else of the directory, and no other thread, looks at the room or takes it.
 * Not to be nested. They may wait: not for the loop's thread. */
void reserve_lock(void);
void reserve_unlock(void);

/* Whether there is room for `bytes` more, and `spared` besides. Errors: SHD_ENOMEM: what is needed,
 * what is free, and whose limit that is. */
int reserve_check(uint64_t bytes, uint64_t spared, struct shd_err *e);

/* Huge pages to be taken where they can be had. */
struct reserve_huge {
    void *base;     /* where the memfd is mapped writable, all of it: a multiple of RESERVE_HUGE */
    uint64_t bytes; /* begins as 0: so many were taken in huge pages */
};

/* Take [offset_bytes, + bytes) of a memfd. huge: NULL, or offset_bytes is 0. Errors: SHD_ENOMEM
 * with the numbers; what was taken of it stays taken until the memfd is closed, cut or punched. */
int reserve_pages(int fd, uint64_t offset_bytes, uint64_t bytes, struct reserve_huge *huge,
                  struct shd_err *e);

#endif
