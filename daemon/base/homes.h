/* Where a daemon makes what is large: a model's state, its published copy and its snapshots, each
 * in memory or on files in a directory (proto/share/segment_file.h). Said by whoever runs the
 * daemon, and by no client. What a predecessor has left stays where that made it. */
#ifndef SHD_HOMES_H
#define SHD_HOMES_H

#include <stdbool.h>

struct homes;
struct pager;
struct segment_home;
struct shd_err;

/* "memory" or "file:DIR"; NULL: memory. */
struct homes_words {
    const char *state, *publish, *snapshots;
};

/* Errors: SHD_EINVAL, SHD_ENOMEM. */
int homes_new(const struct homes_words *words, struct homes **ret_homes, struct shd_err *e);

/* Look at the directories; one in memory is told to the log. Of a successor, which has something to
 * go on with, one that will not do is told there, too: models that are opened are refused for it.
 * device: not NULL: one that has memory of its own. Errors: SHD_EINVAL a state or what is published
 * on files there; as of segment_home_check(). */
int homes_check(const struct homes *h, const char *device, bool successor, struct shd_err *e);

void homes_stop(struct homes *h); /* before the segments go: pager_stop(). NULL is a no-op */
void homes_free(struct homes *h); /* likewise */

/* NULL: in memory, without a pager. */
const struct segment_home *homes_state(const struct homes *h);
const struct segment_home *homes_publish(const struct homes *h);
const struct segment_home *homes_snapshots(const struct homes *h);
struct pager *homes_pager(const struct homes *h); /* of all segments on files */

#endif
