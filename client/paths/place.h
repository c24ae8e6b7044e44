/* Owners' slices mapped side by side with the others', host memory all of it (map.h); and the
 * reader of what is mapped, so or in one piece (whole.h). */
#ifndef SHD_PLACE_H
#define SHD_PLACE_H

#include "client/paths/map.h"
#include "client/paths/path.h"

extern const struct mover_ops mover_place;

/* Addresses for all units and slots of a model with a spec and m->map->owners' shards. */
int place_reserve(struct shd_model *m, struct shd_err *e);
int place_reserve_slots(struct shd_model *m, uint32_t slots, struct shd_err *e);
void place_release_slots(struct map_model *map);
void place_release(struct shd_model *m);

/* Addresses for all units, and an owner's slice of each mapped there, read-only, from a segment
 * with the places of its publish segment. In one piece: where neighbours have their slices at one
 * owner, one after the other in its segment, they make one mapping, of which a process may not have
 * many (vm.max_map_count). *ret_units: [units], for place_release_units() (NULL is a no-op). */
int place_reserve_units(const struct shd_model *m, void ***ret_units, struct shd_err *e);
/* The same, of memory of this process. */
int place_memory_units(const struct shd_model *m, void ***ret_units, struct shd_err *e);

int place_units(struct shd_model *m, void *const *units, const struct map_owner *owner, int fd,
                struct shd_err *e);
void place_release_units(const struct shd_model *m, void **units);

/* n is m's model at other owners, opened beside it: have its units at the addresses of m's, which
 * are n's from then on, and m has none. Errors: SHD_ENOMEM, and neither is of any use. */
int place_take_over(struct shd_model *m, struct shd_model *n, struct shd_err *e);

/* The array of a slot, shaped for unit. */
float *place_slot_array(const struct shd_model *m, uint32_t slot, uint32_t unit);

/* mover_ops slot, where take() puts nothing off: nothing. */
int place_ready(struct shd_model *m, struct map_owner *owner, struct shd_err *e);

extern const struct reader_ops reader_mapped;

/* One sleep of a wait that began at start_ns, for this owner to publish a version of the unit or a
 * later one. A short wait is left to the board's word, which costs one system call. A longer one is
 * a sleep in hub_poll(), that replies and hang-ups end as well; the owner ends it, where it does,
 * when it stores the word. SHD_PENDING: not yet, or *ret_late, its time is over. Errors: those of
 * hub_poll(). */
int mapped_sleep(struct shd_model *m, struct link *link, uint32_t unit, uint64_t version,
                 uint64_t start_ns, bool *ret_late, struct shd_err *e);

/* Wait until this owner has published the unit at the open step, in a wait that began at start_ns.
 * Errors: those of hub_poll(); SHD_ETIMEDOUT, SHD_ESTEP: the owner is past it. */
int mapped_wait_owner(struct shd_model *m, struct link *link, uint32_t unit, uint64_t start_ns,
                      struct shd_err *e);

/* Slots of both tables for what is there since the model was opened: nothing. */
int mapped_nothing(struct shd_model *m, uint32_t unit_or_slot, struct shd_err *e);
void mapped_let_go(struct shd_model *m, uint32_t unit);

#endif
