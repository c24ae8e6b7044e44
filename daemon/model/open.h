/* OpenModel's way: create the model a spec describes, or attach to the one that is open.
 *
 * One at a time per daemon, in order of arrival. Happy path: parse the spec on libuv's pool (the
 * loop must not block); find the model or make it there too; fill in initial values on the device;
 * make the session's inbox on the pool; give it that and tickets. Any failure answers the request
 * and leaves no trace; nor does a session that ends before the model it wants is whole.
 */
#ifndef SHD_OPEN_H
#define SHD_OPEN_H

#include <stdint.h>

struct create;
struct daemon;
struct drop;
struct model;
struct moved;
struct op;
struct open_work;

struct open_queue { /* served one at a time */
    struct op *first, **last;
    struct open_work *work; /* owned; NULL when idle */
    const char *making;     /* borrowed: the name of the model that it makes; NULL: none */
    struct model *filling;  /* owned: that model while it gets its initial values; NULL: none */
    /* What sessions make beside the queue (create.h). */
    struct create *creates; /* owned list */
    uint32_t create_count;
    struct model *found; /* borrowed: what `work` attaches to, or compares specs with; or NULL */
    struct drop *drops;  /* owned list (drop.h) */
    struct moved *moved; /* owned list (moved.h) */
};

/* Serve op, which has a spec, or whose text is the name of an open model: it is finished later. */
void open_model(struct op *op);

/* Free what an unfinished OpenModel holds, at shutdown. */
void open_model_abandon(struct daemon *d);

#endif
