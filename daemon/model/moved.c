/* See moved.h. */
#include "daemon/model/moved.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <uv.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/core/ledger.h"
#include "daemon/model/inbox.h"
#include "daemon/model/model.h"
#include "daemon/model/open.h"
#include "daemon/net/links.h"
#include "daemon/net/op.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/segment.h"
#include "proto/wire/wire.h"

#define WORD_MAGIC  UINT64_C(0x3164766f6d646873) /* "shdmovd1" */
#define WORDS_MAX   64u
#define SHOWN_BYTES 90 /* of the devices, in an error */

struct word { /* in a segment of its own, which the keeper has */
    uint64_t magic;
    _Atomic uint64_t valid; /* written last, and cleared first */
    uint64_t instance;      /* of the model that is dropped with it */
    uint64_t step, id;
    _Atomic uint64_t there; /* the others have opened it */
    _Atomic uint64_t old;   /* one of its name has come here since, from elsewhere */
    char name[WIRE_NAME_BYTES_MAX];
    char path[WIRE_PATH_BYTES_MAX];
    char to[WIRE_TO_BYTES_MAX];
};

struct moved {
    struct moved *next;
    struct segment segment;
    struct word *word;     /* in it */
    uint64_t instance;     /* the keeper's name of it */
    uint64_t session;      /* that told it; 0: it counts */
    struct op *op;         /* borrowed: pending while it is stored */
    struct daemon *daemon; /* borrowed */
    uv_work_t work;
    int status;
};

/* -- The list ----------------------------------------------------------------------------------
 */

static void free_one(struct moved *m)
{
    segment_close(&m->segment);
    free(m);
}

/* Nothing of it is left, for a successor either. */
static void take_out(struct daemon *d, struct moved *m)
{
    struct moved **at = &d->open->moved;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    atomic_store_explicit(&m->word->valid, 0, memory_order_release);
    keeper_remove_part(d->keeper, m->instance, KEEPER_MOVED);
    free_one(m);
}

/* counts: one that does, else one that may come to. */
static struct moved *find(const struct daemon *d, const char *name, bool counts)
{
    for (struct moved *m = d->open->moved; m != NULL; m = m->next)
        if (m->op == NULL && (m->session == 0) == counts && strcmp(m->word->name, name) == 0)
            return m;
    return NULL;
}

static const struct moved *find_only(const struct daemon *d)
{
    const struct moved *only = NULL;
    for (const struct moved *m = d->open->moved; m != NULL; m = m->next) {
        if (m->op != NULL || m->session != 0)
            continue;
        if (only != NULL)
            return NULL;
        only = m;
    }
    return only;
}

static struct moved *find_told(const struct model *model)
{
    struct moved *m = find(model->daemon, model->ledger->head->name, /* counts= */ false);
    return m != NULL && m->word->instance == model->kept.instance ? m : NULL;
}

static uint32_t count(const struct daemon *d)
{
    uint32_t words = 0;
    for (const struct moved *m = d->open->moved; m != NULL; m = m->next)
        words++;
    return words;
}

/* -- What others ask ---------------------------------------------------------------------------
 */

bool moved_by(const struct model *m, uint64_t session)
{
    const struct moved *told = find_told(m);
    return told != NULL && told->session == session;
}

static int err_moved(const struct word *w, struct shd_err *e)
{
    const bool cut = strlen(w->to) > SHOWN_BYTES;
    return err_set(e, SHD_EMOVED,
                   "model '%.60s' has moved to %.*s%s, as of step %" PRIu64 ": open it there",
                   w->name, SHOWN_BYTES, w->to, cut ? "..." : "", w->step);
}

bool moved_away(struct model *m, const struct session *s, struct shd_err *why)
{
    struct daemon *d = m->daemon;
    struct moved *told = find_told(m);
    if (told == NULL)
        return false;
    if (told->session != s->id) {
        take_out(d, told);
        return false;
    }
    struct moved *before = find(d, told->word->name, /* counts= */ true);
    if (before != NULL)
        take_out(d, before);
    told->session = 0;
    err_moved(told->word, why);
    log_info("op=moved model=%s to=%s step=%" PRIu64, told->word->name, told->word->to,
             told->word->step);
    return true;
}

bool moved_forget(struct daemon *d, const char *name)
{
    struct moved *m = find(d, name, /* counts= */ true);
    if (m == NULL)
        return false;
    log_info("op=forget model=%s to=%s", m->word->name, m->word->to);
    take_out(d, m);
    return true;
}

/* Is that the place of this daemon in the list? */
static bool is_seat(const char *to, const char *device, struct moved_seat seat)
{
    const size_t bytes = strlen(device);
    uint32_t count = 0;
    bool ours = false;
    for (const char *at = to; *at != '\0'; count++) {
        const size_t n = strcspn(at, ",");
        ours = ours || (count == seat.owner && n == bytes && memcmp(at, device, n) == 0);
        at += n + (at[n] == ',');
    }
    return ours && count == seat.owners;
}

void moved_here(struct daemon *d, const char *name, struct moved_seat seat)
{
    const struct moved *m = find(d, name, /* counts= */ true);
    if (m != NULL && !is_seat(m->word->to, d->device, seat))
        atomic_store(&m->word->old, 1);
}

int moved_check(const struct daemon *d, const char *name, const struct moved_asked *asked,
                struct shd_err *e)
{
    const struct moved *m = name[0] != '\0' ? find(d, name, /* counts= */ true) : find_only(d);
    if (m == NULL || is_seat(m->word->to, d->device, asked->seat) ||
        (!asked->here && atomic_load(&m->word->old) != 0))
        return SHD_OK;
    return err_moved(m->word, e);
}

/* -- Told --------------------------------------------------------------------------------------
 */

/* A worker that could not go along would end: say so before anything is done. */
static int check_workers(struct op *op, const struct model *m)
{
    const struct session_table *table = op->daemon->sessions;
    for (uint32_t i = 0; i < table->made; i++) {
        struct session *s = &table->items[i];
        if (s->state != SESSION_OPEN || inbox_of(s, m) == NULL)
            continue;
        if (s->said.level < WIRE_LEVEL_MOVES)
            return err_set(&op->err, SHD_ENOTSUP,
                           "worker '%.60s' (pid %d) is of an older build, which does not go along "
                           "to other owners: end it, or start it again with this one",
                           s->name, (int)s->pid);
        if (links_find(s, m) != NULL)
            return err_set(&op->err, SHD_ENOTSUP,
                           "worker '%.60s' (pid %d) has its parameters sent by NCCL, and cannot go "
                           "along: end it first",
                           s->name, (int)s->pid);
        if (s->inbox_count > 1)
            return err_set(&op->err, SHD_EBUSY,
                           "worker '%.60s' (pid %d) trains %" PRIu32
                           " models in one session, which has one set of owners: end it first",
                           s->name, (int)s->pid, s->inbox_count);
    }
    return SHD_OK;
}

static int answer_told(struct op *op, const struct moved *m)
{
    op->reply.type = WIRE_MOVED;
    op->reply.moved = (struct wire_moved){
        .what = WIRE_MOVED_TOLD, .instance = m->word->instance, .to = "", .path = "", .name = ""
    };
    return SHD_OK;
}

static void store(uv_work_t *work)
{
    struct moved *m = work->data;
    m->status = keeper_store(m->daemon->keeper, m->instance, KEEPER_MOVED, m->segment.fd,
                             &m->op->err);
}

static void stored(uv_work_t *work, int cancelled)
{
    struct moved *m = work->data;
    struct op *op = m->op;
    struct daemon *d = m->daemon;
    CHECK(cancelled == 0);
    if (d->stopping)
        return;
    m->op = NULL;
    int r = m->status;
    if (r == SHD_OK && !session_is_there(op->session))
        r = err_set(&op->err, SHD_EGONE, "session ended");
    if (r == SHD_OK)
        r = answer_told(op, m);
    if (r != SHD_OK)
        take_out(d, m);
    op_finish(op, r);
}

static int new_word(struct op *op, const struct model *model, struct moved **ret_moved)
{
    const struct wire_move *req = &op->req.move;
    struct moved *m = sys_calloc(1, sizeof *m);
    if (m == NULL)
        return err_set(&op->err, SHD_ENOMEM, "no memory for a move");
    m->segment = SEGMENT_CLOSED;
    m->daemon = op->daemon;
    m->session = op->session->id;
    if (getrandom(&m->instance, sizeof m->instance, 0) != (ssize_t)sizeof m->instance) {
        free(m);
        return err_sys(&op->err, SHD_EIO, "get random bytes");
    }
    const int r = keeper_segment_new(op->daemon->keeper, KEEPER_MOVED, SEGMENT_LEDGER,
                                     sizeof *m->word, &m->segment, &op->err);
    if (r != SHD_OK) {
        free(m);
        return r;
    }
    m->word = m->segment.base;
    m->word->magic = WORD_MAGIC;
    m->word->instance = model->kept.instance;
    m->word->step = req->step;
    m->word->id = req->id;
    snprintf(m->word->name, sizeof m->word->name, "%s", req->name);
    snprintf(m->word->path, sizeof m->word->path, "%s", req->path);
    snprintf(m->word->to, sizeof m->word->to, "%s", req->to);
    atomic_store_explicit(&m->word->valid, 1, memory_order_release);
    *ret_moved = m;
    return SHD_OK;
}

static int check_told(struct op *op, const struct model *m)
{
    const struct wire_move *req = &op->req.move;
    const struct daemon *d = op->daemon;
    if (m == NULL)
        return err_set(&op->err, SHD_ENOENT, "daemon %s has no model '%s'", d->device, req->name);
    if (req->to[0] == '\0' || req->id == 0)
        return err_set(&op->err, SHD_EINVAL, "a move to nowhere, or of no restore");
    if (d->drain_session != 0)
        return err_set(&op->err, SHD_EBUSY, "daemon %s is being drained", d->device);
    const struct moved *told = find_told(m);
    if (told != NULL && told->session != op->session->id)
        return err_set(&op->err, SHD_EBUSY, "model '%s' is being moved by another session",
                       req->name);
    if (count(d) >= WORDS_MAX)
        return err_set(&op->err, SHD_EBUSY,
                       "daemon %s knows of %u models where they have gone, the most there may be: "
                       "restart its keeper when no worker has its address any more",
                       d->device, WORDS_MAX);
    return check_workers(op, m);
}

static int tell(struct op *op)
{
    struct daemon *d = op->daemon;
    const struct model *model = model_find(d, op->req.move.name);
    int r = op->req.move.name[0] != '\0'
                ? check_told(op, model)
                : err_set(&op->err, SHD_EINVAL, "a model without a name cannot be moved");
    if (r != SHD_OK)
        return r;
    struct moved *told = find_told(model);
    if (told != NULL)
        take_out(d, told);
    struct moved *m = NULL;
    r = new_word(op, model, &m);
    if (r != SHD_OK)
        return r;
    CHECK(m != NULL);
    m->op = op;
    m->next = d->open->moved;
    d->open->moved = m;
    m->work.data = m;
    uv_queue_work(d->loop, &m->work, store, stored);
    return SHD_PENDING;
}

static int look(struct op *op)
{
    const char *name = op->req.move.name;
    const struct moved *m = name[0] != '\0' ? find(op->daemon, name, /* counts= */ true)
                                            : find_only(op->daemon);
    op->reply.type = WIRE_MOVED;
    op->reply.moved = (struct wire_moved){
        .what = WIRE_MOVED_NOT, .to = "", .path = "", .name = ""
    };
    if (m == NULL)
        return SHD_OK;
    op->reply.moved = (struct wire_moved){ .what = WIRE_MOVED_AWAY,
                                           .instance = m->word->instance,
                                           .step = m->word->step,
                                           .id = m->word->id,
                                           .to = m->word->to,
                                           .path = m->word->path,
                                           .name = m->word->name,
                                           .there = atomic_load(&m->word->there) != 0 };
    return SHD_OK;
}

/* Of the move by this restore. */
static int note_there(struct op *op)
{
    struct moved *m = find(op->daemon, op->req.move.name, /* counts= */ true);
    if (m != NULL && m->word->id == op->req.move.id)
        atomic_store(&m->word->there, 1);
    return look(op);
}

int moved_ask(struct op *op)
{
    if (op->req.move.what == WIRE_MOVE_LOOK)
        return look(op);
    if (op->session->role == WIRE_READER)
        return err_set(&op->err, SHD_EAUTH, "a reader does not move a model");
    return op->req.move.what == WIRE_MOVE_TELL ? tell(op) : note_there(op);
}

/* -- A successor -------------------------------------------------------------------------------
 */

static bool is_word(const struct word *w)
{
    return w->magic == WORD_MAGIC && memchr(w->name, '\0', sizeof w->name) != NULL &&
           memchr(w->path, '\0', sizeof w->path) != NULL &&
           memchr(w->to, '\0', sizeof w->to) != NULL;
}

static int map_word(const struct keeper_group *g, struct segment *ret_segment, struct shd_err *e)
{
    struct stat st;
    if (fstat(g->fd[KEEPER_MOVED], &st) != 0 || (uint64_t)st.st_size < sizeof(struct word))
        return err_set(e, SHD_ESEGMENT, "its segment is too short");
    const uint64_t bytes = (uint64_t)st.st_size;
    int r = segment_check(g->fd[KEEPER_MOVED], SEGMENT_LEDGER, bytes, e);
    if (r == SHD_OK)
        r = segment_map(g->fd[KEEPER_MOVED], SEGMENT_LEDGER, bytes, ret_segment, e);
    return r;
}

/* The model of the word: a group that a predecessor left, and that is no incomplete one. */
static bool is_here(const struct keeper *k, uint64_t instance)
{
    for (uint32_t i = 0; i < k->group_count; i++)
        if (k->groups[i].instance == instance && !k->groups[i].done)
            return true;
    return false;
}

static void adopt_word(struct daemon *d, struct keeper_group *g)
{
    struct shd_err e = { 0 };
    struct moved *m = sys_calloc(1, sizeof *m);
    int r = m != NULL ? map_word(g, &m->segment, &e) : err_set(&e, SHD_ENOMEM, "no memory for it");
    if (r == SHD_OK) {
        CHECK(m != NULL && m->segment.base != NULL);
        g->fd[KEEPER_MOVED] = -1; /* the word's now */
        m->word = m->segment.base;
        m->instance = g->instance;
        m->daemon = d;
        m->next = d->open->moved;
        d->open->moved = m;
        if (!is_word(m->word) || atomic_load(&m->word->valid) == 0 ||
            is_here(d->keeper, m->word->instance))
            take_out(d, m);
        return;
    }
    log_error("op=adopt instance=%016" PRIx64 " why=\"where a model has gone is not known: %s\""
              " do=\"give workers its new address\"",
              g->instance, e.text);
    free(m);
}

void moved_adopt(struct daemon *d)
{
    for (uint32_t i = 0; i < d->keeper->group_count; i++) {
        struct keeper_group *g = &d->keeper->groups[i];
        if (g->fd[KEEPER_MOVED] < 0)
            continue;
        adopt_word(d, g);
        g->done = true; /* it is of no model */
    }
}

/* -- Ends --------------------------------------------------------------------------------------
 */

void moved_forget_session(struct daemon *d, const struct session *s)
{
    for (struct moved *m = d->open->moved, *next; m != NULL; m = next) {
        next = m->next;
        if (m->session == s->id && m->op == NULL)
            take_out(d, m);
    }
}

void moved_free(struct daemon *d)
{
    while (d->open->moved != NULL) {
        struct moved *m = d->open->moved;
        d->open->moved = m->next;
        free_one(m);
    }
}
