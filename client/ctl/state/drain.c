/* shardctl drain: end daemons between two steps.
 *
 * Happy path: ask each to begin no further step (Drain); when all are between two steps save the
 * model, if asked to; SIGTERM to each, through a handle of the very process we are connected to;
 * wait until they are gone. Daemons decide one by one which step does not begin any more; those
 * that hold at a lower one than another are asked again (drain.h).
 *
 * Failure: with the session the drain ends, and training goes on as if nothing had been. Where we
 * may not signal a unit of systemd (a member of its group may drain it) we say what somebody else
 * has to run, and wait. */
#include "client/ctl/state/drain.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/status_doc.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/state/checkpoint.h"
#include "client/ctl/state/guard.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "client/session/where.h"
#include "proto/base/clock.h"

#define POLL_NS   UINT64_C(20000000)
#define LOOK_NS   UINT64_C(200000000) /* between two looks whether all hold at one step */
#define STEPS_MAX 0x1p63
#define NAMES_MAX 8u /* sessions that are named */

static const char drain_about[] =
    "End daemons without losing anything: no new sessions, the step under way is finished, no\n"
    "further one begins; then save each model, if asked to, and stop. Workers end with "
    "\"draining\".\n"
    "Until the daemons are told to stop all can be taken back: with Ctrl-C or after the timeout\n"
    "training goes on where it was held.";

static const char drain_more[] = VERB_WHERE
    "\n"
    "Drained daemons are not started again by `shardctl run`, `shardctl up` or systemd; their "
    "memory is given back, so save it.\n"
    "Who is neither root nor the daemons' user cannot stop them: then drain says what to have "
    "run,\n"
    "and waits for it.\n"
    "\n"
    "example:\n"
    "  shardctl drain --checkpoint /data/run1\n"
    "\n"
    "exit codes:\n"
    "  0  drained: they are gone\n"
    "  1  not in time, or not saved; the reason is on stderr\n"
    "  2  the command line was wrong\n"
    "  128 + N  signal N (Ctrl-C: 130) ended it at once\n";

struct ask {
    const char *dir, *checkpoint;
    char **devices; /* borrowed, device_count of them; none: all */
    int device_count;
    uint32_t timeout_s;
};

struct drained { /* of one daemon */
    bool done;
    int status;
    char text[SHD_ERR_TEXT_BYTES];
    uint64_t hold_step; /* highest of its models */
    int pidfd;          /* owned; -1: none */
};

struct drain {
    const struct ask *ask;
    const char *address; /* borrowed: the session's */
    shd_session *session;
    struct hub *hub;
    struct drained *daemons; /* owned, [hub->link_count] */
    uint64_t deadline_ns;
};

/* -- Between two steps --------------------------------------------------------------------------
 */

static int make_drain(struct link *link, const struct call *call, struct wire_request *ret_request,
                      struct shd_err *e)
{
    (void)link;
    (void)call;
    (void)e;
    ret_request->type = WIRE_DRAIN;
    return SHD_OK;
}

static void take_drain(struct link *link, const struct call *call, const struct wire_reply *reply)
{
    struct drained *d = call->ctx;
    (void)link;
    d->done = true;
    d->status = reply->status;
    snprintf(d->text, sizeof d->text, "%s", reply->text);
}

static int ask_one(struct drain *dr, uint32_t owner, struct shd_err *e)
{
    struct drained *d = &dr->daemons[owner];
    const struct call call = { .make = make_drain, .fn = take_drain, .ctx = d };
    d->done = false;
    return hub_ask(&dr->hub->links[owner], &call, e);
}

/* The status of owner's daemon. NULL: not to be had. */
static struct doc *status_of(struct drain *dr, uint32_t owner)
{
    struct shd_err ignored;
    struct doc *doc = NULL;
    char *text = NULL;
    if (shd_status(dr->session, owner, &text, &ignored) != SHD_OK ||
        doc_parse(text, strlen(text), /* with_tools= */ true, &doc, NULL, &ignored) != SHD_OK)
        doc = NULL;
    free(text);
    return doc;
}

static void look_at(struct drain *dr, uint32_t owner)
{
    struct doc *doc = status_of(dr, owner);
    for (uint32_t i = 0; doc != NULL && i < doc->model_count; i++) {
        const double hold = doc->models[i].hold_step;
        if (hold > (double)dr->daemons[owner].hold_step && hold < STEPS_MAX)
            dr->daemons[owner].hold_step = (uint64_t)hold;
    }
    doc_free(doc);
}

/* Some are done, others wait for a step that the first hold back: let it through there. */
static int ask_again(struct drain *dr, struct shd_err *e)
{
    uint64_t highest = 0;
    int r = SHD_OK;
    for (uint32_t i = 0; i < dr->hub->link_count; i++) {
        dr->daemons[i].hold_step = 0;
        look_at(dr, i);
        if (dr->daemons[i].hold_step > highest)
            highest = dr->daemons[i].hold_step;
    }
    for (uint32_t i = 0; r == SHD_OK && i < dr->hub->link_count; i++)
        if (dr->daemons[i].done && dr->daemons[i].hold_step < highest)
            r = ask_one(dr, i, e);
    return r;
}

static uint32_t count_done(const struct drain *dr)
{
    uint32_t done = 0;
    for (uint32_t i = 0; i < dr->hub->link_count; i++)
        done += dr->daemons[i].done;
    return done;
}

static int refused(const struct drain *dr, struct shd_err *e)
{
    for (uint32_t i = 0; i < dr->hub->link_count; i++)
        if (dr->daemons[i].done && dr->daemons[i].status != SHD_OK)
            return link_err(&dr->hub->links[i], dr->daemons[i].status, e, "refuses: %s",
                            dr->daemons[i].text);
    return SHD_OK;
}

/* Names the workers that have gradients to deliver on a daemon that is not done. */
static void add_workers(struct drain *dr, uint32_t owner, char *text, size_t bytes)
{
    struct doc *doc = status_of(dr, owner);
    uint32_t named = 0;
    for (uint32_t i = 0; doc != NULL && i < doc->session_count; i++) {
        const struct doc_session *s = &doc->sessions[i];
        const size_t used = strlen(text);
        if (!(s->slots > 0) || named++ >= NAMES_MAX)
            continue;
        snprintf(text + used, bytes - used, "%s %s (pid %.0f)", named > 1 ? "," : ":", s->name,
                 s->pid);
    }
    doc_free(doc);
}

static int timed_out(struct drain *dr, struct shd_err *e)
{
    char text[200] = "";
    uint32_t first = 0;
    while (first + 1 < dr->hub->link_count && dr->daemons[first].done)
        first++;
    add_workers(dr, first, text, sizeof text);
    return err_set(
        e, SHD_ETIMEDOUT, "device %s is in a step still after %" PRIu32 " s (--timeout)%s%s",
        dr->hub->links[first].device, dr->ask->timeout_s, text[0] != '\0' ? "; at work" : "", text);
}

/* Wait until all daemons are between the same two steps. */
static int settle(struct drain *dr, struct shd_err *e)
{
    uint64_t look_ns = clock_now_ns() + LOOK_NS;
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < dr->hub->link_count; i++)
        r = ask_one(dr, i, e);
    while (r == SHD_OK && count_done(dr) < dr->hub->link_count) {
        const uint64_t now_ns = clock_now_ns();
        if (now_ns >= dr->deadline_ns)
            return timed_out(dr, e);
        r = hub_poll(dr->hub, POLL_NS, e);
        if (r == SHD_OK)
            r = refused(dr, e);
        if (r == SHD_OK && count_done(dr) > 0 && now_ns >= look_ns) {
            look_ns = now_ns + LOOK_NS;
            r = ask_again(dr, e);
        }
    }
    return r == SHD_OK ? refused(dr, e) : r;
}

/* -- Stopping -----------------------------------------------------------------------------------
 */

/* A handle of the process at the other end: it lives as long as the connection, so that a pid that
 * was read from it after the handle was opened is no later process's. */
static int open_process(struct link *link, int *ret_pidfd, struct shd_err *e)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    struct pollfd hung_up = { .fd = link->side_fd, .events = POLLRDHUP };
    const int fd = (int)syscall(SYS_pidfd_open, link->pid, 0);
    if (fd < 0)
        return link_err(link, SHD_EGONE, e, "cannot be watched: %s", strerror(errno));
    if (getsockopt(link->side_fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
        peer.pid == link->pid && poll(&hung_up, 1, 0) == 0) {
        *ret_pidfd = fd;
        return SHD_OK;
    }
    close(fd);
    return link_err(link, SHD_EGONE, e, "has gone");
}

/* True for a process of systemd's shardd@: somebody can stop it by its name. */
static bool is_unit(pid_t pid)
{
    char path[64], line[512];
    bool found = false;
    snprintf(path, sizeof path, "/proc/%ld/cgroup", (long)pid);
    FILE *f = fopen(path, "re");
    while (f != NULL && !found && fgets(line, sizeof line, f) != NULL)
        found = strstr(line, "/shardd@") != NULL;
    if (f != NULL)
        fclose(f);
    return found;
}

static int tell_to_stop(struct drain *dr, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < dr->hub->link_count; i++)
        r = open_process(&dr->hub->links[i], &dr->daemons[i].pidfd, e);
    if (r != SHD_OK)
        return r; /* none was told: all go on */
    for (uint32_t i = 0; i < dr->hub->link_count; i++) {
        struct link *link = &dr->hub->links[i];
        if (syscall(SYS_pidfd_send_signal, dr->daemons[i].pidfd, SIGTERM, NULL, 0) == 0 ||
            errno == ESRCH)
            continue;
        if (errno == EPERM && is_unit(link->pid)) /* a member of its group may drain it */
            ctl_say("device %s is drained, and not yours to stop; have somebody run: "
                    "systemctl stop shardd@%s",
                    link->device, link->device);
        else
            r = link_err(link, SHD_EAUTH, e, "cannot be stopped: %s", strerror(errno));
    }
    return r;
}

static int await_ends(struct drain *dr, struct shd_err *e)
{
    for (uint32_t i = 0; i < dr->hub->link_count; i++) {
        struct pollfd p = { .fd = dr->daemons[i].pidfd, .events = POLLIN };
        for (;;) {
            const uint64_t now_ns = clock_now_ns();
            const bool over = now_ns >= dr->deadline_ns;
            if (poll(&p, 1, over ? 0 : 100) > 0)
                break;
            if (over)
                return link_err(&dr->hub->links[i], SHD_ETIMEDOUT, e,
                                "is drained but did not stop in time (--timeout)");
        }
    }
    return SHD_OK;
}

/* -- The verb -----------------------------------------------------------------------------------
 */

/* One model is saved in DIR, each of several in DIR/NAME. Owner 0 has a part of each. */
static int save_models(struct drain *dr, struct shd_err *e)
{
    const char *dir = dr->ask->checkpoint;
    char path[PATH_MAX];
    struct doc *doc = status_of(dr, 0);
    if (doc == NULL)
        return err_set(e, SHD_EIO, "device %s does not say which models it has",
                       dr->hub->links[0].device);
    int r = SHD_OK;
    if (doc->model_count == 0)
        ctl_say("no model is open: nothing to save");
    if (doc->model_count > 1 && mkdir(dir, 0755) < 0 && errno != EEXIST)
        r = err_sys(e, SHD_EIO, "make directory '%.150s'", dir);
    for (uint32_t i = 0; r == SHD_OK && i < doc->model_count; i++) {
        const char *name = doc->models[i].name;
        const bool fits = snprintf(path, sizeof path, "%s/%s", dir, name) < (int)sizeof path;
        const bool alone = doc->model_count == 1;
        const struct checkpoint_save what = { dr->address, name, alone ? dir : path };
        if (alone || (fits && name[0] != '.')) /* "..", or one that hides, is no directory's name */
            r = checkpoint_save(dr->session, &what, e);
        else
            r = err_set(e, SHD_EINVAL, "model '%.60s' has no place in '%.100s': save it by itself",
                        name, dir);
        if (r != SHD_OK)
            err_prefix(e, "model '%.60s'", name);
    }
    doc_free(doc);
    return r;
}

static int drain(struct drain *dr, struct shd_err *e)
{
    int r = settle(dr, e);
    if (r == SHD_OK && dr->ask->checkpoint != NULL)
        r = save_models(dr, e);
    if (r == SHD_OK)
        r = tell_to_stop(dr, e);
    return r == SHD_OK ? await_ends(dr, e) : r;
}

/* "DIR" or "DIR?cpu0,cpu1". */
static int make_address(const struct ask *ask, char *address, size_t bytes, struct shd_err *e)
{
    struct where where;
    const int r = where_find(ask->dir, &where, e);
    const char *dir = where.address;
    if (r != SHD_OK)
        return r;
    size_t used = ask->device_count > 0 ? strcspn(dir, "?") : strlen(dir);
    int n = snprintf(address, bytes, "%.*s", (int)used, dir);
    for (int i = 0; i < ask->device_count && n >= 0 && (size_t)n < bytes; i++)
        n += snprintf(address + n, bytes - (size_t)n, "%c%s", i == 0 ? '?' : ',', ask->devices[i]);
    return n >= 0 && (size_t)n < bytes
               ? SHD_OK
               : err_set(e, SHD_ERANGE, "the address has more than %zu bytes", bytes - 1);
}

static int drain_all(const struct ask *ask, struct shd_err *e)
{
    char address[4096];
    struct drain dr = { .ask = ask,
                        .address = address,
                        .deadline_ns = clock_now_ns() + ask->timeout_s * NS_PER_S };
    const struct shd_options options = { .size = sizeof options,
                                         .address = address,
                                         .name = "shardctl drain",
                                         .timeout_ms = UINT64_C(1000) * ask->timeout_s };
    int r = make_address(ask, address, sizeof address, e);
    if (r == SHD_OK)
        r = shd_connect(&options, &dr.session, e);
    if (r != SHD_OK)
        return r;
    dr.hub = dr.session->hub;
    const uint32_t count = dr.hub != NULL ? dr.hub->link_count : 0;
    dr.daemons = calloc(count + 1u, sizeof *dr.daemons);
    for (uint32_t i = 0; dr.daemons != NULL && i < count; i++)
        dr.daemons[i].pidfd = -1;
    if (dr.hub == NULL)
        r = err_set(e, SHD_ENOTSUP, "\"local:\" has no daemons");
    else if (dr.daemons == NULL)
        r = err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " daemons", count);
    else
        r = drain(&dr, e);
    if (r == SHD_OK)
        printf("drained %" PRIu32 " daemon%s\n", count, count == 1 ? "" : "s");
    for (uint32_t i = 0; dr.daemons != NULL && i < count; i++) {
        hub_forget(dr.hub, &dr.daemons[i]);
        if (dr.daemons[i].pidfd >= 0)
            close(dr.daemons[i].pidfd);
    }
    shd_close(dr.session);
    free(dr.daemons);
    return r;
}

static int drain_guarded(void *arg)
{
    struct shd_err e = { 0 };
    return drain_all(arg, &e) == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}

static int parse(int argc, char **argv, struct ask *ask)
{
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask->dir),
        { "timeout", 0, FLAG_U32, "SECONDS", "how long it may take (60)", &ask->timeout_s, 1,
          86400 },
        { "checkpoint", 0, FLAG_STRING, "DIR",
          "save there, between step and end; several models in DIR/NAME each", &ask->checkpoint, 0,
          0 },
    };
    const struct flags flags = VERB_FLAGS(drain, "shardctl drain [DEVICE...] [FLAGS]", table);
    const int code = verb_start_words(&flags, argc, argv, &ask->device_count);
    if (code >= 0)
        return code;
    ask->devices = argv + 1;
    if (ask->device_count > 0 && ask->checkpoint != NULL)
        return ctl_usage("--checkpoint saves whole models: name no device");
    return -1;
}

int verb_drain(int argc, char **argv)
{
    struct ask ask = { .timeout_s = 60 };
    const int code = parse(argc, argv, &ask);
    if (code >= 0)
        return code;
    return guard_run(&(struct guarded){
        .work = drain_guarded,
        .arg = &ask,
        .dir = ask.checkpoint,
        .broken = "training goes on where the daemons were not told to stop yet" });
}
