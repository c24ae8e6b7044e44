/* The ledger: what a successor of this process needs to go on with a model exactly where it was
 * killed. One per model, in a segment of its own that the keeper holds, beside the state segment.
 *
 * Everything in it is either written once, before the word that vouches for it, or is a single
 * aligned word. x86-64 keeps stores in program order, so what a killed process leaves is a prefix
 * of its stores, and each word says that all it vouches for is there:
 *
 *   ready             the initial values are in; without it the model never was, with it
 *                     the one that it `replaces` is no more. 0 again: it was dropped
 *   origin            a session has put all its initial values; while ready is not set it is to be
 *                     opened only when owner 0 has opened the one of that origin
 *   commits           so many steps have a recorded decision; record[commits & 1] is of the last.
 *                     Storing it is the commit. Gradients being collected are of step `commits`
 *   unit.version      so many of them are in the unit's parameters and moments
 *   resets            so often the gradients of an open step were given up; with commits it is the
 *                     *round* in which gradients are collected: step + resets
 *   promised          a Prepare of this round was answered: it is not given up any more
 *   unit.progress     how far the sum of the unit's gradients is, and of which round
 *   unit.took         of a mean: how many they are; written before the step's `commits`, and needed
 *                     until the unit's version is as high
 *   unit.updates      as record: so many of the committed steps updated the unit, the t of its bias
 *                     correction; [commits & 1] counts
 *   cell              a gradient that waits for its turn and needs no sender any more: it took no
 *                     part, or its bytes are in the spill segment; and of which round
 *   metrics.tag       the micro-batch's numbers are there; and of which round
 *   history.tag       the row of a step is there; it counts when the step is committed
 *   audit.tag         what that step came from is there, which was skipped; likewise
 *   window.tag        the norms of units in that step are there (share/unit_window.h); likewise
 *   settings.given    so many changes of settings were given; settings.kept[given & 1] is what is
 *                     kept
 *   guard.go_on       what a guard stopped up to there is trained again; guard.record as record
 *   common            the parameters of frozen units are in the segment of this number, which other
 *                     models have as well; 0: in the state segment, as all others are
 *   rewind.under_way  a snapshot is being copied back: nothing else counts until it is
 * (step_rewind.h)
 *
 * Words that belong to a round carry it, and no two attempts at a step, or steps, have the same: so
 * nothing has to be cleared when the next one begins, or the same one begins again. A
 * phase is not stored: it is APPLYING while a unit's version is below commits. The trail
 * (kernels/kern.h) has what a killed kernel left half done.
 *
 * Failure modes: a successor refuses a ledger of another version (the keeper has the bytes) and
 * one whose words contradict each other, by name and value. Pure: no I/O; the simulator keeps
 * ledgers in plain memory.
 */
#ifndef SHD_LEDGER_H
#define SHD_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/base/decision.h"
#include "proto/base/fixsum.h"
#include "proto/base/status.h"

#define LEDGER_MAGIC UINT64_C(0x31726764656c6873) /* "shledgr1" */
/* Without what follows the number: 7 audits, chosen, settings that wait, windows of units;
 * 6 guard, rewinds; 5 settings; 4 counts; 3 resets; 2 more; 1 history. */
#define LEDGER_VERSION    8u
#define LEDGER_ONE_COUNT  4u /* the version of one with one count of updates for all units */
#define LEDGER_COMMON     9u /* as 8, of a model that has, or had, memory in common with others */
#define LEDGER_NAME_BYTES 128u
#define LEDGER_BLOB_BYTES ((uint64_t)768 * 1024)
#define LEDGER_METRICS    4u
#define LEDGER_CELLS_MAX  (UINT64_C(1) << 24) /* units x micro-batches */
#define LEDGER_SNAPSHOTS  8u     /* that an owner can have, one of them in the making */
#define LEDGER_HISTORY    65537u /* HISTORY_SLOTS: of a daemon's ledgers */
/* The trail's numbers of operations are enough for so many steps and resets. */
#define LEDGER_STEP_MAX   ((UINT64_C(1) << 33) - 1)
#define LEDGER_RESETS_MAX (UINT64_C(1) << 32)

struct audit_slot;
struct history_slot;
struct ledger_back;
struct ledger_guard;
struct ledger_rewind;
struct ledger_set;
struct ledger_settings;

struct ledger_decision { /* of a decision what every version of a ledger has */
    bool skip;
    bool sets_updates; /* from version 5 on: of a put, decision.updates is not 0 */
    float scale;
    double lr, loss_scale;
    uint32_t good_steps;
};

struct ledger_more { /* the rest of it */
    double divisor;
    uint32_t rate_count;
    uint32_t puts; /* decision.puts */
    double rates[DECISION_GROUPS_MAX * DECISION_RATES];
};

struct ledger_chosen { /* from version 8 on: what decisions have had since */
    uint32_t micro_batches;
    uint32_t eps_count;
    double eps[DECISION_GROUPS_MAX];
    uint64_t returns; /* gradients that each unit got in the step; 0: not known, as the spec says */
};

struct ledger_record { /* of a committed step */
    uint64_t step;
    uint64_t updates; /* not skipped, this one counted */
    struct ledger_decision decision;
    bool finite;
    uint32_t reported; /* micro-batches with metrics; 0: an older version's, not known */
    struct fixsum sum;
    double metrics[LEDGER_METRICS];
    uint32_t metric_count;
    uint32_t blob_at; /* which of the two blobs is the last committed one */
    uint64_t blob_bytes;
};

struct ledger_restored {
    uint64_t id;       /* of what made it, the same at all owners; 0: no restore did */
    uint64_t replaces; /* instance whose place it takes once it is ready; 0: none */
};

struct ledger_window { /* of units, for a guard: share/unit_window.h; 0: none */
    uint32_t rows, columns;
};

struct ledger_made { /* ledger_maker(); in a place that builds without it leave alone */
    uint64_t by, tag;
    struct ledger_window window; /* from version 8 on */
    _Atomic uint64_t common;     /* from LEDGER_COMMON on: ledger_common() */
};

struct ledger_beside {  /* the records, what came later: */
    uint64_t resets[2]; /* `resets` when that step was committed */
    uint64_t put[2];    /* the decision's put */
};

struct ledger_head {
    /* Every version has these, here. */
    uint64_t magic;
    uint32_t version;
    uint32_t owner, owners;
    uint32_t history_slots;       /* 0: no history */
    uint64_t bytes;               /* of the segment */
    uint64_t instance;            /* random; the names of the model's segments carry it */
    char name[LEDGER_NAME_BYTES]; /* of the model */

    uint32_t units, micros; /* micros: gradients each unit gets in a step */
    uint64_t spec_bytes;    /* JSON, without NUL */
    uint64_t state_bytes;   /* of the state segment */
    uint64_t chunk_count;
    uint64_t trail_bytes;
    uint64_t units_at, cells_at, metrics_at, blobs_at, trail_at, chunks_at, spec_at; /* offsets */
    struct ledger_restored restored;
    /* Of what was asked to be dropped: the instance of owner 0 that it goes with; 0: not known. */
    _Atomic uint64_t first;
    struct ledger_made made;
    _Alignas(64) _Atomic uint64_t ready;
    _Atomic uint64_t origin; /* 0: its initial values are the spec's, or were read from files */
    _Atomic uint64_t resets;
    _Atomic uint64_t promised; /* 1 + the round; 0: none */
    struct ledger_beside beside;
    _Alignas(64) _Atomic uint64_t commits;
    struct ledger_record record[2];
    _Atomic uint64_t twin_of; /* presence_twin(); 0: not known as a replica */
};

struct ledger_unit {
    _Alignas(64) _Atomic uint64_t version;
    _Atomic uint64_t progress; /* ledger_progress() */
    uint32_t took;             /* at most micros */
    uint64_t updates[2];       /* from version 5 on: ledger_unit_updates() */
};

struct ledger_metrics { /* of one micro-batch (or group of them) */
    double values[LEDGER_METRICS];
    _Atomic uint64_t tag; /* ledger_metrics_tag() */
    uint64_t reserved[3];
};

struct kern_trail_area;

/* A ledger in this process's memory: pointers into one segment. Borrowed. */
struct ledger {
    struct ledger_head *head;
    struct ledger_unit *unit;       /* [units] */
    _Atomic uint64_t *cell;         /* [units][micros]: ledger_cell() */
    struct ledger_metrics *metrics; /* [micros] */
    uint8_t *blob[2];               /* [LEDGER_BLOB_BYTES] each */
    struct kern_trail_area *trail;
    _Atomic uint64_t *chunks;     /* [chunk_count] */
    const char *spec;             /* [spec_bytes], no NUL */
    struct history_slot *history; /* [history_slots], behind the blobs */
    struct ledger_more *more;     /* [2], as records, behind that; NULL: an older version's */
    struct ledger_set *set;       /* ledger_set.h, behind that; NULL: likewise, or a later one's */
    struct ledger_guard *guard;   /* ledger_guard.h, behind that; NULL: likewise */
    struct ledger_rewind *rewind; /* ledger_rewind.h, behind that; NULL: likewise */
    struct audit_slot *audit;     /* [AUDIT_SLOTS], behind that; NULL: likewise */
    struct ledger_back *back;     /* ledger_back.h, behind that; NULL: likewise */
    struct ledger_settings *settings; /* ledger_set.h, behind that, and no `set`; NULL: likewise */
    struct ledger_chosen *chosen;     /* [2], as records, behind that; NULL: likewise */
    void *window; /* unit_window_at(), behind that; NULL: likewise, or there is none */
};

struct ledger_maker { /* the user whose session made it, and that user's first group */
    bool known;
    uint32_t uid, gid;
};

struct ledger_shape {
    const char *name; /* of the model, below LEDGER_NAME_BYTES */
    const char *spec; /* JSON */
    uint64_t spec_bytes;
    uint32_t owner, owners;
    uint32_t units, micros;
    uint64_t instance;
    uint64_t state_bytes;
    uint64_t chunk_count;   /* of all units' slices */
    uint32_t history_slots; /* LEDGER_HISTORY; 0: no history */
    struct ledger_window window;
    bool one_count; /* of updates, for all units: another owner is of an older build */
    struct ledger_maker maker;
};

/* Bytes of a ledger, whole pages. Errors: SHD_ERANGE. */
int ledger_bytes(const struct ledger_shape *shape, uint64_t *ret_bytes, struct shd_err *e);

/* Lay one out in zeroed memory of ledger_bytes() aligned to 128: nothing committed, not ready. */
void ledger_init(struct ledger *l, void *memory, const struct ledger_shape *shape);

/* Let a fresh one begin where a checkpoint is: `step` > 0 commits, all of them in all units.
 * Errors: SHD_ERANGE. */
struct ledger_start {
    uint64_t step, updates;
    const uint64_t *unit_updates; /* [units]; NULL: of each `updates` */
    struct decision decision;     /* of the last commit */
    const void *blob;             /* NULL: none */
    uint64_t blob_bytes;
};
int ledger_start_at(struct ledger *l, const struct ledger_start *start, struct shd_err *e);

/* Look at one that a predecessor left: memory[bytes]. Nothing in it is trusted. Errors:
 * SHD_ENOTSUP another version (both named); SHD_ESEGMENT what contradicts what. *l is set on
 * SHD_OK only. */
int ledger_adopt(struct ledger *l, void *memory, uint64_t bytes, struct shd_err *e);

/* Make one of version 3 that was adopted one of version 4: builds of that version do not adopt it
 * from here on. Last, when nothing of the model's adoption can fail any more. One of version 4
 * stays what it is: owners are upgraded one after the other, and all must count alike. */
void ledger_renew(struct ledger *l);

/* It is not owner 0's, or not always. See presence.h. */
static inline bool ledger_follows(const struct ledger_head *h)
{
    return h->owner > 0 || atomic_load(&h->twin_of) != 0;
}

/* Its initial values are in: a successor goes on with it. */
static inline bool ledger_filled(const struct ledger_head *h)
{
    return atomic_load(&h->ready) != 0 || (ledger_follows(h) && atomic_load(&h->origin) != 0);
}

/* The round in which the gradients of the step after the last commit are collected, and that of the
 * step which the last commit (there is one) was of. */
uint64_t ledger_round(const struct ledger *l);
uint64_t ledger_committed_round(const struct ledger *l);

/* Resets so far, and whether there can be more: not in a ledger of an older version. */
uint64_t ledger_resets(const struct ledger *l);
bool ledger_resets_room(const struct ledger *l);

/* Is a rewind (step_rewind.h) under way, and where does it go? Then nothing else counts. */
bool ledger_rewinding(const struct ledger *l, uint64_t *ret_step);

/* Of a ledger of an older version all units have the model's count. */
static inline bool ledger_counts_units(const struct ledger *l)
{
    return l->head->version >= 5;
}

/* Updates of the unit in the committed steps; for what is to be the next commit, before that. */
uint64_t ledger_unit_updates(const struct ledger *l, uint32_t unit);
void ledger_unit_updates_next(struct ledger *l, uint32_t unit, uint64_t updates);

/* The decision in record[slot], and writing it there. Room: false when the ledger is of a version
 * that cannot hold it. */
void ledger_decision_get(const struct ledger *l, uint32_t slot, struct decision *ret_decision);
bool ledger_decision_room(const struct ledger *l, const struct decision *decision);
void ledger_decision_put(struct ledger *l, uint32_t slot, const struct decision *decision);

/* Not known: of one that a build without it has made. */
struct ledger_maker ledger_maker(const struct ledger_head *h);

/* The number of the segment that has the parameters of frozen units; 0: none. Setting it, room or
 * not: false: a ledger of an older version has none. One that was set is no older build's any more,
 * which would take what is not in the state segment for zeros. */
uint64_t ledger_common(const struct ledger *l);
bool ledger_common_room(const struct ledger *l);
void ledger_set_common(struct ledger *l, uint64_t number);

/* True when memory[bytes] is a ledger of any version: *ret_head may be read up to `name`. */
bool ledger_known(const void *memory, uint64_t bytes, const struct ledger_head **ret_head);

/* -- Words --------------------------------------------------------------------------------------
 */

/* started: the accumulator holds the sum of gradients below `next` that took part. */
static inline uint64_t ledger_progress(uint64_t round, bool started, uint32_t next)
{
    return round << 16 | (uint64_t)started << 15 | next;
}
static inline uint64_t ledger_progress_round(uint64_t word)
{
    return word >> 16;
}
static inline bool ledger_progress_started(uint64_t word)
{
    return (word >> 15 & 1) != 0;
}
static inline uint32_t ledger_progress_next(uint64_t word)
{
    return (uint32_t)(word & 0x7fff);
}

enum ledger_cell_kind { LEDGER_CELL_EMPTY, LEDGER_CELL_NONE, LEDGER_CELL_SPILLED };

/* dtype: of a spilled gradient, else 0. */
static inline uint64_t ledger_cell(uint64_t round, enum ledger_cell_kind kind, unsigned dtype)
{
    return round << 8 | (uint64_t)kind << 4 | dtype;
}
static inline uint64_t ledger_cell_round(uint64_t word)
{
    return word >> 8;
}
static inline enum ledger_cell_kind ledger_cell_kind(uint64_t word)
{
    return (enum ledger_cell_kind)(word >> 4 & 0xf);
}
static inline unsigned ledger_cell_dtype(uint64_t word)
{
    return (unsigned)(word & 0xf);
}

static inline uint64_t ledger_metrics_tag(uint64_t round, uint32_t count)
{
    return round << 3 | count;
}
static inline uint64_t ledger_metrics_tag_round(uint64_t tag)
{
    return tag >> 3;
}
static inline uint32_t ledger_metrics_tag_count(uint64_t tag)
{
    return (uint32_t)(tag & 7);
}

/* Numbers of a unit's operations for the trail, each once: those of a round follow those of the
 * round before. micro == micros: the update. */
static inline uint64_t ledger_op(const struct ledger *l, uint64_t round, uint32_t micro)
{
    return round * ((uint64_t)l->head->micros + 1) + micro + 1;
}

#endif
