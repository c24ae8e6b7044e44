/* A model on daemons of this host, whose memory is mapped, to be read and written in place or to be
 * copied from and to.
 *
 * At open each unit gets one reservation in which all owners' published slices are placed side by
 * side, read-only; each gradient slot gets one per unit size, in which the owners' inbox slices
 * are placed, writable. So a unit is one array although N processes own it, and nothing is copied.
 * Mapped once and kept: remapping costs about a microsecond a page. Where a GPU takes part it is
 * done otherwise: whole.h.
 *
 * A daemon's successor has new publish, board and inbox segments. The first two are placed over the
 * old ones: addresses stay, and so do the bytes of every unit at the open step. The inbox is new
 * and empty, and a slot may be in use: its view keeps showing the old inbox, which is still there
 * as long as it is mapped, until it is handed out the next time; what is returned from it before is
 * copied over (place.c).
 */
#ifndef SHD_MAP_H
#define SHD_MAP_H

#include <stdbool.h>
#include <stdint.h>

#include "client/session/gpu.h"
#include "client/session/session.h"
#include "proto/share/board.h"
#include "proto/share/segment.h"
#include "proto/share/shardmap.h"

struct activity;
struct leasing;
struct mover_ops;
struct pinned;
struct turn;

struct map_layout {  /* an owner's answer to OpenModel */
    uint32_t epoch;  /* of the link: segments and handle are of that connection */
    uint32_t handle; /* the model's, in requests */
    uint64_t step;
    uint64_t restore_id; /* of the restore that made it; 0: none did */
    uint64_t instance;   /* of the owner's model; 0: it did not say */
    uint64_t origin;     /* of its start values; 0: the spec's */
    uint32_t twin_pid;   /* who trains with this process's $RANK, too; 0: nobody */
    uint32_t slots;      /* as the daemon laid them out */
    uint64_t slot_bytes;
    bool decided; /* `decision` is that of the step before `step` */
    struct decision decision;
    bool on_gpu;                  /* its publish and inbox are in a GPU's memory */
    uint8_t uuid[GPU_UUID_BYTES]; /* that GPU's */
    struct wire_segment segments[WIRE_SEGMENTS_MAX]; /* offered, to be claimed */
    uint32_t segment_count;
    bool taken;          /* all of them: no ticket is left to be claimed */
    uint64_t spec_bytes; /* in a SEGMENT_SPEC among them; 0: there is none, or it is taken */
    uint64_t attempt;    /* at `step` */
    uint64_t guard_back; /* owner 0's: 1 + the step that its guard went back for, by the last
                          * rewind; 0: that was somebody's */
    bool one_count;      /* of updates, for all units; false: one for each, or it did not say */
    uint32_t room;       /* micro-batches that a step can be set to have; 0: none */
    uint8_t in[MODEL_IN_BYTES]; /* a bit per group that is all in there, of `step` and attempt */
};

struct whole_segment {
    struct segment segment; /* owned; base NULL: held, not mapped yet */
    bool pinned;
};

struct whole_inbox {
    struct whole_segment memory;
    struct whole_inbox *older; /* owned: predecessors', in which slots still lie; NULL: none */
};

struct map_whole { /* of an owner */
    struct kern
        *gpu; /* borrowed: what its memory is copied by; NULL: none yet, or it is the host's */
    struct whole_segment publish;
    struct whole_inbox *inbox; /* owned: today's, first; NULL: none yet */
    struct segment held;       /* owned: today's inbox of another GPU, or publish of a replica: not
                                * mapped */
    uint8_t **slots;           /* owned, [view_slots]: where each slot's slice lies */
};

struct map_owner {                 /* of one model, by owner index */
    const struct mover_ops *mover; /* borrowed */
    struct shardmap *shards;       /* owned */
    struct segment board;          /* owned; its address stays when the daemon is succeeded */
    struct segment inbox; /* owned: of a successor; closed: the views map the only one there was */
    struct map_whole whole; /* instead of places in params and views */
    struct activity *says;  /* owned: our page there, of all owners but the first; or NULL */
    struct map_layout layout;
    bool mapped; /* publish and board */
    bool has_inbox;
    bool joining; /* a replica whose host is in again, and that is not opened yet: rejoin.h */
};

/* A Return that an owner, or a replica, has answered for good. */
struct map_answer {
    uint64_t step, attempt;
    uint32_t group, unit;
    uint32_t member; /* index */
};

struct map_model {
    struct map_owner *owners; /* owned, [member_count]: owners, then their replicas (replica.h) */
    uint32_t owner_count;
    uint32_t member_count; /* == owner_count, or twice as many */
    bool whole;            /* owners' segments are mapped one by one: whole.h */
    bool on_disk;          /* what one of them publishes is on a file: a fetch reads ahead */
    void **params;         /* owned, [units]: reservations; NULL: not made */
    uint32_t *view_of;     /* owned, [units]: views of units that are cut alike are shared */
    uint64_t *view_elems;  /* owned, [view_count]: elements of the unit */
    uint32_t *view_unit;   /* owned, [view_count]: a unit of that view */
    uint32_t view_count;
    float **views; /* owned, [slots * view_count]: reservations; NULL: not made */
    uint32_t view_slots;
    bool *stale; /* owned, [slots * member_count]: the views show a predecessor's inbox there */
    struct turn *turn;       /* owned: the commit at hand */
    double *unit_norms;      /* owned, [guard.columns]: the turn's; NULL: not made */
    struct leasing *leasing; /* owned: the question for work at hand; NULL: none was asked yet */
    uint64_t put_origin;     /* of the last put that was begun here */
    struct pinned *pinned;   /* owned by run/pin.c; NULL: nothing was pinned yet */
    uint64_t first;          /* owner 0's instance, once it has answered; 0: not known */
    bool viewed;             /* who is in was read since it was opened, with the next */
    uint64_t viewed_rewound; /* the last rewind that was done before that; 0: none */
    uint64_t rewound;        /* the attempt that began with the last rewind it knows of; 0: none */
    void (*answered)(struct shd_model *m, const struct map_answer *a); /* NULL: nobody asks */
    void (*look)(struct shd_model *m); /* in each hub_poll(): may set m->fault; NULL: likewise */
    uint64_t moves; /* to other owners that it has gone along with (run/move.h) */
};

#endif
