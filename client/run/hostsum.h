/* Gradients of a group of micro-batches that workers of one host compute together and sum here: one
 * return for all of them, where each would sum and return groups of its own. shd_policy.sums has it
 * so.
 *
 * Happy path: hostsum_open() hands out an array, the *cell* of the micro-batch and unit, in memory
 * that the workers share; hostsum_close() says that it is written. Whoever brings in the last of a
 * group's cells of a unit adds them up in ascending order, from a copy of the first, and returns
 * the sum as if it had computed all of it. The sum is bit for bit that of one worker.
 *
 * A unit has one *lane*: cells for the micro-batches of one group. The next group takes it once all
 * owners have credited the sum, or the step is over or was given up. Until then who computes
 * another group waits: so all workers of the host are to compute each group, in ascending order.
 *
 * Whoever dies. Cells that are in stay; what was being written is written again by the worker's
 * successor, which has the same micro-batches. A sum whose worker died before it was credited is
 * formed anew by whoever comes upon it: its successor, or who waits for the lane. Owners count each
 * group once, so none of this needs to be exact about who returned what. Who is alive says a lock
 * that the kernel gives up as a process ends: of a byte of the file for each member, and one more
 * under which words are changed. One that is stopped in between holds up the others, as one that is
 * stopped in its backward does.
 *
 * The memory is a file in /dev/shm, of this user alone, named after the runtime directory and the
 * model. The last member removes it; what a team leaves that was killed as a whole the next one
 * removes. One thread.
 */
#ifndef SHD_HOSTSUM_H
#define SHD_HOSTSUM_H

#include <stdbool.h>
#include <stdint.h>

struct hostsum;
struct shd_err;
struct shd_model;

/* Join the workers of this host, or be the first of them. Errors: SHD_ENOMEM what it needs is not
 * there, and how much; SHD_EBUSY there are too many, or those that are there have another model;
 * SHD_EAUTH the file is somebody else's; SHD_EIO. */
int hostsum_join(struct shd_model *m, struct hostsum **ret_sums, struct shd_err *e);
void hostsum_leave(const struct shd_model *m, struct hostsum *h); /* NULL is a no-op */

/* Its descriptor, which no child of the process may keep: locks are its. */
int *hostsum_fd(struct hostsum *h);

/* What is to be done before anything else; then the call is to be made again. */
struct hostsum_next {
    enum { HOSTSUM_GO, HOSTSUM_ADD, HOSTSUM_WAIT } what;
    uint32_t group; /* of ADD: hostsum_add() of the unit, and return it */
};

/* The array for a gradient, as grads_open(), when *ret_next is GO; WAIT while the unit's lane is an
 * earlier group's. Errors: SHD_EBUSY another micro-batch of the unit is handed out; SHD_EINVAL
 * others have begun a later group; SHD_EIO. */
int hostsum_open(struct shd_model *m, uint32_t micro, uint32_t unit, float **ret_array,
                 bool *ret_fresh, struct hostsum_next *ret_next, struct shd_err *e);
bool hostsum_is_open(const struct shd_model *m, uint32_t micro, uint32_t unit);

/* The open array of the unit is written (none: the unit took no part in micro, and what was handed
 * out is dropped). While hostsum_is_open() afterwards it is to be called again; *ret_next may be
 * ADD, too, where it was the last one missing. Errors as hostsum_open(). */
int hostsum_close(struct shd_model *m, uint32_t micro, uint32_t unit, bool none,
                  struct hostsum_next *ret_next, struct shd_err *e);

/* SHD_ETIMEDOUT, with what the unit's lane waits for. */
int hostsum_late(const struct shd_model *m, uint32_t unit, struct shd_err *e);

/* Of the group that is to be added up: had no micro-batch a gradient of the unit? What they
 * reported is put in m->reports. */
bool hostsum_is_none(struct shd_model *m, uint32_t unit);

/* Add up its cells into sum[unit elements]. Errors: the kernels'. */
int hostsum_add(const struct shd_model *m, uint32_t unit, float *sum, struct shd_err *e);

/* The sum is with the owners; what they answer is heard by map_model.answered. */
void hostsum_given(struct shd_model *m, uint32_t unit);

/* Drop what is handed out of a group (GRADS_ALL: of all). */
void hostsum_reset(struct shd_model *m, uint32_t group);

/* What is handed out and not returned: false: nothing is. */
bool hostsum_holds(const struct shd_model *m, uint32_t *ret_micro, uint32_t *ret_unit);

#endif
