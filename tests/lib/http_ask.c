#include "tests/lib/http_ask.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "proto/base/check.h"

int http_connect(const struct fixture *f, int index)
{
    char device[FIXTURE_DEVICE_BYTES];
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(address.sun_path, sizeof address.sun_path, "%.80s/%s.status", f->dir,
             fixture_device(f, index, device));
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0)
        return fd;
    close(fd);
    return -1;
}

void http_send(int fd, const char *text)
{
    const size_t bytes = strlen(text);
    size_t sent = 0;
    while (sent < bytes) {
        const ssize_t n = send(fd, text + sent, bytes - sent, MSG_NOSIGNAL);
        if (n <= 0)
            return; /* it has had enough of us */
        sent += (size_t)n;
    }
}

struct http_reply http_receive(int fd, uint64_t timeout_ms)
{
    struct http_reply r = { .text = malloc(1) };
    size_t used = 0, room = 0;
    const uint64_t end_ms = test_now_ms() + timeout_ms;
    for (;;) {
        struct pollfd p = { .fd = fd, .events = POLLIN };
        const uint64_t now_ms = test_now_ms();
        if (now_ms >= end_ms || poll(&p, 1, (int)(end_ms - now_ms)) <= 0)
            break;
        if (used + 65536 > room) {
            room = 2 * used + 65536;
            r.text = realloc(r.text, room + 1);
            CHECK(r.text != NULL);
        }
        const ssize_t n = read(fd, r.text + used, room - used);
        if (n <= 0)
            break;
        used += (size_t)n;
    }
    close(fd);
    r.text[used] = '\0';
    /* NOLINTBEGIN(clang-analyzer-unix.Malloc): the caller's to free */
    if (sscanf(r.text, "HTTP/1.%*d %d", &r.code) != 1)
        r.code = 0;
    const char *body = strstr(r.text, "\r\n\r\n");
    /* NOLINTEND(clang-analyzer-unix.Malloc) */
    r.body = body != NULL ? body + 4 : r.text + used;
    r.body_bytes = used - (size_t)(r.body - r.text);
    return r;
}

struct http_reply http_ask(const struct fixture *f, int index, const char *method, const char *path)
{
    char request[512];
    const uint64_t start_ms = test_now_ms();
    const int fd = http_connect(f, index);
    EXPECT(fd >= 0);
    snprintf(request, sizeof request, "%s %s HTTP/1.1\r\nHost: localhost\r\n\r\n", method, path);
    http_send(fd, request);
    struct http_reply r = http_receive(fd, TEST_HANG_MS);
    r.took_ms = test_now_ms() - start_ms;
    return r;
}

struct http_reply http_get(const struct fixture *f, int index, const char *path)
{
    return http_ask(f, index, "GET", path);
}
