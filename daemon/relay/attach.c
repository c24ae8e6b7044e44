/* See attach.h. */
#include "daemon/relay/attach.h"

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/share/admit.h"
#include "proto/share/segment_file.h"

#define SIDE_MS 10000
#define POLL_MS 200

void attach_close(struct attach *a)
{
    if (a->side_fd >= 0)
        close(a->side_fd);
    a->side_fd = -1;
    zconn_close(&a->z);
}

static int receive_welcome(struct attach *a, struct shd_err *e)
{
    const int r = side_recv(a->side_fd, SIDE_MS, &a->welcome, /* ret_fd= */ NULL, e);
    if (r != SHD_OK)
        return r;
    if (a->welcome.type == SIDE_ERROR)
        return err_set(e, a->welcome.status, "%s", a->welcome.text);
    if (a->welcome.type != SIDE_WELCOME)
        return err_set(e, SHD_EPROTO, "side message of type %" PRIu32 " instead of a welcome",
                       a->welcome.type);
    if (a->welcome.ticket > WIRE_LEVEL)
        a->welcome.ticket = WIRE_LEVEL;
    return side_welcome_check(&a->welcome, e);
}

int attach_open(const char *dir, const char *device, struct attach *ret_attach, struct shd_err *e)
{
    struct attach a = ATTACH_CLOSED;
    struct side_peer peer;
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    if (snprintf(path, sizeof path, "%s/%s.sock", dir, device) >= (int)sizeof path)
        return err_set(e, SHD_ERANGE, "'%.60s...' is too long for a socket's path", dir);
    int r = side_connect(path, &a.side_fd, e);
    if (r == SHD_OK)
        r = side_peer(a.side_fd, &peer, e);
    if (r == SHD_OK)
        r = admit_daemon(&peer, path, e);
    if (r == SHD_OK)
        r = receive_welcome(&a, e);
    snprintf(path, sizeof path, "%s/%s.zmq", dir, device);
    if (r == SHD_OK)
        r = zconn_dial(&a.z, path, e);
    if (r == SHD_OK)
        *ret_attach = a;
    else
        attach_close(&a);
    return r == SHD_OK ? r : err_prefix(e, "daemon %.64s", device);
}

static int receive_segment(struct attach *a, const struct wire_segment *segment, int *ret_fd,
                           struct shd_err *e)
{
    struct side_msg msg;
    int fd = -1;
    int r;
    do
        r = side_recv(a->side_fd, SIDE_MS, &msg, &fd, e);
    while (r == SHD_OK && msg.type == SIDE_WAKE);
    if (r != SHD_OK)
        return r;
    if (msg.type == SIDE_ERROR)
        r = err_set(e, msg.status, "%s", msg.text);
    else if (msg.type != SIDE_SEGMENT || fd < 0 || msg.ticket != segment->ticket ||
             msg.kind != segment->kind || msg.bytes != segment->bytes)
        r = err_set(e, SHD_EPROTO, "passes another segment than was claimed");
    else
        r = segment_shared_check(fd, segment->kind, segment->bytes, e);
    if (r == SHD_OK)
        *ret_fd = fd;
    else if (fd >= 0)
        close(fd);
    return r;
}

int attach_claim(struct attach *a, const struct wire_segment *segment, int *ret_fd,
                 struct shd_err *e)
{
    const struct side_msg claim = { .type = SIDE_CLAIM, .ticket = segment->ticket };
    if (segment->place != SEGMENT_HOST)
        return err_set(e, SHD_ENOTSUP,
                       "its %s segment is in %s memory, and a relay reads the host's",
                       segment_kind_name(segment->kind), segment_place_name(segment->place));
    const int r = side_send(a->side_fd, &claim, /* pass_fd= */ -1, e);
    return r == SHD_OK ? receive_segment(a, segment, ret_fd, e) : r;
}

static int await_reply(struct attach *a, uint64_t deadline_ns, struct wire_arena *arena,
                       struct wire_reply *ret_reply, struct shd_err *e)
{
    for (;;) {
        const uint8_t *body;
        size_t bytes;
        int r = zconn_read(&a->z, e);
        if (r == SHD_OK)
            r = zconn_next(&a->z, &body, &bytes, e);
        if (r == SHD_OK)
            return wire_reply_unpack(body, bytes, arena, ret_reply, e);
        if (r != SHD_PENDING)
            return r;
        if (clock_now_ns() >= deadline_ns)
            return err_set(e, SHD_ETIMEDOUT, "no answer");
        struct pollfd p = { .fd = a->z.fd, .events = POLLIN };
        poll(&p, 1, POLL_MS);
    }
}

int attach_ask(struct attach *a, const struct wire_request *request, uint64_t timeout_ns,
               struct wire_arena *arena, struct wire_reply *ret_reply, struct shd_err *e)
{
    size_t bytes;
    uint8_t *frame = sys_malloc(WIRE_FRAME_BYTES_MAX);
    if (frame == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a request");
    int r = wire_request_pack_for(request, (uint32_t)a->welcome.ticket, frame, WIRE_FRAME_BYTES_MAX,
                                  &bytes, e);
    if (r == SHD_OK)
        r = zconn_write(&a->z, frame, bytes, e);
    free(frame);
    if (r == SHD_OK)
        r = await_reply(a, clock_now_ns() + timeout_ns, arena, ret_reply, e);
    if (r == SHD_OK && ret_reply->status != SHD_OK)
        r = err_set(e, ret_reply->status, "%s", ret_reply->text);
    return r;
}
