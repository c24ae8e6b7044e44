/* The mapped path: daemons on this host, whose memory is read and written in place.
 *
 * At open each unit gets one reservation in which all owners' published slices are placed side by
 * side, read-only; each gradient slot gets one per unit size, in which the owners' inbox slices
 * are placed, writable. So a unit is one array although N processes own it, and nothing is copied.
 * Mapped once and kept: remapping costs about a microsecond a page. Where a GPU takes part it is
 * done otherwise: path_map_whole.h.
 *
 * A daemon's successor has new publish, board and inbox segments. The first two are placed over the
 * old ones: addresses stay, and so do the bytes of every unit at the open step. The inbox is new
 * and empty, and a slot may be in use: its view keeps showing the old inbox, which is still there
 * as long as it is mapped, until it is handed out the next time; what is returned from it before is
 * copied over (path_map_place.c).
 */
#ifndef SHD_PATH_MAP_H
#define SHD_PATH_MAP_H

#include <stdint.h>

#include "client/paths/path.h"
#include "client/paths/path_map_whole.h"
#include "client/paths/turn.h"
#include "client/session/gpu.h"
#include "client/session/hub.h"
#include "proto/share/board.h"
#include "proto/share/segment.h"
#include "proto/share/shardmap.h"

struct map_layout {  /* an owner's answer to OpenModel */
    uint32_t epoch;  /* of the link: segments and handle are of that connection */
    uint32_t handle; /* the model's, in requests */
    uint64_t step;
    uint32_t slots; /* as the daemon laid them out */
    uint64_t slot_bytes;
    bool decided; /* `decision` is that of the step before `step` */
    struct decision decision;
    bool on_gpu;                  /* its publish and inbox are in a GPU's memory */
    uint8_t uuid[GPU_UUID_BYTES]; /* that GPU's */
    struct wire_segment segments[WIRE_SEGMENTS_MAX]; /* offered, to be claimed */
    uint32_t segment_count;
    uint8_t in[MODEL_IN_BYTES]; /* a bit per group that is all in there, of `step` */
};

struct map_owner {           /* of one model, by owner index */
    struct shardmap *shards; /* owned */
    struct segment board;    /* owned; its address stays when the daemon is succeeded */
    struct segment inbox; /* owned: of a successor; closed: the views map the only one there was */
    struct map_whole whole; /* instead of places in params and views */
    struct map_layout layout;
    bool mapped; /* publish and board */
    bool has_inbox;
};

struct map_model {
    struct map_owner *owners; /* owned, [owner_count] */
    uint32_t owner_count;
    bool whole;           /* owners' segments are mapped one by one: path_map_whole.h */
    void **params;        /* owned, [units]: reservations; NULL: not made */
    uint32_t *view_of;    /* owned, [units]: views of units of one size are shared */
    uint64_t *view_elems; /* owned, [view_count]: elements of the unit */
    uint32_t *view_unit;  /* owned, [view_count]: a unit of that size */
    uint32_t view_count;
    float **views; /* owned, [slots * view_count]: reservations; NULL: not made */
    uint32_t view_slots;
    bool *stale; /* owned, [slots * owner_count]: the views show a predecessor's inbox there */
    struct turn *turn; /* owned: the commit at hand */
};

/* path_ops slots, by file. path_map.c: */
int map_open(struct shd_model *m, const char *name, struct shd_err *e);
void map_close(struct shd_model *m);
int map_open_slots(struct shd_model *m, struct shd_err *e);

/* path_map_layout.c: what a model is asked for by. */
struct map_opening {
    struct shd_model *m;
    const char *json; /* borrowed; "": attach to name */
    const char *name; /* borrowed; "": the only one */
    uint32_t slots;
};
/* OpenModel to one or to every daemon, into owner->layout. */
int map_ask_layout(struct map_opening *o, struct link *link, struct shd_err *e);
int map_ask_layouts(struct map_opening *o, struct shd_err *e);
/* Ask once more, of an open model, and take only what can change: steps and decisions. */
int map_refresh(struct shd_model *m, struct shd_err *e);
/* On a link that comes up: the model's layout at the successor. */
int map_exchange_layout(struct shd_model *m, struct link *link, uint32_t slots,
                        struct map_layout *ret_layout, struct shd_err *e);

/* path_map_place.c: claim an owner's segments, each kind once, and map those of the wanted kinds
 * (bits); over what was mapped before, if anything was. SHD_EGONE: the layout is of a connection
 * that is lost. */
int map_take_segments(struct shd_model *m, struct link *link, const struct map_layout *layout,
                      unsigned wanted, struct shd_err *e);
/* Let a free slot's views show the owners' inboxes of today. */
int map_ready_slot(struct shd_model *m, uint32_t slot, struct shd_err *e);
/* Before owner is told of a slot's contents: see to it that they lie in its inbox of today. */
int map_bring_slice(struct shd_model *m, uint32_t owner, uint32_t slot, struct shd_err *e);

/* path_map_again.c: hub->look and hub->reopen. ctx: the session. */
void map_look(void *ctx);
int map_reopen(void *ctx, struct link *link, struct shd_err *e);

/* path_map_step.c and path_map_commit.c: */
int map_fetch(struct shd_model *m, uint32_t unit, struct shd_err *e);
int map_wait_unit(struct shd_model *m, uint32_t unit, struct shd_err *e);
void map_let_go(struct shd_model *m, uint32_t unit);
const void *map_params(const struct shd_model *m, uint32_t unit);
int map_wait_slot(struct shd_model *m, struct shd_err *e);
float *map_slot_array(const struct shd_model *m, uint32_t slot, uint32_t unit);
int map_fill_slot(struct shd_model *m, uint32_t slot, uint32_t unit, const float *grad,
                  enum shd_dtype dtype, struct shd_err *e);
int map_give(struct shd_model *m, const struct path_return *ret, struct shd_err *e);
int map_poll(struct shd_model *m, struct shd_err *e);
int map_commit(struct shd_model *m, const struct shd_update *update, struct decided *ret_decided,
               struct shd_err *e);
/* Its middle: m->map->turn, which has begun, to its end; blob NULL: none. */
int map_turn(struct shd_model *m, const struct wire_bytes *blob, struct shd_err *e);
int map_lease(struct shd_model *m, uint32_t owner, struct wire_leased *ret_leased,
              struct shd_err *e);

/* path_map_settle.c: bring owners that are one step apart to the same step; sets m->step, the
 * decision before it, and which groups are in. */
int map_settle(struct shd_model *m, struct shd_err *e);
/* The same for a worker that fell behind: ask the owners where they are. */
int map_catch_up(struct shd_model *m, struct shd_err *e);

/* path_map_look.c: */
int map_blob(struct shd_model *m, void *buf, size_t capacity, size_t *ret_bytes, struct shd_err *e);
int map_owner_blob(struct shd_model *m, uint32_t owner, void *buf, size_t capacity,
                   size_t *ret_bytes, struct shd_err *e);
int map_leaves(void *ctx, const struct digest_part *part, uint8_t (*ret_leaves)[32],
               struct digest_stamp *stamp, struct shd_err *e);
uint32_t map_owners(const struct shd_session *s);
void map_disconnect(struct shd_session *s);
int map_status(struct shd_session *s, uint32_t owner, char **ret_json, struct shd_err *e);

#endif
