/* Directories of daemons: which are safe to put sockets in, those that runs make and leave, the one
 * of `shardctl up` with its lock, and what is removed at the end. */
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/ctl/base/rundir.h"
#include "client/session/where.h"
#include "proto/base/check.h"
#include "proto/base/dir.h"
#include "tests/lib/child.h"
#include "tests/lib/test.h"

static char base[64]; /* of this test's own, where nobody else can write */

static void need_base(void)
{
    const char *home = getenv("HOME");
    if (base[0] != '\0')
        return;
    snprintf(base, sizeof base, "%.40s/ctl-XXXXXX",
             geteuid() == 0 ? "/run"
             : home != NULL ? home
                            : "");
    if (base[0] != '/' || mkdtemp(base) == NULL) {
        base[0] = '\0';
        SKIP("no place for a private directory");
    }
    setenv("XDG_RUNTIME_DIR", base, 1);
    setenv("HOME", base, 1);
}

static void end_base(void)
{
    char command[100];
    if (base[0] == '\0')
        return;
    snprintf(command, sizeof command, "rm -rf '%s'", base);
    CHECK(system(command) == 0);
    base[0] = '\0';
}

/* base/name/file, made with its directory; an open descriptor of it. */
static int make_file(const char *name, const char *file)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", base, name);
    mkdir(path, 0700);
    snprintf(path, sizeof path, "%s/%s/%s", base, name, file);
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    return fd;
}

static bool is_there(const char *name)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", base, name);
    return access(path, F_OK) == 0;
}

/* -- Names and locks ------------------------------------------------------------------------- */

TEST(names_come_until_the_directory_is_closed)
{
    unsigned found = 0, all = 0;
    need_base();
    close(make_file("names", "a"));
    close(make_file("names", "b"));
    char path[100];
    snprintf(path, sizeof path, "%s/names", base);
    DIR *dir = opendir(path);
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir), all++)
        found += strcmp(name, "a") == 0 || strcmp(name, "b") == 0;
    EXPECT(found == 2 && all == 4 && dir == NULL);
    EXPECT(dir_next(&dir) == NULL);
    end_base();
}

TEST(a_lock_is_held_while_its_process_lives)
{
    need_base();
    char dir[100];
    snprintf(dir, sizeof dir, "%s/locks", base);
    EXPECT_EQ(lock_look(dir, "x.lock"), LOCK_GONE);
    const int fd = make_file("locks", "x.lock");
    EXPECT_EQ(lock_look(dir, "x.lock"), LOCK_FREE);
    EXPECT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
    EXPECT_EQ(lock_look(dir, "x.lock"), LOCK_HELD);
    close(fd);
    EXPECT_EQ(lock_look(dir, "x.lock"), LOCK_FREE); /* the look itself left none */
    EXPECT_EQ(symlinkat("x.lock", open(dir, O_RDONLY | O_CLOEXEC), "link.lock"), 0);
    EXPECT_EQ(lock_look(dir, "link.lock"), LOCK_CLOSED);
    end_base();
}

/* -- Places ---------------------------------------------------------------------------------- */

static void expect_unfit(const char *dir, int code, const char *why)
{
    struct shd_err e = { 0 };
    EXPECT_STATUS(rundir_check(dir, /* make= */ false, &e), code);
    EXPECT_HAS(e.text, why);
}

TEST(places_where_others_can_write_are_refused)
{
    char path[100];
    struct shd_err e = { 0 };
    need_base();
    expect_unfit("relative", SHD_EINVAL, "is not an absolute path");
    expect_unfit("/tmp", SHD_EAUTH, geteuid() == 0 ? "can be written to by others" : "belongs to");
    close(make_file("place", "file"));
    snprintf(path, sizeof path, "%s/place/file", base);
    expect_unfit(path, SHD_EINVAL, "is not a directory");
    snprintf(path, sizeof path, "%s/place", base);
    EXPECT_OK(rundir_check(path, false, &e), &e);
    EXPECT_EQ(chmod(path, 0770), 0);
    expect_unfit(path, SHD_EAUTH, "can be written to by others (mode 0770)");
    snprintf(path, sizeof path, "%s/new/below", base);
    expect_unfit(path, SHD_EIO, "No such file");
    EXPECT_OK(rundir_check(path, /* make= */ true, &e), &e);
    struct stat st;
    EXPECT(stat(path, &st) == 0 && (st.st_mode & 07777) == 0700);
    end_base();
}

/* Whose directory it is decides, and who can put another in its place; not what it is called. */
TEST(a_directory_of_ours_below_one_of_everybody_is_fine_if_nobody_can_move_it)
{
    char all[100], ours[120], below[140];
    struct shd_err e = { 0 };
    need_base();
    snprintf(all, sizeof all, "%s/all", base);
    snprintf(ours, sizeof ours, "%s/ours", all);
    snprintf(below, sizeof below, "%s/below", ours);
    EXPECT(mkdir(all, 0700) == 0 && chmod(all, 01777) == 0);
    EXPECT_OK(rundir_check(below, /* make= */ true, &e), &e);
    EXPECT_EQ(chmod(all, 0777), 0); /* as /tmp, but without the sticky bit */
    expect_unfit(below, SHD_EAUTH, "lets everyone move what is in it (mode 0777)");
    EXPECT_EQ(chmod(all, 01777), 0);
    snprintf(below, sizeof below, "%s/link", all);
    EXPECT_EQ(symlink(ours, below), 0);
    expect_unfit(below, SHD_EAUTH, "is a link of uid");
    if (geteuid() == 0) {
        EXPECT_EQ(chown(ours, 12345, 0), 0);
        snprintf(below, sizeof below, "%s/below", ours);
        expect_unfit(below, SHD_EAUTH, "/all/ours' is of uid 12345, where everyone can write");
    }
    end_base();
}

TEST(the_directory_of_up_is_the_one_asked_for)
{
    char path[RUNDIR_PATH_BYTES], cwd[RUNDIR_PATH_BYTES + 10], longer[200];
    struct shd_err e = { 0 };
    need_base();
    EXPECT_OK(updir_path("/run/x//", path, &e), &e);
    EXPECT_STR(path, "/run/x");
    EXPECT_OK(updir_path("/", path, &e), &e);
    EXPECT_STR(path, "/");
    EXPECT_EQ(chdir(base), 0);
    snprintf(cwd, sizeof cwd, "%s/sub", base);
    EXPECT_OK(updir_path("sub", path, &e), &e);
    EXPECT_STR(path, cwd);
    EXPECT_EQ(chdir("/"), 0);
    memset(longer, 'x', sizeof longer);
    longer[0] = '/';
    longer[RUNDIR_PATH_BYTES] = '\0';
    EXPECT_STATUS(updir_path(longer, path, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "at most 83 leave room for sockets in it");
    longer[RUNDIR_PATH_BYTES - 1] = '\0';
    EXPECT_OK(updir_path(longer, path, &e), &e);
    end_base();
}

/* -- Runs ------------------------------------------------------------------------------------ */

static void count_run(const char *path, void *arg)
{
    CHECK(strstr(path, "/" WHERE_RUN_PREFIX) != NULL || strstr(path, "/" WHERE_UP_PREFIX) != NULL);
    *(unsigned *)arg += strncmp(path, base, strlen(base)) == 0;
}

static const struct devices two_devices = { .names = { "cpu0", "cpu1" }, .count = 2 };

TEST(runs_that_live_stay_and_killed_ones_are_swept)
{
    struct rundir one, two;
    struct shd_err e = { 0 };
    unsigned runs = 0;
    need_base();
    EXPECT_OK(rundir_new(WHERE_RUN_PREFIX, &one, &e), &e);
    EXPECT(strncmp(one.path, base, strlen(base)) == 0);
    close(make_file("shardd-run-killed", WHERE_LOCK)); /* nobody has its lock */
    close(make_file("shardd-run-young", "x"));         /* its lock is yet to come */
    close(make_file("something-else", "x"));
    rundir_each(count_run, &runs);
    EXPECT_EQ(runs, 3);
    EXPECT_OK(rundir_new(WHERE_RUN_PREFIX, &two, &e), &e);
    EXPECT(!is_there("shardd-run-killed"));
    EXPECT(is_there("shardd-run-young") && is_there("something-else"));
    EXPECT_EQ(access(one.path, F_OK), 0);
    EXPECT_OK(rundir_remove(&one, &e), &e);
    EXPECT_OK(rundir_remove(&two, &e), &e);
    EXPECT(access(one.path, F_OK) < 0 && errno == ENOENT);
    end_base();
}

static void expect_found(const char *given, enum where_by by, const char *address)
{
    struct where where;
    struct shd_err e = { 0 };
    EXPECT_OK(where_find(given, &where, &e), &e);
    EXPECT_STR(where.address, address);
    EXPECT_EQ(where.by, by);
}

TEST(daemons_are_where_the_rule_says)
{
    static const struct devices listed = { .names = { "gpu1", "cpu0" },
                                           .count = 2,
                                           .listed = true };
    struct rundir run;
    struct updir up;
    struct where where;
    char path[RUNDIR_PATH_BYTES], with_devices[RUNDIR_PATH_BYTES + 20];
    struct shd_err e = { 0 };
    need_base();
    unsetenv(WHERE_ENV);
    expect_found(NULL, WHERE_BY_DEFAULT, "/run/shardd");
    close(make_file("shardd-run-killed", WHERE_LOCK)); /* counts as nothing */
    expect_found("", WHERE_BY_DEFAULT, "/run/shardd");
    EXPECT_OK(rundir_new(WHERE_RUN_PREFIX, &run, &e), &e);
    expect_found(NULL, WHERE_ONLY, run.path); /* it is yet to say where its daemons are */
    rundir_note_address(&run, &two_devices, run.path);
    expect_found(NULL, WHERE_ONLY, run.path);
    expect_found("/given?cpu7", WHERE_GIVEN, "/given?cpu7");
    setenv(WHERE_ENV, "/of/the/environment", 1);
    expect_found(NULL, WHERE_BY_ENV, "/of/the/environment");
    expect_found("local:", WHERE_GIVEN, "local:");
    unsetenv(WHERE_ENV);

    snprintf(path, sizeof path, "%s/anywhere", base);
    snprintf(with_devices, sizeof with_devices, "%s?gpu1,cpu0", path);
    EXPECT_OK(updir_take(path, &listed, &up, &e), &e);
    EXPECT_STATUS(where_find(NULL, &where, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "2 `shardctl up` or `run` of yours go on");
    EXPECT_HAS(e.text, with_devices);
    EXPECT_HAS(e.text, run.path);
    EXPECT_OK(rundir_remove(&run, &e), &e);
    expect_found(NULL, WHERE_ONLY, with_devices);
    EXPECT_OK(updir_find(NULL, with_devices, &e), &e);
    EXPECT_STR(with_devices, path);
    EXPECT_STATUS(updir_find("local:", with_devices, &e), SHD_ENOTSUP);
    updir_release(&up, /* keep_log= */ false);
    expect_found(NULL, WHERE_BY_DEFAULT, "/run/shardd");
    end_base();
}

/* -- up -------------------------------------------------------------------------------------- */

TEST(a_directory_is_kept_by_one_process_and_removed_with_it)
{
    char path[RUNDIR_PATH_BYTES];
    struct updir dir;
    struct shd_err e = { 0 };
    uint32_t daemons = 9;
    int status;
    need_base();
    snprintf(path, sizeof path, "%s/up", base);
    EXPECT_EQ(updir_keeper(path, &daemons), 0);
    EXPECT_OK(updir_take(path, &two_devices, &dir, &e), &e);
    EXPECT(dir.made);
    const pid_t parent = getpid(), pid = test_fork();
    if (pid == 0) { /* a lock of fcntl() is only another process's */
        MUST(updir_keeper(path, &daemons) == parent && daemons == 2);
        MUST(updir_take(path, &two_devices, &dir, &e) == SHD_EBUSY);
        MUST(strstr(e.text, "`shardctl down --runtime-dir ") != NULL);
        _exit(0);
    }
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
    close(make_file("up", "cpu0.sock"));
    close(make_file("up", "cpu0.lock"));
    close(make_file("up", UPDIR_LOG));
    updir_release(&dir, /* keep_log= */ false);
    EXPECT(!is_there("up"));
    end_base();
}

TEST(files_of_others_stay_and_so_does_a_log_that_is_wanted)
{
    char path[RUNDIR_PATH_BYTES];
    struct updir dir;
    struct shd_err e = { 0 };
    need_base();
    snprintf(path, sizeof path, "%s/there", base);
    close(make_file("there", "mine"));
    close(make_file("there", "cpu0.sock")); /* of a daemon that is gone */
    close(make_file("there", UPDIR_LOG));   /* of a keeper that was killed */
    EXPECT_OK(updir_take(path, &two_devices, &dir, &e), &e);
    EXPECT(!dir.made && !is_there("there/cpu0.sock") && is_there("there/" UPDIR_LOG_OLD));
    close(make_file("there", "cpu1.sock"));
    close(make_file("there", "cpu1.lock"));
    close(make_file("there", "cpu10.sock"));
    updir_release(&dir, /* keep_log= */ true);
    EXPECT(is_there("there/mine") && is_there("there/" UPDIR_LOG_OLD));
    EXPECT(!is_there("there/cpu1.sock") && is_there("there/cpu1.lock"));
    EXPECT(!is_there("there/up.lock"));
    EXPECT(is_there("there/cpu10.sock")); /* another device's */
    end_base();
}

TEST(a_directory_that_was_made_goes_with_its_last_keeper)
{
    char path[RUNDIR_PATH_BYTES];
    struct updir dir;
    struct shd_err e = { 0 };
    need_base();
    snprintf(path, sizeof path, "%s/made", base);
    EXPECT_OK(updir_take(path, &two_devices, &dir, &e), &e);
    close(make_file("made", UPDIR_LOG));
    close(make_file("made", "cpu1.lock"));
    close(make_file("made", "cpu10.lock"));
    updir_release(&dir, /* keep_log= */ true);
    EXPECT(is_there("made/" UPDIR_LOG) && is_there("made/up.lock"));
    EXPECT(!is_there("made/cpu1.lock") && is_there("made/cpu10.lock")); /* another device's */
    EXPECT_OK(updir_take(path, &two_devices, &dir, &e), &e);
    EXPECT(dir.made); /* the lock file has said so */
    updir_release(&dir, /* keep_log= */ false);
    EXPECT(is_there("made/cpu10.lock") && !is_there("made/up.lock"));
    end_base();
}

TEST(a_daemon_that_runs_there_is_not_disturbed)
{
    char path[RUNDIR_PATH_BYTES];
    struct updir dir;
    struct shd_err e = { 0 };
    need_base();
    snprintf(path, sizeof path, "%s/busy", base);
    const int fd = make_file("busy", "cpu3.lock");
    EXPECT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
    close(make_file("busy", "cpu3.sock"));
    EXPECT_STATUS(updir_take(path, &two_devices, &dir, &e), SHD_EBUSY);
    EXPECT_HAS(e.text, "a daemon for 'cpu3' runs at");
    EXPECT(is_there("busy/cpu3.sock"));
    close(fd);
    end_base();
}

int main(int argc, char **argv)
{
    test_clean_up = end_base;
    return test_run_all(argc, argv);
}
