/* Pages of segments on files (proto/share/segment_file.h): read before they are needed, written
 * back and given up when they are not, so that what lies on a disk takes a bounded part of memory.
 *
 * Two threads of a daemon, started when they are first needed, so that reading never waits for
 * writing. One has the kernel read ahead. The other takes pages out of this process's page table,
 * has them written, waits for that, and gives them up; while it waits for one range the next is
 * being written. What the range holds stays what it is: whoever touches it again finds it in the
 * page cache or has it read.
 *
 * Nothing of it is needed for a result: where a queue is full a range stays in memory, for the
 * kernel to give up, and its completion fires at once. A segment is closed by the second thread,
 * behind what it still has to do with it: no page of a successor at its address is ever touched.
 *
 * Failure modes: a write that fails is the kernel's to report, by SIGBUS to who reads it next. No
 * thread to be had: ranges stay, segments are closed by the caller. */
#ifndef SHD_PAGER_H
#define SHD_PAGER_H

#include <stdint.h>

struct kern_done;
struct pager;
struct segment;
struct shd_err;

/* Errors: SHD_ENOMEM. */
int pager_new(struct pager **ret_pager, struct shd_err *e);

/* End the threads: what is queued is closed, and completed without being written. Later ranges
 * stay, segments are closed by the caller. */
void pager_stop(struct pager *p);
void pager_free(struct pager *p); /* stopped; NULL is a no-op */

/* Any thread, for these four. Have the kernel read a range, soon. */
void pager_ahead(struct pager *p, const struct segment *s, uint64_t at, uint64_t bytes);

/* Write a range back and give its pages up. done: NULL, or fires exactly once, on any thread, also
 * this one's. */
void pager_behind(struct pager *p, const struct segment *s, uint64_t at, uint64_t bytes,
                  struct kern_done *done);

/* Have a range written, soon, that stays in the page cache for others who read it: the kernel gives
 * written pages up as it needs them. */
void pager_write(struct pager *p, const struct segment *s, uint64_t at, uint64_t bytes);

/* segment_close(), of any segment of the host's: of one on a file behind what is queued for it. It
 * is the pager's from here on, and *s is SEGMENT_CLOSED. p: NULL closes it at once. */
void pager_close(struct pager *p, struct segment *s);

#endif
