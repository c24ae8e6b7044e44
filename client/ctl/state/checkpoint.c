/* shardctl checkpoint: save a model of running daemons, once or again and again; list what is in a
 * directory; verify a checkpoint without daemons. */
#include "client/ctl/state/checkpoint.h"

#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <jansson.h>

#include "client/checkpoint/dir.h"
#include "client/checkpoint/restore.h"
#include "client/checkpoint/save.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/state/guard.h"
#include "client/ctl/state/meter.h"
#include "client/ctl/state/recover.h"
#include "client/session/hub.h"
#include "proto/base/clock.h"
#include "proto/files/ckpt_info.h"

#define LOOK_NS    UINT64_C(20000000)
#define AHEAD_NS   UINT64_C(200000000) /* ask so long before a step is due */
#define AGAIN_NS   500000000L
#define STILL_NS   (5 * NS_PER_S) /* so long without a step: the one asked for may never come */
#define RESUME_MS  10000u         /* of one that stays whatever happens */
#define TIMEOUT_MS 120000u        /* of a session that stays: keepers need 30 s for who hangs */
#define NS_PER_MIN (60 * NS_PER_S)

static const char checkpoint_about[] =
    "Save a model as DIR/step-N and point DIR/LATEST to it. Training goes on meanwhile: it is\n"
    "exactly one step, of parameters, optimizer state and the workers' own blob. The daemons "
    "write\n"
    "the files, so DIR is a directory on their host. Weights are safetensors that other tools "
    "load.";

static const char checkpoint_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl checkpoint /data/run1\n"
    "  shardctl checkpoint /data/run1 --every 500 --keep 3     stays while the daemons run\n"
    "  shardctl checkpoint /data/run1 --every 500 --resume     and go back to it by itself\n"
    "  shardctl checkpoint --list /data/run1\n"
    "  shardctl checkpoint --verify /data/run1                 the latest; or one, by its path\n"
    "\n--every and --every-minutes: SIGTERM saves what is new once more, and ends with 0.\n"
    "\n"
    "--resume: stay whatever happens to daemons. Where one comes back without the model, or all "
    "do,\n"
    "because their host was lost, all go back to DIR's latest; so they do where it begins and "
    "none\n"
    "has the model. Workers end before, and are to be started again. What somebody drops stays\n"
    "dropped. SIGTERM ends it at once: what is new since the last one is not saved.\n"
    "\n"
    "exit codes:\n"
    "  0        saved, listed, good\n"
    "  1        nothing was saved, or what was saved is damaged; the reason is on stderr\n"
    "  2        the command line was wrong\n"
    "  128 + N  signal N (Ctrl-C: 130) ended it at once; nothing half saved is left\n";

struct ask {
    const char *dir, *address, *model;
    uint32_t keep, every, every_minutes;
    bool json, list, verify, resume;
};

static bool stays(const struct ask *ask)
{
    return ask->every > 0 || ask->every_minutes > 0;
}

static volatile sig_atomic_t stopped; /* SIGTERM came, to one that stays */

static void stop(int sig)
{
    stopped = sig;
}

/* -- Saving -------------------------------------------------------------------------------------
 */

struct saved {
    struct shd_checkpointed what;
    const char *model;
    double seconds;
};

static void print_saved(const struct ask *ask, const struct saved *s)
{
    if (ask->json) {
        json_t *o = json_pack("{s:s, s:s, s:I, s:I, s:I, s:s, s:f}", "name", s->what.name, "model",
                              s->model, "step", (json_int_t)s->what.step, "updates",
                              (json_int_t)s->what.updates, "bytes", (json_int_t)s->what.bytes,
                              "sha256", s->what.digest, "seconds", s->seconds);
        verb_json(o, JSON_COMPACT, stdout);
    } else {
        printf("saved %s/%s model=%s bytes=%" PRIu64 " seconds=%.3f digest sha256:%s\n", ask->dir,
               s->what.name, s->model, s->what.bytes, s->seconds, s->what.digest);
    }
    fflush(stdout);
}

static uint64_t saved_step = UINT64_MAX; /* the last one that was */

struct still {
    uint64_t step, since_ns;
};

/* It has been at one step before `step` for STILL_NS. */
static bool stands_still(struct still *still, shd_model *m, uint64_t step)
{
    const uint64_t now = save_step(m);
    if (now != still->step)
        *still = (struct still){ .step = now, .since_ns = clock_now_ns() };
    return now < step && clock_now_ns() - still->since_ns >= STILL_NS;
}

/* Save the open step, or `step` when it comes. Unless it is the last one it is given up when we are
 * told to stop, and where training stands still before `step`: who saves now and then holds DIR's
 * lock, which somebody may want who saves what training has ended with. *ret_done: it is saved. */
static int save_once(const struct ask *ask, shd_model *m, uint64_t step, bool last, bool *ret_done,
                     struct shd_err *e)
{
    const struct shd_checkpoint_options options = { .size = sizeof options,
                                                    .keep = ask->keep,
                                                    .step = step };
    const struct meter_ask how_far = { METER_CHECKPOINT, ask->address, ask->json };
    struct saved s = { .what.size = sizeof s.what, .model = shd_model_name(m) };
    bool done = false;
    uint64_t start_ns = clock_now_ns();
    struct still still = { .step = save_step(m), .since_ns = start_ns };
    int r = shd_checkpoint_begin(m, ask->dir, &options, e);
    /* While training goes on nobody waits for it. */
    struct meter *meter = stays(ask) && !last ? NULL : meter_begin(&how_far);
    while (r == SHD_OK && !done && (last || !(stopped || stands_still(&still, m, step)))) {
        if (save_step(m) < step)
            start_ns = clock_now_ns();
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
        r = shd_checkpoint_poll(m, &done, &s.what, e);
    }
    s.seconds = (double)(clock_now_ns() - start_ns) * 1e-9;
    meter_end(meter);
    *ret_done = r == SHD_OK && done;
    if (r == SHD_OK && !done) { /* break it off */
        save_free(m->saving);
        m->saving = NULL;
    }
    if (r == SHD_OK && done) {
        saved_step = s.what.step;
        print_saved(ask, &s);
    }
    return r;
}

/* Between two looks at the daemons; how fast steps are, smoothed. */
struct pace {
    uint64_t step, at_ns;
    double steps_per_ns;
};

static void look(struct pace *p, uint64_t step)
{
    const uint64_t now_ns = clock_now_ns();
    if (step == p->step)
        return;
    if (step > p->step && now_ns > p->at_ns)
        p->steps_per_ns = (double)(step - p->step) / (double)(now_ns - p->at_ns);
    p->step = step;
    p->at_ns = now_ns;
}

struct due {
    uint64_t last_step, last_ns; /* of the one before; last_ns 0: nobody has looked yet */
    uint64_t given_up;           /* it was, at this step; UINT64_MAX: not */
};

/* Wait until it is time to ask; *ret_step: for what. SHD_OK also when stopped. */
static int wait_due(const struct ask *ask, shd_model *m, const struct due *d, uint64_t *ret_step,
                    struct shd_err *e)
{
    struct pace pace = { save_step(m), clock_now_ns(), 0 };
    const uint64_t due = ask->every > 0 ? (d->last_step / ask->every + 1) * ask->every : 0;
    while (!stopped) {
        const int r = hub_poll(m->session->hub, LOOK_NS, e);
        if (r != SHD_OK)
            return r;
        const uint64_t step = save_step(m);
        look(&pace, step);
        const uint64_t ahead = 1 + (uint64_t)(pace.steps_per_ns * (double)AHEAD_NS);
        if (ask->every > 0 && step + ahead >= due && step != d->given_up) {
            *ret_step = due;
            return SHD_OK;
        }
        if (ask->every_minutes > 0 && step > d->last_step &&
            clock_now_ns() - d->last_ns >= ask->every_minutes * NS_PER_MIN) {
            *ret_step = 0;
            return SHD_OK;
        }
    }
    return SHD_OK;
}

/* Until the daemons are gone, or we are told to stop: both are a good end. SHD_PENDING: what was
 * asked for is given up, as daemons do when its session ends; then on with the same `due`. */
static int save_on(const struct ask *ask, shd_model *m, struct due *due, struct shd_err *e)
{
    bool done = true;
    int r = SHD_OK;
    if (due->last_ns == 0 || save_step(m) < due->last_step)
        *due = (struct due){ save_step(m), clock_now_ns(), UINT64_MAX };
    while (!stopped) {
        uint64_t step = 0;
        r = wait_due(ask, m, due, &step, e);
        if (r == SHD_OK && !stopped)
            r = save_once(ask, m, step, /* last= */ false, &done, e);
        if (r != SHD_OK && (ask->resume || hub_check(m->session->hub, NULL) != SHD_OK))
            break;
        if (r != SHD_OK) /* training goes on, and the next one may succeed */
            ctl_say("not saved: %s", e->text);
        due->given_up = r == SHD_OK && !done ? save_step(m) : UINT64_MAX;
        if (due->given_up != UINT64_MAX && !stopped)
            return SHD_PENDING;
        due->last_step = save_step(m) > step ? save_step(m) : step;
        due->last_ns = clock_now_ns();
    }
    if (stopped && !ask->resume && save_step(m) != saved_step) /* what came since then, too */
        return save_once(ask, m, 0, /* last= */ true, &done, e);
    return stopped || r == SHD_EGONE ? SHD_OK : r;
}

/* The model may be yet to come: workers start as we do. */
static int attach(const struct ask *ask, shd_session *s, shd_model **ret_model, struct shd_err *e)
{
    int r = shd_model_attach(s, ask->model, ret_model, e);
    while (stays(ask) && r == SHD_ENOENT && !stopped && s->hub != NULL) {
        r = hub_poll(s->hub, LOOK_NS, e);
        if (r == SHD_OK)
            r = shd_model_attach(s, ask->model, ret_model, e);
    }
    return stopped && r == SHD_ENOENT ? SHD_PENDING : r;
}

int checkpoint_save(struct shd_session *s, const struct checkpoint_save *what, struct shd_err *e)
{
    const struct ask ask = { .dir = what->dir, .address = what->address, .model = what->model };
    shd_model *m = NULL;
    bool done;
    int r = attach(&ask, s, &m, e);
    if (r == SHD_OK)
        r = save_once(&ask, m, 0, /* last= */ true, &done, e);
    shd_model_close(m);
    return r;
}

/* One session. SHD_PENDING: another one is to go on. */
static int save_in_session(const struct ask *ask, struct due *due, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl checkpoint",
                                         .timeout_ms = stays(ask) ? TIMEOUT_MS : VERB_TIMEOUT_MS };
    shd_session *s;
    shd_model *m = NULL;
    bool done;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    r = attach(ask, s, &m, e);
    if (r == SHD_PENDING) { /* told to stop before there was anything */
        shd_close(s);
        return SHD_OK;
    }
    if (r == SHD_OK && m->map == NULL)
        r = err_set(e, SHD_ENOTSUP, "\"local:\" does not save: run daemons");
    if (r == SHD_OK)
        r = stays(ask) ? save_on(ask, m, due, e) : save_once(ask, m, 0, /* last= */ true, &done, e);
    shd_model_close(m);
    shd_close(s);
    return r;
}

static int save(const struct ask *ask, struct shd_err *e)
{
    struct due due = { .last_ns = 0 };
    int r;
    while ((r = save_in_session(ask, &due, e)) == SHD_PENDING)
        ;
    return r;
}

/* Until a session ends, or we are told to stop. */
static int save_and_resume_once(const struct ask *ask, struct recover *rec, struct due *due,
                                struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = ask->address,
                                         .name = "shardctl checkpoint",
                                         .timeout_ms = RESUME_MS };
    shd_session *s;
    shd_model *m = NULL;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    if (s->hub == NULL)
        r = err_set(e, SHD_ENOTSUP, "\"local:\" does not save: run daemons");
    if (r == SHD_OK)
        r = recover_model(rec, s, &stopped, e);
    if (r == SHD_OK)
        r = attach(ask, s, &m, e);
    if (r == SHD_OK)
        rec->said.text[0] = '\0';
    if (r == SHD_OK)
        r = save_on(ask, m, due, e);
    shd_model_close(m);
    shd_close(s);
    return r;
}

/* Daemons are waited for, whatever happens to them. */
static int save_and_resume(const struct ask *ask, struct shd_err *e)
{
    struct recover rec = { .dir = ask->dir, .model = ask->model, .json = ask->json };
    struct due due = { .last_ns = 0 };
    int r = SHD_OK;
    while (!stopped && r != SHD_ENOTSUP) {
        r = save_and_resume_once(ask, &rec, &due, e);
        if (r != SHD_OK && r != SHD_PENDING)
            recover_say(&rec, e);
        if (!stopped)
            nanosleep(&(struct timespec){ .tv_nsec = AGAIN_NS }, NULL);
    }
    recover_deinit(&rec);
    return r == SHD_ENOTSUP ? r : SHD_OK;
}

static int save_guarded(void *arg)
{
    const struct ask *ask = arg;
    struct shd_err e = { 0 };
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes is an error with a name */
    const int r = ask->resume ? save_and_resume(ask, &e) : save(ask, &e);
    return r == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}

/* -- Looking ------------------------------------------------------------------------------------
 */

static void print_entry(const struct ask *ask, const struct checkpoint_entry *entry,
                        const char *latest)
{
    char at[32] = "";
    const time_t seconds = (time_t)(entry->saved_ns / 1000000000);
    struct tm tm;
    const bool is_latest = strcmp(entry->name, latest) == 0;
    if (localtime_r(&seconds, &tm) != NULL)
        strftime(at, sizeof at, "%Y-%m-%d %H:%M:%S", &tm);
    if (!ask->json) {
        printf("%s  %s%s\n", entry->name, at, is_latest ? "  latest" : "");
        return;
    }
    json_t *o = json_pack("{s:s, s:I, s:I, s:b}", "name", entry->name, "step",
                          (json_int_t)entry->step, "time", (json_int_t)seconds, "latest",
                          is_latest);
    verb_json(o, JSON_COMPACT, stdout);
}

static int list(const struct ask *ask, struct shd_err *e)
{
    char latest[CHECKPOINT_NAME_BYTES] = "";
    struct checkpoint_entry *entries = NULL;
    uint32_t count = 0;
    const int fd = open(ask->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, SHD_ENOENT, "open directory '%.150s'", ask->dir);
    int r = checkpoint_dir_list(fd, &entries, &count, e);
    if (r == SHD_OK && count > 0)
        r = checkpoint_dir_newest(fd, latest, e);
    for (uint32_t i = 0; i < count; i++)
        print_entry(ask, &entries[i], latest);
    free(entries);
    close(fd);
    return r;
}

static int verify(const struct ask *ask, struct shd_err *e)
{
    struct checkpoint_verified v;
    const int r = checkpoint_verify(ask->dir, &v, e);
    if (r != SHD_OK)
        return r;
    if (!ask->json) {
        printf("good model=%s step=%" PRIu64 " updates=%" PRIu64 " bytes=%" PRIu64
               " digest sha256:%s\n",
               v.model, v.step, v.updates, v.bytes, v.digest);
        if (!v.summed)
            ctl_say("note: " CKPT_INFO " has no checksum, an older build wrote it: damage to the "
                    "blob, the decision or the spec's words may go unseen");
        return SHD_OK;
    }
    json_t *o = json_pack("{s:s, s:I, s:I, s:I, s:s, s:b}", "model", v.model, "step",
                          (json_int_t)v.step, "updates", (json_int_t)v.updates, "bytes",
                          (json_int_t)v.bytes, "sha256", v.digest, "checksum", v.summed);
    verb_json(o, JSON_COMPACT, stdout);
    return SHD_OK;
}

/* -- The verb -----------------------------------------------------------------------------------
 */

static int check_ask(const struct ask *ask, struct shd_err *e)
{
    if (ask->dir == NULL)
        return err_set(e, SHD_EINVAL, "no directory: shardctl checkpoint DIR");
    if (ask->list && ask->verify)
        return err_set(e, SHD_EINVAL, "--list and --verify: one at a time");
    if ((ask->list || ask->verify) && (stays(ask) || ask->keep > 0))
        return err_set(e, SHD_EINVAL, "--list and --verify only look");
    if (ask->every > 0 && ask->every_minutes > 0)
        return err_set(e, SHD_EINVAL, "--every and --every-minutes: one at a time");
    if (ask->resume && !stays(ask))
        return err_set(e, SHD_EINVAL,
                       "--resume is of one that stays: with --every or "
                       "--every-minutes; `shardctl restore` restores once");
    return SHD_OK;
}

/* DIR may stand before the flags or behind them. */
static int parse(int argc, char **argv, struct ask *ask)
{
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask->address),
        { "model", 'm', FLAG_STRING, "NAME", "which model (the only one there)", &ask->model, 0,
          0 },
        { "keep", 'k', FLAG_U32, "N", "then remove the oldest but N (keep all)", &ask->keep, 1,
          1000000 },
        { "every", 0, FLAG_U32, "STEPS", "stay, and save at every multiple of STEPS", &ask->every,
          1, UINT32_MAX },
        { "every-minutes", 0, FLAG_U32, "M", "stay, and save every M minutes", &ask->every_minutes,
          1, 1000000 },
        { "resume", 0, FLAG_BOOL, NULL,
          "restore the latest where daemons have lost the model (see below)", &ask->resume, 0, 0 },
        { "list", 'l', FLAG_BOOL, NULL, "list what is in DIR, the oldest first", &ask->list, 0, 0 },
        { "verify", 0, FLAG_BOOL, NULL, "check every byte of a checkpoint, without daemons",
          &ask->verify, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object a line", &ask->json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(checkpoint, "shardctl checkpoint DIR [FLAGS]", table);
    const char *more;
    const int code = verb_start_word(&flags, argc, argv, &ask->dir, &more);
    if (code >= 0)
        return code;
    if (more != NULL)
        return ctl_usage("one directory at a time, got '%s' as well", more);
    return -1;
}

int verb_checkpoint(int argc, char **argv)
{
    struct ask ask = { .dir = NULL };
    struct shd_err e = { 0 };
    const int code = parse(argc, argv, &ask);
    if (code >= 0)
        return code;
    if (check_ask(&ask, &e) != SHD_OK)
        return ctl_usage("%s", e.text);
    if (!ask.list && !ask.verify)
        return guard_run(&(struct guarded){ .work = save_guarded,
                                            .arg = &ask,
                                            .on_term = stays(&ask) ? stop : NULL,
                                            .dir = ask.dir,
                                            .broken = "not saved; training goes on" });
    const int r = ask.list ? list(&ask, &e) : verify(&ask, &e);
    return r == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}
