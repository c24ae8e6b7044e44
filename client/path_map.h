/* The mapped path: daemons on this host, whose memory is read and written in place.
 *
 * At open each unit gets one reservation in which all owners' published slices are placed side by
 * side, read-only; each gradient slot gets one per unit size, in which the owners' inbox slices
 * are placed, writable. So a unit is one array although N processes own it, and nothing is copied.
 * Mapped once and kept: remapping costs about a microsecond a page.
 */
#ifndef SHD_PATH_MAP_H
#define SHD_PATH_MAP_H

#include <stdint.h>

#include "client/hub.h"
#include "client/path.h"
#include "proto/board.h"
#include "proto/segment.h"
#include "proto/shardmap.h"

struct map_owner {           /* of one model, by owner index */
    struct shardmap *shards; /* owned */
    struct segment board;    /* owned */
    uint32_t handle;         /* the model's, in requests */
    uint64_t step;           /* at open */
    uint32_t slots;          /* as the daemon laid them out */
    uint64_t slot_bytes;
    bool decided; /* `decision` is that of the step before `step` */
    struct wire_decision decision;
    struct wire_segment segments[WIRE_SEGMENTS_MAX]; /* offered, to be claimed */
    uint32_t segment_count;
};

struct map_model {
    struct map_owner *owners; /* owned, [owner_count] */
    uint32_t owner_count;
    void **params;        /* owned, [units]: reservations; NULL: not made */
    uint32_t *view_of;    /* owned, [units]: views of units of one size are shared */
    uint64_t *view_elems; /* owned, [view_count]: elements of the unit */
    uint32_t *view_unit;  /* owned, [view_count]: a unit of that size */
    uint32_t view_count;
    float **views; /* owned, [slots * view_count]: reservations; NULL: not made */
    uint32_t view_slots;
    struct wire_prepared *prepared; /* owned, [owner_count]: replies of the step */
    struct wire_decision *counts;   /* owned, [owner_count]: the decisions that count */
};

/* path_ops slots, by file. path_map.c: */
int map_open(struct shd_model *m, const char *name, struct shd_err *e);
void map_close(struct shd_model *m);
int map_open_slots(struct shd_model *m, struct shd_err *e);

/* path_map_step.c: */
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
/* Its halves: all owners' Prepared replies into map->prepared; what follows from them. */
int map_prepare(struct shd_model *m, struct shd_err *e);
int map_decide_and_commit(struct shd_model *m, const struct shd_update *update,
                          struct decided *ret_decided, struct shd_err *e);

/* path_map_settle.c: bring owners that are one step apart to the same step; sets m->step and the
 * decision before it. */
int map_settle(struct shd_model *m, struct shd_err *e);

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
