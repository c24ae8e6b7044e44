/* See fdpass.h. */
#include "proto/share/fdpass.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"
#include "proto/base/version.h"
#include "proto/share/activity.h"
#include "proto/share/board.h"
#include "proto/share/segment.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5 */
#endif

#define BACKLOG 128
#define FDS_MAX 8 /* received and closed; the kernel drops more itself */

static_assert(sizeof(struct side_msg) == 184, "the message on the socket");

static int address_set(const char *path, struct sockaddr_un *ret_address, struct shd_err *e)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    const size_t bytes = strlen(path);
    if (bytes == 0 || bytes >= sizeof a.sun_path)
        return err_set(e, SHD_EINVAL, "socket path '%.120s' has %zu bytes, the limit is %zu", path,
                       bytes, sizeof a.sun_path - 1);
    memcpy(a.sun_path, path, bytes + 1);
    *ret_address = a;
    return SHD_OK;
}

/* A socket that a dead daemon left at the address may be replaced. A live one, and what is no
 * socket, are refused. */
static int check_stale(const struct sockaddr_un *a, struct shd_err *e)
{
    struct stat st;
    if (lstat(a->sun_path, &st) < 0) {
        if (errno == ENOENT)
            return SHD_OK;
        return err_sys(e, SHD_EIO, "look at '%s'", a->sun_path);
    }
    if (!S_ISSOCK(st.st_mode)) /* connect() would say "refused", as for a stale socket */
        return err_set(e, SHD_EEXIST, "'%s' is there and is not a socket", a->sun_path);
    const int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0)
        return err_sys(e, SHD_EIO, "probe '%s'", a->sun_path);
    const int connected = connect(probe, (const struct sockaddr *)a, sizeof *a);
    const int why = connected < 0 ? errno : 0;
    close(probe);
    if (why != ENOENT && why != ECONNREFUSED)
        return err_set(e, SHD_EEXIST, "'%s' is in use by a live process", a->sun_path);
    return SHD_OK;
}

/* "DIR/cpu0.sock" is made as "DIR/.cpu0sock", which is as long and is no socket of anybody's. */
static int aside_set(const char *path, struct sockaddr_un *ret_aside, struct shd_err *e)
{
    const char *slash = strrchr(path, '/'), *name = slash != NULL ? slash + 1 : path,
               *dot = strrchr(name, '.');
    if (dot == NULL || dot == name)
        return err_set(e, SHD_EINVAL, "socket path '%.120s' does not end in NAME.SUFFIX", path);
    char aside[sizeof ret_aside->sun_path];
    snprintf(aside, sizeof aside, "%.*s.%.*s%s", (int)(name - path), path, (int)(dot - name), name,
             dot + 1);
    return address_set(aside, ret_aside, e);
}

int side_listen(const char *path, int *ret_fd, struct shd_err *e)
{
    struct sockaddr_un final, a;
    int r = address_set(path, &final, e);
    if (r == SHD_OK)
        r = aside_set(path, &a, e);
    if (r == SHD_OK)
        r = check_stale(&final, e);
    if (r != SHD_OK)
        return r;
    unlink(a.sun_path); /* of a daemon that was killed right here */
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "open side socket");
    /* bind() gives the node the socket's mode less the umask, so it is never wider than this for
     * a moment; chmod() then restores what the umask took. */
    if (fchmod(fd, 0660) < 0 || bind(fd, (const struct sockaddr *)&a, sizeof a) < 0) {
        r = err_sys(e, SHD_EIO, "bind '%s'", path);
        goto out;
    }
    /* It takes the stale one's place in one step: a directory's sockets are the daemons of a
     * session, and one whose daemon starts again is never missing among them. */
    if (listen(fd, BACKLOG) < 0 || chmod(a.sun_path, 0660) < 0 || rename(a.sun_path, path) < 0) {
        r = err_sys(e, SHD_EIO, "listen on '%s'", path);
        unlink(a.sun_path);
        goto out;
    }
    *ret_fd = fd;
out:
    if (r != SHD_OK)
        close(fd);
    return r;
}

static int connect_failed(const char *path, struct shd_err *e)
{
    switch (errno) {
    case ENOENT:
    case ENOTDIR:
        return err_sys(e, SHD_ENOENT, "connect to '%s'", path);
    case ECONNREFUSED:
    case ECONNRESET:
        return err_sys(e, SHD_EGONE, "nobody listens at '%s'", path);
    case EACCES:
    case EPERM:
        return err_sys(e, SHD_EAUTH, "connect to '%s'", path);
    case EAGAIN:
        return err_set(e, SHD_ETIMEDOUT, "'%s' accepts no connection", path);
    default:
        return err_sys(e, SHD_EIO, "connect to '%s'", path);
    }
}

int side_connect(const char *path, int *ret_fd, struct shd_err *e)
{
    struct sockaddr_un a;
    int r = address_set(path, &a, e);
    if (r != SHD_OK)
        return r;
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_sys(e, SHD_EIO, "open side socket");
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) < 0)
        r = connect_failed(path, e);
    if (r == SHD_OK)
        *ret_fd = fd;
    else
        close(fd);
    return r;
}

int side_peer(int fd, struct side_peer *ret_peer, struct shd_err *e)
{
    struct ucred cred;
    socklen_t bytes = sizeof cred;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &bytes) < 0)
        return err_sys(e, SHD_EIO, "credentials of the peer");
    *ret_peer = (struct side_peer){ .pid = cred.pid, .uid = cred.uid, .gid = cred.gid };
    return SHD_OK;
}

int side_pidfd(int fd, pid_t pid)
{
    int pidfd;
    socklen_t bytes = sizeof pidfd;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &bytes) == 0)
        return pidfd; /* CLOEXEC */
    return pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
}

int side_peer_allowed(const struct side_peer *peer, const char *what, struct shd_err *e)
{
    const uid_t own = geteuid();
    if (peer->uid == own || peer->uid == 0)
        return SHD_OK;
    return err_set(e, SHD_EAUTH, "%s is uid %u (pid %d), only uid %u and root are allowed", what,
                   peer->uid, peer->pid, own);
}

/* The sizes of the board's header with one word, and of the activity page. */
#define PAGES \
    ((uint64_t)(sizeof(struct board) + sizeof(struct board_word)) << 32 | (uint32_t)ACTIVITY_BYTES)

struct side_msg side_welcome(const uint8_t token[SHD_TOKEN_BYTES], uint32_t level)
{
    struct side_msg msg = { .type = SIDE_WELCOME,
                            .ticket = level,
                            .bytes = PAGES,
                            .kind = SEGMENT_SPEC,
                            .text = SHARDD_VERSION };
    memcpy(msg.token, token, sizeof msg.token);
    return msg;
}

int side_welcome_check(const struct side_msg *msg, struct shd_err *e)
{
    if (msg->bytes == 0 || msg->bytes == PAGES)
        return SHD_OK;
    return err_set(e, SHD_EPROTO,
                   "its build (version %.20s) has a board of %u and an activity page of %u bytes, "
                   "this one (version %s) of %u and %u: use daemon and library of one build",
                   msg->text, (unsigned)(msg->bytes >> 32), (unsigned)(uint32_t)msg->bytes,
                   SHARDD_VERSION, (unsigned)(PAGES >> 32), (unsigned)(uint32_t)PAGES);
}

static int send_failed(struct shd_err *e)
{
    switch (errno) {
    case EAGAIN:
        return err_set(e, SHD_EBUSY, "side socket is full: the peer does not read");
    case EPIPE:
    case ECONNRESET:
    case ECONNREFUSED:
    case ENOTCONN:
        return err_sys(e, SHD_EGONE, "send on side socket");
    case ETOOMANYREFS: /* until some of them are received */
        return err_set(e, SHD_EBUSY,
                       "side socket: descriptors of this user that are passed and not received "
                       "have reached the limit (ulimit -n)");
    case ENOBUFS:
        return err_sys(e, SHD_ENOMEM, "send on side socket");
    default:
        return err_sys(e, SHD_EIO, "send on side socket");
    }
}

int side_send(int fd, const struct side_msg *msg, int pass_fd, struct shd_err *e)
{
    CHECK(msg->type >= SIDE_WELCOME && msg->type <= SIDE_WAKE);
    struct side_msg m = *msg;
    m.magic = SIDE_MAGIC;
    m.protocol = SHD_PROTOCOL;
    m.text[sizeof m.text - 1] = 0;
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    struct iovec data = { .iov_base = &m, .iov_len = sizeof m };
    struct msghdr h = { .msg_iov = &data, .msg_iovlen = 1 };
    if (pass_fd >= 0) {
        h.msg_control = control.bytes;
        h.msg_controllen = sizeof control.bytes;
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof pass_fd);
        memcpy(CMSG_DATA(c), &pass_fd, sizeof pass_fd);
    }
    ssize_t n;
    do
        n = sys_sendmsg(fd, &h, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n < 0 ? send_failed(e) : SHD_OK;
}

/* Wait until fd can be read (or has hung up, which reads as its end). */
static int wait_readable(int fd, int timeout_ms, struct shd_err *e)
{
    const uint64_t deadline_ns = clock_now_ns() + (uint64_t)timeout_ms * NS_PER_MS;
    int left = timeout_ms;
    for (;;) {
        struct pollfd p = { .fd = fd, .events = POLLIN };
        const int n = poll(&p, 1, left);
        if (n > 0)
            return SHD_OK;
        if (n < 0 && errno != EINTR)
            return err_sys(e, SHD_EIO, "wait for a side message");
        const uint64_t now_ns = clock_now_ns();
        if (n == 0 || now_ns > deadline_ns)
            return err_set(e, SHD_ETIMEDOUT, "no side message within %d ms", timeout_ms);
        left = (int)((deadline_ns - now_ns) / NS_PER_MS);
    }
}

/* Take the first descriptor out of a received message, close all others. */
static int fd_take(struct msghdr *h)
{
    int first = -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(h); c != NULL; c = CMSG_NXTHDR(h, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (first < 0)
                first = fd;
            else
                close(fd);
        }
    }
    return first;
}

static int msg_check(const struct side_msg *m, ssize_t bytes, bool has_fd, struct shd_err *e)
{
    /* The fields that every version begins with are checked first, so that a peer of another
     * version is told so. */
    if (bytes < (ssize_t)offsetof(struct side_msg, type) || m->magic != SIDE_MAGIC)
        return err_set(e, SHD_EPROTO, "side message of %zd bytes is not shardd's", bytes);
    if (m->protocol != SHD_PROTOCOL)
        return err_set(e, SHD_EPROTO, "peer speaks protocol %" PRIu32 ", this side %u", m->protocol,
                       SHD_PROTOCOL);
    if (bytes != (ssize_t)sizeof *m)
        return err_set(e, SHD_EPROTO, "side message has %zd bytes, expected %zu", bytes, sizeof *m);
    if (m->type < SIDE_WELCOME || m->type > SIDE_WAKE)
        return err_set(e, SHD_EPROTO, "side message type is %" PRIu32 ", expected %d to %d",
                       m->type, SIDE_WELCOME, SIDE_WAKE);
    if (m->reserved != 0)
        return err_set(e, SHD_EPROTO, "side message reserved field is %" PRIu32 ", expected 0",
                       m->reserved);
    if (memchr(m->text, 0, sizeof m->text) == NULL)
        return err_set(e, SHD_EPROTO, "side message text is not terminated");
    if (m->type == SIDE_ERROR && (m->status == SHD_OK || !status_known(m->status)))
        return err_set(e, SHD_EPROTO, "side message status %" PRId32 " is unknown", m->status);
    if (m->type == SIDE_SEGMENT && !segment_kind_shared(m->kind))
        return err_set(e, SHD_EPROTO,
                       "side message segment kind is %" PRIu32 ", expected " SEGMENT_KINDS_SHARED,
                       m->kind);
    if (m->type == SIDE_SEGMENT && !has_fd)
        return err_set(e, SHD_EPROTO, "side message of a %s segment came without descriptor",
                       segment_kind_name(m->kind));
    return SHD_OK;
}

static int recv_failed(struct shd_err *e)
{
    if (errno == EAGAIN)
        return err_set(e, SHD_ETIMEDOUT, "no side message yet");
    const bool gone = errno == ECONNRESET || errno == EPIPE || errno == ENOTCONN;
    return err_sys(e, gone ? SHD_EGONE : SHD_EIO, "receive on side socket");
}

int side_recv(int fd, int timeout_ms, struct side_msg *ret_msg, int *ret_fd, struct shd_err *e)
{
    if (timeout_ms > 0) {
        const int waited = wait_readable(fd, timeout_ms, e);
        if (waited != SHD_OK)
            return waited;
    }
    struct side_msg m = { 0 };
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
    } control;
    struct iovec data = { .iov_base = &m, .iov_len = sizeof m };
    struct msghdr h = { .msg_iov = &data,
                        .msg_iovlen = 1,
                        .msg_control = control.bytes,
                        .msg_controllen = sizeof control.bytes };
    ssize_t n;
    const int look = timeout_ms == 0 ? MSG_DONTWAIT : 0;
    bool reset = false, again;
    do { /* MSG_TRUNC: the real size, also of a message that is too long */
        n = recvmsg(fd, &h, MSG_CMSG_CLOEXEC | MSG_TRUNC | look);
        /* That a peer has gone without reading all is said before what it had sent. */
        again = n < 0 && (errno == EINTR || (errno == ECONNRESET && !reset));
        reset = reset || (n < 0 && errno == ECONNRESET);
    } while (again);
    if (n < 0)
        return recv_failed(e);

    const int got = fd_take(&h);
    if (n > 0 && got < 0 && (h.msg_flags & MSG_CTRUNC) != 0) {
        errno = EMFILE; /* the kernel drops what finds no place, and says no more */
        return err_sys(e, SHD_EIO, "take the descriptor of a side message");
    }
    const int r = n == 0 ? err_set(e, SHD_EGONE, "side socket: the peer hung up")
                         : msg_check(&m, n, got >= 0, e);
    if (r == SHD_OK) {
        *ret_msg = m;
        if (ret_fd != NULL)
            *ret_fd = got;
    }
    if (got >= 0 && (r != SHD_OK || ret_fd == NULL))
        close(got);
    return r;
}
