/* See http.h. */
#include "client/ctl/base/http.h"

#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

#define READ_BYTES      ((size_t)64 * 1024)
#define TICK_MS         100
#define READS_PER_STEP  64u /* others want their turn */
#define DIGITS_OF_CHUNK 8u

bool http_ended(const struct http *h)
{
    return h->state == HTTP_DONE || h->state == HTTP_FAILED;
}

static void hang_up(struct http *h)
{
    if (h->fd >= 0)
        close(h->fd);
    h->fd = -1;
}

/* h->err is set. */
static void fail(struct http *h)
{
    hang_up(h);
    h->state = HTTP_FAILED;
}

static void fail_sys(struct http *h, int error)
{
    const char *path = h->name;
    if (error == ENOENT || error == ENOTDIR)
        err_set(&h->err, SHD_ENOENT, "no status socket %s", path);
    else if (error == ECONNREFUSED)
        err_set(&h->err, SHD_EGONE, "nobody listens at %s: the daemon is gone", path);
    else if (error == EACCES || error == EPERM)
        err_set(&h->err, SHD_EAUTH, "%s: permission denied: be its user, or in its group", path);
    else
        err_set(&h->err, SHD_EIO, "%s: %s", path, strerror(error));
    fail(h);
}

/* -- The answer ------------------------------------------------------------------------------ */

/* The value of a header, in h's head; NULL when it has none. */
static const char *header(const struct http *h, const char *name)
{
    const size_t bytes = strlen(name);
    for (const char *line = strstr(h->buf, "\r\n");
         line != NULL && line + 2 < h->buf + h->head_bytes; line = strstr(line + 2, "\r\n"))
        if (strncasecmp(line + 2, name, bytes) == 0 && line[2 + bytes] == ':')
            return line + 3 + bytes + strspn(line + 3 + bytes, " \t");
    return NULL;
}

/* The head is complete: what does it say? */
static void take_head(struct http *h)
{
    h->length_bytes = SIZE_MAX;
    if (sscanf(h->buf, "HTTP/1.%*1[01] %3d ", &h->code) != 1) {
        h->code = 0;
        err_set(&h->err, SHD_EPROTO, "%s does not answer in HTTP", h->name);
        fail(h);
        return;
    }
    const char *encoding = header(h, "transfer-encoding"), *length = header(h, "content-length");
    h->chunked = encoding != NULL && strncasecmp(encoding, "chunked", 7) == 0;
    if (h->chunked || length == NULL)
        return;
    char *end;
    errno = 0;
    const unsigned long long n = strtoull(length, &end, 10);
    if (length[0] < '0' || length[0] > '9' || errno != 0 || *end != '\r' || n > h->bytes_max) {
        err_set(&h->err, SHD_ERANGE, "%s: an answer of '%.*s' bytes, at most %zu are taken",
                h->name, (int)strspn(length, "0123456789"), length, h->bytes_max);
        fail(h);
        return;
    }
    h->length_bytes = (size_t)n;
}

/* Look for the end of the head in what has come. */
static void find_head(struct http *h)
{
    const char *end = memmem(h->buf, h->used, "\r\n\r\n", 4);
    if (end == NULL && h->used <= HTTP_HEAD_BYTES_MAX)
        return;
    if (end == NULL || memchr(h->buf, '\0', (size_t)(end - h->buf)) != NULL) {
        err_set(&h->err, SHD_EPROTO, "%s does not answer in HTTP", h->name);
        fail(h);
        return;
    }
    h->head_bytes = (size_t)(end - h->buf) + 4;
    take_head(h);
}

/* Put the chunks of a body together, in place; false when it is not whole, or no such body. */
static bool join_chunks(char *body, size_t bytes, size_t *ret_bytes)
{
    size_t from = 0, to = 0;
    for (;;) {
        size_t size = 0, digits = 0;
        for (; from < bytes && digits <= DIGITS_OF_CHUNK; from++, digits++) {
            const char c = body[from];
            if (c >= '0' && c <= '9')
                size = size * 16 + (size_t)(c - '0');
            else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'))
                size = size * 16 + (size_t)((c | 0x20) - 'a') + 10;
            else
                break;
        }
        const char *line = memmem(body + from, bytes - from, "\r\n", 2);
        if (digits == 0 || digits > DIGITS_OF_CHUNK || line == NULL)
            return false;
        from = (size_t)(line - body) + 2;
        if (size == 0)
            break;
        if (size > bytes - from || bytes - from - size < 2)
            return false;
        memmove(body + to, body + from, size);
        to += size;
        from += size + 2;
    }
    *ret_bytes = to;
    return true;
}

static bool ends_like_chunks(const struct http *h)
{
    return h->used >= h->head_bytes + 5 && memcmp(h->buf + h->used - 5, "0\r\n\r\n", 5) == 0;
}

/* All that will come is here. */
static void take_body(struct http *h)
{
    char *body = h->buf + h->head_bytes;
    size_t bytes = h->used - h->head_bytes;
    const bool whole = h->chunked ? ends_like_chunks(h) && join_chunks(body, bytes, &bytes)
                                  : h->length_bytes == SIZE_MAX || bytes >= h->length_bytes;
    if (!whole) {
        err_set(&h->err, SHD_EPROTO, "%s broke off in the middle of its answer (%zu bytes)",
                h->name, h->used);
        fail(h);
        return;
    }
    if (h->length_bytes < bytes)
        bytes = h->length_bytes;
    body[bytes] = '\0';
    if (h->code != 200) {
        err_set(&h->err, h->code == 404 ? SHD_ENOTSUP : SHD_EPROTO, "%s answers with HTTP %d",
                h->name, h->code);
        fail(h);
        return;
    }
    hang_up(h);
    h->body = body;
    h->body_bytes = bytes;
    h->state = HTTP_DONE;
}

/* -- Bytes ----------------------------------------------------------------------------------- */

/* Room for one more read and a NUL. */
static bool make_room(struct http *h)
{
    if (h->capacity - h->used > READ_BYTES)
        return true;
    if (h->used > h->bytes_max + HTTP_HEAD_BYTES_MAX) {
        err_set(&h->err, SHD_ERANGE, "%s: the answer is longer than %zu bytes", h->name,
                h->bytes_max);
        fail(h);
        return false;
    }
    const size_t capacity = (h->capacity + READ_BYTES) * 2;
    char *grown = realloc(h->buf, capacity);
    if (grown == NULL) {
        err_set(&h->err, SHD_ENOMEM, "no memory for the answer of %s", h->name);
        fail(h);
        return false;
    }
    h->buf = grown;
    h->capacity = capacity;
    return true;
}

static void stream_ended(struct http *h)
{
    if (h->head_bytes > 0) {
        take_body(h);
        return;
    }
    err_set(&h->err, SHD_EPROTO, "%s hung up without an answer", h->name);
    fail(h);
}

/* n bytes more have come. */
static void take_bytes(struct http *h, size_t n)
{
    h->used += n;
    h->buf[h->used] = '\0';
    if (h->head_bytes == 0)
        find_head(h);
    if (h->state != HTTP_READING || h->head_bytes == 0)
        return;
    const size_t bytes = h->used - h->head_bytes;
    if (h->chunked ? ends_like_chunks(h) : bytes >= h->length_bytes)
        take_body(h);
}

static void read_some(struct http *h)
{
    for (unsigned i = 0; i < READS_PER_STEP && h->state == HTTP_READING && make_room(h); i++) {
        const ssize_t n = recv(h->fd, h->buf + h->used, READ_BYTES, 0);
        if (n > 0) {
            take_bytes(h, (size_t)n);
        } else if (n == 0) {
            stream_ended(h);
        } else {
            if (errno != EAGAIN && errno != EINTR)
                fail_sys(h, errno);
            return;
        }
    }
}

static void send_some(struct http *h)
{
    const ssize_t n = send(h->fd, h->request + h->sent, h->request_bytes - h->sent, MSG_NOSIGNAL);
    if (n < 0) {
        if (errno != EAGAIN && errno != EINTR)
            fail_sys(h, errno);
        return;
    }
    h->sent += (size_t)n;
    if (h->sent == h->request_bytes)
        h->state = HTTP_READING;
}

/* EAGAIN: the server's queue of connections is full; there is nothing to poll for. */
static void try_connect(struct http *h)
{
    if (connect(h->fd, &h->address.any, h->address_bytes) == 0 || errno == EISCONN)
        h->state = HTTP_SENDING;
    else if (errno != EAGAIN && errno != EINTR && errno != EINPROGRESS && errno != EALREADY)
        fail_sys(h, errno);
}

static int unix_address(struct http *h, const char *path)
{
    const size_t bytes = strlen(path);
    if (bytes >= sizeof(h->address.local.sun_path))
        return err_set(&h->err, SHD_ERANGE, "socket path '%.60s...' has %zu bytes, at most %zu",
                       path, bytes, sizeof(h->address.local.sun_path) - 1);
    h->address.local.sun_family = AF_UNIX;
    memcpy(h->address.local.sun_path, path, bytes + 1);
    h->address_bytes = sizeof(h->address.local);
    return SHD_OK;
}

/* "host:9464", "127.0.0.1:9464", "[::1]:9464". Waits for a name server, where that is a name. */
static int tcp_address(struct http *h, const char *at)
{
    const struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV };
    struct addrinfo *info = NULL;
    const char *colon = strrchr(at, ':');
    char host[HTTP_NAME_BYTES];
    const bool brackets = at[0] == '[' && colon != NULL && colon > at && colon[-1] == ']';
    if (colon == NULL || colon == at || colon[1] == '\0' || strlen(at) >= sizeof(host))
        return err_set(&h->err, SHD_EINVAL,
                       "'%.60s' is not HOST:PORT, as 'node1:9464' or '[::1]:9464'", at);
    snprintf(host, sizeof(host), "%.*s", (int)(colon - at) - (brackets ? 2 : 0), at + brackets);
    const int failed = getaddrinfo(host, colon + 1, &hints, &info);
    if (failed != 0)
        return err_set(&h->err, failed == EAI_NONAME ? SHD_ENOENT : SHD_EIO, "'%.60s': %s", at,
                       gai_strerror(failed));
    memcpy(&h->address, info->ai_addr, info->ai_addrlen);
    h->address_bytes = info->ai_addrlen;
    freeaddrinfo(info);
    return SHD_OK;
}

/* -- The request ----------------------------------------------------------------------------- */

void http_start(struct http *h, const char *path, const char *target, size_t bytes_max,
                uint64_t timeout_ms)
{
    CHECK(h->state == HTTP_IDLE && strlen(target) < HTTP_TARGET_BYTES_MAX);
    *h = (struct http){
        .fd = -1, .state = HTTP_CONNECTING, .bytes_max = bytes_max, .started_ns = clock_now_ns()
    };
    h->deadline_ns = h->started_ns + timeout_ms * NS_PER_MS;
    h->request_bytes = (size_t)snprintf(h->request, sizeof(h->request),
                                        "GET %s HTTP/1.1\r\nHost: localhost\r\n"
                                        "User-Agent: shardctl\r\nConnection: close\r\n\r\n",
                                        target);
    snprintf(h->name, sizeof(h->name), "%s", path);
    if ((path[0] == '/' ? unix_address(h, path) : tcp_address(h, path)) != SHD_OK) {
        fail(h);
        return;
    }
    h->fd = socket(h->address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (h->fd < 0)
        fail_sys(h, errno);
    else
        http_step(h);
}

struct pollfd http_poll(const struct http *h)
{
    struct pollfd p = { .fd = -1 };
    const bool connecting = h->state == HTTP_CONNECTING && h->address.any.sa_family != AF_UNIX;
    if (connecting || h->state == HTTP_SENDING || h->state == HTTP_READING) {
        p.fd = h->fd;
        p.events = h->state == HTTP_SENDING ? POLLOUT : POLLIN;
    }
    return p;
}

void http_step(struct http *h)
{
    if (h->state == HTTP_CONNECTING)
        try_connect(h);
    if (h->state == HTTP_SENDING)
        send_some(h);
    if (h->state == HTTP_READING)
        read_some(h);
    const uint64_t now_ns = clock_now_ns();
    if (h->state == HTTP_IDLE || http_ended(h) || now_ns < h->deadline_ns)
        return;
    err_set(&h->err, SHD_ETIMEDOUT, "%s does not answer (waited %.1f s)", h->name,
            (double)(now_ns - h->started_ns) * 1e-9);
    fail(h);
}

void http_end(struct http *h)
{
    if (h->state == HTTP_IDLE)
        return;
    hang_up(h);
    free(h->buf);
    *h = (struct http){ .fd = -1 };
}

void http_run(struct http *all, uint32_t count)
{
    struct pollfd *polls = calloc(count + 1u, sizeof(*polls));
    for (bool busy = true; busy;) {
        busy = false;
        for (uint32_t i = 0; i < count; i++) {
            if (polls != NULL)
                polls[i] = http_poll(&all[i]);
            busy = busy || (all[i].state != HTTP_IDLE && !http_ended(&all[i]));
        }
        if (!busy)
            break;
        poll(polls, polls != NULL ? count : 0, polls != NULL ? TICK_MS : 1);
        for (uint32_t i = 0; i < count; i++)
            http_step(&all[i]);
    }
    free(polls);
}
