/* See relay.h. */
#include "daemon/relay/relay.h"

#include <errno.h>
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
#include "daemon/relay/frames.h"
#include "daemon/relay/serve.h"
#include "daemon/relay/stand_in.h"
#include "daemon/relay/thread.h"
#include "proto/base/sys.h"
#include "proto/share/fdpass.h"
#include "proto/share/listen.h"

#define DOORS_MAX  (2 * RELAY_DEVICES_MAX)
#define SWEEP_MS   500
#define CROWDED_MS 50
#define PATH_BYTES (sizeof(((struct sockaddr_un *)NULL)->sun_path))

struct door {
    int fd; /* owned: listening */
    void (*main)(struct relay *relay, void *arg);
    char device[64];       /* "": of TCP */
    char path[PATH_BYTES]; /* "": none to remove */
};

struct doors {
    struct door items[DOORS_MAX];
    uint32_t count;
};

/* -- Doors ------------------------------------------------------------------------------------- */

static int open_unix(struct doors *doors, const struct relay_config *config, const char *device,
                     bool side, struct shd_err *e)
{
    struct door *door = &doors->items[doors->count];
    char path[PATH_BYTES];
    if (snprintf(path, sizeof path, "%s/%s.%s", config->runtime_dir, device,
                 side ? "sock" : "zmq") >= (int)sizeof path)
        return err_set(e, SHD_ERANGE, "'%.60s...' is too long for a socket's path",
                       config->runtime_dir);
    const int r = side ? side_listen(path, &door->fd, e) : listen_unix(path, &door->fd, e);
    if (r != SHD_OK)
        return r;
    chmod(path, 0660); /* as a daemon's: the directory says who gets there */
    door->main = side ? stand_in_side : stand_in_requests;
    memcpy(door->path, path, sizeof path);
    snprintf(door->device, sizeof door->device, "%s", device);
    doors->count++;
    return SHD_OK;
}

/* "cpu0,cpu1". Requests' socket first: a worker looks for the other one. */
static int open_devices(struct doors *doors, const struct relay_config *config, struct shd_err *e)
{
    char names[RELAY_DEVICES_MAX * 64], *rest = NULL;
    if (snprintf(names, sizeof names, "%s", config->devices) >= (int)sizeof names)
        return err_set(e, SHD_ERANGE, "too many devices");
    int r = SHD_OK;
    for (char *name = strtok_r(names, ",", &rest); r == SHD_OK && name != NULL;
         name = strtok_r(NULL, ",", &rest)) {
        if (doors->count == DOORS_MAX)
            return err_set(e, SHD_ERANGE, "more than %u devices", RELAY_DEVICES_MAX);
        r = frame_check_device(name, e);
        if (r == SHD_OK)
            r = open_unix(doors, config, name, /* side= */ false, e);
        if (r == SHD_OK)
            r = open_unix(doors, config, name, /* side= */ true, e);
    }
    if (r == SHD_OK && doors->count == 0)
        r = err_set(e, SHD_EINVAL, "no device is named");
    return r;
}

static int open_tcp(struct doors *doors, const struct relay *relay, struct shd_err *e)
{
    struct door *door = &doors->items[0];
    bool remote;
    const int r = listen_tcp(bulk_keys_address(relay->keys), LISTEN_NAMES | LISTEN_REMOTE,
                             &door->fd, &remote, e);
    door->main = serve_connection;
    doors->count = r == SHD_OK;
    return r;
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
    if (door->device[0] == '\0') {
        int *arg = sys_malloc(sizeof *arg);
        if (arg != NULL)
            *arg = fd;
        return arg;
    }
    struct stand_in_door *arg = sys_malloc(sizeof *arg);
    if (arg != NULL) {
        arg->fd = fd;
        memcpy(arg->device, door->device, sizeof arg->device);
    }
    return arg;
}

/* False: no descriptor, or no thread, is to be had now. */
static bool let_in(struct relay *relay, const struct door *door)
{
    struct shd_err e = { 0 };
    const int fd = accept4(door->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return errno == EAGAIN || errno == ECONNABORTED || errno == EINTR;
    void *arg = door_arg(door, fd);
    const int r = arg != NULL ? relay_thread(relay, door->main, arg, &e)
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

static void serve_doors(struct relay *relay, const struct doors *doors, int signal_fd)
{
    struct pollfd p[DOORS_MAX + 1];
    for (;;) {
        bool ok = true;
        for (uint32_t i = 0; i < doors->count; i++)
            p[i] = (struct pollfd){ .fd = doors->items[i].fd, .events = POLLIN };
        p[doors->count] = (struct pollfd){ .fd = signal_fd, .events = POLLIN };
        poll(p, doors->count + 1, SWEEP_MS);
        if (p[doors->count].revents != 0)
            return;
        for (uint32_t i = 0; i < doors->count; i++)
            if (p[i].revents != 0)
                ok = let_in(relay, &doors->items[i]) && ok;
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

int relay_run(const struct relay_config *config, void (*ready)(void), struct shd_err *e)
{
    struct relay relay = { .config = config, .lock = PTHREAD_MUTEX_INITIALIZER };
    struct doors doors = { .count = 0 };
    int signal_fd = -1;
    if (mkdir(config->runtime_dir, 0700) < 0 && errno != EEXIST)
        return err_sys(e, SHD_EIO, "make '%.100s'", config->runtime_dir);
    int r = catch_signals(&signal_fd, e);
    if (r == SHD_OK)
        r = bulk_keys_new(config->cluster, config->host, &relay.keys, e);
    if (r == SHD_OK)
        r = config->from != NULL ? open_devices(&doors, config, e) : open_tcp(&doors, &relay, e);
    if (r == SHD_OK) {
        log_info("op=start relay=%s from=%s", config->host,
                 config->from != NULL ? config->from : "-");
        ready();
        serve_doors(&relay, &doors, signal_fd);
    }
    close_doors(&doors);
    return r;
}
