#include "client/ctl/notify.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define NOTIFY_BYTES_MAX 4096u
#define NOTIFY_FDS_MAX   16u

int notify_listen(const char *dir, int *ret_fd, struct shd_err *e)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    const int n = snprintf(address.sun_path, sizeof(address.sun_path), "%s/" NOTIFY_FILE, dir);
    if (n >= (int)sizeof(address.sun_path))
        return err_set(e, SHD_ERANGE, "'%s/" NOTIFY_FILE "' is %d bytes, a socket's limit is %zu",
                       dir, n, sizeof(address.sun_path) - 1);
    const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "make a socket");
    const int on = 1;
    if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) < 0 ||
        bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
        const int r = err_sys(e, SHD_EIO, "listen at '%s'", address.sun_path);
        close(fd);
        return r;
    }
    *ret_fd = fd;
    return SHD_OK;
}

/* The sender's pid from the control data (0: none there); descriptors in it are closed. */
static pid_t take_control(struct msghdr *msg)
{
    pid_t pid = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c != NULL; c = CMSG_NXTHDR(msg, c)) {
        if (c->cmsg_level != SOL_SOCKET)
            continue;
        if (c->cmsg_type == SCM_CREDENTIALS && c->cmsg_len == CMSG_LEN(sizeof(struct ucred))) {
            struct ucred cred;
            memcpy(&cred, CMSG_DATA(c), sizeof(cred));
            pid = cred.pid;
        } else if (c->cmsg_type == SCM_RIGHTS) {
            const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; i++) {
                int fd;
                memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
                close(fd);
            }
        }
    }
    return pid;
}

/* True when one of the text's lines is exactly READY=1. */
static bool says_ready(const char *text)
{
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, "READY=1", 7) == 0 && (line[7] == '\0' || line[7] == '\n'))
            return true;
    }
    return false;
}

int notify_take(int fd, pid_t *ret_pid)
{
    char text[NOTIFY_BYTES_MAX + 1];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(NOTIFY_FDS_MAX * sizeof(int))];
    } control;
    struct iovec iov = { .iov_base = text, .iov_len = NOTIFY_BYTES_MAX };
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = sizeof(control.bytes) };
    const ssize_t n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EINTR ? 0 : -1;
    text[n] = '\0';
    const pid_t pid = take_control(&msg);
    if (pid <= 0 || (msg.msg_flags & MSG_TRUNC) != 0 || !says_ready(text))
        return 0;
    *ret_pid = pid;
    return 1;
}
