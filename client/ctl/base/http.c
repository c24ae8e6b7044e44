/* See http.h. */
#include "client/ctl/base/http.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#include <curl/curl.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"

#define TICK_MS     100
#define FIRST_BYTES ((size_t)64 * 1024)
#define URL_BYTES   (HTTP_NAME_BYTES + 80u)
#define PREFIX      "http://"
#define UNIX_HOST   "localhost"

/* -- The answer ------------------------------------------------------------------------------ */

static int err_longer(struct http *h)
{
    return err_set(&h->err, SHD_ERANGE, "%s: the answer is longer than %zu bytes", h->name,
                   h->bytes_max);
}

/* Called by libcurl with a piece of the body. Less than bytes ends the request: h->err is set. */
static size_t take_bytes(char *data, size_t one, size_t bytes, void *arg)
{
    struct http *h = arg;
    CHECK(one == 1);
    if (bytes > h->bytes_max - h->used) {
        err_longer(h);
        return 0;
    }
    if (h->used + bytes >= h->capacity) {
        const size_t capacity = (h->used + bytes + FIRST_BYTES) * 2;
        char *grown = realloc(h->buf, capacity);
        if (grown == NULL) {
            err_set(&h->err, SHD_ENOMEM, "no memory for the answer of %s", h->name);
            return 0;
        }
        h->buf = grown;
        h->capacity = capacity;
    }
    memcpy(h->buf + h->used, data, bytes);
    h->used += bytes;
    h->buf[h->used] = '\0';
    return bytes;
}

static int fail_sys(struct http *h)
{
    const char *path = h->name;
    long error = 0;
    curl_easy_getinfo(h->easy, CURLINFO_OS_ERRNO, &error);
    switch (error) {
    case ENOENT:
    case ENOTDIR:
        return err_set(&h->err, SHD_ENOENT, "no status socket %s", path);
    case ECONNREFUSED:
        return err_set(&h->err, SHD_EGONE, "nobody listens at %s: the daemon is gone", path);
    case EACCES:
    case EPERM:
        return err_set(&h->err, SHD_EAUTH, "%s: permission denied: be its user, or in its group",
                       path);
    default:
        return err_set(&h->err, SHD_EIO, "%s: %s", path,
                       error != 0 ? strerror((int)error) : "the connection failed");
    }
}

/* The error of a request that ended without an answer. */
static int fail(struct http *h, CURLcode code)
{
    static const struct {
        CURLcode code;
        int status;
        const char *format; /* of the socket's name */
    } errors[] = {
        { CURLE_UNSUPPORTED_PROTOCOL, SHD_EPROTO, "%s does not answer in HTTP" },
        { CURLE_WEIRD_SERVER_REPLY, SHD_EPROTO, "%s does not answer in HTTP" },
        { CURLE_GOT_NOTHING, SHD_EPROTO, "%s hung up without an answer" },
        { CURLE_COULDNT_RESOLVE_HOST, SHD_ENOENT, "'%.60s': no such host" },
        { CURLE_OUT_OF_MEMORY, SHD_ENOMEM, "no memory for the answer of %s" },
        { CURLE_SEND_ERROR, SHD_ETIMEDOUT, /* a Unix socket says only here that its queue is full */
          "%s does not answer: its queue of connections is full, or it hung up" },
    };
    curl_off_t length = -1;
    for (size_t i = 0; i < ARRAY_SIZE(errors); i++)
        if (errors[i].code == code)
            return err_set(&h->err, errors[i].status, errors[i].format, h->name);
    switch (code) {
    case CURLE_WRITE_ERROR:
        return h->err.code; /* take_bytes() has said it */
    case CURLE_OPERATION_TIMEDOUT:
        return err_set(&h->err, SHD_ETIMEDOUT, "%s does not answer (waited %.1f s)", h->name,
                       (double)(clock_now_ns() - h->started_ns) * 1e-9);
    case CURLE_FILESIZE_EXCEEDED:
        curl_easy_getinfo(h->easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
        if (length < 0) /* libcurl counts by itself from 8.4 on where the answer does not say it */
            return err_longer(h);
        return err_set(&h->err, SHD_ERANGE,
                       "%s: an answer of '%" CURL_FORMAT_CURL_OFF_T
                       "' bytes, at most %zu are taken",
                       h->name, length, h->bytes_max);
    case CURLE_PARTIAL_FILE:
        return err_set(&h->err, SHD_EPROTO, "%s broke off in the middle of its answer (%zu bytes)",
                       h->name, h->used);
    case CURLE_COULDNT_CONNECT:
    case CURLE_RECV_ERROR:
        return fail_sys(h);
    default:
        return err_set(&h->err, SHD_EPROTO, "%s: %s", h->name, curl_easy_strerror(code));
    }
}

static void end(struct http *h, CURLcode code)
{
    long answer = 0;
    curl_easy_getinfo(h->easy, CURLINFO_RESPONSE_CODE, &answer);
    if (code != CURLE_OK)
        fail(h, code);
    else if (answer != 200)
        err_set(&h->err, answer == 404 ? SHD_ENOTSUP : SHD_EPROTO, "%s answers with HTTP %ld",
                h->name, answer);
    h->state = h->err.code == SHD_OK ? HTTP_DONE : HTTP_FAILED;
    h->body = h->buf != NULL ? h->buf : "";
    h->body_bytes = h->used;
}

/* -- The request ----------------------------------------------------------------------------- */

/* The socket to connect to, and the URL that is asked for there. */
static int set_place(struct http *h, const char *path, const char *target)
{
    char url[URL_BYTES];
    const size_t bytes = strlen(path), bytes_max = sizeof(((struct sockaddr_un *)0)->sun_path) - 1;
    const bool local = path[0] == '/';
    if (local && bytes > bytes_max)
        return err_set(&h->err, SHD_ERANGE, "socket path '%.60s...' has %zu bytes, at most %zu",
                       path, bytes, bytes_max);
    CURLcode r = CURLE_OK;
    if (local)
        r = curl_easy_setopt(h->easy, CURLOPT_UNIX_SOCKET_PATH, path);
    snprintf(url, sizeof(url), PREFIX "%s%s", local ? UNIX_HOST : h->name, target);
    if (r == CURLE_OK)
        r = curl_easy_setopt(h->easy, CURLOPT_URL, url);
    return r == CURLE_OK ? SHD_OK
                         : err_set(&h->err, SHD_EINVAL, "%s: %s", h->name, curl_easy_strerror(r));
}

/* No proxy, no signal, no other protocol, one connection for one request. */
static int set_options(struct http *h, uint64_t timeout_ms)
{
    CURL *c = h->easy;
    const bool set = curl_easy_setopt(c, CURLOPT_PRIVATE, h) == CURLE_OK &&
                     curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
                     curl_easy_setopt(c, CURLOPT_NOPROXY, "*") == CURLE_OK &&
                     curl_easy_setopt(c, CURLOPT_FORBID_REUSE, 1L) == CURLE_OK &&
                     curl_easy_setopt(c, CURLOPT_USERAGENT, "shardctl") == CURLE_OK &&
                     curl_easy_setopt(c, CURLOPT_TIMEOUT_MS, (long)timeout_ms) == CURLE_OK &&
                     curl_easy_setopt(c, CURLOPT_MAXFILESIZE_LARGE, (curl_off_t)h->bytes_max) ==
                         CURLE_OK &&
                     curl_easy_setopt(c, CURLOPT_WRITEDATA, h) == CURLE_OK &&
                     curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, take_bytes) == CURLE_OK;
    return set ? SHD_OK : err_set(&h->err, SHD_ENOMEM, "no memory to ask %s", h->name);
}

struct http *http_start(struct http_client *c, const char *path, const char *target,
                        size_t bytes_max, uint64_t timeout_ms)
{
    struct http *h = calloc(1, sizeof(*h));
    if (h == NULL)
        return NULL;
    *h = (struct http){ .client = c, .bytes_max = bytes_max, .started_ns = clock_now_ns() };
    snprintf(h->name, sizeof(h->name), "%s", path);
    h->easy = curl_easy_init();
    if (h->easy == NULL) {
        free(h);
        return NULL;
    }
    int r = set_options(h, timeout_ms);
    if (r == SHD_OK)
        r = set_place(h, path, target);
    if (r == SHD_OK && curl_multi_add_handle(c->multi, h->easy) != CURLM_OK)
        r = err_set(&h->err, SHD_ENOMEM, "no memory to ask %s", h->name);
    if (r != SHD_OK) {
        h->state = HTTP_FAILED;
        return h;
    }
    c->running++;
    http_client_perform(c);
    return h;
}

/* Its handle leaves the client. */
static void detach(struct http *h)
{
    CHECK(h->client->running > 0);
    curl_multi_remove_handle(h->client->multi, h->easy);
    h->client->running--;
}

void http_free(struct http *h)
{
    if (h == NULL)
        return;
    if (h->state == HTTP_RUNNING)
        detach(h);
    curl_easy_cleanup(h->easy);
    free(h->buf);
    free(h);
}

/* -- All of them ----------------------------------------------------------------------------- */

int http_client_init(struct http_client *c, struct shd_err *e)
{
    *c = (struct http_client){ .multi = NULL };
    if (curl_global_init(CURL_GLOBAL_NOTHING) == CURLE_OK)
        c->multi = curl_multi_init();
    return c->multi != NULL ? SHD_OK : err_set(e, SHD_ENOMEM, "no memory for an HTTP client");
}

void http_client_deinit(struct http_client *c)
{
    CHECK(c->running == 0);
    curl_multi_cleanup(c->multi);
    c->multi = NULL;
}

void http_client_perform(struct http_client *c)
{
    int running, left;
    curl_multi_perform(c->multi, &running);
    for (CURLMsg *m = curl_multi_info_read(c->multi, &left); m != NULL;
         m = curl_multi_info_read(c->multi, &left)) {
        struct http *h = NULL;
        const CURLcode code = m->data.result;
        curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, (char **)&h);
        end(h, code);
        detach(h);
    }
}

void http_client_wait(struct http_client *c, int fd, int timeout_ms)
{
    struct curl_waitfd also = { .fd = fd, .events = CURL_WAIT_POLLIN };
    curl_multi_poll(c->multi, &also, fd >= 0 ? 1 : 0, timeout_ms, NULL);
}

void http_client_run(struct http_client *c)
{
    for (http_client_perform(c); c->running > 0; http_client_perform(c))
        http_client_wait(c, /* fd= */ -1, TICK_MS);
}
