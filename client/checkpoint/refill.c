/* See refill.h. One session has the others' daemons, and one those of the host: which of whose
 * slices these are its hub->members.seats say. */
#include "client/checkpoint/refill.h"

#include <ftw.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "client/checkpoint/refill_model.h"
#include "client/session/address.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/files/arbiter.h"
#include "proto/files/replicas.h"

#define CLAIMS_MAX    16 /* lost to others, one after the other */
#define TIMEOUT_MS    60000u
#define BUSY_NS       (60 * NS_PER_S) /* workers let go of what was left there */
#define BUSY_PAUSE_MS 200u
#define PATH_BYTES    4096u
#define LINE_BYTES    400u
#define OPEN_FILES    16 /* of nftw() */

struct filling {
    const struct refill *r;
    struct replicas replicas;
    const struct replicas_host *host; /* borrowed */
    struct arbiter *arbiter;
    struct arbiter_view view;
    shd_session *others, *there;
    struct hub_seats seats;
    char dir[PATH_BYTES];        /* DIR/refill-HOST */
    struct refill_model *models; /* owned list */
    uint32_t count;
};

static void say(const struct filling *f, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

static void say(const struct filling *f, const char *fmt, ...)
{
    char line[LINE_BYTES];
    va_list ap;
    if (f->r->say == NULL)
        return;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    f->r->say(f->r->ctx, line);
}

/* -- The view ---------------------------------------------------------------------------------- */

typedef int view_change(const struct arbiter_view *v, const char *host,
                        struct arbiter_view *ret_next, struct shd_err *e);

static int read_view(struct filling *f, struct shd_err *e)
{
    struct arbiter_view view = { 0 };
    const int r = arbiter_read(f->arbiter, &view, e);
    if (r != SHD_OK)
        return r;
    arbiter_view_free(&f->view);
    f->view = view;
    return SHD_OK;
}

/* Claim what the change makes of the view, whatever that is by then. */
static int claim(struct filling *f, view_change *change, struct shd_err *e)
{
    int r = SHD_EBUSY;
    for (int i = 0; r == SHD_EBUSY && i < CLAIMS_MAX; i++) {
        struct arbiter_view next = { 0 };
        r = read_view(f, e);
        if (r == SHD_OK)
            r = change(&f->view, f->host->name, &next, e);
        if (r == SHD_OK)
            r = arbiter_claim(f->arbiter, &next, e);
        arbiter_view_free(&next);
    }
    return r == SHD_OK ? read_view(f, e) : r;
}

/* Left by who died in filling it: nobody knows how far that came. */
static int begin_out(struct filling *f, struct shd_err *e)
{
    const struct arbiter_behind *behind = arbiter_view_behind(&f->view, f->host->name);
    if (arbiter_view_has(&f->view, f->host->name))
        return SHD_OK;
    if (behind == NULL || !behind->filling)
        return err_set(e, SHD_EEXIST,
                       "host '%s' is in, in view %" PRIu64 ": nothing is to be filled",
                       f->host->name, f->view.number);
    say(f, "host '%s' was being filled, and who did it is gone: it is out again", f->host->name);
    const int r = claim(f, arbiter_view_next, e);
    return r == SHD_EEXIST ? SHD_OK : r;
}

/* -- Who is there ------------------------------------------------------------------------------ */

static int know(struct filling *f, const struct address *address, struct shd_err *e)
{
    int r = replicas_read(address->dir, &f->replicas, e);
    if (r == SHD_ENOENT || (r == SHD_OK && address->owners == address->count))
        return err_set(
            e, SHD_ENOENT,
            "no replicas at '%.100s': the address that `shardctl host --replicas 2` prints "
            "is wanted",
            f->r->address);
    if (r == SHD_OK && (f->host = replicas_by_name(&f->replicas, f->r->host)) == NULL)
        r = err_set(e, SHD_ENOENT, "there is no host '%.60s' with devices", f->r->host);
    if (r == SHD_OK)
        r = arbiter_open(f->replicas.arbiter, f->replicas.cluster, &f->arbiter, e);
    return r == SHD_OK ? read_view(f, e) : r;
}

static int connect_as(const char *address, shd_session **ret_session, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = address,
                                         .name = "shardctl refill",
                                         .timeout_ms = TIMEOUT_MS };
    return shd_connect(&options, ret_session, e);
}

/* The host's daemons that the address names, and whose slices they have: as the others' session has
 * them, which is without them. */
static int connect_host(struct filling *f, const char *dir, struct shd_err *e)
{
    const struct hub *hub = f->others->hub;
    uint32_t count = 0;
    const size_t bytes = strlen(dir) + 2 + CLUSTER_DEVICES_BYTES;
    char *text = sys_malloc(bytes);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an address");
    size_t used = (size_t)snprintf(text, bytes, "%s", dir);
    for (uint32_t i = 0; i < hub->link_count; i++) {
        if (replicas_host_of(&f->replicas, hub->links[i].device) != f->host)
            continue;
        used += (size_t)snprintf(text + used, bytes - used, "%c%s", count > 0 ? ',' : '?',
                                 hub->links[i].device);
        f->seats.owner[count++] = link_owner(&hub->links[i]);
    }
    const int r = count > 0 ? connect_as(text, &f->there, e)
                            : err_set(e, SHD_ENOENT, "no daemon of host '%s' is in the address",
                                      f->host->name);
    free(text);
    if (r != SHD_OK)
        return r;
    f->seats.owners = hub->owner_count;
    f->there->hub->members.seats = &f->seats;
    return SHD_OK;
}

/* -- Models ------------------------------------------------------------------------------------ */

/* The names of an owner's models: *ret_names is the caller's to give up. */
static int list_models(shd_session *s, uint32_t owner, json_t **ret_names, struct shd_err *e)
{
    char *text;
    size_t i;
    const json_t *model;
    int r = shd_status(s, owner, &text, e);
    if (r != SHD_OK)
        return r;
    json_t *root = json_loads(text, 0, NULL), *names = json_array();
    const json_t *models = json_object_get(root, "models");
    if (!json_is_array(models) || names == NULL)
        r = err_set(e, SHD_EPROTO, "a daemon's status has no models");
    json_array_foreach(models, i, model) json_array_append(names, json_object_get(model, "name"));
    json_decref(root);
    free(text);
    if (r == SHD_OK)
        *ret_names = names;
    else
        json_decref(names);
    return r;
}

/* Who has it open still may not have read yet that the host is out. */
static int drop_one(const struct filling *f, const char *name, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    bool said = false;
    int r;
    while ((r = shd_model_drop(f->there, name, NULL, e)) == SHD_EBUSY &&
           clock_now_ns() - start_ns < BUSY_NS) {
        if (!said)
            say(f, "waiting for who has model '%s' of host '%s' open: %s", name, f->host->name,
                e->text);
        said = true;
        usleep(BUSY_PAUSE_MS * 1000);
    }
    return r == SHD_ENOENT ? SHD_OK : r;
}

/* What the host has of before is of no use. */
static int drop_left(struct filling *f, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < f->there->hub->link_count; i++) {
        json_t *names = NULL;
        size_t n;
        const json_t *name;
        r = list_models(f->there, i, &names, e);
        json_array_foreach(names, n, name)
        {
            if (r != SHD_OK)
                break;
            say(f, "model '%s' that host '%s' has of before is dropped there",
                json_string_value(name), f->host->name);
            r = drop_one(f, json_string_value(name), e);
        }
        json_decref(names);
    }
    return r;
}

static bool has_model(const struct filling *f, const char *name)
{
    for (const struct refill_model *m = f->models; m != NULL; m = m->next)
        if (strcmp(shd_model_name(m->model), name) == 0)
            return true;
    return false;
}

static int fill_one(struct filling *f, const char *name, struct shd_err *e)
{
    char path[PATH_BYTES + 16];
    struct refill_model *m = sys_calloc(1, sizeof *m);
    if (m == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to fill a model");
    m->there = f->there->hub;
    int r = shd_model_attach(f->others, name, &m->model, e);
    if (r == SHD_ENOENT) { /* dropped meanwhile */
        free(m);
        return SHD_OK;
    }
    if (r != SHD_OK) {
        free(m);
        return r;
    }
    m->next = f->models;
    f->models = m;
    snprintf(path, sizeof path, "%s/%" PRIu32, f->dir, f->count++);
    if (m->model->spec->guard != NULL)
        say(f, "model '%s' has a guard: its windows begin anew at host '%s'", name, f->host->name);
    r = refill_model_save(m, path, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT("refill:saved");
    say(f, "model '%s' is saved at step %" PRIu64 ": host '%s' restores it", name, m->step,
        f->host->name);
    r = refill_model_restore(m, path, e);
    FAIL_POINT("refill:restored");
    return r;
}

/* Those that the others have, and that are not filled yet. */
static int fill_all(struct filling *f, struct shd_err *e)
{
    json_t *names = NULL;
    size_t i;
    const json_t *name;
    int r = list_models(f->others, 0, &names, e);
    json_array_foreach(names, i, name) if (r == SHD_OK && !has_model(f, json_string_value(name)))
        r = fill_one(f, json_string_value(name), e);
    json_decref(names);
    return r;
}

/* -- In again ---------------------------------------------------------------------------------- */

/* The host is in whatever becomes of this. */
static void settle(const struct filling *f, struct refill_model *m)
{
    const char *name = shd_model_name(m->model);
    struct shd_err e;
    bool lost;
    const int r = refill_model_settle(m, &lost, &e);
    if (r != SHD_OK)
        say(f,
            "model '%s' is not kept at host '%s' as it is elsewhere: `shardctl snapshot --every`: "
            "%s",
            name, f->host->name, e.text);
    if (lost)
        say(f,
            "model '%s' lacks what was set while host '%s' was filled, for a daemon is of an "
            "older build: set it again",
            name, f->host->name);
    if (refill_model_lost_puts(m))
        say(f,
            "values were put into model '%s' behind step %" PRIu64
            ", and went with the steps: put them again",
            name, m->step);
}

/* Whoever sees a rewind from here on has read the view with the host. A model that is made
 * meanwhile is made there, too, by who made it, or is there now. */
static int go_in(struct filling *f, struct shd_err *e)
{
    int r = claim(f, arbiter_view_in, e);
    if (r != SHD_OK)
        return r;
    FAIL_POINT("refill:claimed");
    r = fill_all(f, e);
    for (struct refill_model *m = f->models; r == SHD_OK && m != NULL; m = m->next) {
        r = refill_model_go_back(m, e);
        if (r == SHD_OK)
            say(f, "model '%s' goes on from step %" PRIu64 ", with host '%s'",
                shd_model_name(m->model), m->step, f->host->name);
        if (r == SHD_OK)
            settle(f, m);
    }
    const bool back = r == SHD_OK;
    if (back)
        r = claim(f, arbiter_view_filled, e);
    if (back && r == SHD_ENOENT)
        return err_set(e, SHD_ESTEP, "host '%s' was put out again before it was filled",
                       f->host->name);
    if (r == SHD_OK)
        return r;
    struct shd_err ignored;
    claim(f, arbiter_view_next, &ignored);
    return r;
}

/* -- All of it --------------------------------------------------------------------------------- */

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st;
    (void)at;
    return kind == FTW_DP ? rmdir(path) : unlink(path);
}

static int make_dir(struct filling *f, struct shd_err *e)
{
    struct stat st;
    snprintf(f->dir, sizeof f->dir, "%s/refill-%s", f->r->dir, f->host->name);
    if (f->r->dir[0] != '/' || strlen(f->r->dir) + strlen(f->host->name) + 32 > PATH_BYTES)
        return err_set(e, SHD_EINVAL,
                       "directory '%.100s': an absolute path is wanted, that all hosts have",
                       f->r->dir);
    if (stat(f->r->dir, &st) != 0)
        return err_sys(e, SHD_ENOENT, "look at directory '%.100s'", f->r->dir);
    nftw(f->dir, remove_one, OPEN_FILES, FTW_DEPTH | FTW_PHYS); /* of who died in it */
    if (mkdir(f->dir, 0711) !=
        0) /* daemons of another user pass; what is in it has a mode of its own */
        return err_sys(e, SHD_EIO, "make directory '%.150s'", f->dir);
    return SHD_OK;
}

static int fill(struct filling *f, const char *dir, struct shd_err *e)
{
    int r = begin_out(f, e);
    if (r == SHD_OK)
        r = make_dir(f, e);
    if (r == SHD_OK)
        r = connect_as(f->r->address, &f->others, e);
    if (r == SHD_OK)
        r = connect_host(f, dir, e);
    if (r == SHD_OK)
        r = drop_left(f, e);
    if (r == SHD_OK)
        r = fill_all(f, e);
    return r == SHD_OK ? go_in(f, e) : r;
}

int refill_host(const struct refill *r, struct shd_err *e)
{
    struct filling f = { .r = r };
    struct address address = { 0 };
    int s = address_parse(r->address, &address, e);
    if (s == SHD_OK)
        s = know(&f, &address, e);
    if (s == SHD_OK)
        s = fill(&f, address.dir, e);
    if (s == SHD_OK)
        say(&f, "host '%s' is in again, in view %" PRIu64 ": %" PRIu32 " model%s filled", r->host,
            f.view.number, f.count, f.count == 1 ? "" : "s");
    while (f.models != NULL) {
        struct refill_model *m = f.models;
        f.models = m->next;
        free(m); /* shd_model: the session's */
    }
    shd_close(f.others);
    shd_close(f.there);
    if (f.dir[0] == '/')
        nftw(f.dir, remove_one, OPEN_FILES, FTW_DEPTH | FTW_PHYS);
    arbiter_view_free(&f.view);
    arbiter_close(f.arbiter);
    replicas_free(&f.replicas);
    address_free(&address);
    return s;
}
