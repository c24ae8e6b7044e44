/* keeper: what becomes of descriptors at a service manager that is stopped. Its socket is this
 * test's, which reads when it likes to. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/base/keeper.h"
#include "daemon/base/manager.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "tests/lib/test.h"

#define INSTANCE UINT64_C(0x0123456789abcdef)
#define NAME     "m0123456789abcdef"
#define FILLING  "STATUS=filling"
#define TICKS    20

static uv_loop_t loop;
static struct keeper k;
static int manager; /* its socket */
static char path[64];

static void start(void)
{
    struct shd_err e = { 0 };
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(path, sizeof path, "/var/tmp/shd-keeper-%d", (int)getpid());
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    unlink(path);
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    CHECK(manager >= 0 && bind(manager, (struct sockaddr *)&address, sizeof address) == 0);
    setenv("NOTIFY_SOCKET", path, 1);
    CHECK(uv_loop_init(&loop) == 0);
    EXPECT_OK(keeper_init(&k, &loop, NULL, &e), &e);
}

static void stop(void)
{
    keeper_stop(&k);
    uv_run(&loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&loop) == 0);
    keeper_deinit(&k);
    close(manager);
    unlink(path);
    unsetenv("NOTIFY_SOCKET");
}

static void fill(void)
{
    int why;
    while ((why = manager_tell(FILLING, -1, 0)) == 0) {
    }
    EXPECT_EQ(why, EAGAIN);
}

/* What comes next, without what it was filled with; "": nothing. Its descriptor is closed. */
static const char *heard(void)
{
    static char text[256];
    union {
        struct cmsghdr head;
        char space[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    for (;;) {
        struct iovec data = { text, sizeof text - 1 };
        struct msghdr msg = { .msg_iov = &data,
                              .msg_iovlen = 1,
                              .msg_control = &control,
                              .msg_controllen = sizeof control };
        const ssize_t n = recvmsg(manager, &msg, MSG_CMSG_CLOEXEC);
        text[n > 0 ? n : 0] = '\0';
        const struct cmsghdr *c = n > 0 ? CMSG_FIRSTHDR(&msg) : NULL;
        if (c != NULL && c->cmsg_type == SCM_RIGHTS) {
            int fd;
            memcpy(&fd, CMSG_DATA(c), sizeof fd);
            close(fd);
        }
        if (strcmp(text, FILLING) != 0)
            return text;
    }
}

/* The same, when it comes, while the loop runs. */
static const char *hear(void)
{
    const char *text = "";
    const uint64_t end_ms = test_now_ms() + TEST_HANG_MS;
    while (text[0] == '\0' && test_now_ms() < end_ms) {
        uv_run(&loop, UV_RUN_NOWAIT);
        text = heard();
        sleep_ms(1);
    }
    return text;
}

static int ticks;

static void tick(uv_timer_t *timer)
{
    if (++ticks == TICKS)
        uv_close((uv_handle_t *)timer, NULL);
}

TEST(the_loop_waits_for_no_manager_that_is_stopped)
{
    uv_timer_t timer;
    start();
    k.wait_us = 3600 * US_PER_S; /* who waits here is seen to */
    fill();
    keeper_remove_part(&k, INSTANCE, KEEPER_PUT);
    keeper_remove_part(&k, INSTANCE, KEEPER_SPILL);
    ticks = 0;
    uv_timer_init(&loop, &timer);
    uv_timer_start(&timer, tick, 1, 1);
    while (ticks < TICKS)
        uv_run(&loop, UV_RUN_ONCE);
    EXPECT_STR(hear(), "FDSTOREREMOVE=1\nFDNAME=" NAME "-put");
    EXPECT_STR(hear(), "FDSTOREREMOVE=1\nFDNAME=" NAME "-spill");
    keeper_remove_part(&k, INSTANCE, KEEPER_STATE); /* at once */
    EXPECT_STR(heard(), "FDSTOREREMOVE=1\nFDNAME=" NAME "-state");
    EXPECT_STR(heard(), "");
    stop();
}

static int stored;

static void *store(void *arg)
{
    struct shd_err e;
    stored = keeper_store(&k, INSTANCE, KEEPER_PUT, *(const int *)arg, &e);
    return NULL;
}

/* By its name, which the new one has as well. */
TEST(what_is_stored_comes_behind_what_it_takes_the_place_of)
{
    pthread_t thread;
    int fd = memfd_create("values", MFD_CLOEXEC);
    start();
    fill();
    keeper_remove_part(&k, INSTANCE, KEEPER_PUT);
    CHECK(pthread_create(&thread, NULL, store, &fd) == 0);
    EXPECT_STR(hear(), "FDSTOREREMOVE=1\nFDNAME=" NAME "-put");
    EXPECT_STR(hear(), "FDSTORE=1\nFDNAME=" NAME "-put\nFDPOLL=0");
    EXPECT_STR(hear(), "BARRIER=1");
    pthread_join(thread, NULL);
    EXPECT_STATUS(stored, SHD_OK);
    EXPECT_STR(heard(), "");
    close(fd);
    stop();
}

TEST(who_waits_for_a_manager_that_does_not_answer_waits_no_longer_than_it_may)
{
    struct shd_err e = { 0 };
    const int fd = memfd_create("values", MFD_CLOEXEC);
    start();
    k.wait_us = 20 * US_PER_MS;
    keeper_wait(&k);
    EXPECT_STR(heard(), "BARRIER=1");
    EXPECT_STATUS(keeper_store(&k, INSTANCE, KEEPER_PUT, fd, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "the service manager has not taken '" NAME "-put' within");
    EXPECT_STR(heard(), "FDSTORE=1\nFDNAME=" NAME "-put\nFDPOLL=0");
    EXPECT_STR(heard(), "BARRIER=1");
    EXPECT_STR(hear(), "FDSTOREREMOVE=1\nFDNAME=" NAME "-put"); /* should it come to it */
    fill();
    EXPECT_STATUS(keeper_store(&k, INSTANCE, KEEPER_PUT, fd, &e), SHD_ETIMEDOUT);
    keeper_wait(&k);
    EXPECT_STR(heard(), ""); /* neither of it */
    close(fd);
    stop();
}

/* Nobody waits for the memory then, nor for the names: a successor finds them. */
TEST(who_ends_waits_for_no_barrier)
{
    start();
    k.wait_us = 20 * US_PER_MS; /* not all of them have room */
    keeper_stop(&k);
    keeper_wait(&k);
    EXPECT_STR(heard(), "");
    keeper_remove(&k, INSTANCE);
    EXPECT_STR(heard(), "FDSTOREREMOVE=1\nFDNAME=" NAME "-snap0");
    uv_run(&loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&loop) == 0);
    keeper_deinit(&k);
    close(manager);
    unlink(path);
    unsetenv("NOTIFY_SOCKET");
}

TEST_MAIN()
