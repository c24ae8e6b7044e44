/* See recover.h. */
#include "client/ctl/state/recover.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "client/checkpoint/dir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt_info.h"
#include "proto/spec/spec.h"
#include "proto/spec/spec_json.h"

#define LOOK_NS UINT64_C(250000000)
#define LOST_NS UINT64_C(3000000000) /* so long it looks lost before it is */
#define SAME_S  5                    /* a process's start by a clock that was set meanwhile */

enum recover_state recover_judge(const struct recover_owner *owners, uint32_t count,
                                 uint32_t *ret_lost, uint64_t *ret_step)
{
    uint32_t having = 0;
    uint64_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (owners[i].reads || (owners[i].has && !owners[i].ready))
            return RECOVER_WAIT;
        having += owners[i].has;
        if (owners[i].has && owners[i].before > most)
            most = owners[i].before;
    }
    *ret_step = most;
    if (having == 0)
        return RECOVER_NONE;
    /* Owners that train are at most one step apart. */
    for (uint32_t i = 0; i < count; i++)
        if (!owners[i].has || owners[i].step + 1 < most) {
            *ret_lost = i;
            return most > 0 ? RECOVER_LOST : RECOVER_WAIT;
        }
    return RECOVER_WHOLE;
}

/* -- Looking ----------------------------------------------------------------------------------- */

static int read_owner(const json_t *root, const char *model, struct recover_owner *o,
                      struct shd_err *e)
{
    const char *device = NULL;
    json_int_t pid = 0;
    double uptime_s = 0, time_s = 0;
    size_t i;
    const json_t *m, *models = json_object_get(root, "models");
    if (json_unpack((json_t *)root, "{s:s, s:I, s:F, s:F}", "device", &device, "pid", &pid,
                    "uptime_s", &uptime_s, "time_s", &time_s) != 0 ||
        !json_is_array(models))
        return err_set(e, SHD_EPROTO, "a daemon's status has no device, pid or models");
    *o = (struct recover_owner){ .reads = json_is_object(json_object_get(root, "restore")) };
    snprintf(o->device, sizeof o->device, "%s", device);
    o->process = (struct recover_process){ pid, time_s - uptime_s };
    json_array_foreach(models, i, m)
    {
        const char *name = json_string_value(json_object_get(m, "name"));
        if (name == NULL || strcmp(name, model) != 0)
            continue;
        o->has = true;
        o->ready = json_is_true(json_object_get(m, "ready"));
        o->step = (uint64_t)json_integer_value(json_object_get(m, "step"));
    }
    return SHD_OK;
}

static int look_at(struct shd_session *s, uint32_t owner, const char *model,
                   struct recover_owner *o, struct shd_err *e)
{
    char *text;
    int r = shd_status(s, owner, &text, e);
    if (r != SHD_OK)
        return r;
    json_t *root = json_loads(text, 0, NULL);
    r = root != NULL ? read_owner(root, model, o, e)
                     : err_set(e, SHD_EPROTO, "a daemon's status is no JSON");
    json_decref(root);
    free(text);
    return r;
}

static int look(struct shd_session *s, const char *model, struct recover_owner *owners,
                struct shd_err *e)
{
    const uint32_t count = shd_owners(s);
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < count; i++)
        r = look_at(s, i, model, &owners[i], e);
    for (uint32_t i = 0; r == SHD_OK && i < count; i++) {
        const uint64_t before = owners[i].step;
        r = look_at(s, i, model, &owners[i], e);
        owners[i].before = before;
    }
    return r;
}

static bool are_the_same(const struct recover *r, const struct recover_owner *owners,
                         uint32_t count)
{
    bool same = r->had != NULL && r->count == count;
    for (uint32_t i = 0; same && i < count; i++)
        same = r->had[i].pid == owners[i].process.pid &&
               fabs(r->had[i].start_s - owners[i].process.start_s) < SAME_S;
    return same;
}

static int remember(struct recover *r, const struct recover_owner *owners, uint32_t count,
                    struct shd_err *e)
{
    if (r->count != count) {
        free(r->had);
        r->count = 0;
        r->had = sys_calloc(count, sizeof *r->had);
        if (r->had == NULL)
            return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " daemons", count);
        r->count = count;
    }
    CHECK(r->had != NULL);
    for (uint32_t i = 0; i < count; i++)
        r->had[i] = owners[i].process;
    r->dropped = false;
    return SHD_OK;
}

void recover_deinit(struct recover *r)
{
    free(r->had);
    r->had = NULL;
}

struct latest {
    char name[CHECKPOINT_NAME_BYTES];
    char model[SPEC_NAME_BYTES_MAX];
    uint64_t step;
};

/* SHD_ENOENT: there is none. */
static int read_latest(const char *path, struct latest *ret, struct shd_err *e)
{
    struct ckpt_info info = { 0 };
    struct spec *spec = NULL;
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open directory '%.150s'", path);
    int r = checkpoint_dir_newest(fd, ret->name, e);
    const int at = r == SHD_OK ? openat(fd, ret->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (r == SHD_OK && at < 0)
        r = err_sys(e, SHD_EIO, "open '%.150s/%s'", path, ret->name);
    if (r == SHD_OK)
        r = ckpt_info_read(at, &info, e);
    if (r == SHD_OK)
        r = spec_parse(info.spec_json, strlen(info.spec_json), &spec, e);
    if (r == SHD_OK) {
        ret->step = info.step;
        snprintf(ret->model, sizeof ret->model, "%s", spec->name);
    }
    spec_free(spec);
    ckpt_info_deinit(&info);
    if (at >= 0)
        close(at);
    close(fd);
    return r;
}

/* -- Going back -------------------------------------------------------------------------------- */

void recover_say(struct recover *r, const struct shd_err *why)
{
    if (strcmp(r->said.text, why->text) == 0)
        return;
    r->said = *why;
    ctl_say("%s", why->text);
}

static void print_restored(const struct recover *r, const struct latest *latest,
                           const struct shd_restored *what)
{
    if (r->json) {
        json_t *o = json_pack("{s:s, s:s, s:I, s:I}", "restored", latest->name, "model",
                              what->model, "step", (json_int_t)what->step, "bytes",
                              (json_int_t)what->bytes);
        verb_json(o, JSON_COMPACT, stdout);
    } else {
        printf("restored %s/%s model=%s step=%" PRIu64 " bytes=%" PRIu64 "\n", r->dir, latest->name,
               what->model, what->step, what->bytes);
    }
    fflush(stdout);
}

/* With `lost` nobody can train it any more, who ever has it open. */
static int go_back(struct recover *r, struct shd_session *s, const struct latest *latest, bool lost,
                   struct shd_err *e)
{
    const struct shd_restore_options how = { .size = sizeof how, .replace = lost, .force = lost };
    struct shd_restored restored = { .size = sizeof restored };
    struct shd_err why = { 0 };
    char path[4096];
    if (snprintf(path, sizeof path, "%s/%s", r->dir, latest->name) >= (int)sizeof path)
        return err_set(e, SHD_ERANGE, "'%.150s' is too long a path", r->dir);
    void (*before)(int) = signal(SIGTERM, SIG_DFL); /* it may take long */
    const int done = shd_restore(s, path, &how, &restored, &why);
    signal(SIGTERM, before);
    if (done == SHD_OK) {
        print_restored(r, latest, &restored);
        r->said.text[0] = '\0';
    } else {
        struct shd_err not_yet;
        err_set(&not_yet, why.code, "not restored yet: %s", why.text);
        recover_say(r, &not_yet);
    }
    return hub_check(s->hub, e);
}

static void say_lost(struct recover *r, const struct recover_owner *owner, uint64_t step,
                     const struct latest *latest)
{
    struct shd_err what;
    char again[64] = "";
    if (step > latest->step)
        snprintf(again, sizeof again, "; to be computed again: %" PRIu64 " step%s",
                 step - latest->step, step - latest->step == 1 ? "" : "s");
    err_set(&what, SHD_EGONE,
            "daemon %s has lost model '%.60s', which others have at step %" PRIu64
            ": back to %.100s/%s%s",
            owner->device, latest->model, step, r->dir, latest->name, again);
    recover_say(r, &what);
}

/* A training that began before the checkpoint was restored, for workers are quick. */
static int begin_again(struct recover *r, struct shd_session *s, const struct latest *latest,
                       struct shd_err *e)
{
    struct shd_err what;
    err_set(&what, SHD_EGONE,
            "model '%.60s' was begun at step 0, and %.100s has step %" PRIu64
            " of it: who trains it ends, and it goes back there",
            latest->model, r->dir, latest->step);
    recover_say(r, &what);
    return go_back(r, s, latest, /* lost= */ true, e);
}

static int none_there(struct recover *r, struct shd_session *s, const struct latest *latest,
                      const struct recover_owner *owners, struct shd_err *e)
{
    struct shd_err what;
    if (!r->dropped && !are_the_same(r, owners, shd_owners(s)))
        return go_back(r, s, latest, /* lost= */ false, e);
    r->dropped = true;
    err_set(&what, SHD_ENOENT,
            "model '%.60s' was dropped: nothing is restored (`shardctl restore %.100s` does)",
            latest->model, r->dir);
    recover_say(r, &what);
    return SHD_OK;
}

struct looks { /* that have found it lost, at this step of who has it */
    uint64_t since_ns, step;
};

/* One look, and what follows; *ret_whole: there is nothing more to do. */
static int look_once(struct recover *r, struct shd_session *s, const struct latest *latest,
                     struct recover_owner *owners, struct looks *looks, bool *ret_whole,
                     struct shd_err *e)
{
    const uint32_t count = shd_owners(s);
    uint32_t lost = 0;
    uint64_t step = 0;
    const int err = look(s, latest->model, owners, e);
    if (err != SHD_OK)
        return err;
    const enum recover_state state = recover_judge(owners, count, &lost, &step);
    const uint64_t now_ns = clock_now_ns();
    *ret_whole = state == RECOVER_WHOLE && (r->had != NULL || step > 0 || latest->step == 0);
    if (*ret_whole)
        return remember(r, owners, count, e);
    if (state != RECOVER_LOST || step != looks->step) /* what goes on is not lost */
        *looks = (struct looks){ .since_ns = now_ns, .step = step };
    if (state == RECOVER_WHOLE)
        return begin_again(r, s, latest, e);
    if (state == RECOVER_NONE)
        return none_there(r, s, latest, owners, e);
    if (state == RECOVER_WAIT || now_ns - looks->since_ns < LOST_NS)
        return SHD_OK;
    say_lost(r, &owners[lost], step, latest);
    return go_back(r, s, latest, /* lost= */ true, e);
}

int recover_model(struct recover *r, struct shd_session *s, const volatile sig_atomic_t *stopped,
                  struct shd_err *e)
{
    struct recover_owner *owners = sys_calloc(shd_owners(s), sizeof *owners);
    struct looks looks = { .since_ns = clock_now_ns() };
    bool whole = false;
    int err = SHD_OK;
    if (owners == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to look at daemons");
    while (err == SHD_OK && !whole) {
        struct latest latest = { .step = 0 };
        err = read_latest(r->dir, &latest, e);
        if (err == SHD_ENOENT ||
            (err == SHD_OK && r->model != NULL && strcmp(r->model, latest.model) != 0)) {
            err = SHD_OK; /* nothing to go back to */
            break;
        }
        if (err == SHD_OK)
            err = look_once(r, s, &latest, owners, &looks, &whole, e);
        if (err == SHD_OK && !whole)
            err = *stopped ? SHD_PENDING : hub_poll(s->hub, LOOK_NS, e);
    }
    free(owners);
    return err;
}
