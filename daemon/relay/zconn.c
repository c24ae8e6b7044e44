/* See zconn.h. */
#include "daemon/relay/zconn.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/net/zmtp.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/wire/wire.h"

#define IN_BYTES       (WIRE_FRAME_BYTES_MAX + ZMTP_HEADER_BYTES_MAX + (size_t)65536)
#define WRITE_STALL_NS (10 * NS_PER_S)
#define POLL_MS        200

static const char own_type[6] = { 'D', 'E', 'A', 'L', 'E', 'R' };

void zconn_close(struct zconn *z)
{
    if (z->fd >= 0)
        close(z->fd);
    free(z->in);
    *z = ZCONN_CLOSED;
}

/* Waits for room, at most WRITE_STALL_NS; reads meanwhile, lest both wait for each other. */
static int write_bytes(struct zconn *z, const uint8_t *data, size_t bytes, struct shd_err *e)
{
    uint64_t since_ns = clock_now_ns();
    for (size_t done = 0; done < bytes;) {
        const ssize_t n = send(z->fd, data + done, bytes - done, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0) {
            done += (size_t)n;
            since_ns = clock_now_ns();
            continue;
        }
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return err_sys(e, SHD_EGONE, "send requests");
        struct pollfd p = { .fd = z->fd, .events = POLLOUT };
        p.events |= z->used < IN_BYTES ? POLLIN : 0;
        poll(&p, 1, POLL_MS);
        const int r = (p.revents & POLLIN) != 0 ? zconn_read(z, e) : SHD_OK;
        if (r != SHD_OK)
            return r;
        if (clock_now_ns() - since_ns >= WRITE_STALL_NS)
            return err_set(e, SHD_ETIMEDOUT, "takes no message");
    }
    return SHD_OK;
}

int zconn_open(struct zconn *z, int fd, bool dealer, struct shd_err *e)
{
    uint8_t opening[ZMTP_OPENING_BYTES];
    *z = (struct zconn){ .fd = fd, .dealer = dealer, .in = sys_malloc(IN_BYTES) };
    if (z->in == NULL) {
        zconn_close(z);
        return err_set(e, SHD_ENOMEM, "no memory for a connection");
    }
    zmtp_opening(opening);
    if (dealer) /* its end is the type of the socket */
        memcpy(opening + sizeof opening - sizeof own_type, own_type, sizeof own_type);
    const int r = write_bytes(z, opening, sizeof opening, e);
    if (r != SHD_OK)
        zconn_close(z);
    return r;
}

int zconn_dial(struct zconn *z, const char *path, struct shd_err *e)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof a.sun_path)
        return err_set(e, SHD_ERANGE, "'%.60s...' is too long for a socket's path", path);
    memcpy(a.sun_path, path, strlen(path) + 1);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "socket for '%s'", path);
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) < 0) {
        const int r = err_sys(e, SHD_EGONE, "connect to '%s'", path);
        close(fd);
        return r;
    }
    return zconn_open(z, fd, /* dealer= */ true, e);
}

int zconn_read(struct zconn *z, struct shd_err *e)
{
    while (z->used < IN_BYTES) {
        const ssize_t n = recv(z->fd, z->in + z->used, IN_BYTES - z->used, MSG_DONTWAIT);
        if (n == 0)
            return err_set(e, SHD_EGONE, "hung up");
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? SHD_OK : err_sys(e, SHD_EGONE, "receive requests");
        z->used += (size_t)n;
    }
    return SHD_OK;
}

static void drop(struct zconn *z, size_t bytes)
{
    memmove(z->in, z->in + bytes, z->used - bytes);
    z->used -= bytes;
}

static int take_greeting(struct zconn *z, struct shd_err *e)
{
    if (z->used < ZMTP_GREETING_BYTES)
        return SHD_PENDING;
    const int r = zmtp_greeting_check(z->in, e);
    if (r != SHD_OK)
        return r;
    drop(z, ZMTP_GREETING_BYTES);
    z->greeted = true;
    return SHD_OK;
}

static int take_command(struct zconn *z, const uint8_t *body, size_t bytes, struct shd_err *e)
{
    if (z->ready)
        return SHD_OK;
    const int r = z->dealer ? SHD_OK : zmtp_ready_check(body, bytes, e);
    z->ready = r == SHD_OK;
    return r;
}

int zconn_next(struct zconn *z, const uint8_t **ret_body, size_t *ret_bytes, struct shd_err *e)
{
    drop(z, z->skip);
    z->skip = 0;
    int r = z->greeted ? SHD_OK : take_greeting(z, e);
    while (r == SHD_OK) {
        struct zmtp_frame frame;
        r = zmtp_header(z->in, z->used, &frame, e);
        if (r != SHD_OK)
            break;
        if (frame.more || frame.bytes > WIRE_FRAME_BYTES_MAX)
            return err_set(e, SHD_EPROTO, "a message of several frames, or above %zu bytes",
                           WIRE_FRAME_BYTES_MAX);
        const size_t bytes = frame.header_bytes + (size_t)frame.bytes;
        if (z->used < bytes)
            return SHD_PENDING;
        if (!frame.command && !z->ready)
            return err_set(e, SHD_EPROTO, "a message before READY");
        if (!frame.command) {
            *ret_body = z->in + frame.header_bytes;
            *ret_bytes = (size_t)frame.bytes;
            z->skip = bytes;
            return SHD_OK;
        }
        r = take_command(z, z->in + frame.header_bytes, (size_t)frame.bytes, e);
        drop(z, bytes);
    }
    return r;
}

int zconn_write(struct zconn *z, const void *body, size_t bytes, struct shd_err *e)
{
    uint8_t header[ZMTP_HEADER_BYTES_MAX];
    const int r = write_bytes(z, header, zmtp_header_write(header, bytes), e);
    return r == SHD_OK ? write_bytes(z, body, bytes, e) : r;
}
