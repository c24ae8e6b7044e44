#include "client/ctl/run/notify.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/ctl/base/rundir.h"
#include "proto/base/check.h"

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

/* The sender's pid (0: none there) and the descriptors from the control data. */
static void take_control(struct msghdr *msg, struct notify_message *m)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c != NULL; c = CMSG_NXTHDR(msg, c)) {
        if (c->cmsg_level != SOL_SOCKET)
            continue;
        if (c->cmsg_type == SCM_CREDENTIALS && c->cmsg_len == CMSG_LEN(sizeof(struct ucred))) {
            struct ucred cred;
            memcpy(&cred, CMSG_DATA(c), sizeof(cred));
            m->pid = cred.pid;
        } else if (c->cmsg_type == SCM_RIGHTS) {
            const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            CHECK(count <= NOTIFY_FDS_MAX - m->fd_count);
            memcpy(m->fds + m->fd_count, CMSG_DATA(c), count * sizeof(int));
            m->fd_count += (uint32_t)count;
        }
    }
}

static void parse_line(struct notify_message *m, const char *line)
{
    if (strcmp(line, "READY=1") == 0)
        m->ready = true;
    else if (strcmp(line, "STATUS=Drained") == 0)
        m->drained = true;
    else if (strcmp(line, "FDSTORE=1") == 0)
        m->store = true;
    else if (strcmp(line, "FDSTOREREMOVE=1") == 0)
        m->remove = true;
    else if (strncmp(line, "EXTEND_TIMEOUT_USEC=", strlen("EXTEND_TIMEOUT_USEC=")) == 0)
        m->more_us = strtoull(line + strlen("EXTEND_TIMEOUT_USEC="), NULL, 10);
    else if (strncmp(line, "FDNAME=", strlen("FDNAME=")) == 0)
        m->name = line + strlen("FDNAME=");
}

int notify_take(int fd, struct notify_message *ret_message)
{
    struct notify_message *m = ret_message;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(NOTIFY_FDS_MAX * sizeof(int))];
    } control;
    struct iovec iov = { .iov_base = m->text, .iov_len = NOTIFY_BYTES_MAX };
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = sizeof(control.bytes) };
    const ssize_t n = recvmsg(fd, &msg, MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EINTR ? 0 : -1;
    m->pid = 0;
    m->ready = m->store = m->remove = m->drained = false;
    m->name = NULL;
    m->more_us = 0;
    m->fd_count = 0;
    m->fds_lost = (msg.msg_flags & MSG_CTRUNC) != 0;
    take_control(&msg, m);
    if (m->pid <= 0 || (msg.msg_flags & MSG_TRUNC) != 0) {
        notify_close(m);
        return 0;
    }
    m->text[n] = '\0';
    char *rest = m->text;
    for (const char *line = strsep(&rest, "\n"); line != NULL; line = strsep(&rest, "\n"))
        parse_line(m, line);
    return 1;
}

void notify_close(struct notify_message *message)
{
    for (uint32_t i = 0; i < message->fd_count; i++)
        if (message->fds[i] >= 0)
            close(message->fds[i]);
    message->fd_count = 0;
}
