/* Exactly once per (session, sequence number): which requests of a session were seen, and the
 * replies they got, both bounded. A request that arrives again is answered from here, or ignored
 * while the first is still being served. Numbers ascend from 1; they may arrive out of order within
 * a window. A client must not send number n before n - REPLIES_WINDOW is answered: a copy of that
 * one would be ignored from then on. Pure but for one allocation.
 */
#ifndef SHD_REPLIES_H
#define SHD_REPLIES_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define REPLIES_WINDOW    256u /* numbers below the highest seen that are still told apart */
#define REPLIES_BYTES_MAX 448u /* longer replies are not kept: their requests are served again */

enum replies_verdict {
    REPLIES_NEW,     /* serve it */
    REPLIES_PENDING, /* it is being served: ignore this copy */
    REPLIES_AGAIN,   /* here is what it got */
    REPLIES_SERVE,   /* it was answered, the answer was too long to keep: it may be served again */
    REPLIES_OLD,     /* below the window: a copy of something answered long ago; ignore it */
};

struct replies;

int replies_new(struct replies **ret_replies, struct shd_err *e);
void replies_free(struct replies *r); /* NULL is a no-op */

/* *ret_frame, *ret_bytes are set for REPLIES_AGAIN, borrowed until the next call. seq > 0. */
enum replies_verdict replies_take(struct replies *r, uint64_t seq, const void **ret_frame,
                                  size_t *ret_bytes);

/* The request was answered with this frame. Nothing happens when it was never taken, has an answer
 * already, or fell out of the window. */
void replies_keep(struct replies *r, uint64_t seq, const void *frame, size_t bytes);

#endif
