#include "client/ctl/run/relay.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "proto/base/check.h"

#define RELAY_RETRY_MS   20u
#define RELAY_CLOSING_MS 500  /* how long the last lines may wait for a reader of our stderr */
#define RELAY_WAKE_READS 16u  /* per wake-up, so that one loud child does not starve the rest */
#define RELAY_LAST_READS 256u /* at the close: more than a pipe holds */

static void relay_readable(uv_poll_t *poll, int status, int events);

/* True when a write of PIPE_BUF bytes to stderr would not block within wait_ms. A closed reader
 * counts: the write fails at once, and there is no one to tell. */
static bool stderr_takes(int wait_ms)
{
    struct pollfd p = { .fd = STDERR_FILENO, .events = POLLOUT };
    const int n = poll(&p, 1, wait_ms);
    return n > 0 || (n < 0 && errno != EINTR);
}

static void emit(struct relay *r, size_t bytes)
{
    char line[RELAY_PREFIX_BYTES + RELAY_LINE_BYTES_MAX + 1];
    size_t used = strlen(r->prefix);
    memcpy(line, r->prefix, used);
    memcpy(line + used, r->buf, bytes);
    used += bytes;
    if (line[used - 1] != '\n')
        line[used++] = '\n';
    say_line(line, used);
    snprintf(r->last, sizeof(r->last), "%.*s", (int)strcspn(line + strlen(r->prefix), "\n"),
             line + strlen(r->prefix));
}

/* Put out the complete lines of the buffer; at the end of the stream the rest as well. False:
 * stderr took no more within wait_ms, something is left. */
static bool relay_flush(struct relay *r, bool end, int wait_ms)
{
    while (r->used > 0) {
        const char *newline = memchr(r->buf, '\n', r->used);
        if (newline == NULL && !end && r->used < sizeof(r->buf))
            return true;
        if (!stderr_takes(wait_ms))
            return false;
        const size_t bytes = newline != NULL ? (size_t)(newline - r->buf) + 1 : r->used;
        emit(r, bytes);
        r->used -= bytes;
        memmove(r->buf, r->buf + bytes, r->used);
    }
    return true;
}

/* One read. 1: got bytes, 0: nothing there now, -1: end of the stream. */
static int relay_read(struct relay *r)
{
    CHECK(r->used < sizeof(r->buf));
    const ssize_t n = read(r->fd, r->buf + r->used, sizeof(r->buf) - r->used);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    r->used += (size_t)n;
    return n > 0 ? 1 : -1;
}

static void relay_retry(uv_timer_t *timer)
{
    struct relay *r = timer->data;
    uv_poll_start(&r->poll, UV_READABLE, relay_readable);
}

static void relay_readable(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    struct relay *r = poll->data;
    int more = 1;
    for (unsigned i = 0; i < RELAY_WAKE_READS && more > 0; i++) {
        if (!relay_flush(r, false, 0)) {
            uv_poll_stop(poll);
            uv_timer_start(&r->retry, relay_retry, RELAY_RETRY_MS, 0);
            return;
        }
        more = relay_read(r);
    }
    if (more < 0)
        uv_poll_stop(poll); /* relay_close() puts out what is left */
    else
        relay_flush(r, false, 0);
}

int relay_open(struct relay *relay, uv_loop_t *loop, const char *name, int *ret_write_fd,
               struct shd_err *e)
{
    int ends[2];
    CHECK(relay_idle(relay));
    if (pipe2(ends, O_CLOEXEC) < 0)
        return err_sys(e, SHD_EIO, "make a pipe for %s", name);
    if (fcntl(ends[0], F_SETFL, O_NONBLOCK) < 0 || uv_poll_init(loop, &relay->poll, ends[0]) != 0) {
        const int r = err_sys(e, SHD_EIO, "watch the output of %s", name);
        close(ends[0]);
        close(ends[1]);
        return r;
    }
    uv_timer_init(loop, &relay->retry);
    relay->poll.data = relay;
    relay->retry.data = relay;
    relay->fd = ends[0];
    relay->handles = 2;
    relay->used = 0;
    relay->last[0] = '\0';
    snprintf(relay->prefix, sizeof(relay->prefix), "[%s] ", name);
    uv_poll_start(&relay->poll, UV_READABLE, relay_readable);
    *ret_write_fd = ends[1];
    return SHD_OK;
}

bool relay_idle(const struct relay *relay)
{
    return relay->fd < 0 && relay->handles == 0;
}

static void handle_closed(uv_handle_t *handle)
{
    struct relay *r = handle->data;
    r->handles--;
}

void relay_close(struct relay *relay)
{
    if (relay->fd < 0)
        return;
    int more = 1;
    for (unsigned i = 0; i < RELAY_LAST_READS && more > 0; i++)
        more = relay_flush(relay, false, RELAY_CLOSING_MS) ? relay_read(relay) : 0;
    relay_flush(relay, true, RELAY_CLOSING_MS);
    uv_close((uv_handle_t *)&relay->poll, handle_closed);
    uv_close((uv_handle_t *)&relay->retry, handle_closed);
    close(relay->fd);
    relay->fd = -1;
}
