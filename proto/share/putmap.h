/* The segment by which values for an open model come to one of its owners: which they are, then the
 * values. The worker writes the values, the daemon the rest; it is kept until they have taken
 * effect.
 *
 *   struct putmap_head, arrays[units]          to the end of a page
 *   slices [elems], fp32, array by array and unit by unit, those that `arrays` names
 *   updates[units], uint64_t, where the magic says so    to the end of a page
 *
 * Slices are whole pages. Pure.
 */
#ifndef SHD_PUTMAP_H
#define SHD_PUTMAP_H

#include <stdbool.h>
#include <stdint.h>

struct shardmap;
struct shd_err;
struct spec;

#define PUTMAP_ARRAYS 4u                           /* spec_arrays(), at most */
#define PUTMAP_MAGIC  UINT64_C(0x3174757064726873) /* "shrdput1" */
#define PUTMAP_COUNTS UINT64_C(0x3274757064726873) /* "shrdput2": and updates of units */

struct putmap_head {
    uint64_t magic; /* all is there: written last */
    uint64_t origin;
    uint64_t step; /* in whose place the put is */
    uint64_t units;
    uint64_t consent; /* owner 0's */
};

/* arrays[count]: of each unit a bit for each array. Errors: SHD_EINVAL an array that the unit does
 * not have, named; none at all; SHD_ERANGE another number of units. */
int putmap_check(const struct spec *spec, const uint8_t *arrays, uint64_t count, struct shd_err *e);

/* Up to the updates of units, or of all of it. */
uint64_t putmap_updates_at(const struct shardmap *map, const uint8_t *arrays);
uint64_t putmap_bytes(const struct shardmap *map, const uint8_t *arrays, bool updates);

/* Of a slice that is in it. */
uint64_t putmap_offset_bytes(const struct shardmap *map, const uint8_t *arrays, uint32_t array,
                             uint32_t unit);

#endif
