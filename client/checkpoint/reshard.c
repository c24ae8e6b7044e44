/* See reshard.h. One session has the owners that there are, and one those that are to be. */
#include "client/checkpoint/reshard.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "client/checkpoint/restore.h"
#include "client/paths/map.h"
#include "client/paths/moved.h"
#include "client/paths/rewind.h"
#include "client/session/address.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"

#define ATTEMPTS_MAX 16u /* of deciding: daemons that die in it hold nothing any more */
#define TIMEOUT_MS   60000u
#define FIRST_MS     10000u /* for a daemon to be there */
#define PATH_BYTES   4096u
#define LINE_BYTES   400u
#define OPEN_FILES   16 /* of nftw() */
#define HINT         "it may be busy with its memory"

struct moving {
    const struct reshard *r;
    shd_session *old, *there;
    shd_model *model;                /* at the old owners; NULL: they have it no more */
    struct address at, to;           /* of both */
    struct moved_word word;          /* where it will be, or is */
    bool asked;                      /* owner 0 was asked to drop it: it may have moved */
    char dir[PATH_BYTES];            /* DIR/reshard-INSTANCE */
    int dir_fd;                      /* locked; -1: not open */
    struct wire_snapshots snapshots; /* what is kept by itself; without rows */
};

static void say(const struct moving *v, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void say(const struct moving *v, const char *fmt, ...)
{
    char line[LINE_BYTES];
    va_list ap;
    if (v->r->say == NULL)
        return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    v->r->say(v->r->ctx, line);
}

/* -- Who is there ------------------------------------------------------------------------------ */

static bool same_devices(const struct address *a, const struct address *b)
{
    bool same = a->count == b->count;
    for (uint32_t i = 0; same && i < a->count; i++)
        same = strcmp(a->devices[i], b->devices[i]) == 0;
    return same;
}

/* One that never was there would be waited for. */
static int check_there(const struct address *to, struct shd_err *e)
{
    char path[PATH_BYTES];
    for (uint32_t i = 0; i < to->count; i++) {
        snprintf(path, sizeof path, "%s/%s.sock", to->dir, to->devices[i]);
        const bool bound = access(path, F_OK) == 0;
        snprintf(path, sizeof path, "%s/%s.lock", to->dir, to->devices[i]);
        if (!bound && access(path, F_OK) != 0)
            return err_set(e, SHD_ENOENT,
                           "there is no daemon '%.60s' in '%.100s': start it first, as "
                           "`shardctl up` does",
                           to->devices[i], to->dir);
    }
    return SHD_OK;
}

/* Workers could not go along. */
static int check_host_memory(const struct address *to, struct shd_err *e)
{
    for (uint32_t i = 0; i < to->count; i++)
        if (strncmp(to->devices[i], "gpu", 3) == 0)
            return err_set(e, SHD_ENOTSUP,
                           "daemon '%.60s' has a GPU's memory: models move between daemons in host "
                           "memory alone",
                           to->devices[i]);
    return SHD_OK;
}

static int parse_to(struct moving *v, struct shd_err *e)
{
    char text[PATH_BYTES + WIRE_TO_BYTES_MAX];
    if (v->r->to[0] == '\0' || strpbrk(v->r->to, "?+/") != NULL)
        return err_set(e, SHD_EINVAL,
                       "'%.100s': the names of the daemons are wanted that are to have the model, "
                       "as cpu0,cpu1,cpu2",
                       v->r->to);
    if (strlen(v->r->to) >= WIRE_TO_BYTES_MAX)
        return err_set(e, SHD_ERANGE, "%zu bytes of names, at most %u", strlen(v->r->to),
                       WIRE_TO_BYTES_MAX - 1);
    snprintf(text, sizeof text, "%s?%s", v->at.dir, v->r->to);
    int r = address_parse(text, &v->to, e);
    if (r == SHD_OK)
        r = check_host_memory(&v->to, e);
    return r == SHD_OK ? check_there(&v->to, e) : r;
}

static int connect_as(const struct address *address, shd_session **ret_session, struct shd_err *e)
{
    size_t bytes = strlen(address->dir) + 2;
    for (uint32_t i = 0; i < address->count; i++)
        bytes += strlen(address->devices[i]) + 1;
    char *text = sys_malloc(bytes);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an address");
    size_t used = (size_t)snprintf(text, bytes, "%s", address->dir);
    for (uint32_t i = 0; i < address->count; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%c%s", i > 0 ? ',' : '?',
                                 address->devices[i]);
    const struct shd_options options = {
        .size = sizeof options, .address = text, .name = "shardctl reshard", .timeout_ms = FIRST_MS
    };
    const int r = shd_connect(&options, ret_session, e);
    free(text);
    if (r != SHD_OK)
        return r;
    (*ret_session)->hub->members.stays = true;
    (*ret_session)->hub->timeout_ns = TIMEOUT_MS * NS_PER_MS;
    return SHD_OK;
}

static int connect_both(struct moving *v, struct shd_err *e)
{
    int r = address_parse(v->r->address, &v->at, e);
    if (r == SHD_OK && v->at.local)
        r = err_set(e, SHD_ENOTSUP, "\"local:\" has one owner, and no other: run daemons");
    if (r == SHD_OK && v->at.owners < v->at.count)
        r = err_set(e, SHD_ENOTSUP,
                    "'%.100s' has replicas: such a model's owners follow from its cluster's "
                    "hosts; `shardctl hosts` fills one",
                    v->r->address);
    if (r == SHD_OK)
        r = parse_to(v, e);
    if (r == SHD_OK)
        r = connect_as(&v->at, &v->old, e);
    if (r == SHD_OK)
        r = connect_as(&v->to, &v->there, e);
    if (r == SHD_OK && hub_has_older(v->old->hub, WIRE_LEVEL_MOVES))
        r = err_set(e, SHD_ENOTSUP,
                    "a daemon that has the model is of an older version, whose "
                    "models do not move");
    if (r == SHD_OK && hub_has_older(v->there->hub, WIRE_LEVEL_MOVES))
        r = err_set(e, SHD_ENOTSUP,
                    "a daemon that is to have the model is of an older version, "
                    "to which none moves");
    return r;
}

/* -- The checkpoint ---------------------------------------------------------------------------- */

static int remove_inside(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    if (at->level == 0)
        return 0;
    return kind == FTW_DP ? rmdir(path) : unlink(path);
}

static void remove_dir(struct moving *v)
{
    if (v->dir[0] != '/')
        return;
    nftw(v->dir, remove_inside, OPEN_FILES, FTW_DEPTH | FTW_PHYS);
    rmdir(v->dir);
    v->dir[0] = '\0';
}

/* The same for whoever moves this model: one at a time. What is in it is of who died in it. */
static int make_dir(struct moving *v, uint64_t instance, struct shd_err *e)
{
    struct stat st;
    const int n = snprintf(v->dir, sizeof v->dir, "%s/reshard-%016" PRIx64, v->r->dir, instance);
    if (v->r->dir[0] != '/' || n < 0 || (size_t)n + 64 > sizeof v->dir) {
        v->dir[0] = '\0';
        return err_set(e, SHD_EINVAL,
                       "directory '%.100s': an absolute path is wanted, that all hosts have",
                       v->r->dir);
    }
    int r = SHD_OK;
    if (stat(v->r->dir, &st) != 0)
        r = err_sys(e, SHD_ENOENT, "look at directory '%.100s'", v->r->dir);
    else if (mkdir(v->dir, 0711) != 0 && errno != EEXIST) /* daemons of another user pass */
        r = err_sys(e, SHD_EIO, "make directory '%.150s'", v->dir);
    else if ((v->dir_fd = open(v->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW)) < 0)
        r = err_sys(e, SHD_EIO, "open directory '%.150s'", v->dir);
    else if (flock(v->dir_fd, LOCK_EX | LOCK_NB) != 0)
        r = err_set(e, SHD_EBUSY, "model '%.60s' is being moved by another one, in '%.120s'",
                    shd_model_name(v->model), v->dir);
    if (r != SHD_OK) {
        v->dir[0] = '\0'; /* not ours */
        return r;
    }
    nftw(v->dir, remove_inside, OPEN_FILES, FTW_DEPTH | FTW_PHYS);
    return SHD_OK;
}

/* Of a later move it is a larger number: words of several are told apart by it. */
static int choose_id(uint64_t *ret_id, struct shd_err *e)
{
    struct timespec now;
    uint16_t random;
    if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random)
        return err_sys(e, SHD_EIO, "get random bytes");
    clock_gettime(CLOCK_REALTIME, &now);
    *ret_id = ((uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec) / 1024 * 1024 +
              (random & 1022u) + 1;
    return SHD_OK;
}

static int save(struct moving *v, struct shd_err *e)
{
    const struct shd_checkpoint_options options = { .size = sizeof options, .keep = 1 };
    struct shd_checkpointed saved = { .size = sizeof saved };
    int r = make_dir(v, v->model->map->owners[0].layout.instance, e);
    if (r == SHD_OK)
        r = shd_checkpoint(v->model, v->dir, &options, &saved, e);
    if (r != SHD_OK)
        return r;
    const size_t bytes = strlen(v->dir) + sizeof saved.name + 2;
    if (choose_id(&v->word.id, e) != SHD_OK)
        return SHD_EIO;
    v->word.step = saved.step;
    v->word.name = sys_strdup(shd_model_name(v->model));
    v->word.to = sys_strdup(v->r->to);
    v->word.path = sys_malloc(bytes);
    if (v->word.name == NULL || v->word.to == NULL || v->word.path == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a move");
    snprintf(v->word.path, bytes, "%s/%s", v->dir, saved.name);
    return SHD_OK;
}

/* What the daemons that have it may have open still. */
static void find_beside(const struct moving *v, uint64_t *ret_beside)
{
    for (uint32_t i = 0; i < v->to.count; i++) {
        ret_beside[i] = 0;
        for (uint32_t k = 0; k < v->at.count; k++)
            if (strcmp(v->to.devices[i], v->at.devices[k]) == 0)
                ret_beside[i] = v->model->map->owners[k].layout.instance;
    }
}

static int have_read(struct moving *v, struct shd_err *e)
{
    uint64_t beside[SHD_OWNERS_MAX], step;
    const struct restore_as as = { .id = v->word.id,
                                   .one_count = v->model->map->owners[0].layout.one_count,
                                   .beside = beside };
    find_beside(v, beside);
    return restore_read(v->there->hub, v->word.path, &as, &step, e);
}

/* -- Deciding: dropping it at its owners ------------------------------------------------------- */

struct dropping { /* ctx of its rounds */
    const char *name;
    enum wire_drop_what what;
    uint64_t first; /* owner 0's instance */
    struct wire_dropped reply;
};

static void make_drop(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct dropping *d = round->ctx;
    ret_request->drop = (struct wire_drop){ .what = d->what,
                                            .name = d->name,
                                            .first = link->index > 0 ? d->first : 0,
                                            .owner = link->index,
                                            .owners = link->hub->owner_count,
                                            .force = true };
}

static int take_dropped(const struct round *round, const struct link *link,
                        const struct wire_reply *reply, struct shd_err *e)
{
    struct dropping *d = round->ctx;
    (void)link;
    (void)e;
    d->reply = reply->dropped;
    return SHD_OK;
}

static int ask(struct dropping *d, enum wire_drop_what what, struct link *link, struct shd_err *e)
{
    struct round round = { .what = "Drop",
                           .hint = HINT,
                           .asks = WIRE_DROP,
                           .type = WIRE_DROPPED,
                           .make = make_drop,
                           .take = take_dropped,
                           .ctx = d };
    d->what = what;
    d->reply = (struct wire_dropped){ .what = WIRE_DROPPED_KEPT };
    return round_one(&round, link, 0, e);
}

static int hold(struct dropping *d, struct hub *hub, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < hub->owner_count; i++) {
        r = ask(d, WIRE_DROP_HOLD, &hub->links[i], e);
        if (r == SHD_OK && d->reply.what != WIRE_DROPPED_HELD)
            r = link_err(&hub->links[i], SHD_ENOENT, e, "has no model '%s' any more", d->name);
        if (r == SHD_OK && i == 0)
            d->first = d->reply.instance;
    }
    return r;
}

/* Those that are another one's part by now are left. */
static int drop_others(struct dropping *d, struct hub *hub, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 1; r == SHD_OK && i < hub->owner_count; i++) {
        struct shd_err why = { 0 };
        r = ask(d, WIRE_DROP_GO, &hub->links[i], &why);
        if (r == SHD_ESPEC)
            r = SHD_OK;
        if (r != SHD_OK)
            return err_copy(&why, e);
    }
    return r;
}

/* A daemon that was killed in it holds nothing, and has forgotten what it was told: once more. They
 * are told before, as else workers would be in the way, and behind, for one that was killed in
 * between holds what it was not told of. Owner 0 drops only what it has held since then. */
static int decide(struct moving *v, struct shd_err *e)
{
    struct hub *hub = v->old->hub;
    struct dropping d = { .name = v->word.name };
    for (uint32_t i = 0; i < ATTEMPTS_MAX; i++) {
        int r = moved_tell(hub, &v->word, e);
        FAIL_POINT("reshard:told");
        if (r == SHD_OK)
            r = hold(&d, hub, e);
        if (r == SHD_OK)
            r = moved_tell(hub, &v->word, e);
        FAIL_POINT("reshard:held");
        v->asked = v->asked || r == SHD_OK;
        if (r == SHD_OK)
            r = ask(&d, WIRE_DROP_GO, &hub->links[0], e);
        if (r != SHD_OK)
            return v->asked ? err_prefix(e, "it may have moved: do it again") : r;
        if (d.reply.what != WIRE_DROPPED_GONE)
            continue;
        v->word.instance = d.first;
        return SHD_OK;
    }
    return err_set(e, SHD_EGONE, "the daemons do not stay: model '%.60s' is not moved",
                   v->word.name);
}

/* -- At the others ----------------------------------------------------------------------------- */

static void make_look(const struct round *round, const struct link *link,
                      struct wire_request *ret_request)
{
    const struct moving *v = round->ctx;
    ret_request->snapshot = (struct wire_snapshot){
        .model = v->model->map->owners[link->index].layout.handle, .what = WIRE_SNAPSHOT_LOOK
    };
}

static int take_look(const struct round *round, const struct link *link,
                     const struct wire_reply *reply, struct shd_err *e)
{
    struct moving *v = round->ctx;
    (void)link;
    (void)e;
    v->snapshots = reply->snapshots;
    v->snapshots.rows = (struct wire_bytes){ 0 };
    return SHD_OK;
}

static int look_at_snapshots(struct moving *v, struct shd_err *e)
{
    struct round round = { .what = "Snapshot",
                           .hint = HINT,
                           .asks = WIRE_SNAPSHOT,
                           .type = WIRE_SNAPSHOTS,
                           .make = make_look,
                           .take = take_look,
                           .ctx = v };
    return round_one(&round, &v->old->hub->links[0], 0, e);
}

/* From owner 0's word to its end: also of who did not come to that. */
static int finish(struct moving *v, struct shd_err *e)
{
    struct dropping d = { .name = v->word.name, .first = v->word.instance };
    const struct restore_as as = { .id = v->word.id };
    shd_model *m = NULL;
    uint64_t step = 0;
    int r = drop_others(&d, v->old->hub, e);
    FAIL_POINT("reshard:dropped");
    if (r == SHD_OK && shd_model_attach(v->there, v->word.name, &m, NULL) != SHD_OK) {
        r = restore_ready(v->there->hub, v->word.path, &as, &step, e);
        FAIL_POINT("reshard:opened");
        if (r == SHD_OK)
            r = shd_model_attach(v->there, v->word.name, &m, e);
    }
    if (r == SHD_OK && (v->snapshots.every > 0 || v->snapshots.keep > 0))
        r = snapshot_options(m, v->snapshots.every, v->snapshots.keep, e);
    if (r == SHD_OK)
        r = moved_there(v->old->hub, &v->word, e);
    return r;
}

/* -- All of it --------------------------------------------------------------------------------- */

static int check_model(const struct moving *v, struct shd_err *e)
{
    const struct shd_model *m = v->model;
    if (same_devices(&v->at, &v->to))
        return err_set(e, SHD_EEXIST, "model '%.60s' is at %.100s already", shd_model_name(m),
                       v->r->to);
    for (uint32_t i = 0; i < m->map->owner_count; i++)
        if (m->map->owners[i].layout.on_gpu)
            return err_set(e, SHD_ENOTSUP,
                           "model '%.60s' is in the memory of a GPU at daemon %s: models move "
                           "between daemons in host memory alone",
                           shd_model_name(m), v->at.devices[i]);
    return SHD_OK;
}

static int move(struct moving *v, struct shd_err *e)
{
    int r = check_model(v, e);
    if (r == SHD_OK)
        r = look_at_snapshots(v, e);
    if (r == SHD_OK)
        r = save(v, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT("reshard:saved");
    say(v, "model '%s' is saved at step %" PRIu64 ": %.100s read it", v->word.name, v->word.step,
        v->word.to);
    r = have_read(v, e);
    FAIL_POINT("reshard:read");
    shd_model_close(v->model); /* a successor has none to be opened again */
    v->model = NULL;
    if (r == SHD_OK)
        r = decide(v, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT("reshard:decided");
    say(v, "model '%s' has moved, from step %" PRIu64 " on: workers go along", v->word.name,
        v->word.step);
    r = finish(v, e);
    return r == SHD_OK ? r : err_prefix(e, "it has moved, and is not there: do it again");
}

/* Of who died in it, or did it before. */
static int go_on(struct moving *v, struct shd_err *e)
{
    if (strcmp(v->word.to, v->r->to) != 0)
        return err_set(e, SHD_EMOVED,
                       "model '%.60s' has moved to %.100s at step %" PRIu64
                       " before: move it from there",
                       v->word.name, v->word.to, v->word.step);
    say(v, "model '%s' has moved to %.100s, from step %" PRIu64 " on: that is brought to its end",
        v->word.name, v->word.to, v->word.step);
    const char *slash = strrchr(v->word.path, '/');
    if (slash != NULL && slash > v->word.path)
        snprintf(v->dir, sizeof v->dir, "%.*s", (int)(slash - v->word.path), v->word.path);
    const int r = finish(v, e);
    if (r != SHD_OK)
        v->dir[0] = '\0'; /* it is needed still */
    return r;
}

static int run(struct moving *v, struct shd_err *e)
{
    const char *name = v->r->model != NULL ? v->r->model : "";
    struct shd_err why = { 0 }, ignored;
    int r = connect_both(v, e);
    if (r != SHD_OK)
        return r;
    const int attached = shd_model_attach(v->old, name, &v->model, &why);
    if (attached == SHD_OK) {
        r = move(v, e);
        if (r != SHD_OK && v->asked)
            v->dir[0] = '\0'; /* the checkpoint is needed */
        return r;
    }
    r = moved_look(v->old->hub, 0, name, &v->word, &ignored);
    if (r == SHD_OK && v->word.away)
        return go_on(v, e);
    return err_copy(&why, e);
}

int reshard_model(const struct reshard *r, struct resharded *ret_resharded, struct shd_err *e)
{
    struct moving v = { .r = r, .dir_fd = -1 };
    const int status = run(&v, e);
    if (status == SHD_OK) {
        ret_resharded->step = v.word.step;
        snprintf(ret_resharded->model, sizeof ret_resharded->model, "%s", v.word.name);
    }
    shd_close(v.old);
    shd_close(v.there);
    remove_dir(&v);
    if (v.dir_fd >= 0)
        close(v.dir_fd);
    moved_word_free(&v.word);
    address_free(&v.at);
    address_free(&v.to);
    return status;
}
