/* See http_conn.h. A connection is not closed here but shut down: libmicrohttpd then finds it ended
 * and closes it. */
#include "daemon/view/http_conn.h"

#include <sys/socket.h>

#include <uv.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

#define ASK_NS    (10000 * NS_PER_MS) /* from connecting to the end of the request */
#define ANSWER_NS (60000 * NS_PER_MS) /* from connecting to the end of the answer */

static void shut(struct http_conn *c)
{
    if (!c->shut && c->fd >= 0)
        shutdown(c->fd, SHUT_RDWR);
    c->shut = true;
}

/* One too many: the oldest that has not asked anything makes room, so that who connects and sends
 * nothing stands only in the way of others that do. */
static void make_room(struct http_conns *all)
{
    struct http_conn *oldest = NULL;
    for (uint32_t i = 0; i < ARRAY_SIZE(all->items); i++) {
        struct http_conn *c = &all->items[i];
        if (c->connection == NULL || c->shut || c->suspended)
            continue;
        if (oldest == NULL || (oldest->asked && !c->asked) ||
            (oldest->asked == c->asked && c->since_ns < oldest->since_ns))
            oldest = c;
    }
    if (oldest != NULL)
        shut(oldest);
}

struct http_conn *http_conn_add(struct http_conns *all, struct MHD_Connection *connection, int fd)
{
    struct http_conn *c = NULL;
    if (all->count >= HTTP_CONNECTIONS)
        make_room(all);
    for (uint32_t i = 0; i < ARRAY_SIZE(all->items) && c == NULL; i++)
        if (all->items[i].connection == NULL)
            c = &all->items[i];
    if (c == NULL) {
        shutdown(fd, SHUT_RDWR);
        return NULL;
    }
    *c = (struct http_conn){ .connection = connection, .fd = fd, .since_ns = uv_hrtime() };
    all->count++;
    return c;
}

void http_conn_remove(struct http_conns *all, struct http_conn *c)
{
    if (c == NULL)
        return;
    CHECK(all->count > 0);
    all->traces -= c->traces;
    all->count--;
    all->removed = true;
    *c = (struct http_conn){ .fd = -1 };
}

int http_conns_sweep(struct http_conns *all, uint64_t now_ns)
{
    uint64_t next_ns = UINT64_MAX;
    for (uint32_t i = 0; i < ARRAY_SIZE(all->items); i++) {
        struct http_conn *c = &all->items[i];
        if (c->connection == NULL || c->shut || c->suspended)
            continue;
        const uint64_t end_ns = c->since_ns + (c->asked ? ANSWER_NS : ASK_NS);
        if (end_ns <= now_ns)
            shut(c);
        else if (end_ns - now_ns < next_ns)
            next_ns = end_ns - now_ns;
    }
    return next_ns == UINT64_MAX ? -1 : (int)(next_ns / NS_PER_MS) + 1;
}
