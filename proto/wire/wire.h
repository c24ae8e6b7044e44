/* Requests and replies as plain structs, and the only code that packs and unpacks them.
 *
 * Happy path: *_unpack() turns a frame into a struct whose every number is inside its limits;
 * *_pack() writes one frame into a caller's buffer. Failure: anything else is SHD_EPROTO,
 * SHD_ERANGE or SHD_EINVAL with the field and the value, and nothing was kept.
 *
 * Unpacking allocates from a caller's arena (no malloc): strings and bytes in the struct point
 * into it and live until the arena is reset. Frames above WIRE_FRAME_BYTES_MAX are refused before
 * protobuf-c sees them (it truncates size_t counts: protobuf-c#796).
 */
#ifndef SHD_WIRE_H
#define SHD_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/decision.h"
#include "proto/base/dtype.h"
#include "proto/base/fixsum.h"
#include "proto/share/segment.h"

#define WIRE_FRAME_BYTES_MAX ((size_t)1024 * 1024)
#define WIRE_ARENA_BYTES     (WIRE_FRAME_BYTES_MAX * 2 + 65536)
#define WIRE_BLOB_BYTES_MAX  ((size_t)768 * 1024)
#define WIRE_METRICS_MAX     4u
#define WIRE_SEGMENTS_MAX    5u
#define WIRE_LEAVES_MAX      16384u  /* per reply: 512 KiB */
#define WIRE_RANGE_ELEMS_MAX 262144u /* of a digest of several tensors: 1 MiB an array */
#define WIRE_RANGE_UNITS_MAX 32u     /* that they are of */
#define WIRE_ROWS_MAX        4096u   /* per reply: 352 KiB */
#define WIRE_UNITS_MAX       256u    /* likewise: 62 KiB */
#define WIRE_UNIT_SUMS_MAX   128u    /* those of more units are asked for page by page */
#define WIRE_VALUES_MAX      131072u /* per reply, and of one Show's range: 512 KiB */
#define WIRE_NAME_BYTES_MAX  128u
#define WIRE_PATH_BYTES_MAX  4096u
#define WIRE_TO_BYTES_MAX    16384u
#define WIRE_LINK_ID_BYTES   128u
#define WIRE_TOKEN_BYTES     16u /* SHD_TOKEN_BYTES: of the side channel */
#define WIRE_SUM_BYTES       32u
#define WIRE_SET_JSON_MAX    ((size_t)128 * 1024)
#define WIRE_SNAPSHOTS_MAX   8u
#define WIRE_SNAPSHOT_BYTES  24u /* step, bytes, time */

struct shd_err;

/* A bump allocator over caller's memory; protobuf-c takes from it while unpacking. */
struct wire_arena {
    uint8_t *base; /* borrowed, aligned to 16 */
    size_t bytes;
    size_t used;
};

struct wire_bytes {
    const uint8_t *data; /* into the arena (unpacked) or the caller's (to pack) */
    size_t bytes;
};

/* Feature levels. A field that a build does not know ends the session, so each side tells the other
 * its level, and gets no field of a higher one: packing leaves it out, or refuses what would mean
 * something else without it. Each field's level is in wire_tables.c. A new field is of a new level,
 * once a build with the last one is in use.
 *
 * A daemon tells its level in SIDE_WELCOME, before anything else is said, a client then in Hello,
 * which is packed for the daemon's. Builds of the first two levels tell none: what they do instead
 * is said here. */
enum wire_level {
    WIRE_LEVEL_BASE,
    WIRE_LEVEL_SPECS,  /* specs in segments (SIDE_WELCOME.kind, OpenModel.spec_apart), names of
                        * metrics and how many reported, the attempt of a put */
    WIRE_LEVEL_TOLD,   /* Hello.level */
    WIRE_LEVEL_RANGES, /* Digest.tensors */
    WIRE_LEVEL_MEETS,  /* Lease.meet */
    WIRE_LEVEL_COUNTS, /* unit_updates, one_count */
    WIRE_LEVEL_RINGS,  /* OpenRing and Ring, SIDE_WAKE */
    WIRE_LEVEL_SAID,   /* Layout.one_count */
    WIRE_LEVEL_STATES, /* Pin, Show, Drop, Fork, Set; settings of Prepared and Checkpointed;
                        * Digest.tensors of several units; OpenModel.first, Layout.instance */
    WIRE_LEVEL_RULES,  /* Snapshot, Rewind; Commit.attempt; guards: of Decision, Prepared, Set;
                        * Pin.ema */
    WIRE_LEVEL_AUDITS, /* what a skipped step came from: Decision.cause_*, unit_sums of Prepare and
                        * Prepared, Rows.audits; Fork of a step that is kept, Fork.settings;
                        * Set.more, Prepared.settings_more, Layout.room; micro_batches and eps of
                        * Decision; Prepared.unit_limits, Commit.unit_norms;
                        * History.units_from, Rows.units */
    WIRE_LEVEL_FORCES, /* Restore.force */
    WIRE_LEVEL_VIEWS,  /* Hello.view */
    WIRE_LEVEL_MOVES,  /* Move, Restore.beside */
    WIRE_LEVEL_TWINS,  /* what owner 0's replica is told: Prepared.unit_norms, Commit.recorded */
    WIRE_LEVEL_PAIRS,  /* that it is one: `twin`, `first` of Layout and Dropped */
    WIRE_LEVEL_STAYS,  /* Rewind.keep_settings */
    WIRE_LEVEL_END
};
#define WIRE_LEVEL ((uint32_t)WIRE_LEVEL_END - 1) /* of this build */

/* X(NAME, name): request bodies in tag order. The daemon's dispatch table is built from it. */
#define WIRE_REQUEST_MAP(X)   \
    X(HELLO, hello)           \
    X(OPEN_MODEL, open_model) \
    X(RETURN, return_grad)    \
    X(PREPARE, prepare)       \
    X(COMMIT, commit)         \
    X(GET_BLOB, get_blob)     \
    X(DIGEST, digest)         \
    X(STATUS, status)         \
    X(DETACH, detach)         \
    X(LEASE, lease)           \
    X(CHECKPOINT, checkpoint) \
    X(RESTORE, restore)       \
    X(DRAIN, drain)           \
    X(JOIN, join)             \
    X(FETCH, fetch)           \
    X(HISTORY, history)       \
    X(CREATE, create)         \
    X(PUT, put)               \
    X(GET, get)               \
    X(RESET, reset)           \
    X(OPEN_RING, open_ring)   \
    X(PIN, pin)               \
    X(UNPIN, unpin)           \
    X(SHOW, show)             \
    X(DROP, drop)             \
    X(FORK, fork)             \
    X(SET, set)               \
    X(SNAPSHOT, snapshot)     \
    X(REWIND, rewind)         \
    X(MOVE, move)

enum wire_request_type {
#define WIRE_REQUEST_ENUM(NAME, name) WIRE_##NAME,
    WIRE_REQUEST_MAP(WIRE_REQUEST_ENUM)
#undef WIRE_REQUEST_ENUM
        WIRE_REQUEST_TYPES
};

enum wire_role { WIRE_TRAINER = 1, WIRE_READER = 2, WIRE_ADMIN = 3 };

struct wire_hello {
    uint32_t protocol; /* any value: op_hello answers a mismatch with both versions */
    enum wire_role role;
    uint8_t token[WIRE_TOKEN_BYTES];
    const char *name; /* < WIRE_NAME_BYTES_MAX, printable */
    uint32_t rank;    /* of its process, plus 1; 0: it has none */
    uint32_t level;   /* enum wire_level, or a later build's; 0: it tells none */
    uint64_t view;    /* of hosts with replicas, the number plus 1; 0: it has none */
};
struct wire_spec_at { /* where a spec is that does not fit its message (proto/share/spec_segment.h)
                       */
    uint64_t ticket;  /* under which its segment was passed */
    uint64_t bytes;   /* at most SPEC_JSON_BYTES_MAX; 0: it is in the message */
    struct wire_bytes sum; /* WIRE_SUM_BYTES, or none */
};
struct wire_open_model {
    struct wire_bytes spec; /* JSON, at most SPEC_MESSAGE_BYTES_MAX; empty: attach by name */
    const char *name;       /* "" : the only one */
    uint32_t owner, owners; /* owner < owners <= SHD_OWNERS_MAX */
    uint32_t slots;         /* 0..SHD_SLOTS_MAX */
    uint64_t origin;
    bool settled;
    struct wire_spec_at spec_at;
    bool spec_apart; /* the client is of WIRE_LEVEL_SPECS at least */
    bool one_count;  /* of updates, for all units of a model that is made: an owner is of a level
                      * below WIRE_LEVEL_COUNTS */
    uint64_t first;  /* owner 0's Layout.first, or else its instance; 0: not known */
    bool twin;       /* to a replica; also false below WIRE_LEVEL_PAIRS */
};
struct wire_return {
    uint32_t model;
    uint64_t step;
    uint32_t micro, unit; /* below SHD_MICROS_MAX / SHD_UNITS_MAX; the model's own limits later */
    uint32_t slot;        /* below SHD_SLOTS_MAX */
    enum shd_dtype dtype;
    bool none; /* then slot and dtype say nothing (dtype 0 is taken, and comes out as F32) */
    double metrics[WIRE_METRICS_MAX]; /* finite or not: the client's business */
    uint32_t metric_count;
    uint64_t turn;    /* of the link up by which the gradient comes; 0: it lies in the slot */
    uint64_t attempt; /* as the board has it; 0: any */
    const char
        *metric_names; /* < WIRE_NAME_BYTES_MAX, printable, commas between them; "": not said */
};
struct wire_prepare {
    uint32_t model;
    uint64_t step;
    uint64_t attempt;
    uint32_t unit_sums; /* 1 + the unit from which on they are asked for; 0: not */
    uint32_t part_sums; /* 1 + a group: instead, of that unit, behind each group from it on */
};
struct wire_commit {
    uint32_t model;
    uint64_t step;
    struct decision decision;
    bool has_blob;
    struct wire_bytes blob;       /* at most WIRE_BLOB_BYTES_MAX */
    double norm;                  /* finite or not */
    uint64_t attempt;             /* 0: any */
    struct wire_bytes unit_norms; /* doubles, in any place: of guard.columns; empty: not told */
    bool recorded;                /* owner 0 has it on record; also false below WIRE_LEVEL_TWINS */
};
struct wire_get_blob {
    uint32_t model;
};
struct wire_digest {
    uint32_t model, tensor, array; /* array < 4 */
    uint64_t first_leaf;
    uint32_t tensors; /* > 0: all arrays of so many, of WIRE_RANGE_UNITS_MAX units at most (before
                       * WIRE_LEVEL_STATES of one); at most WIRE_RANGE_ELEMS_MAX elements from the
                       * first of a unit to its last, all units together, and WIRE_LEAVES_MAX
                       * leaves in a reply, tensor after tensor, array after array */
};
struct wire_lease {
    uint32_t model;
    uint64_t step;
    bool now;       /* do not wait */
    bool back;      /* take `group` back, and hand nothing out */
    uint32_t group; /* below SHD_MICROS_MAX */
    uint64_t attempt;
    uint32_t meet; /* > 0: hand nothing out, wait for so many sessions; at most SHD_MICROS_MAX */
};
struct wire_checkpoint {
    uint32_t model;
    uint64_t step;
    const char *path; /* absolute, < WIRE_PATH_BYTES_MAX, no control characters */
};
struct wire_restore {
    const char *path;       /* likewise */
    struct wire_bytes spec; /* JSON, at most SPEC_MESSAGE_BYTES_MAX */
    uint32_t owner, owners;
    bool weights;
    bool open;           /* what the same request without it has read */
    bool replace;        /* the model that is open, if one is */
    uint64_t restore_id; /* the same for all owners; 0: not said */
    struct wire_spec_at spec_at;
    bool one_count;  /* as in wire_open_model */
    bool force;      /* with replace: also where somebody trains or saves it */
    uint64_t beside; /* not open: the instance that may be open still, as it moves; 0: none */
};

struct wire_drain {
    bool off; /* not any more */
};

struct wire_join {
    uint32_t model;
    uint8_t down[WIRE_LINK_ID_BYTES], up[WIRE_LINK_ID_BYTES]; /* NCCL's unique ids */
    uint64_t timeout_ms;
};
struct wire_fetch {
    uint32_t model, unit; /* unit below SHD_UNITS_MAX */
    uint64_t step;
    uint64_t turn; /* > 0 */
};
struct wire_history {
    uint32_t model;
    uint64_t from;
    uint32_t count;      /* 1..WIRE_ROWS_MAX; with the next at most WIRE_UNITS_MAX */
    uint32_t units_from; /* not 0: 1 + a unit; `from` UINT64_MAX: of the last step */
};
enum wire_create_what {
    WIRE_CREATE_BEGIN = 1,
    WIRE_CREATE_FULL = 2,
    WIRE_CREATE_OPEN = 3,
    WIRE_CREATE_DROP = 4,
    WIRE_CREATE_PUT = 5, /* of an open model: begin a put */
    WIRE_CREATE_PUT_FULL = 6,
    WIRE_CREATE_PUT_DROP = 7,
};
struct wire_create {
    enum wire_create_what what;
    uint64_t origin;        /* > 0 */
    const char *name;       /* begin: of the model */
    struct wire_bytes spec; /* begin: JSON */
    uint32_t owner, owners;
    uint32_t model;           /* of a put, with the next two */
    uint64_t step;            /* the open one */
    struct wire_bytes arrays; /* begin: a byte for each unit, a bit for each array of it */
    uint64_t consent;         /* begin, to the others: owner 0's */
    uint64_t attempt;         /* of a put, begin: the sender's, at `step`; 0: it knows none */
    struct wire_spec_at spec_at;
    struct wire_bytes
        unit_updates; /* of a put, begin: of each unit a uint64_t, in any place: 1 + the
                       * updates that count; 0: as the decision says. None: of all */
    bool one_count;   /* begin: as in wire_open_model */
    bool twin;        /* likewise */
};
struct wire_put {
    uint64_t origin; /* > 0 */
    uint32_t unit;   /* below SHD_UNITS_MAX */
};
struct wire_get {
    uint32_t model;
    uint32_t unit;  /* below SHD_UNITS_MAX */
    uint32_t array; /* < 4: of the state's, in order */
};
enum wire_show_array { /* the first three as enum shardmap_array */
                       WIRE_SHOW_PARAM,
                       WIRE_SHOW_M,
                       WIRE_SHOW_V,
                       WIRE_SHOW_GRAD,
                       WIRE_SHOW_UPDATE,
                       WIRE_SHOW_EMA,
};
struct wire_show {
    uint32_t model;
    uint32_t tensor; /* below SHD_TENSORS_MAX */
    enum wire_show_array array;
    uint64_t first; /* element of the tensor; the tensor's own limits later */
    uint64_t elems; /* 1..SHD_MODEL_ELEMS_MAX; with values WIRE_VALUES_MAX, checked later */
    bool values;
};
struct wire_reset {
    uint32_t model;
    uint64_t step;
    uint64_t attempt; /* > 1 */
    bool agreed;
};
struct wire_set {
    uint32_t model;
    struct wire_bytes change, more; /* doubles, in any place: settings_unpack(); may be empty */
    uint64_t from;                  /* 0: the first step that it can be */
    uint64_t id;                    /* the same of what is asked again; 0: none */
    bool look;
    bool go_on;
};
enum wire_snapshot_what {
    WIRE_SNAPSHOT_TAKE = 1,
    WIRE_SNAPSHOT_LOOK = 2,
    WIRE_SNAPSHOT_EVERY = 3,
};
struct wire_snapshot {
    uint32_t model;
    enum wire_snapshot_what what;
    uint64_t step;  /* TAKE: the open one, or one to come */
    uint64_t every; /* EVERY: 0: none by itself */
    uint32_t keep;  /* EVERY: at most WIRE_SNAPSHOTS_MAX - 1; 0: as it is */
};
enum wire_rewind_what {
    WIRE_REWIND_HOLD = 1,
    WIRE_REWIND_GO = 2,     /* to owner 0 */
    WIRE_REWIND_FOLLOW = 3, /* to the others, or to all: owner 0 has begun it */
};
struct wire_rewind {
    uint32_t model;
    uint64_t step;
    enum wire_rewind_what what;
    uint64_t attempt; /* FOLLOW: that began with it; else with the last that the sender knows of */
    uint64_t consent;
    bool keep_settings; /* HOLD: those given since, too; not below WIRE_LEVEL_STAYS */
};
struct wire_pin {
    uint32_t model;
    uint64_t step;
    bool ema;
};
struct wire_unpin {
    uint32_t model;
};
enum wire_drop_what {
    WIRE_DROP_HOLD = 1,
    WIRE_DROP_GO = 2,
    WIRE_DROP_UNDO = 3,
    WIRE_DROP_WAIT = 4, /* for its memory */
};
struct wire_drop {
    enum wire_drop_what what;
    const char *name;
    uint64_t first; /* to the others: owner 0's wire_dropped.first, or else its instance; 0: it has
                     * none */
    uint32_t owner, owners;
    bool force;
    bool twin; /* as in wire_open_model */
};
enum wire_move_what {
    WIRE_MOVE_TELL = 1,
    WIRE_MOVE_LOOK = 2,
    WIRE_MOVE_THERE = 3,
};
struct wire_move {
    enum wire_move_what what;
    const char *name;  /* LOOK: "": the only one's */
    const char *to;    /* TELL: < WIRE_TO_BYTES_MAX, names of devices with commas between them */
    uint64_t step, id; /* TELL: as of which they have it, and of which restore */
    const char *path;  /* TELL: of a checkpoint, < WIRE_PATH_BYTES_MAX, printable */
};
struct wire_fork {
    uint64_t origin; /* > 0 */
    uint32_t model;
    uint64_t step;
    struct wire_bytes settings;      /* to owner 0: as wire_set.change, in force from `step` on */
    struct wire_bytes settings_more; /* likewise: as wire_set.more */
};

struct wire_request {
    uint64_t seq;
    uint64_t session;
    enum wire_request_type type;
    union {
        struct wire_hello hello;
        struct wire_open_model open_model;
        struct wire_return return_grad;
        struct wire_prepare prepare;
        struct wire_commit commit;
        struct wire_get_blob get_blob;
        struct wire_digest digest;
        struct wire_lease lease;
        struct wire_checkpoint checkpoint;
        struct wire_restore restore;
        struct wire_drain drain;
        struct wire_join join;
        struct wire_fetch fetch;
        struct wire_history history;
        struct wire_create create;
        struct wire_put put;
        struct wire_get get;
        struct wire_reset reset;
        struct wire_pin pin;
        struct wire_unpin unpin;
        struct wire_show show;
        struct wire_set set;
        struct wire_drop drop;
        struct wire_fork fork;
        struct wire_snapshot snapshot;
        struct wire_rewind rewind;
        struct wire_move move;
    };
};

/* Replies. */
enum wire_reply_type {
    WIRE_REPLY_NONE, /* status alone */
    WIRE_WELCOME,
    WIRE_LAYOUT,
    WIRE_PREPARED,
    WIRE_COMMITTED,
    WIRE_BLOB,
    WIRE_LEAVES,
    WIRE_STATUS_TEXT,
    WIRE_CREDIT,
    WIRE_LEASED,
    WIRE_CHECKPOINTED,
    WIRE_RESTORED,
    WIRE_FETCHED,
    WIRE_ROWS,
    WIRE_CREATED,
    WIRE_GOT,
    WIRE_RESET_ANSWER,
    WIRE_RING,
    WIRE_PINNED,
    WIRE_SHOWN,
    WIRE_DROPPED,
    WIRE_FORKED,
    WIRE_SET_ANSWER,
    WIRE_SNAPSHOTS,
    WIRE_REWOUND,
    WIRE_MOVED,
};
#define WIRE_REPLY_TYPES (WIRE_MOVED + 1)

struct wire_welcome {
    uint64_t session;
    const char *device;
    bool kept;
    uint32_t requests; /* types it knows; 0: up to WIRE_HISTORY */
};
#define WIRE_DEVICE_BYTES 16u

struct wire_segment {
    enum segment_kind kind;
    uint64_t ticket;
    uint64_t bytes; /* > 0, multiple of SHD_PAGE_BYTES, <= 2^62 */
    enum segment_place place;
};
struct wire_layout {
    uint32_t model;
    uint64_t step;
    struct wire_bytes spec;
    uint32_t owner, owners, slots;
    uint64_t slot_bytes; /* multiple of SHD_PAGE_BYTES */
    struct wire_segment segments[WIRE_SEGMENTS_MAX];
    uint32_t segment_count;
    bool has_decision; /* of the last committed step */
    struct decision decision;
    struct wire_bytes
        in; /* a bit per group, lowest first, at most SHD_MICROS_MAX; may be shorter */
    struct wire_bytes device; /* UUID of the GPU, WIRE_DEVICE_BYTES; none: the host */
    uint64_t origin;
    uint64_t restore_id; /* of the restore that made it; 0: none did */
    uint32_t twin_pid;   /* who trains it with this session's rank, too; 0: nobody */
    uint64_t attempt;    /* 1 + the resets of open steps so far; 0: not known */
    uint64_t spec_bytes; /* in the SEGMENT_SPEC among the segments; 0: it is in `spec` */
    bool one_count;      /* of updates; also false below WIRE_LEVEL_SAID */
    uint64_t instance;   /* 0 below WIRE_LEVEL_STATES */
    uint64_t guard_back; /* owner 0's: 1 + the step that a guard has gone back for, last; 0: none */
    uint32_t room;       /* micro-batches that a step can be set to have; 0: none; below AUDITS */
    uint64_t first;      /* instance of the owner that it was a replica of; 0: of none */
};
struct wire_prepared {
    uint64_t step;
    bool over; /* committed long ago, the record is gone: the rest is meaningless */
    bool finite;
    struct fixsum sum; /* carried */
    double metrics[WIRE_METRICS_MAX];
    uint32_t metric_count;
    bool has_decision;
    struct decision decision;
    uint32_t reported; /* returned groups that had metrics; 0: not known */
    struct wire_bytes
        settings; /* doubles, in any place: settings_unpack(); empty: nothing is set */
    struct wire_bytes settings_more;
    struct wire_bytes guard;       /* likewise: guard_limits_unpack(); empty: no guard */
    struct wire_bytes unit_sums;   /* fixsum_unpack() each, at most WIRE_UNIT_SUMS_MAX; NULL: not
                                    * finite */
    uint32_t unit_sums_from;       /* as asked; 0: they are not there */
    uint32_t part_sums_from;       /* likewise */
    struct wire_bytes unit_limits; /* doubles, in any place: watch_own() of each unit */
    struct wire_bytes unit_norms;  /* with a decision: as in wire_commit; empty: not told */
};
struct wire_committed {
    uint64_t step;
    bool over; /* as in wire_prepared */
    struct decision decision;
};
struct wire_blob {
    uint64_t step;
    struct wire_bytes blob;
};
struct wire_leaves {
    uint64_t step, updates, total;
    struct wire_bytes leaves; /* multiple of 32 bytes, at most WIRE_LEAVES_MAX leaves */
};
struct wire_status_text {
    struct wire_bytes json;
};
struct wire_credit {
    uint32_t slot;
    bool stale;
};
enum wire_leased_what {
    WIRE_LEASED_GROUP = 1, /* compute `group` */
    WIRE_LEASED_ALL_IN = 2,
    WIRE_LEASED_OVER = 3,    /* the step was committed */
    WIRE_LEASED_NOTHING = 4, /* now; or taken back */
};
struct wire_leased {
    uint64_t step;
    enum wire_leased_what what;
    uint32_t group; /* below SHD_MICROS_MAX */
};
struct wire_checkpointed {
    uint64_t step, updates, bytes;
    bool has_decision; /* of the step before */
    struct decision decision;
    struct wire_bytes blob;         /* at most WIRE_BLOB_BYTES_MAX */
    struct wire_bytes unit_updates; /* of each unit a uint64_t, in any place; none: `updates` */
    struct wire_bytes settings;     /* JSON (settings_text.h); empty: nothing is set */
};
struct wire_restored {
    uint64_t step, bytes;
};

struct wire_fetched {
    uint64_t step; /* what was sent */
};
struct wire_rows {
    uint64_t next;
    struct wire_bytes rows;   /* multiple of HISTORY_ROW_BYTES, at most WIRE_ROWS_MAX of them */
    struct wire_bytes audits; /* of those of them that have one, AUDIT_ROW_BYTES each */
    struct wire_bytes units;  /* UNIT_ROW_BYTES each */
    uint64_t units_step;      /* plus 1; 0: there are none */
    double units_divisor;
    uint32_t units_skipped; /* history_skipped() */
};
enum wire_created_what {
    WIRE_CREATED_YOURS = 1, /* put its units */
    WIRE_CREATED_FULL = 2,
    WIRE_CREATED_OPEN = 3,
    WIRE_CREATED_OTHERS = 4, /* another session makes it */
    WIRE_CREATED_DROPPED = 5,
    WIRE_CREATED_OVER = 6, /* of a put: its step is */
};
struct wire_created {
    enum wire_created_what what;
    uint64_t ticket, bytes; /* YOURS: of the stage; bytes as a segment's, else 0 */
    const char *by;         /* OTHERS: the name of that session */
    uint64_t consent;       /* of a put, owner 0's: ascending */
};
struct wire_got {
    uint64_t step, updates; /* updates: of the unit */
    uint64_t ticket, bytes; /* of the stage */
};
enum wire_reset_what {
    WIRE_RESET_DONE = 1,
    WIRE_RESET_PROMISED = 2, /* not: Prepare was answered in the attempt before */
    WIRE_RESET_OVER = 3,     /* the step was committed */
};
struct wire_reset_answer {
    uint64_t step;
    uint64_t attempt; /* of the owner now */
    enum wire_reset_what what;
};

struct wire_ring {
    uint64_t requests, replies; /* tickets: of the page that the client writes, and the daemon */
    uint64_t bytes;             /* of each, as a segment's */
};
struct wire_set_answer {
    uint64_t from;
    struct wire_bytes json; /* at most WIRE_SET_JSON_MAX bytes */
};

struct wire_shown {
    uint64_t step, updates;   /* updates: of the unit */
    uint64_t of_step;         /* WIRE_SHOW_GRAD, with the next */
    uint32_t groups;          /* at most SHD_MICROS_MAX */
    struct wire_bytes tally;  /* none, or TALLY_BYTES, not looked at: tally_check() */
    struct wire_bytes values; /* fp32, at most WIRE_VALUES_MAX */
};

struct wire_pinned {
    uint64_t step;
    uint64_t ticket, bytes; /* of the segment */
    uint64_t segment;       /* > 0: its number; a ticket with the same one is for the same */
};

enum wire_dropped_what {
    WIRE_DROPPED_HELD = 1, /* nobody opens it */
    WIRE_DROPPED_GONE = 2,
    WIRE_DROPPED_NONE = 3, /* of that name */
    WIRE_DROPPED_KEPT = 4, /* as before */
};
struct wire_dropped {
    enum wire_dropped_what what;
    uint64_t instance, step; /* HELD: of this owner's model; NONE: 1, it had moved, and this is
                              * forgotten */
    const char *near;        /* NONE: the most similar name here, or "" */
    uint64_t first;          /* HELD: as in wire_layout */
};
enum wire_moved_what {
    WIRE_MOVED_TOLD = 1, /* it will be */
    WIRE_MOVED_AWAY = 2,
    WIRE_MOVED_NOT = 3, /* nothing is known of that name */
};
struct wire_moved {
    enum wire_moved_what what;
    uint64_t instance;            /* of this owner's that moves */
    uint64_t step, id;            /* AWAY: as wire_move has them, with the next */
    const char *to, *path, *name; /* "": not said */
    bool there;                   /* AWAY: they had it open */
};
struct wire_forked {
    uint64_t step, updates;
};
struct wire_snapshots {
    uint64_t step; /* that is open */
    uint64_t every;
    uint32_t keep;
    struct wire_bytes rows; /* WIRE_SNAPSHOT_BYTES each, at most WIRE_SNAPSHOTS_MAX, in any place */
};
struct wire_rewound { /* the last one */
    uint64_t step;
    uint64_t attempt; /* that began with it; 0: there was none */
    uint64_t consent;
};

struct wire_reply {
    uint64_t seq;
    int status;        /* a known status code */
    const char *text;  /* "" when status is SHD_OK */
    uint32_t retry_ms; /* SHD_EBUSY: it was not served; ask again after so long. 0: that is final */
    enum wire_reply_type type;
    union {
        struct wire_welcome welcome;
        struct wire_layout layout;
        struct wire_prepared prepared;
        struct wire_committed committed;
        struct wire_blob blob;
        struct wire_leaves leaves;
        struct wire_status_text status_text;
        struct wire_credit credit;
        struct wire_leased leased;
        struct wire_checkpointed checkpointed;
        struct wire_restored restored;
        struct wire_fetched fetched;
        struct wire_rows rows;
        struct wire_created created;
        struct wire_got got;
        struct wire_reset_answer reset_answer;
        struct wire_ring ring;
        struct wire_pinned pinned;
        struct wire_shown shown;
        struct wire_set_answer set_answer;
        struct wire_dropped dropped;
        struct wire_forked forked;
        struct wire_snapshots snapshots;
        struct wire_rewound rewound;
        struct wire_moved moved;
    };
};

int wire_request_unpack(const void *frame, size_t bytes, struct wire_arena *arena,
                        struct wire_request *ret_request, struct shd_err *e);
int wire_reply_unpack(const void *frame, size_t bytes, struct wire_arena *arena,
                      struct wire_reply *ret_reply, struct shd_err *e);

/* Pack into buf[capacity]; *ret_bytes is the frame's size. SHD_ERANGE when it would not fit or
 * would exceed WIRE_FRAME_BYTES_MAX. */
int wire_request_pack(const struct wire_request *request, void *buf, size_t capacity,
                      size_t *ret_bytes, struct shd_err *e);
int wire_reply_pack(const struct wire_reply *reply, void *buf, size_t capacity, size_t *ret_bytes,
                    struct shd_err *e);

/* The same for a peer of a lower level than this build's. SHD_ENOTSUP, which names the field, where
 * the message would say something else without what the peer does not know. */
int wire_request_pack_for(const struct wire_request *request, uint32_t level, void *buf,
                          size_t capacity, size_t *ret_bytes, struct shd_err *e);
int wire_reply_pack_for(const struct wire_reply *reply, uint32_t level, void *buf, size_t capacity,
                        size_t *ret_bytes, struct shd_err *e);

/* "RETURN" ... for logs; type must be valid. */
const char *wire_request_name(enum wire_request_type type);

#endif
