/* An open model on this daemon: its slice of every unit, in segments, and the step core that
 * says what may happen to it. Lives as long as the daemon, or until it is dropped (drop.h). */
#ifndef SHD_MODEL_H
#define SHD_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/share/segment.h"

struct board;
struct checkpoint;
struct common;
struct daemon;
struct drop;
struct keeper;
struct kern;
struct kern_ema;
struct kern_hyper;
struct kern_trail_area;
struct kern_whole;
struct ledger;
struct ledger_start;
struct lease;
struct metrics_model;
struct model_fill;
struct model_hypers;
struct model_unit;
struct step_cause;
struct op;
struct paging;
struct pins;
struct put;
struct quota;
struct quota_use;
struct session;
struct settings_bytes;
struct shardmap;
struct shd_err;
struct snapshots;
struct spare;
struct spec;
struct spill;
struct step;
struct step_prepared;
struct step_stopped;
struct step_action;
struct wire_prepared;

struct model_kept {              /* what outlives this process */
    const struct keeper *keeper; /* borrowed */
    uint64_t instance;           /* random; the keeper's names of the segments carry it */
    int spare_fd;                /* owned: memory for a successor (spare.h); -1: none */
    _Atomic int next_fd;         /* owned: a file for its publish (spare.h); -1: none */
    _Atomic uint64_t spare_bytes;
    struct paging *paging;   /* owned: of a state on a file (paging.h); NULL: it is in memory */
    bool stored;             /* with the keeper */
    bool adopted;            /* from a predecessor */
    bool one_count;          /* as model_home, where it is made here */
    struct quota_use *quota; /* owned: what it takes, and who made it (quota.h) */
    struct common *common;   /* owned: frozen units that forks have as well (common.h); or NULL */
};

struct model_trail {              /* of all units' work */
    struct kern_trail_area *area; /* in the ledger, or at the end of the state */
    _Atomic uint64_t *chunks;     /* NULL: the device's own affair */
    uint64_t chunk_count;
};

struct model_json { /* the spec, canonical */
    char *text;     /* owned, or in the segment; no NUL */
    uint64_t bytes;
    struct segment segment; /* owned; closed: it fits into a message */
};

struct model_waits {    /* requests, to be tried again */
    struct op *phase;   /* after SEALED or OPENED */
    struct op *lease;   /* LEASE, for which there is no work yet */
    struct op *meet;    /* LEASE of workers that wait for each other (meet.h) */
    uint64_t met;       /* 1 + the step in which they have met; 0: in none */
    struct op *held;    /* while the daemon drains: what would begin hold_step, as it came */
    uint64_t hold_step; /* the first that does not begin */
    struct pins *pins;  /* owned: what readers have pinned, or wait for (pin.h); NULL: nothing */
    struct snapshots *snapshots; /* owned: steps that are kept (snapshots.h); NULL: none */
};

struct model_use {
    struct drop *drop;    /* borrowed: nobody opens it now (drop.h); NULL: who likes */
    bool dropped;         /* nothing is begun for it any more */
    bool rewinding;       /* it goes back (rewind.h): requests are to be asked again */
    uint32_t shows;       /* that count something of it now */
    uint32_t forks;       /* that see to memory in common now: no put begins */
    uint32_t inboxes;     /* of all sessions, those included that are being closed */
    uint64_t inbox_bytes; /* of all sessions, now */
    uint64_t snapshot_bytes, snapshot_file_bytes; /* of these, in memory and on files */
    uint64_t paged_bytes;                         /* of a state on a file, in memory (paging.h) */
};

struct model {
    struct daemon *daemon; /* borrowed */
    uint32_t handle;       /* no other model's of this process, ever; 0: nobody sees it */
    struct spec *spec;     /* owned */
    struct model_json json;
    struct shardmap *map; /* owned */
    struct kern *kern;    /* borrowed: the device that has its memory */
    struct model_kept kept;
    struct segment state, ledger_segment; /* what a successor goes on with */
    struct segment publish, board_segment;
    struct ledger *ledger; /* its parts in ledger_segment; lives as long as the model */
    struct model_trail trail;
    struct board *board;         /* in board_segment */
    struct step *core;           /* owned */
    struct lease *lease;         /* owned */
    struct model_unit *units;    /* owned, [spec->unit_count] */
    struct model_hypers *hypers; /* of updates that run; lives as long as the model */
    struct model_fill *fill;     /* of initial values; here and the next three live as long as it */
    struct spill *spill;
    struct spare *spare;
    struct metrics_model *metrics;
    struct model_waits waits;
    struct model_unit *backlog_first, **backlog_last; /* the kernel queue was full */
    bool ready;                                       /* initial values are in */
    int last_status;                                  /* SHD_OK, or why a kernel failed */
    struct model_use use;
    struct checkpoint *checkpoint; /* owned: being written; NULL: none */
    struct put *put;               /* owned: values that wait for their commit; NULL: none */
};

struct model_maker { /* the user whose session made it, and that user's first group */
    bool known;
    uint32_t uid, gid;
};

/* Where a model is to be. */
struct model_home {
    struct kern *kern;           /* borrowed: its memory, its work */
    const struct keeper *keeper; /* borrowed */
    uint32_t owner, owners;
    bool one_count;      /* of updates, for all units, in the ledger that is made */
    struct quota *quota; /* borrowed: it counts there, for */
    struct model_maker maker;
};

/* Make a model of a parsed spec (taken on SHD_OK only): segments, stored with the keeper; core,
 * runs. Not for the loop's thread, for it waits for the keeper and the device; touches no daemon.
 * Errors: SHD_ENOMEM with the numbers, SHD_ERANGE, SHD_EIO, SHD_ETIMEDOUT. */
int model_new(struct spec *spec, const struct model_home *home, struct model **ret_model,
              struct shd_err *e);

/* Its parts, for one whose kept segments exist already. plan: without segments and core. share:
 * the segments that workers map; those of a predecessor are sealed against it. SHD_ENOMEM when
 * there is no room for them now. core: where the ledger is. trail: where its trail is, once state
 * and ledger are there. */
int model_plan(struct spec *spec, const struct model_home *home, struct model **ret_model,
               struct shd_err *e);
void model_find_trail(struct model *m);
int model_share(struct model *m, struct shd_err *e);
int model_core(struct model *m, struct shd_err *e);
int model_core_anew(struct model *m, struct shd_err *e); /* in the place of the one there is */
/* Let one that was just made go on from where `start` is. Errors: SHD_ERANGE, SHD_ENOMEM;
 * SHD_ENOTSUP: units have counts of their own, and its ledger has none. */
int model_start_at(struct model *m, const struct ledger_start *start, struct shd_err *e);

/* Among the daemon's models, with a handle; and out of them. */
void model_register(struct daemon *d, struct model *m);
void model_unregister(struct model *m);
void model_free(struct model *m); /* NULL is a no-op; no work may be running, may block */

uint64_t model_restore_id(const struct model *m); /* of the restore that made it; 0: none did */
bool model_one_count(const struct model *m);      /* of updates, for all its units (ledger.h) */

/* Of its state segment: the arrays, and the trail where the device keeps it there. */
uint64_t model_state_bytes(const struct model *m);

/* Memory of it, as quota_take() and its like count for it (quota.h). */
void model_adopted(struct model *m); /* what it had already */
int model_take(const struct model *m, uint64_t bytes, const char *what, struct shd_err *e);
void model_have(const struct model *m, uint64_t bytes);
void model_give(const struct model *m, uint64_t bytes);
void model_settle(const struct model *m, uint64_t asked, uint64_t got);

/* Start filling in initial values; on_filled(m) follows when they are published, or cannot be
 * (last_status). Nobody sees it before model_begin(), which registers it with the daemon. Loop
 * thread. */
void model_fill(struct daemon *d, struct model *m, void (*on_filled)(struct model *m));
void model_begin(struct daemon *d, struct model *m);

/* Register one whose values are there, of the step of its core. */
void model_serve(struct daemon *d, struct model *m);

/* Go on filling when the kernel queue may have room again. */
void model_retry(struct model *m);

/* The part of a handle that fits a byte, from 1: of no other open model, but in time another's. */
#define MODEL_PLACES 255u
static inline uint32_t model_place(uint32_t handle)
{
    return handle & MODEL_PLACES;
}

struct model *model_find(struct daemon *d, const char *name); /* "": the only one; or NULL */

/* First float of an array (enum shardmap_array) of a unit's slice in the state segment: the
 * device's memory, for its operations. So is the published copy. */
float *model_array(const struct model *m, uint32_t array, uint32_t unit);

/* The same of one whose moments may be in 8 bits: for kern_read_of() and its like. */
struct kern_array model_state(const struct model *m, uint32_t array, uint32_t unit);
uint8_t *model_published(const struct model *m, uint32_t unit);

/* An operation that publishes elements [first_elem, + elems) of the slices as they lie one behind
 * the other, whole blocks, of the parameters as they are when it runs. */
struct kern_op model_publish(const struct model *m, uint64_t first_elem, uint64_t elems);

/* Hyperparameters [groups] of an APPLY that changes values, by the decision of its step and the
 * unit's t; to be given back when its kernel is done. */
const struct kern_hyper *model_hypers(struct model *m, const struct step_action *a);
/* What that update does to the moving average of its unit's parameters; none: all zero. */
struct kern_ema model_ema(const struct model *m, const struct step_action *a);
/* The matrices that it updates, and where; none: all zero. */
struct kern_whole model_whole(const struct model *m, uint32_t unit);
void model_hypers_done(struct model *m, const struct kern_hyper *hypers);

/* The norm of a unit's part here of the mean gradient that was applied last; NaN: it was not
 * finite. Returns 1 + its step; 0: it is not known. */
uint64_t model_norm(const struct model *m, uint32_t unit, double *ret_norm);

/* The same of the update that was measured last (norms.h), and of the parameters after it. */
uint64_t model_change(const struct model *m, uint32_t unit, double *ret_update, double *ret_weight);

/* Change settings, as step_set() at owner 0. Errors beside those: SHD_EPROTO, SHD_EINVAL,
 * SHD_ERANGE. */
int model_set(struct model *m, const struct settings_bytes *change, uint64_t at, uint64_t id,
              uint64_t *ret_from, struct shd_err *e);

/* What is set, if anything, into an answer to Prepare; borrowed, as *p has it. */
void model_tell_settings(const struct step_prepared *p, struct wire_prepared *ret_prepared);

/* Micro-batches that a step can be set to have at most; 0: in a ledger of an older version none. */
uint32_t model_room(const struct model *m);

/* As step_stopped(). */
bool model_stopped(const struct model *m, struct step_stopped *ret_stopped);

/* Train on after a guard has stopped it, as step_go_on() at owner 0. Errors beside those:
 * SHD_EINVAL.
 */
int model_go_on(struct model *m, struct shd_err *e);

/* What is set of the model at `step`, as JSON (proto/spec/settings_text.h), and taking it over from
 * a checkpoint (NULL: nothing), at owner 0. *ret_json: the caller's to free; NULL: nothing is set.
 * Errors: SHD_ENOMEM; SHD_ENOTSUP a ledger without room for it; SHD_EINVAL, SHD_ERANGE. */
int model_settings(const struct model *m, uint64_t step, char **ret_json, struct shd_err *e);
bool model_settings_new(const struct model *m); /* as settings_kept_new() */
int model_take_settings(struct model *m, const char *json, struct shd_err *e);

/* 1 + the step that its guard has gone back for, by the last rewind; 0: that was somebody's. */
uint64_t model_gone_back(const struct model *m);

/* What a committed step came from, which was skipped. False: it is not known. */
bool model_cause(const struct model *m, uint64_t step, struct step_cause *ret_cause);

/* The spill segment's size, and where in it the gradient of a unit has its place; see spill.h. */
uint64_t model_spill_bytes(const struct model *m);
void *model_spilled(const struct model *m, uint32_t unit, uint32_t micro);

/* The open model that a request's handle names: sets op->model. SHD_ENOENT else. */
int model_of(struct op *op, uint32_t handle);

/* Let op wait until the model's phase changes; its handler is called again then. */
void model_wait(struct model *m, struct op *op);
void model_wake(struct model *m);

/* It is dropped: so are its waiting requests. */
void model_refuse(struct model *m, const struct shd_err *why);

/* A session died: finish its waiting requests. */
void model_forget_session(struct model *m, const struct session *s);

#endif
