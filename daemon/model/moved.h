/* Where a model is that was here: `shardctl reshard` has given it other owners.
 *
 * Happy path: MOVE tell, to every owner of it: the word is written and stored with the keeper, and
 * says nothing yet. The session that told it has the model dropped (drop.h), and from the store at
 * owner 0 that drops it the word counts: whoever opens the model here is refused with SHD_EMOVED,
 * sessions that have it open end with that, and MOVE look says where it is. So what decides is the
 * drop, which is one store, and a word is only there before it.
 *
 * Failure: the session ends before, or somebody else drops the model: the word goes. A process that
 * is killed: its successor has the word; it counts where the model's instance is gone, and goes
 * where that is there. A word stays as long as the keeper, or until the next one of that name.
 * Loop thread; words are stored on the pool. */
#ifndef SHD_DAEMON_MOVED_H
#define SHD_DAEMON_MOVED_H

#include <stdbool.h>
#include <stdint.h>

struct daemon;
struct model;
struct op;
struct session;
struct shd_err;

struct moved_seat { /* a daemon's, among those that have a model */
    uint32_t owner, owners;
};

/* MOVE, of both kinds. */
int moved_ask(struct op *op);

/* Is m to be where this session has told, should it drop it? */
bool moved_by(const struct model *m, uint64_t session);

/* m is being dropped by s, just before the store that says so: its word counts from then on, or,
 * where another session has told it, never. True: it counts; *why is what sessions end with. */
bool moved_away(struct model *m, const struct session *s, struct shd_err *why);

/* One of this name came to be here, as this owner: what was known of it before, and is not of its
 * coming here, leads those on who ask for another owner's, as long as it is here. */
void moved_here(struct daemon *d, const char *name, struct moved_seat seat);

/* A drop finds none of this name: nobody is led to where it has gone any more. False: nothing is
 * known of it. */
bool moved_forget(struct daemon *d, const char *name);

/* A model of this name ("": the only one) is asked for: SHD_OK where nothing is known of it, or it
 * is here that it went, else SHD_EMOVED. */
struct moved_asked {
    struct moved_seat seat; /* as of this owner */
    bool here;              /* one is here, as of another owner */
};
int moved_check(const struct daemon *d, const char *name, const struct moved_asked *asked,
                struct shd_err *e);

/* What a predecessor has left: before models are adopted, those that are not are known. */
void moved_adopt(struct daemon *d);

void moved_forget_session(struct daemon *d, const struct session *s);
void moved_free(struct daemon *d); /* at shutdown, when no work runs any more */

#endif
