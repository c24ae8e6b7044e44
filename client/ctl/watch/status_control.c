/* See status_control.h. */
#include "client/ctl/watch/status_control.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/ctl/base/text.h"
#include "client/shd.h"

#define TIMEOUT_MS  3000
#define GREETING_MS 500

/* Whether somebody listens there: shd_connect() would wait long for one that does not. A daemon
 * greets who connects; hanging up before it has would make it complain. */
static bool listens(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof(a.sun_path))
        return false;
    memcpy(a.sun_path, path, strlen(path) + 1);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    const bool does = fd >= 0 && connect(fd, (const struct sockaddr *)&a, sizeof(a)) == 0;
    struct pollfd p = { .fd = fd, .events = POLLIN };
    if (does)
        poll(&p, 1, GREETING_MS);
    if (fd >= 0)
        close(fd);
    return does;
}

static int ask(const char *address, char **ret_text, struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof(options),
                                         .address = address,
                                         .name = "shardctl status",
                                         .timeout_ms = TIMEOUT_MS };
    shd_session *s;
    int r = shd_connect(&options, &s, e);
    if (r != SHD_OK)
        return r;
    r = shd_status(s, 0, ret_text, e);
    shd_close(s);
    return r;
}

static void ask_one(struct node *n, struct node_daemon *d)
{
    char path[NODE_PATH_BYTES + DOC_NAME_BYTES + 8], *text;
    snprintf(path, sizeof(path), "%s/%s.sock", n->dir, d->device);
    if (!listens(path))
        return;
    snprintf(path, sizeof(path), "%s?%s", n->dir, d->device);
    struct shd_err e = { 0 };
    if (ask(path, &text, &e) != SHD_OK) {
        d->why = e;
        text_clean(e.text, d->why.text, sizeof(d->why.text));
        return;
    }
    node_take(n, d, text, strlen(text));
    free(text);
}

void control_ask(struct node *n)
{
    for (uint32_t i = 0; i < n->count; i++) {
        struct node_daemon *d = &n->daemons[i];
        if (!d->up &&
            (d->why.code == SHD_ENOENT || d->why.code == SHD_EGONE || d->why.code == SHD_ENOTSUP))
            ask_one(n, d);
    }
}
