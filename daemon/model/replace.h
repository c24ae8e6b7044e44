/* A restore in the place of a model that is open.
 *
 * The new model is read, checked and parked beside the open one, whose memory stays as it is. Its
 * ledger names the instance that it replaces. The store that makes it ready is what replaces: a
 * successor of this process, however it ended, adopts what is ready and drops what such a ledger
 * names (adopt.h). So the daemon ends right after that store, and its successor serves the new
 * model; the way of a replacement is that of every kill.
 *
 * Refused where somebody has gradient slots in the open model: where such a worker is in its data
 * is of the state that would go. Readers end with an error that says so (restore_id in Layout).
 *
 * Over several owners: `restore_id` is one random number for all of them. An owner that has a model
 * of that restore already is done, so the restorer repeats the two requests until all have, also
 * after kills; where it died halfway, nobody can open a model of two restores.
 */
#ifndef SHD_REPLACE_H
#define SHD_REPLACE_H

#include <stdbool.h>

struct daemon;
struct model;
struct op;

/* op's RESTORE has been carried out here: the model is of it. */
bool replace_done(const struct op *op, const struct model *open);

/* Whether op may replace it now. Errors: SHD_EEXIST it does not ask for that; SHD_ESPEC other
 * daemons own the rest of it; SHD_ENOTSUP nobody would start a successor; SHD_EBUSY somebody trains
 * or saves it, with their names. */
int replace_check(struct op *op, const struct model *open);

/* Make m ready in its place, and end this process. */
void replace_with(struct model *open, struct model *m);

/* Where none is open: make m ready, and an open model of d. */
void replace_nothing(struct daemon *d, struct model *m);

#endif
