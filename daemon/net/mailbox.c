/* See mailbox.h. */
#include "daemon/net/mailbox.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/net/conn.h"
#include "daemon/net/door.h"
#include "daemon/net/rings.h"
#include "daemon/net/session.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/fdpass.h"
#include "proto/share/listen.h"

#define SOCKET_MODE 0660

/* -- Connections --------------------------------------------------------------------------------
 */

static void message(void *ctx, uint64_t id, const void *data, size_t bytes)
{
    struct daemon *d = ctx;
    if (!d->stopping) /* else what a request would need is going away */
        d->hooks->frame(d, id, /* by_ring= */ false, data, bytes);
}

static void several(void *ctx, uint64_t id)
{
    const struct daemon *d = ctx;
    (void)id;
    d->mailbox->bad_frames++;
}

static void ended(void *ctx, uint64_t id, const char *why)
{
    struct session *s = session_by_conn(ctx, id);
    if (s != NULL)
        session_end(s, why);
    else
        log_debug("op=connection_end why=\"%s\"", why);
}

static const struct conn_events events = { .message = message, .several = several, .ended = ended };

void mailbox_admit(const struct session *s)
{
    conn_admit(s->daemon->mailbox->conns, s->conn, /* admitted= */ true);
}

void mailbox_session_ended(struct session *s)
{
    conn_admit(s->daemon->mailbox->conns, s->conn, /* admitted= */ false);
    rings_end(s);
}

int mailbox_open_ring(struct session *s, struct wire_ring *ret_ring, struct shd_err *e)
{
    return rings_open(s, ret_ring, e);
}

void mailbox_woken(struct session *s)
{
    rings_wake(s);
}

void mailbox_published(struct daemon *d, uint64_t awaited)
{
    if (d->mailbox->rings != NULL) /* an adopted model goes on before anybody can come */
        rings_published(d->mailbox->rings, awaited);
}

uint64_t mailbox_ring_bytes(const struct daemon *d)
{
    return rings_bytes(d->mailbox->rings);
}

bool mailbox_push_out(struct daemon *d)
{
    return conns_push_out(d->mailbox->conns);
}

/* Where descriptors are short, the oldest that has said no Hello gives up its own. */
static void enter(void *ctx, int fd, const struct side_peer *peer, bool crowded)
{
    struct daemon *d = ctx;
    struct shd_err e = { 0 };
    if (!crowded || mailbox_push_out(d)) {
        if (crowded)
            fd = door_move_down(fd);
        if (conn_new(d->mailbox->conns, fd, peer->uid, &e) == SHD_OK)
            return;
    } else {
        close(fd);
        err_set(&e, SHD_EBUSY, "descriptors have run out (RLIMIT_NOFILE is %" PRIu32 ")",
                door_descriptors_max());
    }
    log_warn(
        "op=connect pid=%d uid=%u status=SHD_EBUSY why=\"%s\" do=\"raise LimitNOFILE=, see who "
        "connects\"",
        (int)peer->pid, (unsigned)peer->uid, e.text);
}

static int open_door(struct daemon *d, struct shd_err *e)
{
    struct mailbox *mb = d->mailbox;
    char path[sizeof mb->path];
    int fd;
    snprintf(path, sizeof path, "%s/%s.zmq", d->runtime_dir, d->device);
    unlink(path); /* the device lock is ours: a file here is stale */
    const int r = listen_unix(path, &fd, e);
    if (r != SHD_OK)
        return r;
    memcpy(mb->path, path, sizeof path); /* ours to remove from here on */
    if (chmod(path, SOCKET_MODE) != 0) {
        close(fd);
        return err_sys(e, SHD_EIO, "set the mode of '%s'", path);
    }
    return door_open(d->loop, fd, enter, d, &mb->door, e);
}

int mailbox_init(struct daemon *d, struct shd_err *e)
{
    struct mailbox *mb = d->mailbox;
    mb->arena_memory = sys_malloc(WIRE_ARENA_BYTES);
    mb->frame = sys_malloc(WIRE_FRAME_BYTES_MAX);
    if (mb->arena_memory == NULL || mb->frame == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for message buffers");
    mb->arena = (struct wire_arena){ .base = mb->arena_memory, .bytes = WIRE_ARENA_BYTES };
    int r = conns_new(d->loop, &events, d, &mb->conns, e);
    if (r == SHD_OK)
        r = rings_new(d, &mb->rings, e);
    return r == SHD_OK ? open_door(d, e) : r;
}

void mailbox_deinit(struct daemon *d)
{
    struct mailbox *mb = d->mailbox;
    door_close(mb->door);
    conns_free(mb->conns);
    rings_free(mb->rings);
    if (mb->path[0] != '\0')
        unlink(mb->path);
    free(mb->arena_memory);
    free(mb->frame);
    *mb = (struct mailbox){ 0 };
}
