/* Attaching to daemons and leaving them; see hub.h.
 *
 * Happy path per daemon: connect the side channel, look who is there, receive the token, connect
 * the DEALER, Hello with the token, Welcome with the session id. All daemons are greeted before
 * the first answer is waited for. */
#include "client/hub.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/check.h"
#include "proto/sys.h"

#define NS_PER_MS       UINT64_C(1000000)
#define DETACH_NS_MAX   (500 * NS_PER_MS)
#define HIGH_WATER_MARK ((int)HUB_CALLS_MAX * 2)

/* "DIR/DEVICE.sock", or with a prefix and another suffix. */
static char *make_path(const char *prefix, const char *dir, const char *device, const char *suffix)
{
    const size_t bytes = strlen(prefix) + strlen(dir) + strlen(device) + strlen(suffix) + 2;
    char *path = sys_malloc(bytes);
    if (path != NULL)
        snprintf(path, bytes, "%s%s/%s%s", prefix, dir, device, suffix);
    return path;
}

static int receive_token(struct link *link, uint64_t timeout_ns, uint8_t *ret_token,
                         struct shd_err *e)
{
    struct side_msg msg;
    const uint64_t timeout_ms = timeout_ns / NS_PER_MS;
    const int r = side_recv(link->side_fd, timeout_ms < INT32_MAX ? (int)timeout_ms : INT32_MAX,
                            &msg, /* ret_fd= */ NULL, e);
    if (r != SHD_OK)
        return r;
    if (msg.type == SIDE_ERROR)
        return err_set(e, msg.status, "%s", msg.text);
    if (msg.type != SIDE_WELCOME)
        return err_set(e, SHD_EPROTO, "side message of type %" PRIu32 " instead of a welcome",
                       msg.type);
    memcpy(ret_token, msg.token, SHD_TOKEN_BYTES);
    return SHD_OK;
}

static int connect_side(struct link *link, uint8_t *ret_token, struct shd_err *e)
{
    struct side_peer peer;
    int r = side_connect(link->path, &link->side_fd, e);
    if (r != SHD_OK)
        return r;
    r = side_peer(link->side_fd, &peer, e);
    if (r == SHD_OK)
        r = side_peer_allowed(&peer, "daemon", e);
    if (r != SHD_OK)
        return r;
    link->pid = peer.pid;
    return receive_token(link, link->hub->timeout_ns, ret_token, e);
}

static int connect_dealer(struct link *link, const char *dir, struct shd_err *e)
{
    const int linger = 0, hwm = HIGH_WATER_MARK;
    const int64_t frame_max = (int64_t)WIRE_FRAME_BYTES_MAX;
    link->dealer = zmq_socket(link->hub->zmq, ZMQ_DEALER);
    if (link->dealer == NULL)
        return err_sys(e, SHD_EIO, "create the ZeroMQ socket");
    zmq_setsockopt(link->dealer, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(link->dealer, ZMQ_SNDHWM, &hwm, sizeof hwm);
    zmq_setsockopt(link->dealer, ZMQ_RCVHWM, &hwm, sizeof hwm);
    zmq_setsockopt(link->dealer, ZMQ_MAXMSGSIZE, &frame_max, sizeof frame_max);
    char *endpoint = make_path("ipc://", dir, link->device, ".zmq");
    if (endpoint == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for an endpoint");
    int r = SHD_OK;
    if (zmq_connect(link->dealer, endpoint) != 0)
        r = err_set(e, SHD_EIO, "connect to '%s': %s", endpoint, zmq_strerror(zmq_errno()));
    free(endpoint);
    return r;
}

static int take_welcome(struct round *round, struct link *link, uint64_t arg,
                        const struct wire_reply *reply, struct shd_err *e)
{
    (void)round;
    (void)arg;
    if (strcmp(reply->welcome.device, link->device) != 0)
        return link_err(link, SHD_EPROTO, e, "says it is device '%.64s'", reply->welcome.device);
    link->session = reply->welcome.session;
    return SHD_OK;
}

static int greet(struct link *link, const char *dir, const char *name, struct round *round,
                 struct shd_err *e)
{
    struct wire_request hello = {
        .type = WIRE_HELLO,
        .hello = { .protocol = SHD_PROTOCOL, .role = WIRE_TRAINER, .name = name },
    };
    int r = connect_side(link, hello.hello.token, e);
    if (r == SHD_OK)
        r = connect_dealer(link, dir, e);
    if (r != SHD_OK) {
        struct shd_err why = e != NULL ? *e : (struct shd_err){ 0 };
        return err_set(e, r, "daemon %s at %s: %s", link->device, link->path, why.text);
    }
    link->hub->poll_items[link->index].socket = link->dealer;
    link->hub->poll_items[link->hub->link_count + link->index].fd = link->side_fd;
    return round_ask(round, link, &hello, 0, e);
}

static int init_links(struct hub *hub, const struct address *address, struct shd_err *e)
{
    const uint32_t count = address->count;
    hub->links = sys_calloc(count, sizeof *hub->links);
    hub->poll_items = sys_calloc(2 * (size_t)count, sizeof *hub->poll_items);
    hub->frame = sys_malloc(WIRE_FRAME_BYTES_MAX);
    hub->arena_memory = sys_malloc(WIRE_ARENA_BYTES);
    if (hub->links == NULL || hub->poll_items == NULL || hub->frame == NULL ||
        hub->arena_memory == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " connections", count);
    hub->link_count = count;
    for (uint32_t i = 0; i < count; i++)
        hub->links[i] = (struct link){ .hub = hub, .index = i, .side_fd = -1 };
    for (uint32_t i = 0; i < 2 * count; i++)
        hub->poll_items[i] = (zmq_pollitem_t){ .fd = -1, .events = ZMQ_POLLIN };
    for (uint32_t i = 0; i < count; i++) {
        struct link *link = &hub->links[i];
        link->device = sys_strdup(address->devices[i]);
        link->path = make_path("", address->dir, address->devices[i], ".sock");
        if (link->device == NULL || link->path == NULL)
            return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " connections", count);
    }
    hub->zmq = zmq_ctx_new();
    if (hub->zmq == NULL)
        return err_sys(e, SHD_EIO, "create the ZeroMQ context");
    zmq_ctx_set(hub->zmq, ZMQ_IO_THREADS, 1);
    if (count >= (uint32_t)zmq_ctx_get(hub->zmq, ZMQ_MAX_SOCKETS))
        zmq_ctx_set(hub->zmq, ZMQ_MAX_SOCKETS, (int)count + 1);
    return SHD_OK;
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
    int r = init_links(hub, address, &why);
    if (r == SHD_OK) {
        struct round round = { .what = "Hello", .type = WIRE_WELCOME, .take = take_welcome };
        for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++)
            r = greet(&hub->links[i], address->dir, name, &round, &why);
        r = round_finish(&round, hub, r, &why);
    }
    if (r != SHD_OK) {
        hub_free(hub);
        if (e != NULL)
            *e = why;
        return r;
    }
    *ret_hub = hub;
    return SHD_OK;
}

/* So that the daemons have let go when we return. Best effort: hanging up says the same. */
static void detach(struct hub *hub)
{
    struct round round = { .what = "Detach", .type = WIRE_REPLY_NONE };
    struct shd_err ignored;
    if (hub->timeout_ns > DETACH_NS_MAX)
        hub->timeout_ns = DETACH_NS_MAX;
    int r = hub_check(hub, &ignored);
    for (uint32_t i = 0; r == SHD_OK && i < hub->link_count; i++) {
        struct wire_request request = { .type = WIRE_DETACH };
        if (hub->links[i].session == 0)
            r = SHD_EGONE;
        else
            r = round_ask(&round, &hub->links[i], &request, 0, &ignored);
    }
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
    }
    if (hub->zmq != NULL)
        zmq_ctx_term(hub->zmq);
    free(hub->links);
    free(hub->poll_items);
    free(hub->frame);
    free(hub->arena_memory);
    free(hub);
}
