/* Who is admitted by a runtime directory's owner, group and mode. Children become other users, so
 * most of it needs root. */
#include "proto/share/admit.h"

#include <errno.h>
#include <grp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "proto/base/check.h"
#include "tests/lib/side_pair.h"

#define DAEMON_UID  4001u
#define WORKER_UID  4002u
#define TEAM        4010u
#define OTHER       4011u
#define GROUPS_MANY 200u /* more than admit.c's own array takes */

struct place {
    char dir[64];
    char path[96];
};

static struct place place_new(uid_t uid, gid_t gid, mode_t mode)
{
    struct place p = { .dir = "/tmp/shd-admit-XXXXXX" };
    EXPECT(mkdtemp(p.dir) != NULL);
    snprintf(p.path, sizeof p.path, "%s/cpu0.sock", p.dir);
    EXPECT(chown(p.dir, uid, gid) == 0 && chmod(p.dir, mode) == 0);
    return p;
}

static void place_free(const struct place *p)
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

static void connect_main(const struct place *p, const struct ids *who)
{
    int fd;
    char end;
    if (setgroups(who->count, who->groups) != 0 || setresgid(who->gid, who->gid, who->gid) != 0 ||
        setresuid(who->uid, who->uid, who->uid) != 0)
        _exit(1);
    if (side_connect(p->path, &fd, NULL) != SHD_OK)
        _exit(2);
    _exit(read(fd, &end, 1) == 0 ? 0 : 3);
}

static int admitted(const struct place *p, const struct ids *who, struct shd_err *e)
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
    const struct place p = place_new(0, TEAM, 0750);
    EXPECT_OK(admitted(&p, &(struct ids){ WORKER_UID, TEAM, NULL, 0 }, &e), &e);
    const gid_t groups[] = { 4100, TEAM, 4101 };
    EXPECT_OK(admitted(&p, &(struct ids){ WORKER_UID, OTHER, groups, 3 }, &e), &e);
    place_free(&p);
}

TEST(member_is_found_among_many_groups)
{
    need_root();
    struct shd_err e;
    gid_t groups[GROUPS_MANY];
    for (size_t i = 0; i < GROUPS_MANY; i++)
        groups[i] = 5000 + (gid_t)i;
    const struct ids who = { WORKER_UID, OTHER, groups, GROUPS_MANY };
    const struct place p = place_new(0, TEAM, 0750);
    EXPECT_STATUS(admitted(&p, &who, &e), SHD_EAUTH);
    groups[GROUPS_MANY - 1] = TEAM;
    EXPECT_OK(admitted(&p, &who, &e), &e);
    place_free(&p);
}

TEST(stranger_is_refused_with_the_group_named)
{
    need_root();
    struct shd_err e;
    const gid_t groups[] = { 4100, 4101 };
    const struct place p = place_new(0, TEAM, 0750);
    EXPECT_STATUS(admitted(&p, &(struct ids){ WORKER_UID, OTHER, groups, 2 }, &e), SHD_EAUTH);
    EXPECT_HAS(e.text, "client is uid 4002");
    EXPECT_HAS(e.text, "members of group 4010");
    EXPECT_STATUS(admitted(&p, &(struct ids){ WORKER_UID, OTHER, NULL, 0 }, &e), SHD_EAUTH);
    place_free(&p);
}

TEST(closed_directory_admits_no_member)
{
    need_root();
    struct shd_err e;
    static const mode_t modes[] = { 0700, 0710, 0740 };
    for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
        const struct place p = place_new(0, TEAM, modes[i]);
        EXPECT_STATUS(admitted(&p, &(struct ids){ WORKER_UID, TEAM, NULL, 0 }, &e), SHD_EAUTH);
        EXPECT_HAS(e.text, "only uid 0 and root");
        place_free(&p);
    }
}

/* 65534 is what every id of another user namespace reads as: it must open nothing. */
TEST(overflow_group_admits_nobody)
{
    need_root();
    struct shd_err e;
    const struct place p = place_new(0, 65534, 0750);
    EXPECT_STATUS(admitted(&p, &(struct ids){ WORKER_UID, 65534, NULL, 0 }, &e), SHD_EAUTH);
    place_free(&p);
}

TEST(own_uid_and_root_need_no_group)
{
    struct shd_err e;
    int fds[2];
    pair_new(fds);
    const struct side_peer own = { 1, geteuid(), 0 }, root = { 1, 0, 0 };
    EXPECT_OK(admit_client(fds[0], &own, "/nonexistent", &e), &e);
    EXPECT_OK(admit_client(fds[0], &root, "/nonexistent", &e), &e);
    EXPECT_OK(admit_daemon(&own, "/nonexistent/cpu0.sock", &e), &e);
    EXPECT_OK(admit_daemon(&root, "/nonexistent/cpu0.sock", &e), &e);
    pair_free(fds);
}

TEST(vanished_directory_admits_nobody)
{
    struct shd_err e;
    int fds[2];
    pair_new(fds);
    const struct side_peer other = { 1, geteuid() + 1, 1 };
    EXPECT_STATUS(admit_client(fds[0], &other, "/nonexistent", &e), SHD_EIO);
    EXPECT_STATUS(admit_daemon(&other, "/nonexistent/cpu0.sock", &e), SHD_EIO);
    pair_free(fds);
}

TEST(daemon_is_the_owner_of_a_directory_closed_to_writers)
{
    need_root();
    struct shd_err e;
    const struct side_peer daemon = { 1, DAEMON_UID, DAEMON_UID };
    struct place p = place_new(DAEMON_UID, TEAM, 0750);
    EXPECT_OK(admit_daemon(&daemon, p.path, &e), &e);
    static const mode_t modes[] = { 0770, 0752, 01777 };
    for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
        EXPECT(chmod(p.dir, modes[i]) == 0);
        EXPECT_STATUS(admit_daemon(&daemon, p.path, &e), SHD_EAUTH);
        EXPECT_HAS(e.text, "others could put a socket there");
    }
    place_free(&p);
    p = place_new(WORKER_UID, TEAM, 0750);
    EXPECT_STATUS(admit_daemon(&daemon, p.path, &e), SHD_EAUTH);
    EXPECT_HAS(e.text, "daemon is uid 4001");
    EXPECT_HAS(e.text, "uid 4002 (owner of");
    place_free(&p);
}

TEST_MAIN()
