/* See http.h.
 *
 * libmicrohttpd bounds the number of connections, their memory and how long one may be without a
 * byte. Two things it has no limit for are kept here. At its number it accepts no further
 * connection, so that a crowd that connects and says nothing would shut others out: the newest
 * pushes out the oldest that has not asked anything. And each byte begins its timeout anew, so that
 * a request sent byte by byte would never end: it has 10 s in all, the answer 60 s. A user with 32
 * connections pushes out one of its own. A connection is
 * not closed here but shut down: libmicrohttpd then finds it ended and closes it. */
#include "daemon/view/http.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <microhttpd.h>
#include <uv.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/net/door.h"
#include "daemon/view/http_answer.h"
#include "daemon/view/tensor.h"
#include "daemon/view/view.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/listen.h"

#define SNAPSHOT_MS_MAX 200 /* a request waits for a snapshot */
#define TENSOR_MS_MAX   (TENSOR_WAIT_MS + 2000)
#define IDLE_S          5u
#define MEMORY_BYTES    8192u /* of a connection: its headers */
#define POLL_MS_MAX     1000
#define STATUS_MODE     0660
#define ASK_NS          (10000 * NS_PER_MS) /* from connecting to the end of the request */
#define ANSWER_NS       (60000 * NS_PER_MS) /* from connecting to the end of the answer */

/* -- Connections --------------------------------------------------------------------------------
 */

static void shut(struct http_conn *c)
{
    if (!c->shut && c->fd >= 0)
        shutdown(c->fd, SHUT_RDWR);
    c->shut = true;
}

/* The oldest connection that has not asked anything makes room for one too many. So a client that
 * connects and sends nothing is in the way of its like alone. uid: of this user; NULL: of any. */
static void make_room(struct http_conns *all, const int64_t *uid)
{
    struct http_conn *oldest = NULL;
    for (uint32_t i = 0; i < ARRAY_SIZE(all->items); i++) {
        struct http_conn *c = &all->items[i];
        if (c->connection == NULL || c->shut || c->suspended || (uid != NULL && c->uid != *uid))
            continue;
        if (oldest == NULL || (oldest->asked && !c->asked) ||
            (oldest->asked == c->asked && c->since_ns < oldest->since_ns))
            oldest = c;
    }
    if (oldest != NULL)
        shut(oldest);
}

static int64_t uid_of(int fd)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    /* A TCP socket answers too, with nobody. */
    const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.pid != 0;
    return known ? (int64_t)peer.uid : -1;
}

static uint32_t count_of(const struct http_conns *all, int64_t uid)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < ARRAY_SIZE(all->items); i++) {
        const struct http_conn *c = &all->items[i];
        count += c->connection != NULL && !c->shut && c->uid == uid;
    }
    return count;
}

/* NULL: no room; it is shut down. */
static struct http_conn *conn_add(struct http_conns *all, struct MHD_Connection *connection, int fd)
{
    struct http_conn *c = NULL;
    const int64_t uid = uid_of(fd);
    if (uid >= 0 && count_of(all, uid) >= (all->max + 1) / 2)
        make_room(all, &uid);
    else if (all->count >= all->max)
        make_room(all, NULL);
    for (uint32_t i = 0; i < ARRAY_SIZE(all->items) && c == NULL; i++)
        if (all->items[i].connection == NULL)
            c = &all->items[i];
    if (c == NULL) {
        shutdown(fd, SHUT_RDWR);
        return NULL;
    }
    *c = (struct http_conn){
        .connection = connection, .fd = fd, .uid = uid, .since_ns = uv_hrtime()
    };
    all->count++;
    return c;
}

static void conn_remove(struct http_conns *all, struct http_conn *c)
{
    if (c == NULL)
        return;
    CHECK(all->count > 0);
    all->traces -= c->traces;
    all->count--;
    all->removed = true;
    *c = (struct http_conn){ .fd = -1 };
}

/* Shut what has been there too long. Returns in how many ms to look again; -1: nothing to see. */
static int conns_sweep(struct http_conns *all, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;
    for (uint32_t i = 0; i < ARRAY_SIZE(all->items); i++) {
        struct http_conn *c = &all->items[i];
        if (c->connection == NULL || c->shut || c->suspended)
            continue;
        const uint64_t end_ns = c->since_ns + (c->asked ? ANSWER_NS : ASK_NS);
        if (end_ns <= now_ns)
            shut(c);
        else if (end_ns - now_ns < next_ns)
            next_ns = end_ns - now_ns;
    }
    return next_ns == UINT64_MAX ? -1 : (int)(next_ns / NS_PER_MS) + 1;
}

/* -- Called by libmicrohttpd, on our thread -----------------------------------------------------
 */

static void connection_changed(void *cls, struct MHD_Connection *connection, void **socket_context,
                               enum MHD_ConnectionNotificationCode code)
{
    struct http *h = cls;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) {
        conn_remove(&h->conns, *socket_context);
        *socket_context = NULL;
        return;
    }
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(
        connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    *socket_context = conn_add(&h->conns, connection, info != NULL ? info->connect_fd : -1);
}

static struct http_conn *conn_of(struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(
        connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    return info != NULL ? info->socket_context : NULL;
}

static enum http_kind kind_of(const struct http *h, struct MHD_Connection *connection)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection,
                                                                   MHD_CONNECTION_INFO_DAEMON);
    return info != NULL && info->daemon == h->servers[HTTP_TCP].mhd ? HTTP_TCP : HTTP_UNIX;
}

static enum MHD_Result requested(void *cls, struct MHD_Connection *connection, const char *url,
                                 const char *method, const char *version, const char *upload,
                                 size_t *upload_bytes, void **request)
{
    struct http *h = cls;
    struct http_conn *c = conn_of(connection);
    (void)version;
    (void)upload;
    if (c == NULL)
        return MHD_NO;
    if (*request == NULL) { /* the headers are in; the next call may answer */
        *request = c;
        c->asked = true;
        return MHD_YES;
    }
    if (*upload_bytes > 0)
        return MHD_NO; /* nothing here takes a body */
    switch (http_answer(h, kind_of(h, connection), c, url, method)) {
    case HTTP_ANSWERED:
        return MHD_YES;
    case HTTP_WAIT:
        c->suspended = true;
        MHD_suspend_connection(connection);
        return MHD_YES;
    case HTTP_FAILED:
        break;
    }
    return MHD_NO;
}

/* -- The thread ---------------------------------------------------------------------------------
 */

/* Requests that wait for a snapshot go on when there is one, or when they have waited long enough:
 * http_answer() sees which. */
static int resume_waiting(struct http *h, bool published, uint64_t now_ns)
{
    int next_ms = -1;
    for (uint32_t i = 0; i < ARRAY_SIZE(h->conns.items); i++) {
        struct http_conn *c = &h->conns.items[i];
        if (c->connection == NULL || !c->suspended)
            continue;
        const uint64_t waited_ms = (now_ns - c->wait_ns) / NS_PER_MS;
        const int most_ms = c->tensor != 0 ? TENSOR_MS_MAX : SNAPSHOT_MS_MAX;
        if (published || waited_ms >= (uint64_t)most_ms) {
            c->suspended = false;
            MHD_resume_connection(c->connection);
            next_ms = 0;
        } else if (next_ms < 0 || most_ms - (int)waited_ms < next_ms) {
            next_ms = most_ms - (int)waited_ms;
        }
    }
    return next_ms;
}

static int earlier(int a_ms, int b_ms)
{
    if (a_ms < 0 || b_ms < 0)
        return a_ms < 0 ? b_ms : a_ms;
    return a_ms < b_ms ? a_ms : b_ms;
}

static int poll_ms(struct http *h, bool published)
{
    const uint64_t now_ns = uv_hrtime();
    int ms = earlier(conns_sweep(&h->conns, now_ns), resume_waiting(h, published, now_ns));
    for (int i = 0; i < HTTP_KINDS; i++) {
        MHD_UNSIGNED_LONG_LONG wanted_ms;
        if (h->servers[i].mhd == NULL || MHD_get_timeout(h->servers[i].mhd, &wanted_ms) != MHD_YES)
            continue;
        ms = earlier(ms, wanted_ms < POLL_MS_MAX ? (int)wanted_ms : POLL_MS_MAX);
    }
    if (h->conns.removed) /* at its limit it listens no more, and nothing else would wake it */
        ms = 0;
    h->conns.removed = false;
    return ms;
}

static void *serve(void *arg)
{
    struct http *h = arg;
    const struct view *v = h->daemon->view;
    bool published = false;
    while (!atomic_load(&h->stop)) {
        struct pollfd fds[1 + HTTP_KINDS] = { { .fd = v->event_fd, .events = POLLIN } };
        for (int i = 0; i < HTTP_KINDS; i++)
            fds[1 + i] = (struct pollfd){ .fd = h->servers[i].epoll_fd, .events = POLLIN };
        const int ready = poll(fds, ARRAY_SIZE(fds), poll_ms(h, published));
        if (ready < 0 && errno != EINTR)
            log_error("op=http why=\"poll: %s\" do=\"restart the daemon if /status stays slow\"",
                      strerror(errno));
        uint64_t count;
        published = read(v->event_fd, &count, sizeof count) == (ssize_t)sizeof count;
        for (int i = 0; i < HTTP_KINDS; i++)
            if (h->servers[i].mhd != NULL)
                MHD_run(h->servers[i].mhd);
    }
    return NULL;
}

/* -- Starting and ending ------------------------------------------------------------------------
 */

/* The socket is of our user and of the directory's group: more people may look than may train. */
static int set_access(const struct daemon *d, const char *path, struct shd_err *e)
{
    struct stat st;
    if (stat(d->runtime_dir, &st) != 0)
        return err_sys(e, SHD_EIO, "look at '%s'", d->runtime_dir);
    if (st.st_gid != getegid() && chown(path, (uid_t)-1, st.st_gid) != 0)
        log_warn("op=http path=%s why=\"give it to group %u: %s\" do=\"chgrp it, or members of the "
                 "group cannot read the status\"",
                 path, (unsigned)st.st_gid, strerror(errno));
    if (chmod(path, STATUS_MODE) != 0)
        return err_sys(e, SHD_EIO, "set the mode of '%s'", path);
    return SHD_OK;
}

static int open_unix(struct http *h, int *ret_fd, struct shd_err *e)
{
    const struct daemon *d = h->daemon;
    char path[sizeof h->path];
    snprintf(path, sizeof path, "%s/%s.status", d->runtime_dir, d->device);
    unlink(path); /* the device lock is ours: a file here is stale */
    const int r = listen_unix(path, ret_fd, e);
    if (r != SHD_OK)
        return r;
    memcpy(h->path, path, sizeof path); /* ours to remove from here on */
    return set_access(d, path, e);
}

static int open_tcp(const char *address, struct http_server *server, struct shd_err *e)
{
    bool remote = false;
    const int r = listen_tcp(address, LISTEN_NAMES | LISTEN_REMOTE, &server->listen_fd, &remote, e);
    if (r != SHD_OK)
        return err_prefix(e, "--status-address");
    server->loopback = !remote;
    if (remote)
        log_warn("op=http address=%s why=\"others can read names, pids and progress there\" "
                 "do=\"use a loopback address, or a firewall\"",
                 address);
    return SHD_OK;
}

static int start_server(struct http *h, enum http_kind kind, struct shd_err *e)
{
    struct http_server *server = &h->servers[kind];
    server->mhd = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME, 0, NULL, NULL, requested, h,
        MHD_OPTION_LISTEN_SOCKET, (MHD_socket)server->listen_fd, MHD_OPTION_CONNECTION_LIMIT,
        h->conns.max + HTTP_SPARE, MHD_OPTION_CONNECTION_TIMEOUT, IDLE_S,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)MEMORY_BYTES, MHD_OPTION_NOTIFY_CONNECTION,
        connection_changed, h, MHD_OPTION_END);
    const union MHD_DaemonInfo *info = server->mhd != NULL
                                           ? MHD_get_daemon_info(server->mhd,
                                                                 MHD_DAEMON_INFO_EPOLL_FD)
                                           : NULL;
    if (info == NULL)
        return err_set(e, SHD_EIO, "start the HTTP server: %s", strerror(errno));
    server->epoll_fd = info->epoll_fd;
    return SHD_OK;
}

static int start_thread(struct http *h, struct shd_err *e)
{
    const int r = sys_thread(&h->thread, NULL, serve, h);
    if (r != 0)
        return err_set(e, SHD_EIO, "start the HTTP thread: %s", strerror(r));
    h->running = true;
    pthread_setname_np(h->thread, "shardd-http");
    return SHD_OK;
}

/* libmicrohttpd waits where descriptors run out, so it must not come to that. */
static uint32_t connections_max(void)
{
    const uint32_t kept = door_descriptors_kept() / 2;
    if (kept < 2 * HTTP_SPARE)
        return HTTP_CONNECTIONS_MIN;
    return kept - HTTP_SPARE < HTTP_CONNECTIONS ? kept - HTTP_SPARE : HTTP_CONNECTIONS;
}

int http_init(struct http *h, struct daemon *d, const char *address, struct shd_err *e)
{
    h->daemon = d;
    h->conns.max = connections_max();
    int r = open_unix(h, &h->servers[HTTP_UNIX].listen_fd, e);
    if (r == SHD_OK)
        r = start_server(h, HTTP_UNIX, e);
    if (r == SHD_OK && address != NULL)
        r = open_tcp(address, &h->servers[HTTP_TCP], e);
    if (r == SHD_OK && address != NULL)
        r = start_server(h, HTTP_TCP, e);
    return r == SHD_OK ? start_thread(h, e) : r;
}

static void stop_server(struct http_server *server)
{
    if (server->mhd != NULL)
        MHD_stop_daemon(server->mhd); /* closes the listening socket too */
    else if (server->listen_fd >= 0)
        close(server->listen_fd);
    *server = (struct http_server){ .listen_fd = -1, .epoll_fd = -1 };
}

void http_deinit(struct http *h)
{
    const uint64_t one = 1;
    if (h->running) {
        atomic_store(&h->stop, true);
        const ssize_t written = write(h->daemon->view->event_fd, &one, sizeof one);
        CHECK(written == (ssize_t)sizeof one || errno == EAGAIN);
        pthread_join(h->thread, NULL);
        h->running = false;
        resume_waiting(h, /* published= */ true, uv_hrtime());
    }
    for (int i = 0; i < HTTP_KINDS; i++)
        stop_server(&h->servers[i]);
    if (h->path[0] != '\0')
        unlink(h->path);
    h->path[0] = '\0';
}
