/* See hub_open.h. */
#include "client/session/hub_open.h"

#include <ctype.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "client/session/membership.h"
#include "client/session/round.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define POLL_SLICE_NS (100 * NS_PER_MS)
#define DETACH_NS_MAX (500 * NS_PER_MS)
#define PUT_OFF_NS    (100 * NS_PER_US) /* some small gradients' time */
#define FDS_OF_ZMQ    6u                /* its two threads' */
#define FDS_OF_LINK   3u                /* the side channel, a dealer and its connection */

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

/* libzmq ends the process when it gets no descriptor for its threads, and leaves a connection
 * without one unanswered: look before, whether there are enough. */
static int check_descriptors(const struct hub *hub, struct shd_err *e)
{
    const uint32_t need = FDS_OF_ZMQ + FDS_OF_LINK * hub->link_count +
                          1; /* a segment's, in passing */
    uint32_t count = 0;
    int r = SHD_OK, *fds = sys_calloc(need, sizeof *fds);
    if (fds == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a session");
    while (count < need && (fds[count] = eventfd(0, EFD_CLOEXEC)) >= 0)
        count++;
    if (count < need)
        r = err_sys(e, SHD_EIO,
                    "a session with %" PRIu32 " daemon%s takes %" PRIu32 " descriptors, %" PRIu32
                    " are left (ulimit -n)",
                    hub->link_count, hub->link_count == 1 ? "" : "s", need, count);
    while (count > 0)
        close(fds[--count]);
    free(fds);
    return r;
}

static int init_zmq(struct hub *hub, struct shd_err *e)
{
    const int r = check_descriptors(hub, e);
    if (r != SHD_OK)
        return r;
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

/* Launchers (torchrun's kind, shardctl run) number their workers so. */
static uint32_t rank_of_environment(void)
{
    const char *text = getenv("RANK");
    char *end = NULL;
    const unsigned long rank = text != NULL && isdigit((unsigned char)text[0])
                                   ? strtoul(text, &end, 10)
                                   : 0;
    return end != NULL && *end == '\0' && rank < UINT32_MAX ? (uint32_t)rank + 1 : 0;
}

/* For comparisons: docs/benchmarks.md. */
static bool ring_of_environment(void)
{
    const char *text = getenv("SHD_RING");
    return text == NULL || strcmp(text, "off") != 0;
}

static int init_links(struct hub *hub, const struct address *address, const char *name,
                      struct shd_err *e)
{
    const uint32_t count = address->count;
    hub->links = sys_calloc(count, sizeof *hub->links);
    hub->poll_items = sys_calloc(2 * (size_t)count, sizeof *hub->poll_items);
    hub->sides = sys_calloc(count, sizeof *hub->sides);
    hub->no_ring = !ring_of_environment();
    hub->frame = sys_malloc(WIRE_FRAME_BYTES_MAX);
    hub->arena_memory = sys_malloc(WIRE_ARENA_BYTES);
    hub->name = sys_strdup(name);
    hub->rank = rank_of_environment();
    if (hub->links == NULL || hub->poll_items == NULL || hub->sides == NULL || hub->frame == NULL ||
        hub->arena_memory == NULL || hub->name == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " connections", count);
    hub->link_count = hub->down_count = count;
    hub->owner_count = address->owners;
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

static int open_members(struct hub *hub, const char *dir, struct shd_err *e)
{
    int r = membership_open(dir, &hub->members.membership, e);
    if (r == SHD_OK)
        r = membership_begin(hub, e);
    if (r == SHD_OK)
        hub->members.look = membership_look;
    return r;
}

int hub_new(const struct address *address, const struct hub_options *options, struct hub **ret_hub,
            struct shd_err *e)
{
    CHECK(!address->local && address->count > 0);
    struct hub *hub = sys_calloc(1, sizeof *hub);
    if (hub == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a session");
    hub->timeout_ns = options->timeout_ns;
    hub->wakes.put_off_ns = PUT_OFF_NS;
    hub->patient = options->patient;
    hub->idle = options->idle;
    hub->events = options->events;
    struct shd_err why = { 0 };
    hub->role = options->role;
    int r = init_links(hub, address, options->name, &why);
    if (r == SHD_OK && address->owners < address->count)
        r = open_members(hub, address->dir, &why);
    while (r == SHD_OK && hub->down_count > 0) /* each link has its own bound */
        r = hub_poll(hub, POLL_SLICE_NS, &why);
    if (r != SHD_OK) {
        hub_free(hub);
        return err_copy(&why, e);
    }
    *ret_hub = hub;
    return SHD_OK;
}

/* The goodbye is waited for, so that daemons have let go of this session when its owner goes on. A
 * daemon that does not answer learns the same when we hang up. */
static void detach(struct hub *hub)
{
    struct round round = { .what = "Detach", .asks = WIRE_DETACH, .type = WIRE_REPLY_NONE };
    struct shd_err ignored;
    if (hub->timeout_ns > DETACH_NS_MAX)
        hub->timeout_ns = DETACH_NS_MAX;
    hub->leaving = true;
    int r = hub_check(hub, &ignored);
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
        if (hub->links[i].state == LINK_UP) /* others have hung up, or were hung up on */
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
        link_ring_close(&link->ring);
        free(link->device);
        free(link->path);
        free(link->endpoint);
    }
    membership_close(hub->members.membership);
    if (hub->zmq != NULL)
        zmq_ctx_term(hub->zmq);
    free(hub->links);
    free(hub->poll_items);
    free(hub->sides);
    free(hub->name);
    free(hub->frame);
    free(hub->arena_memory);
    free(hub);
}
