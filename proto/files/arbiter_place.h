/* Internal to arbiter.c: where views are, a table for each kind of place. */
#ifndef SHD_ARBITER_PLACE_H
#define SHD_ARBITER_PLACE_H

struct arbiter_view;
struct shd_err;

/* Calls come one after the other, each perhaps on another thread; errors as arbiter.h has them. */
struct arbiter_ops {
    int (*read)(void *place, struct arbiter_view *ret_view, struct shd_err *e);
    int (*claim)(void *place, const struct arbiter_view *next, struct shd_err *e);
    void (*close)(void *place);
};

struct arbiter_place {
    const struct arbiter_ops *ops;
    void *place; /* owned, by close() */
};

#endif
