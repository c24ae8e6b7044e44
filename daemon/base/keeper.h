/* The keeper: whoever holds a model's descriptors while no daemon does. The service manager
 * (systemd, or `shardctl run`) by the sd_notify protocol: FDSTORE=1 puts one in, LISTEN_FDS gives
 * all of them to a successor, FDSTOREREMOVE=1 takes one out.
 *
 * A model's descriptors are named after its instance: m<16 hex digits>-ledger, -state, -spill,
 * -spare, -next, -put, -common, -snap0 to -snap7. The ledger goes in first and out last, so that
 * whatever lies there without one is not ours, but for -moved, which is of no model.
 *
 * Failure modes: no manager (NOTIFY_SOCKET is not set): nothing is stored, state dies with the
 * process, and Status says so. A manager that does not take a descriptor in time: an error to who
 * wanted to make the model; what it is to give up waits for it (removals.h). Descriptors with other
 * names, doubled ones: kept open, and said; they may be another version's.
 */
#ifndef SHD_KEEPER_H
#define SHD_KEEPER_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "proto/base/status.h"
#include "proto/share/segment.h"

struct homes;
struct removals;

enum keeper_part {
    KEEPER_LEDGER,
    KEEPER_STATE,
    KEEPER_SPILL,
    KEEPER_SPARE,
    KEEPER_NEXT, /* the file that a successor publishes in */
    KEEPER_PUT,
    KEEPER_COMMON,   /* other models have it as well */
    KEEPER_MOVED,    /* of no model: where one has gone, and its own instance (model/moved.h) */
    KEEPER_SNAPSHOT, /* the first of KEEPER_SNAPSHOTS */
    KEEPER_PARTS = KEEPER_SNAPSHOT + 8
};
#define KEEPER_SNAPSHOTS (KEEPER_PARTS - KEEPER_SNAPSHOT)

struct keeper_group { /* of one model, from a predecessor */
    uint64_t instance;
    int fd[KEEPER_PARTS]; /* owned until somebody takes it and puts -1 here; -1: none */
    bool done;            /* adopted, dropped or refused */
};

struct keeper {
    bool notify;      /* there is a manager */
    uint64_t wait_us; /* so long it may take to read what it is told, and to answer */
    struct keeper_group *groups;
    uint32_t group_count;
    int *unknown; /* owned descriptors with names that say nothing to us */
    uint32_t unknown_count;
    const struct homes *homes; /* borrowed: where is made what it is given; NULL: in memory */
    struct removals *removals; /* owned: what it is to give up; NULL: there is no manager */
};

/* Take what a predecessor left. loop: from which nothing waits for the manager. homes: borrowed, or
 * NULL. Errors: SHD_ENOMEM, SHD_EIO. */
int keeper_init(struct keeper *k, uv_loop_t *loop, const struct homes *homes, struct shd_err *e);
void keeper_stop(const struct keeper *k); /* before the loop is closed */
void keeper_deinit(struct keeper *k);     /* closes; what the manager holds it goes on to hold */

/* "notify" or "none", for Status. */
const char *keeper_name(const struct keeper *k);

/* Put fd in, and wait until the manager has it: after SHD_OK the bytes outlive this process. Any
 * thread but the loop's. With no manager it does nothing. Errors: SHD_EIO, SHD_ETIMEDOUT. */
int keeper_store(const struct keeper *k, uint64_t instance, enum keeper_part part, int fd,
                 struct shd_err *e);

/* -- What it is given ----------------------------------------------------------------------------
 */

/* A part that may be on a file (KEEPER_STATE, KEEPER_NEXT, KEEPER_SNAPSHOT) is made there, not in
 * memory. */
bool keeper_on_file(const struct keeper *k, enum keeper_part part);

/* "memory", or "file:DIR". */
#define KEEPER_HOME_BYTES 520u
const char *keeper_home(const struct keeper *k, enum keeper_part part, char buf[KEEPER_HOME_BYTES]);

/* A segment of the host's that is to be stored as this part, where it is to be. Not stored yet.
 * Errors: of segment_new(), segment_file_new(). */
int keeper_segment_new(const struct keeper *k, enum keeper_part part, enum segment_kind kind,
                       uint64_t bytes, struct segment *ret_segment, struct shd_err *e);

/* One on a file that is not mapped yet: segment_file_room(), of a part that is to be on files. */
int keeper_room_new(const struct keeper *k, enum keeper_part part, enum segment_kind kind,
                    uint64_t bytes, int *ret_fd, struct shd_err *e);

/* segment_file_lend(), of such a one. */
int keeper_room_lend(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                     struct shd_err *e);

/* One that a predecessor has left: segment_kept_map(). */
int keeper_segment_map(int fd, enum segment_kind kind, uint64_t bytes, struct segment *ret_segment,
                       struct shd_err *e);

/* Write a range of one on a file back, and give its pages up; as pager_behind(). Any thread. */
void keeper_segment_behind(const struct keeper *k, const struct segment *s, uint64_t at,
                           uint64_t bytes);
/* As pager_write(), of one on a file. */
void keeper_segment_write(const struct keeper *k, const struct segment *s, uint64_t at,
                          uint64_t bytes);
void keeper_segment_close(const struct keeper *k, struct segment *s); /* as pager_close() */

void keeper_forget(struct keeper_group *g); /* close what nobody took */

/* Take all of a model's out: any thread but the loop's while that runs. Take one out: any thread,
 * it never waits. A manager that does not read is told later. */
void keeper_remove(const struct keeper *k, uint64_t instance);
void keeper_remove_part(const struct keeper *k, uint64_t instance, enum keeper_part part);

/* Wait until the manager has closed what was taken out: memory that nobody else has is the host's
 * again. A manager that does not answer in time has it still. Not once keeper_stop() was called,
 * when nobody waits for that. Any thread but the loop's. */
void keeper_wait(const struct keeper *k);

/* Before the daemon is ready: what it is busy with (STATUS=), and that the manager should give it
 * five more minutes from now on: one that goes on is not ended for a large model, one that hangs
 * is. */
void keeper_progress(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
