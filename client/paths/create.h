/* Making a model on daemons with this program's start values: all of them have it, or none.
 *
 * Happy path: Create to owner 0, which lets one session at a time, then to the others; a unit after
 * the other is filled here, copied to where each owner's stage is mapped, and Put; Create (full) to
 * all; Create (open) to owner 0, whose opening is what counts, then to the others. The next unit is
 * filled while the owners take this one.
 *
 * A fork: instead of units that are filled here, each owner takes its part from another model that
 * is open there, all of one step.
 *
 * Failure: a daemon that dies before owner 0 has opened takes its part along, and all of it is
 * begun anew under another origin. Whatever else fails is told to the daemons, which drop the
 * model. */
#ifndef SHD_CLIENT_CREATE_H
#define SHD_CLIENT_CREATE_H

struct shd_err;
struct shd_model;
struct spec_out;
struct starts;

/* json: m's spec. SHD_OK: the model is there, made by us (starts->created) or by another.
 * SHD_ENOENT: another session is making it. */
int create_model(struct shd_model *m, const struct spec_out *json, struct starts *starts,
                 struct shd_err *e);

#endif
