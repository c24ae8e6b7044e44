/* See door.h. */
#include "daemon/net/door.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "proto/base/sys.h"
#include "proto/share/fdpass.h"

#define ACCEPT_BATCH_MAX 32
#define KEPT_MAX         160u
#define KEPT_MIN         24u
#define KEPT_PART        8u

struct door {
    uv_poll_t poll;
    bool poll_ready;
    int fd, spare_fd; /* owned */
    door_enter *enter;
    void *ctx; /* the owner's */
};

uint32_t door_descriptors_max(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > INT32_MAX)
        return INT32_MAX;
    return (uint32_t)limit.rlim_cur;
}

uint32_t door_descriptors_kept(void)
{
    const uint32_t all = door_descriptors_max();
    const uint32_t part = all / KEPT_PART;
    const uint32_t least = all / 2 < KEPT_MIN ? all / 2 : KEPT_MIN;
    return part > KEPT_MAX ? KEPT_MAX : part < least ? least : part;
}

static bool is_crowded(int fd)
{
    return (uint32_t)fd >= door_descriptors_max() - door_descriptors_kept();
}

int door_move_down(int fd)
{
    const int lower = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (lower < 0)
        return fd;
    close(fd);
    return lower;
}

static void take(struct door *door, int fd, bool crowded)
{
    struct side_peer peer;
    struct shd_err e;
    if (side_peer(fd, &peer, &e) != SHD_OK)
        close(fd);
    else
        door->enter(door->ctx, fd, &peer, crowded);
}

/* No descriptor is left to accept with. Left alone the listener would stay readable and the loop
 * spin. */
static void take_last(struct door *door)
{
    close(door->spare_fd);
    const int fd = accept4(door->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0)
        take(door, fd, /* crowded= */ true);
    door->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void connecting(uv_poll_t *poll, int status, int events)
{
    (void)events;
    struct door *door = poll->data;
    for (int i = 0; status == 0 && i < ACCEPT_BATCH_MAX; i++) {
        const int fd = accept4(door->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            take(door, fd, is_crowded(fd));
            continue;
        }
        if (errno == EMFILE || errno == ENFILE)
            take_last(door);
        else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
            log_error("op=accept why=\"%s\" do=\"shardctl doctor: limits and memory\"",
                      strerror(errno));
        return;
    }
}

int door_open(uv_loop_t *loop, int fd, door_enter *enter, void *ctx, struct door **ret_door,
              struct shd_err *e)
{
    struct door *door = sys_calloc(1, sizeof *door);
    if (door == NULL) {
        close(fd);
        return err_set(e, SHD_ENOMEM, "no memory to listen");
    }
    *door = (struct door){ .fd = fd, .enter = enter, .ctx = ctx };
    door->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int r = door->spare_fd < 0 ? err_sys(e, SHD_EIO, "open '/dev/null'") : SHD_OK;
    const int error = r == SHD_OK ? uv_poll_init(loop, &door->poll, fd) : 0;
    if (error < 0)
        r = err_set(e, SHD_EIO, "poll a listening socket: %s", uv_strerror(error));
    if (r != SHD_OK) {
        door_close(door);
        return r;
    }
    door->poll_ready = true;
    door->poll.data = door;
    uv_poll_start(&door->poll, UV_READABLE, connecting);
    *ret_door = door;
    return SHD_OK;
}

void door_close(struct door *door)
{
    if (door == NULL)
        return;
    if (door->poll_ready) {
        uv_close((uv_handle_t *)&door->poll, NULL);
        uv_run(door->poll.loop, UV_RUN_NOWAIT); /* it must end before its memory */
    }
    close(door->fd);
    if (door->spare_fd >= 0)
        close(door->spare_fd);
    free(door);
}
