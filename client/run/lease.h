/* Leases, as shd_lease() and the elastic driver take them. */
#ifndef SHD_RUN_LEASE_H
#define SHD_RUN_LEASE_H

#include <stdint.h>

struct shd_err;
struct shd_model;
struct wire_leased;

/* Ask the owners in turn until one has something to say. NOTHING: only while something is leased
 * here. */
int lease_take(struct shd_model *m, struct wire_leased *ret_leased, struct shd_err *e);

/* The group will not be computed here. */
int lease_drop(struct shd_model *m, uint32_t group, struct shd_err *e);

#endif
