/* See manager.h. */
#include "daemon/base/manager.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/sys.h"

bool manager_is_there(void)
{
    return getenv("NOTIFY_SOCKET") != NULL;
}

/* False: there is none. '@': an abstract name. */
static bool find_address(struct sockaddr_un *ret_address, socklen_t *ret_bytes)
{
    const char *path = getenv("NOTIFY_SOCKET");
    const size_t bytes = path != NULL ? strlen(path) : 0;
    *ret_address = (struct sockaddr_un){ .sun_family = AF_UNIX };
    if (bytes == 0 || bytes >= sizeof ret_address->sun_path)
        return false;
    memcpy(ret_address->sun_path, path, bytes);
    if (path[0] == '@')
        ret_address->sun_path[0] = '\0';
    *ret_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + bytes);
    return true;
}

static int send_by(int sock, const struct msghdr *msg, uint64_t wait_us)
{
    const struct timeval wait = { .tv_sec = (time_t)(wait_us / US_PER_S),
                                  .tv_usec = (suseconds_t)(wait_us % US_PER_S) };
    const int flags = MSG_NOSIGNAL | (wait_us == 0 ? MSG_DONTWAIT : 0);
    ssize_t n;
    if (wait_us > 0 && setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait) != 0)
        return errno;
    do
        n = sys_sendmsg(sock, msg, flags);
    while (n < 0 && errno == EINTR);
    return n < 0 ? errno : 0;
}

int manager_tell_by(int sock, const char *text, int fd, uint64_t wait_us)
{
    struct sockaddr_un address;
    socklen_t bytes;
    if (!find_address(&address, &bytes))
        return 0;
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    struct iovec data = { .iov_base = (char *)text, .iov_len = strlen(text) };
    struct msghdr msg = {
        .msg_name = &address, .msg_namelen = bytes, .msg_iov = &data, .msg_iovlen = 1
    };
    if (fd >= 0) {
        msg.msg_control = &control;
        msg.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        *c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof fd),
                               .cmsg_level = SOL_SOCKET,
                               .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    return send_by(sock, &msg, wait_us);
}

int manager_tell(const char *text, int fd, uint64_t wait_us)
{
    const int sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (sock < 0)
        return errno;
    const int r = manager_tell_by(sock, text, fd, wait_us);
    close(sock);
    return r;
}

/* Until the other end of a pipe is closed. */
static int wait_closed(int fd, uint64_t wait_us)
{
    const uint64_t end_ns = clock_now_ns() + wait_us * NS_PER_US;
    for (;;) {
        struct pollfd p = { .fd = fd };
        const uint64_t now_ns = clock_now_ns();
        const uint64_t left_ns = end_ns > now_ns ? end_ns - now_ns : 0;
        const int n = poll(&p, 1, (int)((left_ns + NS_PER_MS - 1) / NS_PER_MS));
        if (n > 0)
            return 0;
        if (n == 0)
            return ETIMEDOUT;
        if (errno != EINTR)
            return errno;
    }
}

int manager_barrier(uint64_t wait_us)
{
    int pair[2];
    if (!manager_is_there())
        return 0;
    if (pipe2(pair, O_CLOEXEC) != 0)
        return errno;
    int r = manager_tell("BARRIER=1", pair[1], wait_us);
    close(pair[1]); /* the manager has the only one, and closes it when it comes to it */
    if (r == 0)
        r = wait_closed(pair[0], wait_us);
    close(pair[0]);
    return r;
}
