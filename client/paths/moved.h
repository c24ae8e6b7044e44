/* Where a model is that `shardctl reshard` has given other owners, by the word of those that had it
 * (daemon/model/moved.h). */
#ifndef SHD_PATHS_MOVED_H
#define SHD_PATHS_MOVED_H

#include <stdbool.h>
#include <stdint.h>

#include "client/session/hub.h"

struct moved_word {
    bool away;         /* it has moved; else nothing is known of it, and the rest says nothing */
    uint64_t instance; /* of the part that was there */
    uint64_t step, id; /* as of which the others have it, and of which restore */
    bool there;        /* they had it open: where they have it not it was dropped */
    char *to;          /* owned: their devices, with commas between them */
    char *path;        /* owned: of the checkpoint that they have it of */
    char *name;        /* owned: of the model */
};
void moved_word_free(struct moved_word *w); /* leaves it empty; empty is a no-op */

/* What the daemon of links[index] says of a model of this name; "": of the only one that has moved.
 * ret_word is empty. Errors: those of a round; SHD_ENOTSUP a daemon of an older build. */
int moved_look(struct hub *hub, uint32_t index, const char *name, struct moved_word *ret_word,
               struct shd_err *e);

/* Tell all daemons of hub, which have w->name open, where that will be: w->to, step, id, path.
 * Errors: as the daemon's: SHD_EBUSY, SHD_ENOTSUP a worker cannot go along, with its name. */
int moved_tell(struct hub *hub, const struct moved_word *w, struct shd_err *e);

/* Tell them that the others have it open. */
int moved_there(struct hub *hub, const struct moved_word *w, struct shd_err *e);

#endif
