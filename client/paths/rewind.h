/* Snapshots of a model at its owners, and going back to one: all of them, or none
 * (daemon/model/rewind.h says how they agree). */
#ifndef SHD_PATHS_REWIND_H
#define SHD_PATHS_REWIND_H

#include "client/paths/rewind_turn.h"
#include "client/session/session.h"

/* By the boards, now: the newest rewind that an owner has done (the attempt that began with it; 0:
 * none) and where it went. */
uint64_t rewind_newest(const struct shd_model *m, uint64_t *ret_step);

/* Another number after each rewind that this worker has gone along with, or move to other owners.
 */
uint64_t rewind_known(const struct shd_model *m);

/* SHD_ERESET: an owner has gone back since. */
int rewind_seen(const struct shd_model *m, struct shd_err *e);

/* While an owner's parameters are those of no step, as a snapshot is being copied back: wait. What
 * was read of them before is of no use then, and rewind_seen() says so. */
int rewind_await(struct shd_model *m, struct shd_err *e);

/* Before all owners are asked for one step; and when all have answered: is it of different runs, as
 * one of them went back? Then they are to be asked again. */
struct rewind_mark rewind_mark(const struct shd_model *m);
bool rewind_since(const struct shd_model *m, const struct rewind_mark *asked);

/* Have owners follow that have not gone back yet where another one has. *ret_apart: some had not.
 */
int rewind_together(struct shd_model *m, bool *ret_apart, struct shd_err *e);

/* Have all owners go back to their snapshot of `step`. known: the attempt that began with the last
 * rewind. keep_settings: those of after the snapshot stay, from the same steps on, unless one of
 * the daemons is of an older build. Errors:
 * SHD_ENOENT there is none at all of them; SHD_ESTEP another session has rewound it since, or does;
 * SHD_EBUSY, SHD_ENOTSUP; SHD_ERANGE no room for the settings. */
int rewind_owners(struct shd_model *m, uint64_t step, uint64_t known, bool keep_settings,
                  struct shd_err *e);

/* The same with them, but for who goes back because of what it has seen: where anybody has gone
 * back since this worker knows, that is it. Errors: as above; while others are at it, it tries
 * again. */
int rewind_once(struct shd_model *m, uint64_t step, struct shd_err *e);

/* Keep the open step, or one soon after. */
int snapshot_owners(struct shd_model *m, uint64_t *ret_step, struct shd_err *e);
int snapshot_options(struct shd_model *m, uint64_t every, uint32_t keep, struct shd_err *e);

struct snapshot_row {
    uint64_t step, bytes, time_ns; /* bytes: of all owners */
};
/* Those that all owners have, ascending: rows[WIRE_SNAPSHOTS_MAX]. */
int snapshot_list(struct shd_model *m, struct snapshot_row *ret_rows, uint32_t *ret_count,
                  struct shd_err *e);

#endif
