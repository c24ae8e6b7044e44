/* See hub_open.h. */
#include "client/session/hub_open.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/session/round.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define DETACH_NS_MAX (500 * NS_PER_MS)
#define POLL_SLICE_NS (100 * NS_PER_MS)

/* "DIR/DEVICE.sock", or with a prefix and another suffix. */
static char *make_path(const char *prefix, const char *dir, const char *device, const char *suffix)
{
    const size_t bytes = strlen(prefix) + strlen(dir) + strlen(device) + strlen(suffix) + 2;
    char *path = sys_malloc(bytes);
    if (path != NULL)
        snprintf(path, bytes, "%s%s/%s%s", prefix, dir, device, suffix);
    return path;
}

static int init_link(struct hub *hub, uint32_t index, const struct address *address,
                     struct shd_err *e)
{
    struct link *link = &hub->links[index];
    const char *device = address->devices[index];
    link->device = sys_strdup(device);
    link->path = make_path("", address->dir, device, ".sock");
    link->endpoint = make_path("ipc://", address->dir, device, ".zmq");
    if (link->device == NULL || link->path == NULL || link->endpoint == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " connections", address->count);
    link->since_ns = clock_now_ns();
    link->since = time(NULL);
    return SHD_OK;
}

static int init_zmq(struct hub *hub, struct shd_err *e)
{
    hub->zmq = zmq_ctx_new();
    if (hub->zmq == NULL)
        return err_sys(e, SHD_EIO, "create the ZeroMQ context");
    zmq_ctx_set(hub->zmq, ZMQ_IO_THREADS, 1);
    /* A closed socket counts for a moment longer. */
    const int sockets = 2 * (int)hub->link_count + 64;
    if (sockets > zmq_ctx_get(hub->zmq, ZMQ_MAX_SOCKETS))
        zmq_ctx_set(hub->zmq, ZMQ_MAX_SOCKETS, sockets);
    return SHD_OK;
}

static int init_links(struct hub *hub, const struct address *address, const char *name,
                      struct shd_err *e)
{
    const uint32_t count = address->count;
    hub->links = sys_calloc(count, sizeof *hub->links);
    hub->poll_items = sys_calloc(2 * (size_t)count, sizeof *hub->poll_items);
    hub->frame = sys_malloc(WIRE_FRAME_BYTES_MAX);
    hub->arena_memory = sys_malloc(WIRE_ARENA_BYTES);
    hub->name = sys_strdup(name);
    if (hub->links == NULL || hub->poll_items == NULL || hub->frame == NULL ||
        hub->arena_memory == NULL || hub->name == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " connections", count);
    hub->link_count = hub->down_count = count;
    for (uint32_t i = 0; i < count; i++)
        hub->links[i] = (struct link){ .hub = hub, .index = i, .side_fd = -1 };
    for (uint32_t i = 0; i < 2 * count; i++)
        hub->poll_items[i] = (zmq_pollitem_t){ .fd = -1, .events = ZMQ_POLLIN };
    for (uint32_t i = 0; i < count; i++) {
        const int r = init_link(hub, i, address, e);
        if (r != SHD_OK)
            return r;
    }
    return init_zmq(hub, e);
}

int hub_new(const struct address *address, const char *name, uint64_t timeout_ns,
            struct hub **ret_hub, struct shd_err *e)
{
    CHECK(!address->local && address->count > 0);
    struct hub *hub = sys_calloc(1, sizeof *hub);
    if (hub == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a session");
    hub->timeout_ns = timeout_ns;
    struct shd_err why = { 0 };
    int r = init_links(hub, address, name, &why);
    while (r == SHD_OK && hub->down_count > 0) /* each link has its own bound */
        r = hub_poll(hub, POLL_SLICE_NS, &why);
    if (r != SHD_OK) {
        hub_free(hub);
        if (e != NULL)
            *e = why;
        return r;
    }
    *ret_hub = hub;
    return SHD_OK;
}

static int make_detach(struct round *round, struct link *link, uint64_t arg,
                       struct wire_request *ret_request, struct shd_err *e)
{
    (void)round;
    (void)link;
    (void)arg;
    (void)e;
    ret_request->type = WIRE_DETACH;
    return SHD_OK;
}

/* So that the daemons have let go when we return. Best effort: hanging up says the same. */
static void detach(struct hub *hub)
{
    struct round round = { .what = "Detach", .type = WIRE_REPLY_NONE, .make = make_detach };
    struct shd_err ignored;
    if (hub->timeout_ns > DETACH_NS_MAX)
        hub->timeout_ns = DETACH_NS_MAX;
    hub->leaving = true;
    int r = hub->down_count > 0 ? SHD_EGONE : hub_check(hub, &ignored);
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        r = round_ask(&round, &hub->links[i], 0, &ignored);
    round_finish(&round, hub, r, &ignored);
}

void hub_free(struct hub *hub)
{
    if (hub == NULL)
        return;
    if (hub->link_count > 0 && hub->zmq != NULL)
        detach(hub);
    for (uint32_t i = 0; i < hub->link_count; i++) {
        struct link *link = &hub->links[i];
        if (link->dealer != NULL)
            zmq_close(link->dealer);
        if (link->side_fd >= 0)
            close(link->side_fd);
        free(link->device);
        free(link->path);
        free(link->endpoint);
    }
    if (hub->zmq != NULL)
        zmq_ctx_term(hub->zmq);
    free(hub->links);
    free(hub->poll_items);
    free(hub->name);
    free(hub->frame);
    free(hub->arena_memory);
    free(hub);
}
