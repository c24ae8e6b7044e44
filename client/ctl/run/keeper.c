/* See keeper.h. */
#include "client/ctl/run/keeper.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "proto/base/check.h"

/* -- Messages -----------------------------------------------------------------------------------
 */

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
    else if (strcmp(line, "WATCHDOG=1") == 0)
        m->alive = true;
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

/* Receive one message into m, whose text it does not end. Returns its bytes; -1: errno. */
static ssize_t receive(int fd, int flags, struct notify_message *m)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(NOTIFY_FDS_MAX * sizeof(int))];
    } control;
    struct iovec iov = { .iov_base = m->text, .iov_len = NOTIFY_BYTES_MAX };
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = sizeof(control.bytes) };
    const ssize_t n = recvmsg(fd, &msg, flags | MSG_CMSG_CLOEXEC);
    m->pid = 0;
    m->ready = m->alive = m->store = m->remove = m->drained = false;
    m->name = NULL;
    m->more_us = 0;
    m->fd_count = 0;
    m->fds_lost = n >= 0 && (msg.msg_flags & MSG_CTRUNC) != 0;
    if (n >= 0)
        take_control(&msg, m);
    if (n >= 0 && (msg.msg_flags & MSG_TRUNC) != 0)
        m->pid = 0; /* too long to be one of ours */
    return n;
}

enum notify_result notify_take(int fd, bool lossy, struct notify_message *ret_message)
{
    struct notify_message *m = ret_message;
    ssize_t n = lossy ? 0 : receive(fd, MSG_PEEK, m);
    if (n >= 0 && !lossy) {
        notify_close(m); /* those of the look */
        if (m->fds_lost)
            return NOTIFY_LATER;
    }
    if (n >= 0)
        n = receive(fd, 0, m);
    if (n < 0)
        return errno == EINTR ? NOTIFY_USELESS : NOTIFY_NONE;
    if (m->pid <= 0) {
        notify_close(m);
        return NOTIFY_USELESS;
    }
    m->text[n] = '\0';
    char *rest = m->text;
    for (const char *line = strsep(&rest, "\n"); line != NULL; line = strsep(&rest, "\n"))
        parse_line(m, line);
    return NOTIFY_TAKEN;
}

void notify_close(struct notify_message *message)
{
    for (uint32_t i = 0; i < message->fd_count; i++)
        if (message->fds[i] >= 0)
            close(message->fds[i]);
    message->fd_count = 0;
}

/* -- What is kept -------------------------------------------------------------------------------
 */

/* As systemd's fdname_is_valid(): it must survive a list separated by ':'. */
static bool name_is_valid(const char *name)
{
    size_t bytes = 0;
    for (; name[bytes] != '\0'; bytes++)
        if (name[bytes] < ' ' || name[bytes] > '~' || name[bytes] == ':')
            return false;
    return bytes > 0 && bytes <= KEPT_NAME_BYTES_MAX;
}

static bool same_file(int a, int b)
{
    struct stat x, y;
    return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino &&
           fcntl(a, F_GETFL) == fcntl(b, F_GETFL);
}

static bool is_kept(const struct kept *k, const char *name, int fd)
{
    for (uint32_t i = 0; i < k->count; i++)
        if (strcmp(k->names[i], name) == 0 && same_file(k->fds[i], fd))
            return true;
    return false;
}

/* All the room there may be, which takes memory only as it is used. */
static bool make_room(struct kept *k)
{
    if (k->fds == NULL)
        k->fds = calloc(KEPT_FDS_MAX, sizeof(*k->fds));
    if (k->names == NULL)
        k->names = calloc(KEPT_FDS_MAX, sizeof(*k->names));
    return k->fds != NULL && k->names != NULL;
}

/* Keep one. NULL: done, fd is ours; else why not. */
static const char *keep(struct kept *k, const char *name, int fd)
{
    const size_t bytes = strlen(name) + 1;
    if (k->count == KEPT_FDS_MAX)
        return "a daemon's limit is 4096";
    if (k->names_bytes + bytes > KEPT_NAMES_BYTES_MAX)
        return "all names together are limited to 127 KiB";
    char *copy = make_room(k) ? strdup(name) : NULL;
    if (copy == NULL)
        return "out of memory";
    k->fds[k->count] = fd;
    k->names[k->count] = copy;
    k->count++;
    k->names_bytes += bytes;
    return NULL;
}

static void store(struct kept *k, struct notify_message *m, const char *name, const char *daemon)
{
    static_assert(KEPT_FDS_MAX == 4096 && KEPT_NAMES_BYTES_MAX == 127 * 1024, "said in keep()");
    for (uint32_t i = 0; i < m->fd_count; i++) {
        if (is_kept(k, name, m->fds[i]))
            continue;
        const char *why = keep(k, name, m->fds[i]);
        if (why != NULL) {
            ctl_say("daemon %s: cannot keep %" PRIu32 " of its descriptors, '%s': %s", daemon,
                    m->fd_count - i, name, why);
            return;
        }
        m->fds[i] = -1;
    }
}

static void drop_name(struct kept *k, const char *name)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < k->count; i++) {
        if (strcmp(k->names[i], name) == 0) {
            k->names_bytes -= strlen(name) + 1;
            close(k->fds[i]);
            free(k->names[i]);
            continue;
        }
        k->fds[left] = k->fds[i];
        k->names[left] = k->names[i];
        left++;
    }
    k->count = left;
}

void keeper_take(struct kept *kept, struct notify_message *message, const char *daemon)
{
    const char *name = message->name != NULL ? message->name : "stored"; /* as systemd says */
    if (!message->store && !message->remove)
        return;
    if (message->fds_lost)
        ctl_say("daemon %s: descriptors it wanted kept did not arrive: too many open files here",
                daemon);
    if (!name_is_valid(name))
        ctl_say("daemon %s: refused FDNAME '%.64s': 1 to %u printable ASCII characters, no ':'",
                daemon, name, KEPT_NAME_BYTES_MAX);
    else if (message->remove)
        drop_name(kept, name);
    else
        store(kept, message, name, daemon);
}

int keeper_names(const struct kept *kept, char **ret_names, struct shd_err *e)
{
    char *names = malloc(kept->names_bytes + 1);
    if (names == NULL)
        return err_set(e, SHD_ENOMEM, "out of memory for %" PRIu32 " names", kept->count);
    char *at = names;
    for (uint32_t i = 0; i < kept->count; i++) {
        const size_t bytes = strlen(kept->names[i]);
        memcpy(at, kept->names[i], bytes);
        at[bytes] = ':';
        at += bytes + 1;
    }
    CHECK(at == names + kept->names_bytes);
    at[kept->count > 0 ? -1 : 0] = '\0';
    *ret_names = names;
    return SHD_OK;
}

void keeper_free(struct kept *kept)
{
    for (uint32_t i = 0; i < kept->count; i++) {
        close(kept->fds[i]);
        free(kept->names[i]);
    }
    free(kept->fds);
    free(kept->names);
    *kept = (struct kept){ 0 };
}
