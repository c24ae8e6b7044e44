/* Returns in the order of a stream of the program's on its GPU: shd_set_stream().
 *
 * Happy path: order_push() notes a return, and sets a mark behind what the stream has been given
 * until then. order_look() tells when that of the oldest one is reached; the caller (who knows how)
 * carries it out and calls order_pop(). A *fence* is a mark alone: nothing is carried out.
 *
 * What the library does to memory that such work may still use comes behind it: order_drop() before
 * arrays are given to somebody else, order_free() before they go, marks of the copy path's slots
 * before others are copied there. Who maps a device's memory anew waits for the device.
 *
 * Failure: the program's work failed, and what it should have written is not there. SHD_EIO, as of
 * every later call.
 */
#ifndef SHD_PATH_ORDER_H
#define SHD_PATH_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct CUevent_st;
struct shd_model;

#define ORDER_MAX 256u
#define ORDER_ALL UINT32_MAX /* groups, where one is asked for */

struct order_item {
    bool fence;
    uint32_t micro, unit;    /* of a return */
    struct CUevent_st *mark; /* owned: the place's in the ring; NULL: not made yet */
};

struct order { /* m->order; NULL: the program waits for its GPU itself */
    void *stream;
    struct order_item items[ORDER_MAX]; /* a ring */
    uint32_t first, count;
    bool reached; /* the first one's mark */
};

/* The model's calls are in the order of this stream from here on. What an earlier one has been
 * given is still waited for, as a fence. Errors: SHD_EINVAL it is none of this GPU's. */
int order_set(struct shd_model *m, void *stream, struct shd_err *e);

/* Of a model with an order that is not full: has room for two. */
int order_push(struct shd_model *m, uint32_t micro, uint32_t unit, struct shd_err *e);
int order_fence(struct shd_model *m, struct shd_err *e);
bool order_full(const struct shd_model *m);

/* These are of any model. */
bool order_any(const struct shd_model *m);

/* Returns that are noted: of a group (ORDER_ALL: of all); and is one of its unit? */
uint32_t order_returns(const struct shd_model *m, uint32_t group);
bool order_has(const struct shd_model *m, uint32_t group, uint32_t unit);

/* The oldest, if its mark is reached; else *ret_item is NULL. */
int order_look(struct shd_model *m, const struct order_item **ret_item, struct shd_err *e);
void order_pop(struct shd_model *m);

/* Wait for all that the stream has been given (errors are left to who looks); then forget the
 * group's returns (ORDER_ALL: all). */
void order_drop(struct shd_model *m, uint32_t group);

/* A mark behind what the stream has been given, instead of *mark's (NULL: a new one); where none
 * can be set, the wait for it. Nothing without an order. */
void order_mark(struct shd_model *m, struct CUevent_st **mark);

/* Wait for it, too. */
void order_free(struct shd_model *m);

#endif
