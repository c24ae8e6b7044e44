#include "tests/lib/keeper.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define KEEPER_DAEMONS_MAX 16
#define KEEPER_FDS_MAX     64
#define KEEPER_PARKED_FD   600 /* where a child keeps them until 3, 4, ... are free */

struct keeper_msg {
    enum keeper_order order;
    int index;
    long number;
    char text[160];
};

struct kept_fd {
    int fd;
    char name[64];
};

struct keeper_side { /* one daemon's */
    pid_t pid;       /* 0: none runs */
    bool again;      /* start it again when it dies */
    char fails[160]; /* of starts to come */
    long starts;
    int notify;
    char path[300];
    struct kept_fd kept[KEEPER_FDS_MAX];
    int count;
    char said[16384]; /* without descriptors, one after the other; what does not fit is not there */
};

static struct keeper_side keeper_sides[KEEPER_DAEMONS_MAX]; /* of the manager's process */

/* Send or receive one message with at most one descriptor. Returns false at the end. */
static bool keeper_talk(int fd, struct keeper_msg *msg, int *pass_fd, bool sends)
{
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    struct iovec iov = { msg, sizeof *msg };
    struct msghdr h = { .msg_iov = &iov, .msg_iovlen = 1 };
    if (!sends || *pass_fd >= 0) {
        h.msg_control = &control;
        h.msg_controllen = sizeof control;
    }
    if (sends && *pass_fd >= 0) {
        struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        *c = (struct cmsghdr){ CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS };
        memcpy(CMSG_DATA(c), pass_fd, sizeof *pass_fd);
    }
    ssize_t n;
    do {
        n = sends ? sendmsg(fd, &h, MSG_NOSIGNAL) : recvmsg(fd, &h, MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (!sends) {
        const struct cmsghdr *c = CMSG_FIRSTHDR(&h);
        *pass_fd = -1;
        if (n > 0 && c != NULL && c->cmsg_type == SCM_RIGHTS)
            memcpy(pass_fd, CMSG_DATA(c), sizeof *pass_fd);
    }
    return n == (ssize_t)sizeof *msg;
}

/* -- The manager's process ----------------------------------------------------------------------
 */

static struct kept_fd *keeper_find(struct keeper_side *side, const char *end)
{
    for (int i = 0; i < side->count; i++) {
        const char *name = side->kept[i].name;
        if (strlen(name) >= strlen(end) && strcmp(name + strlen(name) - strlen(end), end) == 0)
            return &side->kept[i];
    }
    return NULL;
}

static void keeper_forget_fd(struct keeper_side *side, struct kept_fd *kept)
{
    close(kept->fd);
    *kept = side->kept[--side->count];
}

/* The value of KEY in a notification of lines, or "". */
static void keeper_value(const char *text, const char *key, char *value, size_t capacity)
{
    const char *at = strstr(text, key);
    value[0] = '\0';
    if (at != NULL && (at == text || at[-1] == '\n'))
        snprintf(value, capacity, "%.*s", (int)strcspn(at + strlen(key), "\n"), at + strlen(key));
}

static void keeper_obey(struct keeper_side *side, const char *text, int fd)
{
    char name[64], one[8];
    struct kept_fd *kept;
    keeper_value(text, "FDNAME=", name, sizeof name);
    keeper_value(text, "FDSTORE=", one, sizeof one);
    if (one[0] == '1' && fd >= 0 && side->count < KEEPER_FDS_MAX) {
        kept = &side->kept[side->count++];
        kept->fd = fd;
        memcpy(kept->name, name, sizeof name);
        return;
    }
    keeper_value(text, "FDSTOREREMOVE=", one, sizeof one);
    while (one[0] == '1' && (kept = keeper_find(side, name)) != NULL)
        keeper_forget_fd(side, kept);
    if (fd >= 0)
        close(fd); /* a barrier's: this is what it waits for */
    else
        snprintf(side->said + strlen(side->said), sizeof side->said - strlen(side->said), "%s\n",
                 text);
}

static long keeper_said(const struct keeper_side *side, const char *begin)
{
    long count = 0;
    for (const char *at = side->said; *at != '\0'; at += strcspn(at, "\n") + 1)
        count += strncmp(at, begin, strlen(begin)) == 0;
    return count;
}

/* What the daemons have said. */
static void keeper_hear(int count)
{
    for (int i = 0; i < count; i++) {
        struct keeper_side *side = &keeper_sides[i];
        for (;;) {
            char text[4096];
            int fd = -1;
            union {
                struct cmsghdr head;
                char space[CMSG_SPACE(sizeof(int))];
            } control = { 0 };
            struct iovec iov = { text, sizeof text - 1 };
            struct msghdr h = { .msg_iov = &iov,
                                .msg_iovlen = 1,
                                .msg_control = &control,
                                .msg_controllen = sizeof control };
            const ssize_t n = recvmsg(side->notify, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
            if (n < 0)
                break;
            text[n] = '\0';
            const struct cmsghdr *c = CMSG_FIRSTHDR(&h);
            if (c != NULL && c->cmsg_type == SCM_RIGHTS)
                memcpy(&fd, CMSG_DATA(c), sizeof fd);
            keeper_obey(side, text, fd);
        }
    }
}

/* In the daemon's process: what systemd would have set up. */
static void keeper_prepare_child(const struct keeper_side *side, const char *fail)
{
    char names[KEEPER_FDS_MAX * 65] = "", number[32];
    size_t used = 0;
    for (int i = 0; i < side->count; i++) {
        const int parked = fcntl(side->kept[i].fd, F_DUPFD, KEEPER_PARKED_FD + i);
        CHECK(parked == KEEPER_PARKED_FD + i);
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i > 0 ? ":" : "",
                                 side->kept[i].name);
    }
    CHECK(close_range(3, KEEPER_PARKED_FD - 1, 0) == 0);
    for (int i = 0; i < side->count; i++) {
        CHECK(dup2(KEEPER_PARKED_FD + i, 3 + i) == 3 + i);
        close(KEEPER_PARKED_FD + i);
    }
    setenv("NOTIFY_SOCKET", side->path, 1);
    if (side->count > 0) {
        snprintf(number, sizeof number, "%d", (int)getpid());
        setenv("LISTEN_PID", number, 1);
        snprintf(number, sizeof number, "%d", side->count);
        setenv("LISTEN_FDS", number, 1);
        setenv("LISTEN_FDNAMES", names, 1);
    }
    if (fail[0] != '\0')
        setenv("SHARDD_FAIL", fail, 1);
}

static void keeper_start_child(int index, void (*serve)(int index))
{
    struct keeper_side *side = &keeper_sides[index];
    char fail[sizeof side->fails];
    const size_t bytes = strcspn(side->fails, ";");
    CHECK(side->pid == 0);
    snprintf(fail, sizeof fail, "%.*s", (int)bytes, side->fails);
    memmove(side->fails, side->fails + bytes + (side->fails[bytes] == ';'),
            strlen(side->fails) - bytes + (side->fails[bytes] != ';'));
    side->starts++;
    fflush(NULL);
    side->pid = fork();
    CHECK(side->pid >= 0);
    if (side->pid > 0)
        return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    keeper_prepare_child(side, fail);
    serve(index);
    _exit(1); /* serve() does not return */
}

/* Reap it, and meanwhile go on listening: it may wait for us. */
static int keeper_reap(int count, int index)
{
    struct keeper_side *side = &keeper_sides[index];
    int status = 0;
    if (side->pid == 0)
        return 0;
    while (waitpid(side->pid, &status, WNOHANG) == 0) {
        keeper_hear(count);
        poll(NULL, 0, 1);
    }
    side->pid = 0;
    keeper_hear(count); /* what it said last */
    return status;
}

static int keeper_serve(struct keeper_msg *msg, int count, void (*serve)(int index))
{
    struct keeper_side *side = &keeper_sides[msg->index];
    struct kept_fd *kept;
    switch (msg->order) {
    case KEEPER_START:
        side->again = strchr(msg->text, ';') != NULL;
        memcpy(side->fails, msg->text, sizeof side->fails);
        keeper_start_child(msg->index, serve);
        msg->number = side->pid;
        break;
    case KEEPER_TERM:
        side->again = false;
        if (side->pid > 0)
            kill(side->pid, SIGTERM);
        msg->number = keeper_reap(count, msg->index);
        break;
    case KEEPER_KILL:
        if (side->pid > 0)
            kill(side->pid, SIGKILL);
        msg->number = keeper_reap(count, msg->index);
        break;
    case KEEPER_STARTS:
        msg->number = side->starts;
        break;
    case KEEPER_WAIT:
        msg->number = keeper_reap(count, msg->index);
        break;
    case KEEPER_COUNT:
        msg->number = side->count;
        break;
    case KEEPER_GIVE:
        kept = keeper_find(side, msg->text);
        msg->number = kept != NULL;
        return kept != NULL ? kept->fd : -1;
    case KEEPER_FORGET:
        kept = keeper_find(side, msg->text);
        if (kept != NULL)
            keeper_forget_fd(side, kept);
        break;
    case KEEPER_SAID:
        keeper_hear(count);
        msg->number = keeper_said(side, msg->text);
        break;
    }
    return -1;
}

/* Successors of those that have died. */
static void keeper_start_again(int count, void (*serve)(int index))
{
    for (int i = 0; i < count; i++) {
        struct keeper_side *side = &keeper_sides[i];
        if (!side->again || (side->pid > 0 && waitpid(side->pid, NULL, WNOHANG) == 0))
            continue;
        side->pid = 0;
        keeper_hear(count); /* what it said last */
        keeper_start_child(i, serve);
    }
}

__attribute__((noreturn)) static void keeper_main(int control, const char *dir, int count,
                                                  void (*serve)(int index))
{
    struct pollfd polled[KEEPER_DAEMONS_MAX + 1] = { { .fd = control, .events = POLLIN } };
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int i = 0; i < count; i++) {
        struct keeper_side *side = &keeper_sides[i];
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        snprintf(side->path, sizeof side->path, "%s/notify%d", dir, i);
        CHECK(strlen(side->path) < sizeof address.sun_path);
        memcpy(address.sun_path, side->path, strlen(side->path));
        side->notify = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        CHECK(bind(side->notify, (const struct sockaddr *)&address, sizeof address) == 0);
        polled[i + 1] = (struct pollfd){ .fd = side->notify, .events = POLLIN };
    }
    for (;;) {
        struct keeper_msg msg;
        int fd;
        poll(polled, (nfds_t)count + 1, /* timeout= */ 2);
        keeper_hear(count);
        keeper_start_again(count, serve);
        if (polled[0].revents == 0)
            continue;
        if (!keeper_talk(control, &msg, &fd, /* sends= */ false))
            break;
        fd = keeper_serve(&msg, count, serve);
        keeper_talk(control, &msg, &fd, /* sends= */ true);
    }
    for (int i = 0; i < count; i++) {
        if (keeper_sides[i].pid > 0)
            kill(keeper_sides[i].pid, SIGKILL);
        keeper_reap(count, i);
        unlink(keeper_sides[i].path);
    }
    _exit(0);
}

/* -- The test's process -------------------------------------------------------------------------
 */

int keeper_new(const char *dir, int count, void (*serve)(int index), pid_t *ret_pid)
{
    int pair[2];
    CHECK(count <= KEEPER_DAEMONS_MAX);
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    fflush(NULL);
    *ret_pid = fork();
    CHECK(*ret_pid >= 0);
    if (*ret_pid == 0) {
        close(pair[0]);
        keeper_main(pair[1], dir, count, serve);
    }
    close(pair[1]);
    return pair[0];
}

long keeper_ask(int control, enum keeper_order order, int index, const char *text, int *ret_fd)
{
    struct keeper_msg msg = { .order = order, .index = index };
    int fd = -1;
    snprintf(msg.text, sizeof msg.text, "%s", text);
    CHECK(keeper_talk(control, &msg, &fd, /* sends= */ true));
    CHECK(keeper_talk(control, &msg, &fd, /* sends= */ false));
    if (ret_fd != NULL)
        *ret_fd = fd;
    else if (fd >= 0)
        close(fd);
    return msg.number;
}
