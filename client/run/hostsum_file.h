/* The memory in which workers of one host sum gradients together (hostsum.h): its file, who is in
 * it, and where things lie. Words are read and written under the lock alone, but for cells that are
 * in, which nobody writes. The lock goes with a process that is killed between two stores, so any
 * prefix of them has to be one that others can go on from.
 *
 * /dev/shm/shardd-sums-UID-HASH, of the runtime directory and the model's name:
 *
 *     head | lanes [units] | done [units][groups], bits | cells [units][accumulate] | arrays
 * [units][accumulate], fp32, whole pages
 *
 * Whoever joins and finds nobody alive begins with empty lanes.
 */
#ifndef SHD_HOSTSUM_FILE_H
#define SHD_HOSTSUM_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/session/session.h"

#define HOSTSUM_MEMBERS_MAX 1024u
#define HOSTSUM_PATH_BYTES  80

struct hostsum_round {
    uint64_t attempt, step;
};

#define HOSTSUM_FREE UINT32_MAX

struct hostsum_lane {
    struct hostsum_round round; /* of what follows, and of hostsum_done() */
    uint32_t group;             /* HOSTSUM_FREE: none, and the cells say nothing */
    uint32_t summer;            /* member plus 1 who returns their sum; 0: nobody yet */
};

enum hostsum_cell_what {
    HOSTSUM_CELL_EMPTY = 0,
    HOSTSUM_CELL_IN = 1,
    HOSTSUM_CELL_NONE = 2, /* the unit took no part */
};

struct hostsum_cell {
    uint32_t what;   /* enum hostsum_cell_what */
    uint32_t writer; /* member plus 1 to whom its array is handed out; 0: nobody */
    uint32_t metric_count;
    double metrics[SHD_METRICS_MAX]; /* of the micro-batch, as known when it came in */
    char names[WIRE_NAME_BYTES_MAX];
};

struct hostsum_head;

struct hostsum_file {
    int fd; /* owned; -1: none */
    char path[HOSTSUM_PATH_BYTES];
    struct hostsum_head *head; /* owned mapping */
    uint64_t bytes;
    uint32_t accumulate, units, member;
    uint32_t done_bytes; /* of a unit */
    struct hostsum_lane *lanes;
    uint8_t *done; /* groups of which all owners have credited the unit */
    struct hostsum_cell *cells;
    uint64_t *offsets; /* owned, [units]: of a unit's arrays */
    uint64_t *strides; /* owned, [units]: from one of them to the next */
};

/* f->fd is -1. Errors: as hostsum_join(). */
int hostsum_file_join(struct hostsum_file *f, const struct shd_model *m, struct shd_err *e);
void hostsum_file_leave(struct hostsum_file *f); /* one that did not join: a no-op */

/* Not to be nested. Errors: SHD_EIO. */
int hostsum_file_lock(struct hostsum_file *f, struct shd_err *e);
void hostsum_file_unlock(struct hostsum_file *f);

/* Is the file where who joins finds it? */
bool hostsum_file_is_there(const struct hostsum_file *f);

/* Is it there, this one too? One that cannot be is not. */
bool hostsum_file_lives(const struct hostsum_file *f, uint32_t member);

struct hostsum_lane *hostsum_lane(const struct hostsum_file *f, uint32_t unit);
uint8_t *hostsum_done(const struct hostsum_file *f, uint32_t unit); /* [done_bytes] */
struct hostsum_cell *hostsum_cell(const struct hostsum_file *f, uint32_t unit, uint32_t index);
float *hostsum_array(const struct hostsum_file *f, uint32_t unit, uint32_t index);

#endif
