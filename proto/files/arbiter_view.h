/* Which hosts of a cluster are out: a view, as an arbiter keeps it (arbiter.h), and as text:
 *
 *   {"schema": 1, "cluster": "NAME", "view": 3, "out": ["b"],
 *    "behind": [{"host": "c", "view": 2, "filling": false}]}
 *
 * Hosts that were out and are in again are `behind` the others, in the order in which they came
 * back; without any the text has no such member. Who holds a slice as its owner and who as its
 * replica follows from that alone (arbiter_view_swaps()), so it is the same for everybody. While
 * one is filled (client/checkpoint/refill.h) it may lack steps, and is no reason to put the other
 * one of a slice out.
 *
 *   in ── next ──▶ out ── in ──▶ behind, filling ── filled ──▶ behind
 *                   ▲                  │                          │
 *                   └───── next ───────┴──────────────────────────┘
 *
 * Pure. */
#ifndef SHD_ARBITER_VIEW_H
#define SHD_ARBITER_VIEW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct shd_err;

#define ARBITER_HOSTS_MAX  1024u
#define ARBITER_NAME_BYTES 64u                   /* of a host or a cluster, with NUL */
#define ARBITER_NUMBER_MAX (UINT64_C(1) << 53)   /* what every reader of JSON reads exactly */
#define ARBITER_TEXT_MAX   (UINT64_C(128) << 10) /* bytes of a view's text, without NUL */

struct arbiter_behind {
    char host[ARBITER_NAME_BYTES];
    uint64_t since; /* the view that it came back with: what was known of it before is of no use */
    bool filling;   /* models there may not have come as far as the others yet */
};

struct arbiter_view {
    uint64_t number; /* of the view; 0: nothing was ever changed, all hosts are in */
    uint32_t out_count, behind_count;
    char (*out)[ARBITER_NAME_BYTES]; /* owned: names of hosts that are out, ascending by strcmp() */
    struct arbiter_behind *behind;   /* owned: none of those; `since` ascends */
};

/* Leaves it empty; an empty one, { 0 }, is a no-op. */
void arbiter_view_free(struct arbiter_view *v);

/* Whether host is out in it. */
bool arbiter_view_has(const struct arbiter_view *v, const char *host);

/* How it came back; NULL: it was never out, or is. */
const struct arbiter_behind *arbiter_view_behind(const struct arbiter_view *v, const char *host);

/* Of a pair of daemons on two hosts, in the order of an address: is the second one the owner, and
 * the first one its replica? */
bool arbiter_view_swaps(const struct arbiter_view *v, const char *first, const char *second);

/* What becomes of v with host out, too; with one that is out in again, behind the others, to be
 * filled; and with one that is filled: *ret_next has the next number and is the caller's to free.
 * Errors: SHD_EEXIST it is out already, SHD_ENOENT it is not out, or not being filled, SHD_ERANGE
 * too many, SHD_EINVAL no name of a host, SHD_ENOMEM. */
int arbiter_view_next(const struct arbiter_view *v, const char *host, struct arbiter_view *ret_next,
                      struct shd_err *e);
int arbiter_view_in(const struct arbiter_view *v, const char *host, struct arbiter_view *ret_next,
                    struct shd_err *e);
int arbiter_view_filled(const struct arbiter_view *v, const char *host,
                        struct arbiter_view *ret_next, struct shd_err *e);

/* The same; the caller's to free. Errors: SHD_ENOMEM. */
int arbiter_view_copy(const struct arbiter_view *v, struct arbiter_view *ret_copy,
                      struct shd_err *e);

/* A name of a host or a cluster, as cluster.h has them. */
bool arbiter_name_is_one(const char *name);

/* Its text, on one line with an end; the caller's to free. Errors: SHD_EINVAL and SHD_ERANGE it is
 * no view (a name, their order, a number), SHD_ENOMEM. */
int arbiter_view_write(const struct arbiter_view *v, const char *cluster, char **ret_text,
                       struct shd_err *e);

/* The view of a text[bytes] that has to be of this cluster. Errors: SHD_EINVAL and SHD_ERANGE, with
 * the member, SHD_ENOMEM. */
int arbiter_view_parse(const char *text, size_t bytes, const char *cluster,
                       struct arbiter_view *ret_view, struct shd_err *e);

#endif
