/* See serve.h. */
#include "daemon/relay/serve.h"

#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/relay/bulk.h"
#include "daemon/relay/feed.h"
#include "daemon/relay/frames.h"
#include "daemon/relay/relay.h"
#include "daemon/relay/routes.h"
#include "daemon/relay/served.h"
#include "daemon/relay/strangers.h"
#include "daemon/relay/traffic.h"

#define HANDSHAKE_NS (10 * NS_PER_S)
#define POLL_MS      500

struct opening {
    bool came;
    struct bulk_head head;
    struct frame_open open;
};

/* One frame, and no other before it is answered. */
static int place(void *ctx, const struct bulk_head *head, void **ret_to, struct shd_err *e)
{
    struct opening *o = ctx;
    if (o->came || head->type != FRAME_OPEN || head->bytes != sizeof o->open)
        return err_set(e, SHD_EPROTO, "a frame of type %" PRIu32 " and %" PRIu64 " bytes %s OPEN",
                       head->type, head->bytes, o->came ? "right behind" : "instead of");
    *ret_to = &o->open;
    return SHD_OK;
}

static int done(void *ctx, const struct bulk_head *head, void *payload, struct shd_err *e)
{
    struct opening *o = ctx;
    (void)payload;
    o->came = true;
    o->head = *head;
    if (memchr(o->open.device, 0, sizeof o->open.device) == NULL ||
        memchr(o->open.model, 0, sizeof o->open.model) == NULL) {
        o->open = (struct frame_open){ .device = "" }; /* nobody is to read it */
        return err_set(e, SHD_EPROTO, "a name in OPEN has no end");
    }
    return frame_check_device(o->open.device, e);
}

static int await_open(struct bulk *bulk, struct opening *o, struct shd_err *e)
{
    const struct bulk_hooks hooks = { .place = place, .done = done, .ctx = o };
    const uint64_t end_ns = clock_now_ns() + HANDSHAKE_NS;
    int r = SHD_OK;
    bulk_set_hooks(bulk, &hooks);
    while (r >= SHD_OK && !o->came) {
        struct pollfd p = { .fd = bulk_fd(bulk), .events = POLLIN };
        poll(&p, 1, POLL_MS);
        r = bulk_receive(bulk, e);
        if (r >= SHD_OK && !o->came && clock_now_ns() >= end_ns)
            return err_set(e, SHD_ETIMEDOUT, "it does not say what it wants");
    }
    return r >= SHD_OK ? SHD_OK : r;
}

static int serve(struct relay *relay, struct bulk *bulk, struct opening *o, struct shd_err *e)
{
    int r = await_open(bulk, o, e);
    if (r != SHD_OK)
        return r;
    r = routes_admit(relay->routes, o->open.device, e);
    if (r != SHD_OK) {
        frame_refuse(bulk, e);
        return r;
    }
    if (o->head.index == FRAME_OPEN_SESSION)
        return served_run(relay, bulk, &o->open, e);
    if (o->head.index == FRAME_OPEN_MODEL)
        return feed_run(relay, bulk, &o->open, o->head.id, e);
    return err_set(e, SHD_EPROTO, "OPEN of kind %" PRIu32, o->head.index);
}

void serve_connection(struct relay *relay, void *arg)
{
    const struct stranger who = *(struct stranger *)arg;
    struct opening o = { .came = false };
    struct shd_err e = { 0 };
    struct bulk *bulk;
    free(arg);
    const int r = bulk_accept(relay->keys, who.fd, HANDSHAKE_NS, &bulk, &e);
    strangers_gone(relay->strangers, who.source);
    if (r != SHD_OK) {
        log_warn("op=relay status=%s why=\"a connection was refused: %s\" do=\"compare the cluster "
                 "files and keys of both hosts\"",
                 status_name(e.code), e.text);
        return;
    }
    bulk_set_count(bulk, traffic_frames(traffic_of(relay, bulk_peer(bulk), "")));
    serve(relay, bulk, &o, &e);
    log_info("op=relay peer=%s device=%s status=%s bytes=%" PRIu64 " why=\"%s\"", bulk_peer(bulk),
             o.open.device, status_name(e.code), bulk_bytes(bulk), e.text);
    bulk_close(bulk);
}
