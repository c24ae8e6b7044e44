/* See save.h. */
#include "client/checkpoint/save.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/checkpoint/files.h"
#include "client/paths/decide.h"
#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/paths/rewind.h"
#include "client/run/stream.h"
#include "client/session/hub.h"
#include "client/session/link.h"
#include "client/session/replay.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/failpoint.h"
#include "proto/base/sys.h"
#include "proto/files/ckpt_info.h"
#include "proto/spec/spec_json.h"

#define TIMEOUT_MS_DEFAULT UINT64_C(600000)
#define REACH_NS           (2000 * NS_PER_MS) /* for a step that was to come */
#define BUSY_NS            (3000 * NS_PER_MS) /* a dead saver's daemons may not know yet */
#define LEAD_MAX           4096u              /* steps ahead of the furthest owner */
#define POLL_NS            (20 * NS_PER_MS)

struct answer { /* of one owner */
    bool in;
    int status;
    uint64_t updates;
    bool has_decision;
    struct decision decision;
    uint8_t *blob; /* owned */
    size_t blob_bytes;
    uint64_t *unit_updates;        /* owned, [units]; NULL: `updates` of each */
    char *settings_json;           /* owned; NULL: nothing is set, or it is not owner 0's */
    char text[SHD_ERR_TEXT_BYTES]; /* when status is not SHD_OK */
};

struct save {
    struct shd_model *model; /* borrowed */
    struct checkpoint_dir dir;
    struct checkpoint_files files;
    char *path; /* owned: of the partial directory */
    uint32_t keep;
    uint64_t from;    /* no step below this one */
    uint64_t step;    /* asked for */
    uint64_t attempt; /* number of the question; answers to earlier ones do not count */
    uint32_t lead;    /* of the next question */
    uint64_t begun_ns, asked_ns, deadline_ns, timeout_ms;
    struct rewind_mark mark; /* when it was asked for */
    struct answer *answers;  /* owned, [owners] */
    uint32_t owners;
};

/* -- Asking ------------------------------------------------------------------------------------ */

static void clear_answer(struct answer *a)
{
    free(a->blob);
    free(a->unit_updates);
    free(a->settings_json);
    *a = (struct answer){ .in = false };
}

static int make_request(struct link *link, const struct call *call,
                        struct wire_request *ret_request, struct shd_err *e)
{
    const struct save *s = call->ctx;
    (void)e;
    ret_request->type = WIRE_CHECKPOINT;
    ret_request->checkpoint = (struct wire_checkpoint){
        .model = s->model->map->owners[link->index].layout.handle,
        .step = call->step,
        .path = s->path,
    };
    return SHD_OK;
}

static void *copy(const struct wire_bytes *from)
{
    void *to = from->bytes > 0 ? sys_malloc(from->bytes) : NULL;
    return to != NULL ? memcpy(to, from->data, from->bytes) : NULL;
}

static char *copy_text(const struct wire_bytes *from)
{
    char *to = from->bytes > 0 ? sys_malloc(from->bytes + 1) : NULL;
    if (to != NULL) {
        memcpy(to, from->data, from->bytes);
        to[from->bytes] = '\0';
    }
    return to;
}

static void take_reply(struct answer *a, const struct wire_checkpointed *got)
{
    a->updates = got->updates;
    a->has_decision = got->has_decision;
    a->decision = got->decision;
    a->blob_bytes = got->blob.bytes;
    a->blob = copy(&got->blob);
    a->unit_updates = copy(&got->unit_updates);
    a->settings_json = copy_text(&got->settings);
    if ((a->settings_json == NULL && got->settings.bytes > 0) ||
        (a->blob == NULL && got->blob.bytes > 0) ||
        (a->unit_updates == NULL && got->unit_updates.bytes > 0)) {
        a->status = SHD_ENOMEM;
        snprintf(a->text, sizeof a->text, "no memory for a blob of %zu bytes", got->blob.bytes);
    }
}

static bool has_good_counts(const struct save *s, const struct wire_checkpointed *got)
{
    const size_t bytes = got->unit_updates.bytes;
    return bytes == 0 || bytes == s->model->spec->unit_count * sizeof(uint64_t);
}

static void answered(struct link *link, const struct call *call, const struct wire_reply *reply)
{
    struct save *s = call->ctx;
    struct answer *a = &s->answers[link->index];
    if (call->arg != s->attempt)
        return; /* of a question that was given up */
    clear_answer(a);
    a->in = true;
    a->status = reply->status;
    if (reply->status != SHD_OK)
        snprintf(a->text, sizeof a->text, "daemon %s: %.200s", link->device, reply->text);
    else if (reply->type != WIRE_CHECKPOINTED || reply->checkpointed.step != s->step ||
             !has_good_counts(s, &reply->checkpointed)) {
        a->status = SHD_EPROTO;
        snprintf(a->text, sizeof a->text, "daemon %s answered CHECKPOINT with something else",
                 link->device);
    } else
        take_reply(a, &reply->checkpointed);
}

uint64_t save_step(const struct shd_model *m)
{
    return look_furthest(m);
}

static int ask(struct save *s, struct shd_err *e)
{
    struct hub *hub = s->model->session->hub;
    s->step = save_step(s->model) + s->lead;
    if (s->step < s->from)
        s->step = s->from;
    s->attempt++;
    s->asked_ns = clock_now_ns();
    s->mark = rewind_mark(s->model);
    int r = SHD_OK;
    for (uint32_t i = 0; i < s->owners; i++)
        clear_answer(&s->answers[i]);
    for (uint32_t i = 0; r == SHD_OK && i < s->owners; i++) {
        const struct call call = {
            .make = make_request, .fn = answered, .ctx = s, .arg = s->attempt, .step = s->step
        };
        r = hub_ask(&hub->links[i], &call, e);
    }
    return r;
}

/* -- Ending ------------------------------------------------------------------------------------ */

static bool same_counts(const uint64_t *a, const uint64_t *b, uint32_t units)
{
    if (a == NULL || b == NULL)
        return a == b;
    return memcmp(a, b, units * sizeof *a) == 0;
}

/* Blobs may differ: at each owner that of the first worker to commit is kept, and owner 0's is what
 * shd_blob() gives and what is saved. */
static bool same_answers(const struct answer *a, const struct answer *b, uint32_t units)
{
    return a->updates == b->updates && a->has_decision == b->has_decision &&
           same_counts(a->unit_updates, b->unit_updates, units) &&
           (!a->has_decision || decision_equal(&a->decision, &b->decision));
}

static int check_answers(const struct save *s, struct shd_err *e)
{
    for (uint32_t i = 1; i < s->owners; i++)
        if (!same_answers(&s->answers[i], &s->answers[0], s->model->spec->unit_count))
            return err_set(e, SHD_EINTERNAL,
                           "owner %" PRIu32 " and owner 0 do not agree on the record of step "
                           "%" PRIu64,
                           i, s->step);
    return SHD_OK;
}

static int write_info(struct save *s, struct shd_checkpointed *saved, struct shd_err *e)
{
    const struct answer *a = &s->answers[0];
    struct ckpt_info info = { .step = s->step,
                              .updates = a->updates,
                              .unit_updates = a->unit_updates,
                              .unit_count = a->unit_updates != NULL ? s->model->spec->unit_count
                                                                    : 0,
                              .has_decision = a->has_decision,
                              .decision = a->decision,
                              .blob = a->blob,
                              .blob_bytes = a->blob_bytes,
                              .settings_json = a->settings_json,
                              .time = time(NULL),
                              .version = SHD_VERSION };
    memcpy(info.digest, saved->digest, sizeof info.digest);
    int r = spec_dump(s->model->spec, &info.spec_json, e);
    if (r != SHD_OK)
        return r;
    char *text = NULL;
    r = ckpt_info_dump(&info, s->files.items, s->files.count, &text, e);
    if (r == SHD_OK)
        r = checkpoint_write(s->dir.partial_fd, CKPT_INFO, text, s->dir.uid, e);
    free(text);
    free(info.spec_json);
    return r;
}

static int finish(struct save *s, struct shd_checkpointed *saved, struct shd_err *e)
{
    static_assert(sizeof saved->digest == DIGEST_HEX_BYTES, "shd.h and digest.h agree");
    static_assert(sizeof saved->name == CHECKPOINT_NAME_BYTES, "shd.h and dir.h agree");
    saved->step = s->step;
    saved->updates = s->answers[0].updates;
    saved->bytes = s->files.bytes;
    int r = check_answers(s, e);
    if (r == SHD_OK)
        r = checkpoint_files_digest(s->dir.partial_fd, s->model->spec, s->step, saved->updates,
                                    saved->digest, e);
    if (r == SHD_OK)
        r = write_info(s, saved, e);
    if (r == SHD_OK)
        r = checkpoint_files_sync(&s->files, s->dir.partial_fd, e);
    if (r == SHD_OK)
        r = checkpoint_dir_publish(&s->dir, s->step, saved->name, e);
    if (r == SHD_OK && s->keep > 0)
        r = checkpoint_dir_retain(&s->dir, s->keep, e);
    return r;
}

/* -- Advancing --------------------------------------------------------------------------------- */

enum outcome { OUTCOME_WAITS, OUTCOME_ALL_IN, OUTCOME_MOVED_ON, OUTCOME_BUSY, OUTCOME_FAILED };

static enum outcome look(const struct save *s, const struct answer **ret_failed)
{
    uint32_t in = 0;
    bool moved_on = false;
    for (uint32_t i = 0; i < s->owners; i++) {
        const struct answer *a = &s->answers[i];
        in += a->in;
        moved_on = moved_on || (a->in && a->status == SHD_ESTEP);
        if (a->in && a->status != SHD_OK && a->status != SHD_ESTEP) {
            *ret_failed = a;
            return a->status == SHD_EBUSY ? OUTCOME_BUSY : OUTCOME_FAILED;
        }
    }
    if (moved_on)
        return OUTCOME_MOVED_ON;
    return in == s->owners ? OUTCOME_ALL_IN : OUTCOME_WAITS;
}

static int timed_out(const struct save *s, struct shd_err *e)
{
    const struct hub *hub = s->model->session->hub;
    for (uint32_t i = 0; i < s->owners; i++)
        if (!s->answers[i].in)
            return link_err(&hub->links[i], SHD_ETIMEDOUT, e,
                            "did not write its part of step %" PRIu64 " (it is at %" PRIu64
                            ") within %" PRIu64 " ms",
                            s->step, look_step(s->model, i), s->timeout_ms);
    return err_set(e, SHD_ETIMEDOUT, "no checkpoint within %" PRIu64 " ms", s->timeout_ms);
}

/* The step that was asked for was still to come, has not come, and nobody writes for it. */
static bool is_given_up(const struct save *s)
{
    return save_step(s->model) < s->step && s->step > s->from &&
           clock_now_ns() - s->asked_ns > REACH_NS;
}

static void set_deadline(struct save *s)
{
    s->deadline_ns = clock_now_ns() + s->timeout_ms * NS_PER_MS;
}

/* SHD_PENDING: not done yet. */
static int advance(struct save *s, struct shd_checkpointed *saved, struct shd_err *e)
{
    const struct answer *failed = NULL;
    const enum outcome outcome = look(s, &failed);
    if (outcome == OUTCOME_FAILED ||
        (outcome == OUTCOME_BUSY && clock_now_ns() - s->begun_ns > BUSY_NS))
        return err_set(e, failed->status, "%s", failed->text);
    const bool mixed = outcome == OUTCOME_ALL_IN && rewind_since(s->model, &s->mark);
    if (outcome == OUTCOME_ALL_IN && !mixed)
        return finish(s, saved, e);
    if (save_step(s->model) < s->from)
        set_deadline(s); /* waiting for the step is what was asked for */
    if (clock_now_ns() >= s->deadline_ns)
        return timed_out(s, e);
    int r = SHD_OK;
    if (outcome == OUTCOME_MOVED_ON) {
        s->lead = s->lead == 0 ? 2 : s->lead < LEAD_MAX ? 2 * s->lead : LEAD_MAX;
        r = ask(s, e);
    } else if (outcome == OUTCOME_BUSY || mixed) {
        if (clock_now_ns() - s->asked_ns > POLL_NS)
            r = ask(s, e);
    } else if (is_given_up(s)) {
        s->lead = 0;
        r = ask(s, e);
    }
    return r == SHD_OK ? SHD_PENDING : r;
}

/* -- Beginning --------------------------------------------------------------------------------- */

void save_free(struct save *s)
{
    if (s == NULL)
        return;
    hub_forget(s->model->session->hub, s);
    checkpoint_files_deinit(&s->files);
    checkpoint_dir_close(&s->dir);
    for (uint32_t i = 0; s->answers != NULL && i < s->owners; i++)
        clear_answer(&s->answers[i]);
    free(s->answers);
    free(s->path);
    free(s);
}

/* Root may save for daemons of another user: they must be able to write. */
static uid_t writer(const struct shd_session *session)
{
    struct stat st;
    if (geteuid() != 0 || stat(session->hub->links[0].path, &st) != 0 || st.st_uid == 0)
        return (uid_t)-1;
    return st.st_uid;
}

static int make_directory(struct save *s, const char *dir, struct shd_err *e)
{
    int r = checkpoint_dir_lock(&s->dir, dir, writer(s->model->session), e);
    if (r == SHD_OK)
        r = checkpoint_dir_check_begin(s->dir.fd, s->dir.path, save_step(s->model), e);
    if (r == SHD_OK)
        r = checkpoint_dir_begin(&s->dir, e);
    if (r == SHD_OK)
        r = checkpoint_files_make(&s->files, s->dir.partial_fd, s->model->spec, s->dir.uid, e);
    if (r == SHD_OK && asprintf(&s->path, "%s/%s", s->dir.path, s->dir.partial) < 0) {
        s->path = NULL;
        r = err_set(e, SHD_ENOMEM, "no memory for a path");
    }
    return r;
}

static int take_options(struct save *s, const struct shd_checkpoint_options *options,
                        struct shd_err *e)
{
    struct shd_checkpoint_options o = { 0 };
    if (options != NULL &&
        sized_take(&o, sizeof o, options, sizeof o.size, "shd_checkpoint_options", e) != SHD_OK)
        return SHD_EINVAL;
    s->keep = o.keep;
    s->timeout_ms = o.timeout_ms > 0 ? o.timeout_ms : TIMEOUT_MS_DEFAULT;
    if (s->timeout_ms > UINT64_MAX / 2 / NS_PER_MS)
        return err_set(e, SHD_ERANGE, "timeout of %" PRIu64 " ms", s->timeout_ms);
    s->from = o.step;
    s->begun_ns = clock_now_ns();
    set_deadline(s);
    return SHD_OK;
}

static int check_model(const shd_model *m, const char *dir, struct shd_err *e)
{
    const int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    if (m->map == NULL)
        return err_set(e, SHD_ENOTSUP, "\"local:\" does not save: run daemons");
    if (m->saving != NULL)
        return err_set(e, SHD_EBUSY, "model '%s' is being saved by this session", m->spec->name);
    if (dir == NULL || dir[0] == '\0')
        return err_set(e, SHD_EINVAL, "no directory to save in");
    return replay_allows("shd_checkpoint()", e);
}

int shd_checkpoint_begin(shd_model *m, const char *dir,
                         const struct shd_checkpoint_options *options, struct shd_err *e)
{
    int r = check_model(m, dir, e);
    if (r != SHD_OK)
        return r;
    struct save *s = sys_calloc(1, sizeof *s);
    if (s == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to save");
    s->model = m;
    s->dir = CHECKPOINT_DIR_CLOSED;
    s->owners = m->map->owner_count;
    s->answers = sys_calloc(s->owners, sizeof *s->answers);
    r = s->answers != NULL ? take_options(s, options, e)
                           : err_set(e, SHD_ENOMEM, "no memory to save");
    if (r == SHD_OK)
        r = make_directory(s, dir, e);
    FAIL_POINT("save:files:after");
    if (r == SHD_OK)
        r = ask(s, e);
    if (r != SHD_OK) {
        save_free(s);
        return r;
    }
    m->saving = s;
    m->save_free = save_free;
    return SHD_OK;
}

static int poll_save(shd_model *m, uint64_t wait_ns, bool *ret_done,
                     struct shd_checkpointed *ret_saved, struct shd_err *e)
{
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = sized_check(ret_saved, sizeof *ret_saved, "shd_checkpointed", e);
    if (r != SHD_OK)
        return r;
    if (m->saving == NULL)
        return err_set(e, SHD_EINVAL, "model '%s' is not being saved", m->spec->name);
    struct shd_checkpointed saved = { .step = 0 };
    r = hub_poll(m->session->hub, wait_ns, e);
    if (r == SHD_OK) /* a step to come may lack what waits for this worker's stream */
        r = stream_look(m, e);
    if (r == SHD_OK)
        r = advance(m->saving, &saved, e);
    *ret_done = r != SHD_PENDING;
    if (r == SHD_PENDING)
        return SHD_OK;
    save_free(m->saving);
    m->saving = NULL;
    if (r == SHD_OK)
        sized_give(ret_saved, &saved);
    return r;
}

int shd_checkpoint_poll(shd_model *m, bool *ret_done, struct shd_checkpointed *ret_saved,
                        struct shd_err *e)
{
    return poll_save(m, /* wait_ns= */ 0, ret_done, ret_saved, e);
}

int shd_checkpoint(shd_model *m, const char *dir, const struct shd_checkpoint_options *options,
                   struct shd_checkpointed *ret_saved, struct shd_err *e)
{
    bool done = false;
    int r = sized_check(ret_saved, sizeof *ret_saved, "shd_checkpointed", e);
    if (r == SHD_OK)
        r = shd_checkpoint_begin(m, dir, options, e);
    while (r == SHD_OK && !done)
        r = poll_save(m, POLL_NS, &done, ret_saved, e);
    return r;
}
