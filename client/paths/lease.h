/* Asking daemons for work, and giving it back: control_ops slots.
 *
 * A question outlives a wait that is broken off: its answer may be a lease, which the owner hands
 * out once. So there is one question at a time, kept with the model; the next wait goes on with it.
 */
#ifndef SHD_CLIENT_LEASE_H
#define SHD_CLIENT_LEASE_H

#include <stdbool.h>
#include <stdint.h>

struct shd_err;
struct shd_model;
struct wire_leased;

int lease_ask_owner(struct shd_model *m, uint32_t owner, bool now, struct wire_leased *ret_leased,
                    struct shd_err *e);
int lease_meet(struct shd_model *m, uint32_t workers, struct shd_err *e);
int lease_to_owners(struct shd_model *m, uint32_t group, struct shd_err *e);

/* The model is closed. */
void lease_close(struct shd_model *m);

#endif
