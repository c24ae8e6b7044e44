/* READY=1 of the real programs, to a service manager that is stopped: its socket is full. They
 * serve, and end, all the same, and it has the word when it reads again. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/shd.h"
#include "proto/base/check.h"
#include "tests/lib/ctl_run.h"

#define FILLING "STATUS=filling"

static char path[96], dir[96];
static int manager; /* its socket */

/* Nothing has room there. */
static void start(void)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(dir, sizeof dir, "%s/run", base);
    snprintf(path, sizeof path, "%s/manager", base);
    memcpy(address.sun_path, path, strlen(path) + 1);
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    CHECK(manager >= 0 && bind(manager, (struct sockaddr *)&address, sizeof address) == 0);
    const int sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    CHECK(sock >= 0);
    while (sendto(sock, FILLING, strlen(FILLING), 0, (struct sockaddr *)&address, sizeof address) >
           0)
        continue;
    EXPECT_EQ(errno, EAGAIN);
    close(sock);
    setenv("NOTIFY_SOCKET", path, 1);
}

static void end(int code)
{
    unsetenv("NOTIFY_SOCKET");
    kill(run.pid, SIGTERM);
    run_finish(&run);
    EXPECT_EQ(run.code, code);
    close(manager);
    unlink(path);
}

/* Whether it is among what has come since. */
static bool heard(const char *word)
{
    char text[256];
    bool found = false;
    ssize_t n;
    while ((n = recv(manager, text, sizeof text - 1, 0)) > 0) {
        text[n] = '\0';
        found = found || strstr(text, word) != NULL;
    }
    return found;
}

static void remove_dir(void)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s' '%s/keys'", dir, base);
    EXPECT_EQ(system(command), 0);
    EXPECT_EQ(leftovers(), 0);
}

static void start_daemon(void)
{
    struct shd_err e = { 0 };
    const struct shd_options options = { .size = sizeof options,
                                         .address = dir,
                                         .timeout_ms = TEST_HANG_MS };
    char door[128];
    shd_session *s;
    start();
    EXPECT(mkdir(dir, 0700) == 0);
    run_start_program(&run, BIN "/shardd",
                      ARGS("--device", "cpu0", "--threads", "1", "--runtime-dir", dir));
    snprintf(door, sizeof door, "%s/cpu0.sock", dir);
    EXPECT_SOON(access(door, F_OK) == 0);
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    shd_close(s);
}

TEST(daemon_serves_while_its_manager_is_stopped_and_is_ready_when_that_reads)
{
    start_daemon();
    EXPECT_SOON(heard("READY=1\nSTATUS=Serving"));
    sleep_ms(300); /* it is told once; else this is only weaker */
    EXPECT(!heard("READY=1"));
    end(0);
    remove_dir();
}

TEST(daemon_that_was_never_heard_ends)
{
    start_daemon();
    end(0);
    remove_dir();
}

/* An address of this process alone. */
static const char *make_keys(const char *devices)
{
    static char cluster[128];
    char host[64], keys[96];
    const unsigned pid = (unsigned)getpid();
    snprintf(keys, sizeof keys, "%s/keys", base);
    EXPECT(mkdir(keys, 0700) == 0);
    snprintf(cluster, sizeof cluster, "%s/cluster.json", keys);
    snprintf(host, sizeof host, "a=127.%u.%u.%u:7190%s", 1 + (pid >> 16 & 127), pid >> 8 & 255,
             pid & 255, devices);
    ctl(ARGS("keys", "new", cluster, host));
    EXPECT_EQ(run.code, 0);
    return cluster;
}

static void start_relay(void)
{
    char status[128];
    start();
    EXPECT(mkdir(dir, 0700) == 0);
    const char *cluster = make_keys("");
    run_start_program(&run, BIN "/shardd",
                      ARGS("--relay", "--cluster", cluster, "--host", "a", "--runtime-dir", dir));
    snprintf(status, sizeof status, "%s/relay.status", dir);
    EXPECT_SOON(access(status, F_OK) == 0);
}

TEST(relay_serves_while_its_manager_is_stopped_and_is_ready_when_that_reads)
{
    start_relay();
    EXPECT_SOON(heard("READY=1\nSTATUS=Relaying"));
    end(0);
    remove_dir();
}

TEST(relay_that_was_never_heard_ends)
{
    start_relay();
    end(0);
    remove_dir();
}

static void start_host(void)
{
    start();
    const char *cluster = make_keys("/cpu0");
    run_start(&run, ARGS("host", "--cluster", cluster, "--name", "a", "-d", dir, "-t", "1"));
    run_await(&run, run.out, "export SHARDD_ADDRESS=");
}

TEST(host_is_ready_when_its_manager_reads)
{
    start_host();
    EXPECT_SOON(heard("READY=1"));
    end(0);
    remove_dir();
}

TEST(host_that_was_never_heard_ends)
{
    start_host();
    end(0);
    remove_dir();
}

int main(int argc, char **argv)
{
    return ctl_main(argc, argv);
}
