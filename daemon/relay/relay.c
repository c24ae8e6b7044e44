/* See relay.h. */
#include "daemon/relay/relay.h"

#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/relay/bulk.h"
#include "daemon/relay/report.h"
#include "daemon/relay/routes.h"
#include "daemon/relay/serve.h"
#include "daemon/relay/stand_in.h"
#include "daemon/relay/strangers.h"
#include "daemon/relay/thread.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/fdpass.h"
#include "proto/share/listen.h"

#define DOORS_MAX  (2 * RELAY_DEVICES_MAX + 1)
#define SWEEP_MS   500
#define CROWDED_MS 50
#define WAITING_MS 10              /* somebody who has come is not heard yet */
#define SAID_NS    (10 * NS_PER_S) /* of those that are hung up on, a line so often */
#define PATH_BYTES (sizeof(((struct sockaddr_un *)NULL)->sun_path))

struct door {
    int fd; /* owned: listening */
    void (*main)(struct relay *relay, void *arg);
    char device[64];       /* "": of TCP */
    const char *host;      /* that has it; the routes' */
    char path[PATH_BYTES]; /* "": none to remove */
};

struct doors {
    struct door items[DOORS_MAX];
    uint32_t count;
};

/* -- Doors ------------------------------------------------------------------------------------- */

static int listen_at(struct door *door, struct shd_err *e)
{
    const bool side = door->main == stand_in_side;
    const int r = side ? side_listen(door->path, &door->fd, e)
                       : listen_unix(door->path, &door->fd, e);
    if (r == SHD_OK)
        chmod(door->path, 0660); /* as a daemon's: the directory says who gets there */
    return r;
}

static int open_unix(struct doors *doors, const char *dir, const struct route *route, bool side,
                     struct shd_err *e)
{
    CHECK(doors->count < DOORS_MAX);
    struct door *door = &doors->items[doors->count];
    *door = (struct door){ .main = side ? stand_in_side : stand_in_requests, .host = route->host };
    if (snprintf(door->path, sizeof door->path, "%s/%s.%s", dir, route->device,
                 side ? "sock" : "zmq") >= (int)sizeof door->path)
        return err_set(e, SHD_ERANGE, "'%.60s...' is too long for a socket's path", dir);
    snprintf(door->device, sizeof door->device, "%s", route->device);
    const int r = listen_at(door, e);
    doors->count += r == SHD_OK;
    return r;
}

/* Requests' socket first: a worker looks for the other one. */
static int open_stand_ins(struct doors *doors, const struct relay *relay, struct shd_err *e)
{
    int r = SHD_OK;
    for (uint32_t i = 0; r == SHD_OK && i < relay->routes->count; i++) {
        const struct route *route = &relay->routes->items[i];
        r = open_unix(doors, relay->config->runtime_dir, route, /* side= */ false, e);
        if (r == SHD_OK)
            r = open_unix(doors, relay->config->runtime_dir, route, /* side= */ true, e);
        if (r != SHD_OK)
            err_prefix(e, "in the stead of host '%s'", route->host);
    }
    return r;
}

static int open_tcp(struct doors *doors, const struct relay *relay, struct shd_err *e)
{
    struct door *door = &doors->items[doors->count];
    bool remote;
    *door = (struct door){ .main = serve_connection };
    const int r = listen_tcp(bulk_keys_address(relay->keys), LISTEN_NAMES | LISTEN_REMOTE,
                             &door->fd, &remote, e);
    doors->count += r == SHD_OK;
    return r;
}

/* Somebody may clear a runtime directory of the sockets of whatever is not a daemon, as `shardctl
 * up` of an older version does: they are made anew. */
static void look_after_doors(struct doors *doors)
{
    for (uint32_t i = 0; i < doors->count; i++) {
        struct door *door = &doors->items[i];
        struct shd_err e = { 0 };
        if (door->path[0] == '\0' || access(door->path, F_OK) == 0 || errno != ENOENT)
            continue;
        const int old = door->fd;
        if (listen_at(door, &e) == SHD_OK) {
            close(old);
            log_info("op=relay device=%s why=\"its socket was gone, and is there again\"",
                     door->device);
        }
    }
}

static void close_doors(struct doors *doors)
{
    for (uint32_t i = 0; i < doors->count; i++) {
        close(doors->items[i].fd);
        if (doors->items[i].path[0] != '\0')
            unlink(doors->items[i].path);
    }
}

static void *door_arg(const struct door *door, int fd)
{
    struct stand_in_door *arg = sys_malloc(sizeof *arg);
    if (arg != NULL) {
        arg->fd = fd;
        memcpy(arg->device, door->device, sizeof arg->device);
        arg->host = door->host;
    }
    return arg;
}

static bool is_tcp(const struct door *door)
{
    return door->main == serve_connection;
}

/* Whoever is kept waiting by it may be of the cluster: it is looked at again soon. */
static bool is_crowded(struct relay *relay, const struct door *door)
{
    return is_tcp(door) && strangers_are_crowded(relay->strangers);
}

/* arg: a heap's, NULL: there was no memory for it. False: fd is closed, arg is gone. */
static bool begin(struct relay *relay, void (*main)(struct relay *relay, void *arg), void *arg,
                  int fd)
{
    struct shd_err e = { 0 };
    const int r = arg != NULL ? relay_thread(relay, main, arg, &e)
                              : err_set(&e, SHD_ENOMEM, "no memory");
    if (r == SHD_OK)
        return true;
    log_warn("op=relay status=%s why=\"%s\" do=\"raise LimitNOFILE=, or let workers use fewer "
             "connections\"",
             status_name(r), e.text);
    free(arg);
    close(fd);
    return false;
}

static void say_hung_up(struct relay *relay, const struct sockaddr *address, socklen_t bytes)
{
    char name[NI_MAXHOST] = "?";
    const uint64_t now_ns = clock_now_ns();
    if (relay->hung_up_ns != 0 && now_ns - relay->hung_up_ns < SAID_NS)
        return;
    relay->hung_up_ns = now_ns;
    getnameinfo(address, bytes, name, sizeof name, NULL, 0, NI_NUMERICHOST);
    log_warn("op=relay why=\"%s has %u connections that have not said who they are: more are hung "
             "up on\" do=\"if it is no host of the cluster, keep it out by a firewall\"",
             name, STRANGERS_OF_ONE + STRANGERS_WAITING_OF_ONE);
}

static bool hear_strangers(struct relay *relay)
{
    struct stranger who;
    bool ok = true;
    while (ok && strangers_next(relay->strangers, &who)) {
        struct stranger *arg = sys_malloc(sizeof *arg);
        if (arg != NULL)
            *arg = who;
        ok = begin(relay, serve_connection, arg, who.fd);
        if (!ok)
            strangers_gone(relay->strangers, who.source);
    }
    return ok;
}

/* False: no descriptor, or no thread, is to be had now. */
static bool let_in(struct relay *relay, const struct door *door)
{
    struct sockaddr_storage from = { .ss_family = AF_UNSPEC };
    struct sockaddr *address = (struct sockaddr *)&from;
    socklen_t bytes = sizeof from;
    const int fd = accept4(door->fd, address, &bytes, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return errno == EAGAIN || errno == ECONNABORTED || errno == EINTR;
    if (!is_tcp(door))
        return begin(relay, door->main, door_arg(door, fd), fd);
    const struct stranger who = { stranger_source(address), fd };
    if (!strangers_come(relay->strangers, &who)) {
        say_hung_up(relay, address, bytes);
        close(fd);
    }
    return hear_strangers(relay);
}

static void serve_doors(struct relay *relay, struct doors *doors, int signal_fd,
                        void (*alive)(void))
{
    struct pollfd p[DOORS_MAX + 1];
    uint64_t looked_ns = clock_now_ns();
    for (;;) {
        bool ok = true, crowded = false;
        for (uint32_t i = 0; i < doors->count; i++) {
            const bool shut = is_crowded(relay, &doors->items[i]);
            p[i] = (struct pollfd){ .fd = doors->items[i].fd, .events = shut ? 0 : POLLIN };
            crowded |= shut;
        }
        p[doors->count] = (struct pollfd){ .fd = signal_fd, .events = POLLIN };
        const bool waits = strangers_wait(relay->strangers);
        poll(p, doors->count + 1, waits ? WAITING_MS : crowded ? CROWDED_MS : SWEEP_MS);
        if (p[doors->count].revents != 0)
            return;
        if (waits)
            ok = hear_strangers(relay);
        for (uint32_t i = 0; i < doors->count; i++)
            if (p[i].revents != 0)
                ok = let_in(relay, &doors->items[i]) && ok;
        if (clock_now_ns() - looked_ns >= SWEEP_MS * NS_PER_MS) {
            looked_ns = clock_now_ns();
            look_after_doors(doors);
            alive();
        }
        stand_in_sweep(relay);
        log_flush(/* all= */ false);
        if (!ok)
            poll(NULL, 0, CROWDED_MS);
    }
}

static int catch_signals(int *ret_fd, struct shd_err *e)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    signal(SIGPIPE, SIG_IGN); /* OpenSSL writes to sockets as to files */
    if (sigprocmask(SIG_BLOCK, &set, NULL) < 0 ||
        (*ret_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK)) < 0)
        return err_sys(e, SHD_EIO, "take signals");
    return SHD_OK;
}

static int read_routes(const struct relay_config *config, struct routes *ret_routes,
                       struct shd_err *e)
{
    struct cluster cluster;
    int r = cluster_load(config->cluster, &cluster, e);
    if (r != SHD_OK)
        return r;
    r = routes_make(&cluster, config, ret_routes, e);
    cluster_free(&cluster);
    return r;
}

static int open_doors(struct doors *doors, struct relay *relay, struct shd_err *e)
{
    int r = open_stand_ins(doors, relay, e);
    if (r == SHD_OK && relay->routes->serves)
        r = open_tcp(doors, relay, e);
    return r == SHD_OK ? report_begin(relay, e) : r;
}

int relay_run(const struct relay_config *config, void (*ready)(void), void (*alive)(void),
              struct shd_err *e)
{
    /* Static: threads use them after the return (see relay.h). */
    static struct routes routes;
    static struct doors doors;
    static struct strangers strangers;
    static struct relay relay = { .routes = &routes,
                                  .strangers = &strangers,
                                  .lock = PTHREAD_MUTEX_INITIALIZER };
    int signal_fd = -1;
    relay.config = config;
    relay.since_ns = clock_now_ns();
    if (mkdir(config->runtime_dir, 0700) < 0 && errno != EEXIST)
        return err_sys(e, SHD_EIO, "make '%.100s'", config->runtime_dir);
    strangers_init(&strangers);
    int r = catch_signals(&signal_fd, e);
    if (r == SHD_OK)
        r = bulk_keys_new(config->cluster, config->host, &relay.keys, e);
    if (r == SHD_OK)
        r = read_routes(config, &routes, e);
    if (r == SHD_OK)
        r = open_doors(&doors, &relay, e);
    if (r == SHD_OK) {
        log_info("op=start relay=%s listens=%s bulk=\"%s\" devices=%s in_stead=%" PRIu32,
                 config->host, routes.serves ? bulk_keys_address(relay.keys) : "-",
                 bulk_keys_way(relay.keys), routes.own[0] != '\0' ? routes.own : "-", routes.count);
        ready();
        serve_doors(&relay, &doors, signal_fd, alive);
        report_end(&relay);
    }
    close_doors(&doors);
    return r;
}
