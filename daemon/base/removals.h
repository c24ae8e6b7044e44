/* Descriptors that the service manager is to give up, by name, in order. The loop does not wait for
 * a manager that is stopped: what its socket has no room for stays here and goes from libuv's pool.
 *
 * A name is given again (keeper.h): who stores one sends what is here first.
 *
 * Failure: the process ends before all is told; its successor finds what nobody needs. */
#ifndef SHD_REMOVALS_H
#define SHD_REMOVALS_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

struct removals;
struct shd_err;

#define REMOVALS_NAME_BYTES 40u

/* wait_us: so long the pool waits for room at a time. Errors: SHD_ENOMEM, SHD_EIO. */
int removals_new(uv_loop_t *loop, uint64_t wait_us, struct removals **ret_removals,
                 struct shd_err *e);

/* For all of these NULL is one that is empty and takes nothing. */

/* Any thread. */
void removals_add(struct removals *r, const char *name);

/* Any thread: tell all that is there, and wait so long for room for one; 0: not at all. False: some
 * is left, which the pool tells. */
bool removals_send(struct removals *r, uint64_t wait_us);

/* Before the loop is closed: nothing goes by itself any more. Then its memory. */
void removals_stop(struct removals *r);
bool removals_stopped(const struct removals *r);
void removals_free(struct removals *r);

#endif
