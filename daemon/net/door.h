/* A door: a listening Unix socket on the loop. Who comes in is told to its owner, with the
 * credentials of the peer; descriptors never run out for it, and so never for what else needs some.
 *
 * A descriptor's number says how many are in use: the kernel gives the lowest that is free. Who
 * gets one of the last, an eighth of RLIMIT_NOFILE (24 to 160), is announced as one too many:
 * they are for models, checkpoints and those that look. When there is none at all a spare one is
 * given up for a moment, so that the peer can be told. Loop thread. */
#ifndef SHD_DOOR_H
#define SHD_DOOR_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "proto/base/status.h"

struct door;
struct side_peer;

/* A peer connected: fd is the callee's. crowded: it is one too many, or the last of all. */
typedef void door_enter(void *ctx, int fd, const struct side_peer *peer, bool crowded);

/* Take over the listening socket fd. Errors: SHD_ENOMEM, SHD_EIO. */
int door_open(uv_loop_t *loop, int fd, door_enter *enter, void *ctx, struct door **ret_door,
              struct shd_err *e);
void door_close(struct door *door); /* NULL is a no-op */

/* A descriptor below was closed for the one that is one too many: move it there, so that a number
 * goes on to say how many are in use. */
int door_move_down(int fd);

/* RLIMIT_NOFILE of this process, and how many of them are kept for all else. */
uint32_t door_descriptors_max(void);
uint32_t door_descriptors_kept(void);

#endif
