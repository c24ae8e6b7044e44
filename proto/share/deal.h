/* The owners of units that one owner has whole ("place": "whole"): for optimizers that need whole
 * tensors, which other units' slices (layout.h) would cut.
 *
 * Greedy: in descending size, the lower index first among equals, each unit goes to the owner that
 * has least of them so far, the lower one among equals. So no owner has more than another by more
 * than its last unit: with L units of one size over N owners, ceil(L / N) of them at most. Other
 * units are spread evenly, and change nothing about it. Pure but for its memory. */
#ifndef SHD_DEAL_H
#define SHD_DEAL_H

#include <stdint.h>

struct shd_err;
struct slice;
struct spec;

#define DEAL_SPREAD UINT32_MAX

/* *ret_owner_of: [units], the caller's to free(): a unit's owner, DEAL_SPREAD where it is not
 * whole. Errors: SHD_ENOMEM. */
int deal_units(const struct spec *spec, uint32_t owners, uint32_t **ret_owner_of,
               struct shd_err *e);

/* What `owner` has of a unit of elems elements whose owner is whole_owner, or DEAL_SPREAD. */
struct slice deal_slice(uint64_t elems, uint32_t whole_owner, uint32_t owner, uint32_t owners);

#endif
