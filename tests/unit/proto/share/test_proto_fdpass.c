/* The side channel between real processes: who may listen, who may connect, what a claim brings.
 * Children report by exit code; EXPECT is the parent's. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/share/admit.h"
#include "proto/share/fdpass.h"
#include "proto/share/segment.h"
#include "tests/lib/proto_util.h"
#include "tests/lib/test.h"

#define NOBODY 65534u

struct place {
    char dir[64];
    char path[96];
};

static struct place place_new(void)
{
    struct place p = { .dir = "/tmp/shd-side-XXXXXX" };
    EXPECT(mkdtemp(p.dir) != NULL);
    snprintf(p.path, sizeof p.path, "%s/side.sock", p.dir);
    return p;
}

static void place_free(const struct place *p)
{
    unlink(p->path);
    rmdir(p->dir);
}

static int accept_one(int listener)
{
    struct pollfd p = { .fd = listener, .events = POLLIN };
    EXPECT(poll(&p, 1, 20000) == 1);
    const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    EXPECT(fd >= 0);
    return fd;
}

/* A worker: is welcomed, claims ticket 7, reads the segment's first byte. */
static void claim_main(const char *path)
{
    int fd, got = -1;
    struct side_msg m;
    struct segment s;
    if (side_connect(path, &fd, NULL) != SHD_OK)
        _exit(1);
    if (side_recv(fd, 20000, &m, &got, NULL) != SHD_OK || m.type != SIDE_WELCOME || got != -1 ||
        m.token[15] != 0x5a)
        _exit(2);
    struct side_msg claim = { .type = SIDE_CLAIM, .ticket = 7 };
    if (side_send(fd, &claim, -1, NULL) != SHD_OK)
        _exit(3);
    if (side_recv(fd, 20000, &m, &got, NULL) != SHD_OK || m.type != SIDE_SEGMENT || got < 0)
        _exit(4);
    if (segment_check(got, (enum segment_kind)m.kind, m.bytes, NULL) != SHD_OK ||
        segment_map(got, (enum segment_kind)m.kind, m.bytes, &s, NULL) != SHD_OK)
        _exit(5);
    _exit(*(const char *)s.base == 'x' ? 0 : 6);
}

TEST(worker_is_welcomed_and_claims_a_segment)
{
    struct shd_err e;
    struct place p = place_new();
    int listener, got;
    EXPECT_OK(side_listen(p.path, &listener, &e), &e);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        claim_main(p.path);
    const int fd = accept_one(listener);

    struct side_peer peer;
    EXPECT_OK(side_peer(fd, &peer, &e), &e);
    EXPECT(peer.pid == pid && peer.uid == geteuid() && peer.gid == getegid());
    EXPECT_OK(side_peer_allowed(&peer, "client", &e), &e);

    struct segment s;
    EXPECT_OK(segment_new("test", SEGMENT_PUBLISH, 4096, &s, &e), &e);
    *(char *)s.base = 'x';
    struct side_msg m = msg_of(SIDE_WELCOME);
    memset(m.token, 0x5a, sizeof m.token);
    EXPECT_OK(side_send(fd, &m, -1, &e), &e);
    EXPECT_OK(side_recv(fd, 20000, &m, &got, &e), &e);
    EXPECT(m.type == SIDE_CLAIM && m.ticket == 7 && got == -1);
    m = msg_of(SIDE_SEGMENT);
    m.kind = SEGMENT_PUBLISH;
    m.bytes = s.bytes;
    EXPECT_OK(side_send(fd, &m, s.fd, &e), &e);
    EXPECT_EQ(child_status(pid), 0);

    EXPECT_STATUS(side_recv(fd, 20000, &m, &got, &e), SHD_EGONE);
    EXPECT_HAS(e.text, "hung up");
    segment_close(&s);
    close(fd);
    close(listener);
    place_free(&p);
}

TEST(socket_has_mode_0660_whatever_the_umask)
{
    struct shd_err e;
    const mode_t masks[] = { 0, 077, 0777 };
    for (size_t i = 0; i < ARRAY_SIZE(masks); i++) {
        struct place p = place_new();
        int listener;
        const mode_t old = umask(masks[i]);
        const int r = side_listen(p.path, &listener, &e);
        umask(old);
        EXPECT_OK(r, &e);
        struct stat st;
        EXPECT(stat(p.path, &st) == 0);
        EXPECT_EQ(st.st_mode & 0777, 0660);
        EXPECT((fcntl(listener, F_GETFD) & FD_CLOEXEC) != 0);
        EXPECT((fcntl(listener, F_GETFL) & O_NONBLOCK) != 0);
        close(listener);
        place_free(&p);
    }
}

TEST(stale_socket_is_replaced)
{
    struct shd_err e;
    struct place p = place_new();
    int listener, fd;
    EXPECT_OK(side_listen(p.path, &listener, &e), &e);
    close(listener);
    EXPECT_STATUS(side_connect(p.path, &fd, &e), SHD_EGONE);
    EXPECT_HAS(e.text, p.path);
    EXPECT_OK(side_listen(p.path, &listener, &e), &e);
    EXPECT_OK(side_connect(p.path, &fd, &e), &e);
    close(fd);
    close(listener);
    place_free(&p);
}

struct lister {
    const char *dir;
    _Atomic bool stop;
    _Atomic uint32_t lists;
};

/* What a client does with a bare directory. */
static void *list_on(void *arg)
{
    struct lister *l = arg;
    while (!l->stop) {
        DIR *dir = opendir(l->dir);
        CHECK(dir != NULL);
        bool found = false;
        for (const struct dirent *d; (d = readdir(dir)) != NULL;)
            found |= strcmp(d->d_name, "side.sock") == 0;
        closedir(dir);
        CHECK(found);
        l->lists++;
    }
    return NULL;
}

TEST(stale_socket_is_never_missing_in_its_directory)
{
    struct shd_err e = { 0 };
    struct place p = place_new();
    int listener;
    EXPECT_OK(side_listen(p.path, &listener, &e), &e);
    close(listener);
    struct lister lister = { .dir = p.dir };
    pthread_t thread;
    EXPECT(pthread_create(&thread, NULL, list_on, &lister) == 0);
    for (uint32_t i = 0; i < 2000 || lister.lists < 2000; i++) {
        EXPECT_OK(side_listen(p.path, &listener, &e), &e);
        close(listener);
    }
    lister.stop = true;
    pthread_join(thread, NULL);
    place_free(&p); /* nothing else is left */
    EXPECT(access(p.dir, F_OK) != 0);
}

TEST(what_a_daemon_killed_in_between_leaves_is_replaced)
{
    struct shd_err e = { 0 };
    struct place p = place_new();
    char aside[sizeof p.path];
    snprintf(aside, sizeof aside, "%s/.sidesock", p.dir);
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    memcpy(a.sun_path, aside, strlen(aside) + 1);
    const int dead = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    EXPECT(bind(dead, (struct sockaddr *)&a, sizeof a) == 0);
    close(dead);
    int listener, fd;
    EXPECT_OK(side_listen(p.path, &listener, &e), &e);
    EXPECT_OK(side_connect(p.path, &fd, &e), &e);
    EXPECT(access(aside, F_OK) != 0);
    close(fd);
    close(listener);
    place_free(&p);
}

TEST(live_socket_is_refused)
{
    struct shd_err e;
    struct place p = place_new();
    int listener, other = -7, fd;
    EXPECT_OK(side_listen(p.path, &listener, &e), &e);
    EXPECT_STATUS(side_listen(p.path, &other, &e), SHD_EEXIST);
    EXPECT_HAS(e.text, "in use");
    EXPECT_EQ(other, -7);
    EXPECT_OK(side_connect(p.path, &fd, &e), &e); /* the first one is unharmed */
    close(fd);
    close(listener);
    place_free(&p);
}

TEST(live_socket_with_a_full_backlog_is_refused_too)
{
    struct shd_err e;
    struct place p = place_new();
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    memcpy(a.sun_path, p.path, strlen(p.path) + 1);
    const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    EXPECT(bind(listener, (struct sockaddr *)&a, sizeof a) == 0 && listen(listener, 0) == 0);
    int fd, other;
    EXPECT_OK(side_connect(p.path, &fd, &e), &e);                   /* fills it */
    EXPECT_STATUS(side_connect(p.path, &other, &e), SHD_ETIMEDOUT); /* at once: links try again */
    EXPECT_HAS(e.text, "accepts no connection");
    EXPECT_STATUS(side_listen(p.path, &other, &e), SHD_EEXIST);
    close(fd);
    close(listener);
    place_free(&p);
}

TEST(stream_socket_of_another_program_is_refused)
{
    struct shd_err e;
    struct place p = place_new();
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    memcpy(a.sun_path, p.path, strlen(p.path) + 1);
    const int other = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(bind(other, (struct sockaddr *)&a, sizeof a) == 0 && listen(other, 4) == 0);
    int fd;
    EXPECT_STATUS(side_listen(p.path, &fd, &e), SHD_EEXIST);
    EXPECT_STATUS(side_connect(p.path, &fd, &e), SHD_EIO);
    close(other);
    place_free(&p);
}

TEST(ordinary_file_is_not_deleted)
{
    struct shd_err e;
    struct place p = place_new();
    int fd = open(p.path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600), listener;
    EXPECT(fd >= 0);
    close(fd);
    EXPECT_STATUS(side_listen(p.path, &listener, &e), SHD_EEXIST);
    EXPECT_HAS(e.text, "is not a socket");
    EXPECT(access(p.path, F_OK) == 0);
    place_free(&p);
}

TEST(paths_that_do_not_fit_name_the_limit)
{
    struct shd_err e;
    char path[400];
    int fd;
    memset(path, 'a', sizeof path);
    path[0] = '/';
    path[108] = 0;
    EXPECT_STATUS(side_listen(path, &fd, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "108 bytes, the limit is 107");
    path[108] = 'a';
    path[399] = 0;
    EXPECT_STATUS(side_connect(path, &fd, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "399 bytes, the limit is 107");
    EXPECT_STATUS(side_listen("", &fd, &e), SHD_EINVAL); /* would be an abstract address */
    EXPECT_STATUS(side_listen("/tmp/side", &fd, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "'/tmp/side' does not end in NAME.SUFFIX");
}

TEST(longest_path_works)
{
    struct shd_err e;
    struct place p = place_new();
    char path[128];
    const int used = snprintf(path, sizeof path, "%s/", p.dir);
    memset(path + used, 'a', sizeof path - (size_t)used);
    memcpy(path + 102, ".sock", 6);
    int listener, fd;
    EXPECT_OK(side_listen(path, &listener, &e), &e);
    EXPECT_OK(side_connect(path, &fd, &e), &e);
    close(fd);
    close(listener);
    unlink(path);
    place_free(&p);
}

TEST(missing_places_are_not_found)
{
    struct shd_err e;
    int fd;
    EXPECT_STATUS(side_connect("/tmp/shd-no-such-dir/side", &fd, &e), SHD_ENOENT);
    EXPECT_STATUS(side_connect("/proc/self/exe/side", &fd, &e), SHD_ENOENT);
    EXPECT_STATUS(side_listen("/tmp/shd-no-such-dir/side.sock", &fd, &e), SHD_EIO);
}

/* A user of another uid: cannot open a 0660 socket; can when the mode was opened by hand. Sees
 * that the daemon is root, which is allowed. */
static void foreigner_main(const char *path, int tried)
{
    int fd;
    if (setgid(NOBODY) != 0 || setuid(NOBODY) != 0)
        _exit(1);
    const int closed = side_connect(path, &fd, NULL);
    if (closed == SHD_OK)
        _exit(2);
    if (closed != SHD_EAUTH)
        _exit(3);
    close(tried); /* now the parent opens it */
    while (access(path, W_OK) != 0)
        usleep(1000);
    if (side_connect(path, &fd, NULL) != SHD_OK)
        _exit(4);
    struct side_peer peer;
    if (side_peer(fd, &peer, NULL) != SHD_OK || peer.uid != 0)
        _exit(5);
    if (side_peer_allowed(&peer, "daemon", NULL) != SHD_OK)
        _exit(6);
    _exit(0);
}

TEST(foreign_uid_is_refused)
{
    if (geteuid() != 0)
        SKIP("needs root to become another user");
    struct shd_err e;
    struct place p = place_new();
    int listener, tried[2];
    EXPECT(pipe2(tried, O_CLOEXEC) == 0);
    EXPECT(chmod(p.dir, 0755) == 0);
    EXPECT_OK(side_listen(p.path, &listener, &e), &e);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        foreigner_main(p.path, tried[1]);
    close(tried[1]);
    char none;
    EXPECT(read(tried[0], &none, 1) == 0);
    close(tried[0]);
    EXPECT(chmod(p.path, 0666) == 0);
    const int fd = accept_one(listener);
    struct side_peer peer;
    EXPECT_OK(side_peer(fd, &peer, &e), &e);
    EXPECT_EQ(peer.uid, NOBODY);
    EXPECT_STATUS(side_peer_allowed(&peer, "client", &e), SHD_EAUTH);
    EXPECT_HAS(e.text, "client is uid 65534");
    EXPECT_HAS(e.text, "only uid 0 and root");
    EXPECT_EQ(child_status(pid), 0);
    close(fd);
    close(listener);
    place_free(&p);
}

TEST(peer_rule_is_own_uid_or_root)
{
    struct shd_err e;
    const struct side_peer own = { 1, geteuid(), 0 }, root = { 1, 0, 0 };
    const struct side_peer other = { 1, geteuid() + 1, 0 };
    EXPECT_STATUS(side_peer_allowed(&own, "client", &e), SHD_OK);
    EXPECT_STATUS(side_peer_allowed(&root, "client", &e), SHD_OK);
    EXPECT_STATUS(side_peer_allowed(&other, "client", &e), SHD_EAUTH);
}

/* Who is admitted by a runtime directory's owner, group and mode. Children become other users, so
 * most of it needs root. */

#define DAEMON_UID  4001u
#define WORKER_UID  4002u
#define TEAM        4010u
#define OTHER       4011u
#define GROUPS_MANY 200u /* more than admit.c's own array takes */

struct door {
    char dir[64];
    char path[96];
};

static struct door door_new(uid_t uid, gid_t gid, mode_t mode)
{
    struct door p = { .dir = "/tmp/shd-admit-XXXXXX" };
    EXPECT(mkdtemp(p.dir) != NULL);
    snprintf(p.path, sizeof p.path, "%s/cpu0.sock", p.dir);
    EXPECT(chown(p.dir, uid, gid) == 0 && chmod(p.dir, mode) == 0);
    return p;
}

static void door_free(const struct door *p)
{
    unlink(p->path);
    rmdir(p->dir);
}

/* What a process with these ids is told by admit_client() of a daemon at p, run as root. The
 * child's end of the socket carries its credentials as of connect(). */
struct ids {
    uid_t uid;
    gid_t gid;
    const gid_t *groups;
    size_t count;
};

static void connect_main(const struct door *p, const struct ids *who)
{
    int fd;
    struct side_msg none;
    if (setgroups(who->count, who->groups) != 0 || setresgid(who->gid, who->gid, who->gid) != 0 ||
        setresuid(who->uid, who->uid, who->uid) != 0)
        _exit(1);
    if (side_connect(p->path, &fd, NULL) != SHD_OK)
        _exit(2);
    _exit(side_recv(fd, 20000, &none, /* ret_fd= */ NULL, NULL) == SHD_EGONE ? 0 : 3);
}

static int admitted(const struct door *p, const struct ids *who, struct shd_err *e)
{
    int listener;
    EXPECT_OK(side_listen(p->path, &listener, e), e);
    /* Open the way in by hand: what is tested is our rule, not the file system's. */
    struct stat st;
    EXPECT(stat(p->dir, &st) == 0 && chmod(p->path, 0666) == 0 && chmod(p->dir, 0755) == 0);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0)
        connect_main(p, who);
    struct pollfd ready = { .fd = listener, .events = POLLIN };
    EXPECT(poll(&ready, 1, 20000) == 1);
    const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    EXPECT(fd >= 0 && chmod(p->dir, st.st_mode & 07777) == 0);
    struct side_peer peer;
    EXPECT_OK(side_peer(fd, &peer, e), e);
    const int r = admit_client(fd, &peer, p->dir, e);
    close(fd);
    EXPECT_EQ(child_status(pid), 0);
    close(listener);
    unlink(p->path);
    return r;
}

static void need_root(void)
{
    if (geteuid() != 0)
        SKIP("needs root to become other users");
}

TEST(member_of_the_directorys_group_is_admitted)
{
    need_root();
    struct shd_err e;
    const struct door p = door_new(0, TEAM, 0750);
    EXPECT_OK(admitted(&p, &(struct ids){ WORKER_UID, TEAM, NULL, 0 }, &e), &e);
    const gid_t groups[] = { 4100, TEAM, 4101 };
    EXPECT_OK(admitted(&p, &(struct ids){ WORKER_UID, OTHER, groups, 3 }, &e), &e);
    door_free(&p);
}

TEST(member_is_found_among_many_groups)
{
    need_root();
    struct shd_err e;
    gid_t groups[GROUPS_MANY];
    for (size_t i = 0; i < GROUPS_MANY; i++)
        groups[i] = 5000 + (gid_t)i;
    const struct ids who = { WORKER_UID, OTHER, groups, GROUPS_MANY };
    const struct door p = door_new(0, TEAM, 0750);
    EXPECT_STATUS(admitted(&p, &who, &e), SHD_EAUTH);
    groups[GROUPS_MANY - 1] = TEAM;
    EXPECT_OK(admitted(&p, &who, &e), &e);
    door_free(&p);
}

TEST(stranger_is_refused_with_the_group_named)
{
    need_root();
    struct shd_err e;
    const gid_t groups[] = { 4100, 4101 };
    const struct door p = door_new(0, TEAM, 0750);
    EXPECT_STATUS(admitted(&p, &(struct ids){ WORKER_UID, OTHER, groups, 2 }, &e), SHD_EAUTH);
    EXPECT_HAS(e.text, "client is uid 4002");
    EXPECT_HAS(e.text, "members of group 4010");
    EXPECT_STATUS(admitted(&p, &(struct ids){ WORKER_UID, OTHER, NULL, 0 }, &e), SHD_EAUTH);
    door_free(&p);
}

TEST(closed_directory_admits_no_member)
{
    need_root();
    struct shd_err e;
    static const mode_t modes[] = { 0700, 0710, 0740 };
    for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
        const struct door p = door_new(0, TEAM, modes[i]);
        EXPECT_STATUS(admitted(&p, &(struct ids){ WORKER_UID, TEAM, NULL, 0 }, &e), SHD_EAUTH);
        EXPECT_HAS(e.text, "only uid 0 and root");
        door_free(&p);
    }
}

/* 65534 is what every id of another user namespace reads as: it must open nothing. */
TEST(overflow_group_admits_nobody)
{
    need_root();
    struct shd_err e;
    const struct door p = door_new(0, 65534, 0750);
    EXPECT_STATUS(admitted(&p, &(struct ids){ WORKER_UID, 65534, NULL, 0 }, &e), SHD_EAUTH);
    door_free(&p);
}

TEST(own_uid_and_root_need_no_group)
{
    struct shd_err e;
    int fds[2];
    pair_new(fds);
    const struct side_peer own = { 1, geteuid(), 0 }, root = { 1, 0, 0 };
    EXPECT_OK(admit_client(fds[0], &own, "/proc/nonexistent", &e), &e);
    EXPECT_OK(admit_client(fds[0], &root, "/proc/nonexistent", &e), &e);
    EXPECT_OK(admit_daemon(&own, "/proc/nonexistent/cpu0.sock", &e), &e);
    EXPECT_OK(admit_daemon(&root, "/proc/nonexistent/cpu0.sock", &e), &e);
    pair_free(fds);
}

TEST(vanished_directory_admits_nobody)
{
    struct shd_err e;
    int fds[2];
    pair_new(fds);
    const struct side_peer other = { 1, geteuid() + 1, 1 };
    EXPECT_STATUS(admit_client(fds[0], &other, "/proc/nonexistent", &e), SHD_EIO);
    EXPECT_STATUS(admit_daemon(&other, "/proc/nonexistent/cpu0.sock", &e), SHD_EIO);
    pair_free(fds);
}

TEST(daemon_is_the_owner_of_a_directory_closed_to_writers)
{
    need_root();
    struct shd_err e;
    const struct side_peer daemon = { 1, DAEMON_UID, DAEMON_UID };
    struct door p = door_new(DAEMON_UID, TEAM, 0750);
    EXPECT_OK(admit_daemon(&daemon, p.path, &e), &e);
    static const mode_t modes[] = { 0770, 0752, 01777 };
    for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
        EXPECT(chmod(p.dir, modes[i]) == 0);
        EXPECT_STATUS(admit_daemon(&daemon, p.path, &e), SHD_EAUTH);
        EXPECT_HAS(e.text, "others could put a socket there");
    }
    door_free(&p);
    p = door_new(WORKER_UID, TEAM, 0750);
    EXPECT_STATUS(admit_daemon(&daemon, p.path, &e), SHD_EAUTH);
    EXPECT_HAS(e.text, "daemon is uid 4001");
    EXPECT_HAS(e.text, "uid 4002 (owner of");
    door_free(&p);
}

TEST_MAIN()
