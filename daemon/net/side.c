/* See side.h. */
#include "daemon/net/side.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/net/session.h"
#include "proto/share/admit.h"
#include "proto/share/fdpass.h"

#define ACCEPT_BATCH_MAX 32

static void refuse(int fd, const struct shd_err *why)
{
    struct side_msg msg = {
        .magic = SIDE_MAGIC, .protocol = SHD_PROTOCOL, .type = SIDE_ERROR, .status = why->code
    };
    snprintf(msg.text, sizeof msg.text, "%.*s", (int)sizeof msg.text - 1, why->text);
    struct shd_err ignored;
    side_send(fd, &msg, /* pass_fd= */ -1, &ignored);
    close(fd);
}

static void take_connection(const struct side *side, int fd)
{
    struct daemon *d = side->daemon;
    struct shd_err e = { 0 };
    struct side_peer peer;
    int r = side_peer(fd, &peer, &e);
    if (r == SHD_OK)
        r = admit_client(fd, &peer, d->runtime_dir, &e);
    if (r == SHD_OK)
        r = session_new(d, fd, &peer, &e);
    if (r != SHD_OK) {
        log_warn("op=connect pid=%d uid=%u status=%s why=\"%s\""
                 " do=\"shardctl doctor as that user says who may attach\"",
                 (int)peer.pid, (unsigned)peer.uid, status_name(r), e.text);
        refuse(fd, &e);
    }
}

/* No descriptor is left to accept with. Left alone the listener would stay readable and the loop
 * spin: give up the spare one for a moment, and tell the client. */
static void refuse_without_descriptors(struct side *side)
{
    struct shd_err e;
    close(side->spare_fd);
    const int fd = accept4(side->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
        err_set(&e, SHD_ENOMEM, "device %s is out of file descriptors (see LimitNOFILE=)",
                side->daemon->device);
        log_error("op=connect status=SHD_ENOMEM why=\"%s\" do=\"raise LimitNOFILE=, restart\"",
                  e.text);
        refuse(fd, &e);
    }
    side->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

static void connecting(uv_poll_t *poll, int status, int events)
{
    (void)events;
    struct side *side = poll->data;
    for (int i = 0; status == 0 && i < ACCEPT_BATCH_MAX; i++) {
        const int fd = accept4(side->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            take_connection(side, fd);
            continue;
        }
        if (errno == EMFILE || errno == ENFILE)
            refuse_without_descriptors(side);
        else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
            log_error("op=accept why=\"%s\" do=\"shardctl doctor: limits and memory\"",
                      strerror(errno));
        return;
    }
}

int side_init(struct side *side, struct daemon *d, struct shd_err *e)
{
    side->daemon = d;
    side->spare_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (side->spare_fd < 0)
        return err_sys(e, SHD_EIO, "open '/dev/null'");
    snprintf(side->path, sizeof side->path, "%s/%s.sock", d->runtime_dir, d->device);
    int r = side_listen(side->path, &side->fd, e);
    if (r != SHD_OK) {
        side->path[0] = '\0';
        return r;
    }
    r = uv_poll_init(d->loop, &side->poll, side->fd);
    if (r < 0)
        return err_set(e, SHD_EIO, "poll '%s': %s", side->path, uv_strerror(r));
    side->poll_ready = true;
    side->poll.data = side;
    uv_poll_start(&side->poll, UV_READABLE, connecting);
    return SHD_OK;
}

void side_deinit(struct side *side)
{
    if (side->poll_ready) {
        uv_close((uv_handle_t *)&side->poll, NULL);
        uv_run(side->poll.loop, UV_RUN_NOWAIT);
        side->poll_ready = false;
    }
    if (side->path[0] != '\0') {
        close(side->fd);
        unlink(side->path);
    }
    if (side->spare_fd >= 0)
        close(side->spare_fd);
    side->fd = side->spare_fd = -1;
}
