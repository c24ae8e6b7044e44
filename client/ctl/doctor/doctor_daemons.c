/* See doctor_daemons.h. */
#include "client/ctl/doctor/doctor_daemons.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "client/ctl/base/http.h"
#include "client/ctl/base/rundir.h"
#include "client/ctl/base/status_doc.h"
#include "client/ctl/base/text.h"
#include "client/ctl/doctor/doctor_check.h"
#include "client/session/where.h"
#include "client/shd.h"
#include "proto/base/dir.h"
#include "proto/share/cluster.h"
#include "proto/share/fdpass.h"

/* -- Service manager --------------------------------------------------------------------------- */

/* The service manager as keeper: its version, the descriptor store, the service's user. */

#define FDSTORE_VERSION  219 /* FDSTORE=1 */
#define PRESERVE_VERSION 254 /* FileDescriptorStorePreserve= */

/* "systemd 252 (252.39-1)" */
static int systemd_version(void)
{
    char line[128] = "";
    int version = 0;
    FILE *f = popen("systemctl --version 2>/dev/null", "re");
    if (f == NULL)
        return 0;
    if (fgets(line, sizeof(line), f) != NULL && strncmp(line, "systemd ", 8) == 0)
        version = atoi(line + 8);
    while (fgets(line, sizeof(line), f) != NULL)
        ; /* else it would see a closed pipe */
    pclose(f);
    return version;
}

static void check_manager(struct doctor *d)
{
    const int version = systemd_version();
    if (version == 0)
        doctor_ok(d, "no systemd: `shardctl run` and `up` keep the daemons' memory");
    else if (access("/run/systemd/system", F_OK) != 0)
        doctor_ok(d,
                  "systemd %d is installed, but did not start this system: `shardctl run` and "
                  "`up` keep the daemons' memory",
                  version);
    else if (version < FDSTORE_VERSION)
        doctor_warn(d, "start daemons by `shardctl run` or `up`",
                    "systemd %d cannot keep memory of a dead daemon, %d can", version,
                    FDSTORE_VERSION);
    else
        doctor_ok(d, "systemd %d keeps the memory of a daemon that died or restarts%s", version,
                  version < PRESERVE_VERSION ? "" : ", and of one that is stopped if asked to");
}

static bool in_group(gid_t gid)
{
    gid_t groups[1024];
    const int count = getgroups((int)(sizeof(groups) / sizeof(*groups)), groups);
    bool found = getegid() == gid;
    for (int i = 0; i < count && !found; i++)
        found = groups[i] == gid;
    return found;
}

/* The user comes with the package; without it nothing is wrong. */
static void check_user(struct doctor *d)
{
    const struct passwd *user = getpwnam("shardd");
    const struct group *group = getgrnam("shardd");
    if (user == NULL || group == NULL)
        return;
    if (geteuid() == 0 || geteuid() == user->pw_uid || in_group(group->gr_gid))
        doctor_ok(d, "the service's daemons run as shardd; this user may attach to them");
    else
        doctor_warn(d, "usermod -aG shardd USER, then log in anew",
                    "the service's daemons run as shardd; this user, uid %u, is not of that group "
                    "and may not attach to them",
                    (unsigned)geteuid());
}

void doctor_systemd(struct doctor *d)
{
    check_manager(d);
    check_user(d);
}

/* -- Runtime directory ------------------------------------------------------------------------- */

/* The runtime directory: its owner, those that can get in, and locks that nobody has. */

static void check_directory(struct doctor *d, const struct stat *st)
{
    const unsigned mode = (unsigned)st->st_mode & 07777u;
    if (!S_ISDIR(st->st_mode))
        doctor_fail(d, "remove it, or name another with --runtime-dir", "%s is not a directory",
                    d->runtime_dir);
    else if ((st->st_mode & S_IWOTH) != 0)
        doctor_fail(d, "chmod 0750 it", "%s has mode %04o: anyone can pose as a daemon",
                    d->runtime_dir, mode);
    else if ((st->st_mode & S_IWGRP) != 0)
        doctor_warn(d, "chmod 0750 it",
                    "%s has mode %04o: its group %u can pose as a daemon, so workers of other "
                    "users refuse to attach",
                    d->runtime_dir, mode, (unsigned)st->st_gid);
    else if (access(d->runtime_dir, R_OK | X_OK) != 0)
        doctor_fail(d, "become a member of its group, or run as its owner",
                    "%s (uid %u, group %u, mode %04o) is closed to this user, uid %u",
                    d->runtime_dir, (unsigned)st->st_uid, (unsigned)st->st_gid, mode,
                    (unsigned)geteuid());
    else
        doctor_ok(d, "%s: uid %u, group %u, mode %04o%s", d->runtime_dir, (unsigned)st->st_uid,
                  (unsigned)st->st_gid, mode,
                  (st->st_mode & S_IXGRP) != 0 ? " (members of the group may attach)" : "");
}

static bool ends_in(const char *name, const char *suffix)
{
    const char *dot = strrchr(name, '.');
    return dot != NULL && strcmp(dot, suffix) == 0;
}

/* The lock file of a daemon that ended stays there on purpose, so it is only counted. */
static void check_locks(struct doctor *d)
{
    DIR *dir = opendir(d->runtime_dir);
    unsigned held = 0, idle = 0;
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir)) {
        if (!ends_in(name, ".lock"))
            continue;
        if (lock_look(d->runtime_dir, name) == LOCK_FREE)
            idle++;
        else
            held++;
    }
    if (held + idle > 0)
        doctor_ok(d, "%u device%s locked by a daemon, %u lock file%s of ended ones (harmless)",
                  held, held == 1 ? "" : "s", idle, idle == 1 ? "" : "s");
}

void doctor_runtime(struct doctor *d)
{
    struct stat st;
    if (d->nowhere != NULL)
        doctor_warn(d, "name one directory with --address", "%s", d->nowhere);
    if (stat(d->runtime_dir, &st) == 0) {
        check_directory(d, &st);
        check_locks(d);
    } else if (errno == ENOENT) {
        doctor_ok(d, "no %s: no daemon was started there yet", d->runtime_dir);
    } else {
        doctor_fail(d, "run as a user that may look there", "%s: %s", d->runtime_dir,
                    strerror(errno));
    }
}

/* -- Sockets ----------------------------------------------------------------------------------- */

/* Each socket of the runtime directory: a daemon should answer there, of our version and with a
 * keeper. */

#define ANSWER_MS_MAX   5000
#define GREETING_MS     500
#define RELAY_BYTES_MAX ((size_t)4 << 20)

/* The version and the keeper of a daemon that answers. */
static void check_status(struct doctor *d, const char *device, const struct doc *doc)
{
    if (strcmp(doc->version, SHD_VERSION) != 0)
        doctor_warn(d, "restart the daemon (its keeper hands the state over), or use its shardctl",
                    "%s: shardd %s, this shardctl is %s", device, doc->version, SHD_VERSION);
    if (strcmp(doc->keeper, "none") == 0)
        doctor_warn(d, "start it by systemd (shardd@), `shardctl run` or `shardctl up`",
                    "%s: pid %.0f answers, %" PRIu32
                    " model%s; nothing keeps its state when it dies",
                    device, doc->pid, doc->model_count, doc->model_count == 1 ? "" : "s");
    else
        doctor_ok(d, "%s: pid %.0f answers, %" PRIu32 " model%s, keeper: %s", device, doc->pid,
                  doc->model_count, doc->model_count == 1 ? "" : "s", doc->keeper);
}

static void check_answers(struct doctor *d, const char *device)
{
    char address[PATH_MAX + 64];
    snprintf(address, sizeof(address), "%s?%s", d->runtime_dir, device);
    const struct shd_options options = { .size = sizeof(options),
                                         .address = address,
                                         .name = "shardctl doctor",
                                         .timeout_ms = ANSWER_MS_MAX };
    struct shd_err e = { 0 };
    shd_session *s;
    char *text = NULL;
    struct doc *doc = NULL;
    if (shd_connect(&options, &s, &e) != SHD_OK) {
        doctor_fail(d, "restart the daemon if it hangs; else what the text says", "%s: %s", device,
                    e.text);
        return;
    }
    if (shd_status(s, 0, &text, &e) == SHD_OK &&
        doc_parse(text, strlen(text), /* with_tools= */ true, &doc, NULL, &e) == SHD_OK)
        check_status(d, device, doc);
    else
        doctor_fail(d, "restart the daemon", "%s: no status: %s", device, e.text);
    doc_free(doc);
    free(text);
    shd_close(s);
}

static void check_socket(struct doctor *d, const char *device)
{
    char path[PATH_MAX];
    struct shd_err e = { 0 };
    int fd;
    snprintf(path, sizeof(path), "%s/%s.sock", d->runtime_dir, device);
    const int r = side_connect(path, &fd, &e);
    if (r == SHD_OK) {
        /* A daemon greets each connection, and logs it as a failure when nobody listens any more.
         */
        poll(&(struct pollfd){ .fd = fd, .events = POLLIN }, 1, GREETING_MS);
        close(fd);
        check_answers(d, device);
    } else if (r == SHD_EGONE) {
        doctor_warn(d, "start it again: the next daemon replaces the socket",
                    "%s: stale socket, its daemon was killed", device);
    } else if (r == SHD_EAUTH) {
        doctor_fail(d, "become a member of the directory's group, or run as its owner", "%s: %s",
                    device, e.text);
    } else {
        doctor_fail(d, "restart the daemon", "%s: %s", device, e.text);
    }
}

/* Its bulk is shown where it is known: another build's may be one that is not. One of before there
 * was a choice says none. */
static void check_relay_status(struct doctor *d, const char *body)
{
    json_t *status = json_loads(body, 0, NULL);
    const char *bulk = json_string_value(json_object_get(status, "bulk"));
    if (status == NULL)
        doctor_fail(d, "restart the relay", "relay: its /status is no JSON");
    else if (bulk != NULL && strcmp(bulk, CLUSTER_UCX_SAID) == 0)
        doctor_warn(d, "`shardctl keys bulk FILE tcp`, unless the hosts' network is theirs alone",
                    "relay: answers, bulk " CLUSTER_UCX_SAID);
    else if (bulk != NULL && strcmp(bulk, CLUSTER_TCP_SAID) != 0)
        doctor_warn(d, "use the relay's own shardctl",
                    "relay: answers, with a bulk not known here");
    else
        doctor_ok(d, "relay: answers, bulk " CLUSTER_TCP_SAID);
    json_decref(status);
}

/* The relay to other hosts, if there is one. */
static void check_relay(struct doctor *d)
{
    char path[PATH_MAX];
    struct http_client client;
    struct shd_err e = { 0 };
    snprintf(path, sizeof(path), "%s/relay.status", d->runtime_dir);
    if (access(path, F_OK) != 0 || http_client_init(&client, &e) != SHD_OK)
        return;
    struct http *h = http_start(&client, path, "/status", RELAY_BYTES_MAX, ANSWER_MS_MAX);
    http_client_run(&client);
    if (h != NULL && h->state == HTTP_DONE)
        check_relay_status(d, h->body);
    else if (h != NULL)
        doctor_warn(d, "restart the relay, if there is to be one", "relay: %s", h->err.text);
    http_free(h);
    http_client_deinit(&client);
}

void doctor_daemons(struct doctor *d)
{
    DIR *dir = opendir(d->runtime_dir);
    unsigned count = 0;
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir)) {
        char device[NAME_MAX + 1];
        if (!ends_in(name, ".sock") || strcmp(name, ".sock") == 0)
            continue;
        snprintf(device, sizeof(device), "%.*s", (int)(strlen(name) - strlen(".sock")), name);
        check_socket(d, device);
        count++;
    }
    if (count == 0)
        doctor_ok(d, "none in %s", d->runtime_dir);
    check_relay(d);
}

/* -- Leftovers --------------------------------------------------------------------------------- */

/* Leftovers of killed programs: directories of `shardctl run`, and memory that only a keeper holds.
 */

#define SEGMENT_PREFIX "/memfd:shardd"

/* Nobody holds the lock of a directory whose run was killed. */
static void check_run(const char *path, void *arg)
{
    if (lock_look(path, WHERE_LOCK) == LOCK_FREE)
        doctor_warn(arg, "the next `shardctl run` or `up` removes it",
                    "%s was left by a killed one", path);
}

struct holders {
    unsigned daemons, others;           /* processes with segments open */
    uint64_t daemon_bytes, other_bytes; /* counted once per holder */
    unsigned unreadable;                /* processes of other users */
    unsigned closed;                    /* of daemons: what these hold, root alone sees */
    char other[64];                     /* "systemd (pid 1)" */
};

static uint64_t segment_bytes(const char *fd_path)
{
    char target[300];
    struct stat st;
    const ssize_t n = readlink(fd_path, target, sizeof(target) - 1);
    if (n <= 0)
        return 0;
    target[n] = '\0';
    if (strncmp(target, SEGMENT_PREFIX, strlen(SEGMENT_PREFIX)) != 0 || stat(fd_path, &st) != 0)
        return 0;
    return (uint64_t)st.st_blocks * 512u; /* what is really there, not what is reserved */
}

static void count_process(struct holders *h, pid_t pid)
{
    char path[PATH_MAX], name[32] = "?";
    uint64_t bytes = 0;
    unsigned segments = 0;
    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    if (dir == NULL) {
        const bool closed = errno == EACCES && doctor_process_name(pid, name, sizeof(name)) &&
                            strcmp(name, "shardd") == 0;
        h->unreadable += errno == EACCES && !closed;
        h->daemons += closed;
        h->closed += closed;
        return;
    }
    for (const char *fd = dir_next(&dir); fd != NULL; fd = dir_next(&dir)) {
        char fd_path[PATH_MAX];
        snprintf(fd_path, sizeof(fd_path), "/proc/%d/fd/%s", (int)pid, fd);
        const uint64_t more = segment_bytes(fd_path);
        segments += more > 0;
        bytes += more;
    }
    if (segments == 0)
        return;
    doctor_process_name(pid, name, sizeof(name));
    if (strcmp(name, "shardd") == 0) {
        h->daemons++;
        h->daemon_bytes += bytes;
        return;
    }
    h->others++;
    h->other_bytes += bytes;
    snprintf(h->other, sizeof(h->other), "%s (pid %d)", name, (int)pid);
}

static void count_all(struct holders *h)
{
    DIR *dir = opendir("/proc");
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir)) {
        const int pid = atoi(name);
        if (pid > 0 && pid != getpid())
            count_process(h, pid);
    }
}

void doctor_leftovers(struct doctor *d)
{
    struct holders h = { 0 };
    char daemon_bytes[TEXT_BYTES], other_bytes[TEXT_BYTES];
    rundir_each(check_run, d);
    count_all(&h);
    const char *partly = h.closed > 0       ? "; what daemons hold, root alone can see"
                         : h.unreadable > 0 ? "; processes of other users could not be seen"
                                            : "";
    text_size(h.daemon_bytes, daemon_bytes);
    text_size(h.other_bytes, other_bytes);
    if (h.others > 0 && h.daemons == 0)
        doctor_warn(d, "start their daemons again, or let go: stop the units, or end the holder",
                    "%s of state held by %s without a daemon%s", other_bytes, h.other, partly);
    else if (h.daemons > 0)
        doctor_ok(d, "%s in segments of %u daemon%s, %u other process%s hold%s some%s",
                  daemon_bytes, h.daemons, h.daemons == 1 ? "" : "s", h.others,
                  h.others == 1 ? "" : "es", h.others == 1 ? "s" : "", partly);
    else
        doctor_ok(d, "no memory of daemons here%s", partly);
}
