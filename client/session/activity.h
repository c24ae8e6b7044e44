/* What this worker does, written where owner 0 can see it (proto/share/activity.h): a few stores
 * and two looks at the clock per operation, no message. Operations nest: a backward may hold a wait
 * for a slot. A worker whose page cannot be mapped trains all the same, and shows nothing. */
#ifndef SHD_CLIENT_ACTIVITY_H
#define SHD_CLIENT_ACTIVITY_H

#include <stdint.h>

#include "proto/share/activity.h"

#define ACTIVITY_DEPTH_MAX 4u

struct shd_model;

struct activity_writer {   /* of a model; zeroed at first */
    struct activity *page; /* owned mapping; NULL: nobody looks */
    uint32_t depth;
    enum activity_what shown;                       /* what the page says now */
    struct activity_span stack[ACTIVITY_DEPTH_MAX]; /* begun and not ended */
};

/* Map the page at offset of owner 0's inbox, instead of the one there was. */
void activity_attach(struct activity_writer *w, int fd, uint64_t offset_bytes,
                     enum activity_path path);
void activity_detach(struct activity_writer *w);
void activity_set_path(struct activity_writer *w, enum activity_path path);

/* The page at offset of an owner's inbox, mapped; it says that no slot is waited for. NULL: it
 * cannot be mapped. */
struct activity *activity_map(int fd, uint64_t offset_bytes);
void activity_unmap(struct activity *page); /* NULL is a no-op */

/* Begin and end something; pairs. unit, micro: ACTIVITY_NONE where it is about none. */
void activity_begin(struct shd_model *m, enum activity_what what, uint32_t unit, uint32_t micro);
void activity_end(struct shd_model *m);

/* In a wait, after each look at the daemons: say so while one of them is away. */
void activity_look(struct shd_model *m);

#endif
