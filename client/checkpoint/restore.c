/* Restoring: every daemon reads its own slices. Asked twice, so that the model is opened by all of
 * them or by none: the first time they read and check it, the second time they open it. Daemons
 * that have opened it, and died and came back, know it by the restore's id: the two are asked again
 * until all have it. */
#include "client/checkpoint/restore.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/checkpoint/files.h"
#include "client/paths/rejoin.h"
#include "client/session/hub.h"
#include "client/session/replay.h"
#include "client/session/round.h"
#include "client/session/session.h"
#include "client/session/spec_out.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt.h"
#include "proto/files/ckpt_info.h"
#include "proto/files/safetensors.h"
#include "proto/spec/spec_json.h"

#define BUSY_NS            (3000 * NS_PER_MS)
#define BUSY_PAUSE_US      50000u
#define ATTEMPTS_MAX       16u /* daemons that lose what they have read, between the two requests */
#define TIMEOUT_MS_DEFAULT UINT64_C(3600000) /* much is read */
#define WINDOW_ELEMS       (UINT64_C(512) * SHD_BLOCK_ELEMS)
#define WINDOW_LEAVES      513u /* of that many elements that begin anywhere */

struct restoring {
    struct hub *hub;
    char *path;      /* owned */
    char *spec_json; /* owned */
    struct spec_out spec;
    bool weights, replace, force, open;
    bool one_count;         /* as wire_open_model */
    uint64_t restore_id;    /* random, the same at all owners */
    const uint64_t *beside; /* borrowed: as restore_as has it */
    bool answered;          /* by one at least: `step` is known */
    uint64_t step;
    uint64_t owner_bytes[SHD_OWNERS_MAX]; /* read by each */
};

static void make_request(const struct round *round, const struct link *link,
                         struct wire_request *ret_request)
{
    const struct restoring *r = round->ctx;
    ret_request->restore = (struct wire_restore){
        .path = r->path,
        .owner = link_owner(link),
        .owners = link_owners(link),
        .weights = r->weights,
        .open = r->open,
        .replace = r->replace,
        .force = r->force,
        .restore_id = r->restore_id,
        .one_count = r->one_count,
        .beside = r->beside != NULL && !r->open ? r->beside[link->index] : 0,
    };
    spec_out_fill(&r->spec, &ret_request->restore.spec, &ret_request->restore.spec_at);
}

static int take_restored(const struct round *round, const struct link *link,
                         const struct wire_reply *reply, struct shd_err *e)
{
    struct restoring *r = round->ctx;
    if (r->answered && reply->restored.step != r->step)
        return link_err(link, SHD_EPROTO, e, "restored step %" PRIu64 ", another one %" PRIu64,
                        reply->restored.step, r->step);
    r->answered = true;
    r->step = reply->restored.step;
    if (reply->restored.bytes > 0) /* 0: opened before */
        r->owner_bytes[link->index] = reply->restored.bytes;
    return SHD_OK;
}

static int ask_all(struct restoring *r, const char *what, struct shd_err *e)
{
    struct round round = { .what = what,
                           .hint = "it may be reading still",
                           .asks = WIRE_RESTORE,
                           .type = WIRE_RESTORED,
                           .make = make_request,
                           .take = take_restored,
                           .replicated = true,
                           .spec = &r->spec,
                           .ctx = r };
    r->answered = false;
    return round_all(&round, r->hub, 0, e);
}

/* Waits out who is busy: a dead restorer's daemons may not know yet, workers may be about to end.
 */
static int ask_patiently(struct restoring *r, bool open, struct shd_err *e)
{
    const char *what = open ? "Restore (opening)" : "Restore (reading)";
    const uint64_t start_ns = clock_now_ns();
    r->open = open;
    int status = ask_all(r, what, e);
    while (status == SHD_EBUSY && clock_now_ns() - start_ns < BUSY_NS) {
        usleep(BUSY_PAUSE_US);
        status = ask_all(r, what, e);
    }
    return status;
}

/* Broken off here, some would have the model and some not. */
static int open_all(struct restoring *r, struct shd_err *e)
{
    const struct idle idle = r->hub->idle;
    r->hub->idle.fn = NULL;
    const int status = ask_patiently(r, /* open= */ true, e);
    r->hub->idle = idle;
    return status;
}

static int choose_id(struct restoring *r, struct shd_err *e)
{
    if (getrandom(&r->restore_id, sizeof r->restore_id, 0) != (ssize_t)sizeof r->restore_id)
        return err_sys(e, SHD_EIO, "get random bytes");
    r->restore_id |= 1; /* not 0 */
    return SHD_OK;
}

static int read_all(struct restoring *r, struct shd_err *e)
{
    const int status = ask_patiently(r, /* open= */ false, e);
    if (status == SHD_ECANCELED) /* who reads gives up, and forgets what it has read */
        hub_renew(r->hub);
    return status;
}

/* What was read is opened. */
static int open_read(struct restoring *r, struct shd_err *e)
{
    int status = open_all(r, e);
    for (uint32_t i = 0; status == SHD_ENOENT && i < ATTEMPTS_MAX; i++) {
        status = read_all(r, e);
        if (status == SHD_OK)
            status = open_all(r, e);
    }
    return status;
}

/* A daemon that was started again in between says that it has read nothing. */
static int run(struct restoring *r, struct shd_err *e)
{
    int status = read_all(r, e);
    if (status == SHD_OK)
        status = open_read(r, e);
    if (status == SHD_OK && r->replace) /* by successors: they serve it */
        status = open_all(r, e);
    return status;
}

/* -- What -------------------------------------------------------------------------------------- */

/* The digest holds the leaves, step and updates together. */
static int check_digest(int dir_fd, const struct spec *spec, const struct ckpt_info *info,
                        struct shd_err *e)
{
    char hex[DIGEST_HEX_BYTES];
    const int r = checkpoint_files_digest(dir_fd, spec, info->step, info->updates, hex, e);
    if (r == SHD_OK && strcmp(hex, info->digest) != 0)
        return err_set(e, SHD_EINVAL,
                       "digest of step %" PRIu64 " with " CKPT_LEAVES " is %.16s..., " CKPT_INFO
                       " says %.16s...: one of them is damaged",
                       info->step, hex, info->digest);
    return r;
}

/* The daemons compare tensors with leaves, so here the leaves are enough. */
static int read_info(int dir_fd, struct ckpt_info *ret_info, struct shd_err *e)
{
    struct spec *spec;
    int r = ckpt_info_read(dir_fd, ret_info, e);
    if (r != SHD_OK)
        return r;
    r = spec_parse(ret_info->spec_json, strlen(ret_info->spec_json), &spec, e);
    if (r == SHD_OK) {
        r = check_digest(dir_fd, spec, ret_info, e);
        spec_free(spec);
    }
    if (r != SHD_OK)
        ckpt_info_deinit(ret_info);
    return r;
}

/* spec_json: the same model, cut into other tiles; NULL: as it was saved. */
static int take_spec(struct restoring *r, struct ckpt_info *info, const char *spec_json,
                     struct shd_err *e)
{
    struct spec *saved = NULL, *asked = NULL;
    if (spec_json == NULL) {
        r->spec_json = info->spec_json;
        info->spec_json = NULL;
        return SHD_OK;
    }
    int status = spec_parse(info->spec_json, strlen(info->spec_json), &saved, e);
    if (status == SHD_OK &&
        (status = spec_parse(spec_json, strlen(spec_json), &asked, e)) != SHD_OK)
        err_prefix(e, "spec");
    if (status == SHD_OK && (status = spec_compare_untiled(saved, asked, e)) != SHD_OK)
        err_prefix(e, "the spec may differ from the checkpoint's in tiles alone");
    spec_free(saved);
    spec_free(asked);
    if (status != SHD_OK)
        return status;
    r->spec_json = sys_strdup(spec_json);
    return r->spec_json != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for a spec");
}

static int take_checkpoint(struct restoring *r, const char *path, const char *spec_json,
                           struct shd_err *e)
{
    struct ckpt_info info;
    int fd;
    int status = checkpoint_dir_resolve(path, &r->path, e);
    if (status == SHD_OK)
        status = ckpt_open_dir(r->path, &fd, e);
    if (status != SHD_OK)
        return status;
    status = read_info(fd, &info, e);
    close(fd);
    if (status != SHD_OK)
        return err_prefix(e, "%.120s", r->path);
    status = take_spec(r, &info, spec_json, e);
    ckpt_info_deinit(&info);
    return status;
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
    const int r = session_check(s, e);
    if (r != SHD_OK)
        return r;
    if (s->hub == NULL)
        return err_set(e, SHD_ENOTSUP, "\"local:\" does not restore: run daemons");
    if (o->timeout_ms > UINT64_MAX / 2 / NS_PER_MS)
        return err_set(e, SHD_ERANGE, "timeout of %" PRIu64 " ms", o->timeout_ms);
    return SHD_OK;
}

static int run_within(struct restoring *r, int (*run_it)(struct restoring *r, struct shd_err *e),
                      uint64_t timeout_ms, struct shd_err *e)
{
    struct hub *hub = r->hub;
    const uint64_t timeout_ns = hub->timeout_ns; /* the session's is for what is quick */
    const bool patient = hub->patient;
    hub->patient = false;
    hub->timeout_ns = (timeout_ms > 0 ? timeout_ms : TIMEOUT_MS_DEFAULT) * NS_PER_MS;
    const int status = run_it(r, e);
    hub->timeout_ns = timeout_ns;
    hub->patient = patient;
    return status;
}

static int restore_as(struct hub *hub, const char *path, const struct restore_as *as,
                      int (*run_it)(struct restoring *r, struct shd_err *e), uint64_t *ret_step,
                      struct shd_err *e)
{
    struct restoring r = { .hub = hub,
                           .restore_id = as->id,
                           .one_count = as->one_count,
                           .beside = as->beside,
                           .spec.segment = SEGMENT_CLOSED };
    CHECK(as->id != 0);
    int status = take_checkpoint(&r, path, /* spec_json= */ NULL, e);
    if (status == SHD_OK)
        status = spec_out_init(&r.spec, r.spec_json, e);
    if (status == SHD_OK)
        status = run_within(&r, run_it, /* timeout_ms= */ 0, e);
    if (status == SHD_OK)
        *ret_step = r.step;
    spec_out_deinit(&r.spec);
    free(r.path);
    free(r.spec_json);
    return status;
}

int restore_seats(struct hub *hub, const char *path, const struct restore_as *as,
                  uint64_t *ret_step, struct shd_err *e)
{
    CHECK(hub->members.seats != NULL);
    return restore_as(hub, path, as, run, ret_step, e);
}

int restore_read(struct hub *hub, const char *path, const struct restore_as *as, uint64_t *ret_step,
                 struct shd_err *e)
{
    return restore_as(hub, path, as, read_all, ret_step, e);
}

int restore_ready(struct hub *hub, const char *path, const struct restore_as *as,
                  uint64_t *ret_step, struct shd_err *e)
{
    return restore_as(hub, path, as, open_read, ret_step, e);
}

int shd_restore(shd_session *s, const char *path, const struct shd_restore_options *options,
                struct shd_restored *ret_restored, struct shd_err *e)
{
    struct shd_restore_options o = { 0 };
    if (options != NULL &&
        sized_take(&o, sizeof o, options, sizeof o.size, "shd_restore_options", e) != SHD_OK)
        return SHD_EINVAL;
    if (sized_check(ret_restored, sizeof *ret_restored, "shd_restored", e) != SHD_OK)
        return SHD_EINVAL;
    struct restoring r = {
        .hub = s->hub, .replace = o.replace, .force = o.force, .spec.segment = SEGMENT_CLOSED
    };
    struct shd_restored restored = { .step = 0 };
    int status = check_session(s, &o, e);
    if (status == SHD_OK)
        status = replay_allows("shd_restore()", e);
    if (status == SHD_OK)
        status = rejoin_session(s, e); /* a host that is in again restores it, too */
    if (status == SHD_OK)
        r.one_count = hub_has_older(s->hub, WIRE_LEVEL_COUNTS);
    if (status == SHD_OK)
        status = o.weights ? take_weights(&r, path, o.spec_json, e)
                           : take_checkpoint(&r, path, o.spec_json, e);
    if (status == SHD_OK)
        status = check_spec(&r, &restored, e);
    if (status == SHD_OK && o.replace)
        status = session_check_closed(s, restored.model, e);
    if (status == SHD_OK)
        status = spec_out_init(&r.spec, r.spec_json, e);
    if (status == SHD_OK)
        status = choose_id(&r, e);
    if (status == SHD_OK)
        status = run_within(&r, run, o.timeout_ms, e);
    if (status == SHD_OK) {
        restored.step = r.step;
        for (uint32_t i = 0; i < s->hub->owner_count; i++)
            restored.bytes += r.owner_bytes[i];
        sized_give(ret_restored, &restored);
    }
    spec_out_deinit(&r.spec);
    free(r.path);
    free(r.spec_json);
    return status;
}

/* -- Verifying: leaves are computed anew from the bytes, the digest from the leaves ------------ */

struct verify {
    int dir_fd;
    struct ckpt_info info;
    struct spec *spec;                     /* owned */
    struct safeset *sets[CKPT_ARRAYS_MAX]; /* owned */
    struct ckpt_hasher *hasher;            /* owned */
    uint64_t *first_leaf;                  /* owned */
    int leaves_fd;                         /* owned */
    float *window;                         /* owned, [WINDOW_ELEMS] */
    uint8_t (*leaves)[CKPT_LEAF_BYTES];    /* owned, [2][WINDOW_LEAVES] */
};

static int differs(const struct verify *v, const struct ckpt_part *part, uint32_t array,
                   const char *file, struct shd_err *e)
{
    const struct spec_tensor *t = &v->spec->tensors[part->tensor];
    uint64_t leaf = 0;
    while (memcmp(v->leaves[leaf], v->leaves[WINDOW_LEAVES + leaf], CKPT_LEAF_BYTES) == 0)
        leaf++;
    uint64_t first = 0;
    const uint64_t elems = ckpt_leaf_elems(t, part->first_leaf + leaf, 1, &first);
    first -= t->offset_elems;
    return err_set(e, SHD_EINVAL,
                   "tensor '%.80s' in '%.60s', elements %" PRIu64 " to %" PRIu64 ", array %" PRIu32
                   ": not what was saved, the file is damaged",
                   t->name, file, first, first + elems - 1, array);
}

static int check_part(struct verify *v, const struct safeset_place *place,
                      const struct ckpt_part *part, uint32_t array, struct shd_err *e)
{
    const struct spec_tensor *t = &v->spec->tensors[part->tensor];
    const uint64_t at = place->tensor->at_bytes +
                        (spec_whole_first(t) + part->first_elem - t->offset_elems) * sizeof(float);
    const uint64_t leaf = v->first_leaf[part->tensor] + array * ckpt_leaf_count(t) +
                          part->first_leaf;
    CHECK(v->leaves != NULL && part->leaves <= WINDOW_LEAVES);
    int r = ckpt_pread(place->file->fd, v->window, part->elems * sizeof(float), at,
                       place->file->name, e);
    if (r == SHD_OK)
        r = ckpt_pread(v->leaves_fd, v->leaves[WINDOW_LEAVES], part->leaves * CKPT_LEAF_BYTES,
                       leaf * CKPT_LEAF_BYTES, CKPT_LEAVES, e);
    if (r != SHD_OK)
        return r;
    if (!ckpt_hash_part(v->hasher, part, v->window, v->leaves))
        return err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    if (memcmp(v->leaves[0], v->leaves[WINDOW_LEAVES], part->leaves * CKPT_LEAF_BYTES) != 0)
        return differs(v, part, array, place->file->name, e);
    return SHD_OK;
}

static int check_array(struct verify *v, uint32_t tensor, uint32_t array, struct shd_err *e)
{
    const struct spec_tensor *t = &v->spec->tensors[tensor];
    struct safeset_place place;
    if (!safeset_find(v->sets[array], spec_whole_name(t), &place) ||
        place.tensor->dtype != SAFETENSORS_F32 || place.tensor->elems != spec_whole_elems(t))
        return err_set(e, SHD_EINVAL, "tensor '%.100s' is not in the files '%s' as it was saved",
                       t->name, ckpt_stem(v->spec, array));
    int r = SHD_OK;
    const uint64_t unit_elems = v->spec->units[t->unit].elems;
    for (uint64_t first = 0; r == SHD_OK && first < unit_elems; first += WINDOW_ELEMS) {
        struct ckpt_part part;
        const struct slice slice = { first, WINDOW_ELEMS };
        if (ckpt_part_of(v->spec, tensor, slice, &part))
            r = check_part(v, &place, &part, array, e);
    }
    return r;
}

static int open_parts(struct verify *v, struct shd_err *e)
{
    int r = ckpt_info_read(v->dir_fd, &v->info, e);
    if (r == SHD_OK)
        r = spec_parse(v->info.spec_json, strlen(v->info.spec_json), &v->spec, e);
    for (uint32_t a = 0; r == SHD_OK && a < spec_arrays(v->spec); a++) {
        const struct safeset_ask ask = { .stem = ckpt_stem(v->spec, a) };
        r = safeset_open_at(v->dir_fd, &ask, &v->sets[a], e);
    }
    if (r == SHD_OK)
        r = ckpt_open_leaves(v->dir_fd, v->spec, /* writable= */ false, &v->leaves_fd,
                             &v->first_leaf, e);
    if (r == SHD_OK)
        r = ckpt_hasher_new(&v->hasher, e);
    if (r != SHD_OK)
        return r;
    v->window = sys_malloc(WINDOW_ELEMS * sizeof *v->window);
    v->leaves = sys_malloc(2 * (size_t)WINDOW_LEAVES * CKPT_LEAF_BYTES);
    if (v->window == NULL || v->leaves == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to verify");
    return SHD_OK;
}

static void close_parts(struct verify *v)
{
    for (uint32_t a = 0; a < CKPT_ARRAYS_MAX; a++)
        safeset_free(v->sets[a]);
    ckpt_hasher_free(v->hasher);
    spec_free(v->spec);
    ckpt_info_deinit(&v->info);
    free(v->first_leaf);
    free(v->window);
    free(v->leaves);
    if (v->leaves_fd >= 0)
        close(v->leaves_fd);
    close(v->dir_fd);
}

int checkpoint_verify(const char *path, struct checkpoint_verified *ret_verified, struct shd_err *e)
{
    struct verify v = { .leaves_fd = -1 };
    char *found;
    int r = checkpoint_dir_resolve(path, &found, e);
    if (r != SHD_OK)
        return r;
    r = ckpt_open_dir(found, &v.dir_fd, e);
    free(found);
    if (r != SHD_OK)
        return r;
    r = open_parts(&v, e);
    for (uint32_t t = 0; r == SHD_OK && t < v.spec->tensor_count; t++)
        for (uint32_t a = 0; r == SHD_OK && a < ckpt_arrays(v.spec, &v.spec->tensors[t]); a++)
            r = check_array(&v, t, a, e);
    if (r == SHD_OK)
        r = check_digest(v.dir_fd, v.spec, &v.info, e);
    if (r == SHD_OK) {
        *ret_verified = (struct checkpoint_verified){ .step = v.info.step,
                                                      .updates = v.info.updates,
                                                      .bytes = v.info.bytes,
                                                      .summed = v.info.summed };
        memcpy(ret_verified->digest, v.info.digest, sizeof ret_verified->digest);
        memcpy(ret_verified->model, v.spec->name, strlen(v.spec->name) + 1);
    }
    close_parts(&v);
    return r;
}
