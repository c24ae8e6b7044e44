/* See side.h. */
#include "daemon/net/side.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/keeper.h"
#include "daemon/base/log.h"
#include "daemon/base/state.h"
#include "daemon/net/door.h"
#include "daemon/net/mailbox.h"
#include "daemon/net/session.h"
#include "proto/share/admit.h"
#include "proto/share/fdpass.h"

#define SWEEP_MS 500u

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

static void sweep(uv_timer_t *timer)
{
    const struct side *side = timer->data;
    if (!session_sweep(side->daemon))
        uv_timer_stop(timer);
}

/* A place or a descriptor is missing: the oldest that waits for its Hello gives up its own. */
static bool has_room(struct daemon *d, const struct side_peer *peer, bool crowded)
{
    if (!session_make_room(d, peer->uid))
        return false;
    return !crowded || mailbox_push_out(d) || session_push_out(d);
}

static int take_connection(struct daemon *d, int *fd, const struct side_peer *peer, bool crowded,
                           struct shd_err *e)
{
    const int r = admit_client(*fd, peer, d->runtime_dir, e);
    if (r != SHD_OK)
        return r;
    if (!has_room(d, peer, crowded))
        return session_too_many(d, e);
    if (crowded)
        *fd = door_move_down(*fd);
    return session_new(d, *fd, peer, e);
}

static void enter(void *ctx, int fd, const struct side_peer *peer, bool crowded)
{
    struct side *side = ctx;
    struct shd_err e = { 0 };
    const int r = take_connection(side->daemon, &fd, peer, crowded, &e);
    if (r == SHD_OK) {
        if (!uv_is_active((uv_handle_t *)&side->timer))
            uv_timer_start(&side->timer, sweep, SWEEP_MS, SWEEP_MS);
        return;
    }
    if (r == SHD_EGONE) { /* it looked whether somebody is here */
        close(fd);
        return;
    }
    log_warn("op=connect pid=%d uid=%u status=%s why=\"%s\" do=\"%s\"", (int)peer->pid,
             (unsigned)peer->uid, status_name(r), e.text,
             r == SHD_EBUSY ? "see shardctl status for who is attached"
                            : "shardctl doctor as that user says who may attach");
    refuse(fd, &e);
}

int side_init(struct side *side, struct daemon *d, struct shd_err *e)
{
    char path[sizeof side->path];
    int fd;
    side->daemon = d;
    snprintf(path, sizeof path, "%s/%s.sock", d->runtime_dir, d->device);
    const int r = side_listen(path, &fd, e);
    if (r != SHD_OK)
        return r;
    memcpy(side->path, path, sizeof path); /* ours to remove from here on */
    uv_timer_init(d->loop, &side->timer);
    side->timer.data = side;
    return door_open(d->loop, fd, enter, side, &side->door, e);
}

/* A successor is to have the models. Who attaches before it is there waits for it, at a socket that
 * nobody listens at: without one a bare directory would mean the other daemons alone. */
static bool comes_back(const struct daemon *d)
{
    return d->keeper->notify && d->model_count > 0 && d->drain_session == 0;
}

void side_deinit(struct side *side)
{
    if (side->path[0] != '\0') {
        uv_close((uv_handle_t *)&side->timer, NULL);
        if (!comes_back(side->daemon))
            unlink(side->path);
    }
    door_close(side->door);
    side->door = NULL;
    side->path[0] = '\0';
}
