/* See moved.h. */
#include "client/paths/moved.h"

#include <stdlib.h>

#include "client/session/round.h"
#include "proto/base/sys.h"

#define HINT "it may be busy with its memory"

static int err_older(struct shd_err *e)
{
    return err_set(e, SHD_ENOTSUP, "a daemon is of an older version, whose models do not move");
}

void moved_word_free(struct moved_word *w)
{
    free(w->to);
    free(w->path);
    free(w->name);
    *w = (struct moved_word){ .to = NULL, .path = NULL, .name = NULL };
}

/* -- Looking ----------------------------------------------------------------------------------- */

struct looking { /* ctx of its round */
    const char *name;
    struct moved_word *word;
};

static void make_look(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct looking *l = round->ctx;
    (void)link;
    ret_request->move = (struct wire_move){
        .what = WIRE_MOVE_LOOK, .name = l->name, .to = "", .path = ""
    };
}

static int take_word(const struct round *round, const struct link *link,
                     const struct wire_reply *reply, struct shd_err *e)
{
    const struct looking *l = round->ctx;
    const struct wire_moved *moved = &reply->moved;
    struct moved_word *w = l->word;
    (void)link;
    moved_word_free(w);
    if (moved->what != WIRE_MOVED_AWAY)
        return SHD_OK;
    struct moved_word got = { .away = true,
                              .instance = moved->instance,
                              .step = moved->step,
                              .id = moved->id,
                              .there = moved->there,
                              .to = sys_strdup(moved->to),
                              .path = sys_strdup(moved->path),
                              .name = sys_strdup(moved->name) };
    if (got.to != NULL && got.path != NULL && got.name != NULL) {
        *w = got;
        return SHD_OK;
    }
    moved_word_free(&got);
    return err_set(e, SHD_ENOMEM, "no memory for where a model is");
}

int moved_look(struct hub *hub, uint32_t index, const char *name, struct moved_word *ret_word,
               struct shd_err *e)
{
    struct looking l = { name, ret_word };
    struct round round = { .what = "Move",
                           .hint = HINT,
                           .asks = WIRE_MOVE,
                           .type = WIRE_MOVED,
                           .make = make_look,
                           .take = take_word,
                           .ctx = &l };
    if (hub->links[index].peer.level < WIRE_LEVEL_MOVES)
        return err_older(e);
    return round_one(&round, &hub->links[index], 0, e);
}

/* -- Telling ----------------------------------------------------------------------------------- */

struct telling { /* ctx of its round */
    const struct moved_word *word;
    enum wire_move_what what;
};

static void make_tell(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct telling *t = round->ctx;
    const struct moved_word *w = t->word;
    (void)link;
    ret_request->move = (struct wire_move){
        .what = t->what, .name = w->name, .to = w->to, .step = w->step, .id = w->id, .path = w->path
    };
}

static int tell(struct hub *hub, enum wire_move_what what, const struct moved_word *w,
                struct shd_err *e)
{
    struct telling t = { w, what };
    struct round round = { .what = "Move",
                           .hint = HINT,
                           .asks = WIRE_MOVE,
                           .type = WIRE_MOVED,
                           .make = make_tell,
                           .ctx = &t };
    if (hub_has_older(hub, WIRE_LEVEL_MOVES))
        return err_older(e);
    return round_all(&round, hub, 0, e);
}

int moved_tell(struct hub *hub, const struct moved_word *w, struct shd_err *e)
{
    return tell(hub, WIRE_MOVE_TELL, w, e);
}

int moved_there(struct hub *hub, const struct moved_word *w, struct shd_err *e)
{
    return tell(hub, WIRE_MOVE_THERE, w, e);
}
