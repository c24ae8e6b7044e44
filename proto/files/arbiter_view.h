/* Which hosts of a cluster are out: a view, as an arbiter keeps it (arbiter.h), and as text:
 *
 *   {"schema": 1, "cluster": "NAME", "view": 3, "out": ["b"]}
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

struct arbiter_view {
    uint64_t number; /* of the view; 0: nothing was ever changed, all hosts are in */
    uint32_t out_count;
    char (*out)[ARBITER_NAME_BYTES]; /* owned: names of hosts that are out, ascending by strcmp() */
};

/* Leaves it empty; an empty one, { 0 }, is a no-op. */
void arbiter_view_free(struct arbiter_view *v);

/* Whether host is out in it. */
bool arbiter_view_has(const struct arbiter_view *v, const char *host);

/* What of changes with host out, too: *ret_next has the next number and is the caller's to free.
 * Errors: SHD_EEXIST it is out already, SHD_ERANGE too many, SHD_EINVAL no name of a host,
 * SHD_ENOMEM. */
int arbiter_view_next(const struct arbiter_view *v, const char *host, struct arbiter_view *ret_next,
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
