/* Restoring: every daemon reads its own slices. Asked twice, so that the model is opened by all of
 * them or by none: the first time they read and check it, the second time they open it. */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/checkpoint/files.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/ckpt_info.h"
#include "proto/spec/spec_json.h"

#define BUSY_NS            (3000 * NS_PER_MS)
#define BUSY_PAUSE_US      50000u
#define TIMEOUT_MS_DEFAULT UINT64_C(3600000) /* much is read */

struct restoring {
    struct hub *hub;
    char *path;      /* owned */
    char *spec_json; /* owned */
    bool weights, open;
    bool answered; /* by one at least: `step` is known */
    uint64_t step, bytes;
};

static int make_request(struct round *round, struct link *link, uint64_t arg,
                        struct wire_request *ret_request, struct shd_err *e)
{
    const struct restoring *r = round->ctx;
    (void)arg;
    (void)e;
    ret_request->type = WIRE_RESTORE;
    ret_request->restore = (struct wire_restore){
        .path = r->path,
        .spec = { (const uint8_t *)r->spec_json, strlen(r->spec_json) },
        .owner = link->index,
        .owners = r->hub->link_count,
        .weights = r->weights,
        .open = r->open,
    };
    return SHD_OK;
}

static int take_restored(struct round *round, struct link *link, uint64_t arg,
                         const struct wire_reply *reply, struct shd_err *e)
{
    struct restoring *r = round->ctx;
    (void)arg;
    if (r->answered && reply->restored.step != r->step)
        return link_err(link, SHD_EPROTO, e, "restored step %" PRIu64 ", another one %" PRIu64,
                        reply->restored.step, r->step);
    r->answered = true;
    r->step = reply->restored.step;
    r->bytes += reply->restored.bytes;
    return SHD_OK;
}

static int ask_all(struct restoring *r, const char *what, struct shd_err *e)
{
    struct round round = { .what = what,
                           .hint = "it may be reading still",
                           .type = WIRE_RESTORED,
                           .make = make_request,
                           .take = take_restored,
                           .ctx = r };
    r->bytes = 0;
    r->answered = false;
    int status = SHD_OK;
    for (uint32_t i = 0; status == SHD_OK && i < r->hub->link_count; i++)
        status = round_ask(&round, &r->hub->links[i], 0, e);
    return round_finish(&round, r->hub, status, e);
}

/* A daemon that was started again in between says that it has read nothing. */
static int run(struct restoring *r, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    int status = ask_all(r, "Restore (reading)", e);
    while (status == SHD_EBUSY && clock_now_ns() - start_ns < BUSY_NS) {
        usleep(BUSY_PAUSE_US); /* a dead restorer's daemons may not know yet */
        status = ask_all(r, "Restore (reading)", e);
    }
    r->open = true;
    if (status == SHD_OK)
        status = ask_all(r, "Restore (opening)", e);
    return status;
}

/* -- What -------------------------------------------------------------------------------------- */

/* The daemons compare tensors with leaves; this holds the leaves, step and updates together. */
static int check_digest(int dir_fd, struct ckpt_info *info, struct shd_err *e)
{
    char hex[DIGEST_HEX_BYTES];
    struct spec *spec;
    int status = spec_parse(info->spec_json, strlen(info->spec_json), &spec, e);
    if (status == SHD_OK) {
        status = checkpoint_files_digest(dir_fd, spec, info->step, info->updates, hex, e);
        spec_free(spec);
    }
    if (status == SHD_OK && strcmp(hex, info->digest) != 0)
        status = err_set(e, SHD_EINVAL,
                         "digest of step %" PRIu64 " with " CKPT_LEAVES " is %.16s..., " CKPT_INFO
                         " says %.16s...: one of them is damaged",
                         info->step, hex, info->digest);
    if (status != SHD_OK)
        ckpt_info_deinit(info);
    return status;
}

static int take_checkpoint(struct restoring *r, const char *path, struct shd_err *e)
{
    struct ckpt_info info;
    int fd;
    int status = checkpoint_dir_resolve(path, &r->path, e);
    if (status == SHD_OK)
        status = ckpt_open_dir(r->path, &fd, e);
    if (status != SHD_OK)
        return status;
    status = ckpt_info_read(fd, &info, e);
    if (status == SHD_OK)
        status = check_digest(fd, &info, e);
    close(fd);
    if (status != SHD_OK)
        return err_prefix(e, "%.120s", r->path);
    r->spec_json = info.spec_json;
    info.spec_json = NULL;
    ckpt_info_deinit(&info);
    return SHD_OK;
}

static int take_weights(struct restoring *r, const char *path, const char *spec_json,
                        struct shd_err *e)
{
    if (spec_json == NULL)
        return err_set(e, SHD_EINVAL, "weights have no spec of their own: give one");
    r->weights = true;
    r->path = realpath(path, NULL);
    if (r->path == NULL)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "look at '%.150s'", path);
    r->spec_json = sys_strdup(spec_json);
    return r->spec_json != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for a spec");
}

/* The spec's own words are kept: daemons make the canonical form. */
static int check_spec(const struct restoring *r, struct shd_restored *restored, struct shd_err *e)
{
    static_assert(sizeof restored->model == SPEC_NAME_BYTES_MAX, "shd.h and spec.h agree");
    struct spec *spec;
    CHECK(r->spec_json != NULL);
    const int status = spec_parse(r->spec_json, strlen(r->spec_json), &spec, e);
    if (status != SHD_OK)
        return err_prefix(e, "spec");
    memcpy(restored->model, spec->name, strlen(spec->name) + 1);
    spec_free(spec);
    return SHD_OK;
}

static int check_session(const shd_session *s, const struct shd_restore_options *o,
                         struct shd_err *e)
{
    if (s->hub == NULL)
        return err_set(e, SHD_ENOTSUP, "\"local:\" does not restore: run daemons");
    if (o->timeout_ms > UINT64_MAX / 2 / NS_PER_MS)
        return err_set(e, SHD_ERANGE, "timeout of %" PRIu64 " ms", o->timeout_ms);
    return SHD_OK;
}

int shd_restore(shd_session *s, const char *path, const struct shd_restore_options *options,
                struct shd_restored *ret_restored, struct shd_err *e)
{
    struct shd_restore_options o = { 0 };
    if (options != NULL &&
        sized_take(&o, sizeof o, options, sizeof o.size, "shd_restore_options", e) != SHD_OK)
        return SHD_EINVAL;
    struct restoring r = { .hub = s->hub };
    struct shd_restored restored = { .step = 0 };
    int status = check_session(s, &o, e);
    if (status == SHD_OK)
        status = o.weights ? take_weights(&r, path, o.spec_json, e) : take_checkpoint(&r, path, e);
    if (status == SHD_OK)
        status = check_spec(&r, &restored, e);
    if (status == SHD_OK) {
        const uint64_t timeout_ns = s->hub->timeout_ns; /* the session's is for what is quick */
        s->hub->timeout_ns = (o.timeout_ms > 0 ? o.timeout_ms : TIMEOUT_MS_DEFAULT) * NS_PER_MS;
        status = run(&r, e);
        s->hub->timeout_ns = timeout_ns;
    }
    if (status == SHD_OK && ret_restored != NULL) {
        restored.step = r.step;
        restored.bytes = r.bytes;
        *ret_restored = restored;
    }
    free(r.path);
    free(r.spec_json);
    return status;
}
