/* notify: when the watchdog is fed while the device has not come back: a copy of a state to a disk
 * is one operation, and no hang as long as something moves; READY=1 at a manager that is stopped.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/base/homes.h"
#include "daemon/base/keeper.h"
#include "daemon/base/manager.h"
#include "daemon/base/notify.h"
#include "daemon/base/state.h"
#include "daemon/base/task.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "tests/lib/test.h"

#define LOOKS     20 /* of the watchdog's, one each PERIOD_MS */
#define PERIOD_MS 5

/* A device that takes work and does not come back. */
static int take(struct kern *k, const struct kern_op *op, struct kern_done *done, struct shd_err *e)
{
    (void)k, (void)op, (void)done, (void)e;
    return SHD_OK;
}

static void *get(struct kern *k, uint64_t bytes)
{
    (void)k;
    return malloc(bytes);
}

static void put(struct kern *k, void *memory, uint64_t bytes)
{
    (void)k, (void)bytes;
    free(memory);
}

static const struct kern_ops ops = { .submit = take, .alloc = get, .release = put };

static struct kern device = { .ops = &ops };
static uv_loop_t loop;
static struct daemon d;
static struct keeper keeper;
static struct homes *homes;
static int manager; /* its socket */
static char path[64];

static void start(const char *state)
{
    struct shd_err e = { 0 };
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    snprintf(path, sizeof path, "/var/tmp/shd-notify-%d", (int)getpid());
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    unlink(path);
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    CHECK(manager >= 0 && bind(manager, (struct sockaddr *)&address, sizeof address) == 0);
    setenv("NOTIFY_SOCKET", path, 1);
    setenv("WATCHDOG_USEC", "10000", 1); /* looked after in half of that: PERIOD_MS */
    CHECK(uv_loop_init(&loop) == 0);
    EXPECT_OK(homes_new(&(struct homes_words){ .state = state }, &homes, &e), &e);
    keeper = (struct keeper){ .homes = homes };
    d = (struct daemon){ .loop = &loop, .kern = &device, .keeper = &keeper };
    EXPECT_OK(task_queue_new(&d, &d.tasks, &e), &e);
    EXPECT_OK(notify_new(&d, &d.notify, &e), &e);
}

static void close_handle(uv_handle_t *handle, void *arg)
{
    (void)arg;
    if (!uv_is_closing(handle))
        uv_close(handle, NULL);
}

static void stop(void)
{
    task_queue_close(d.tasks);
    uv_walk(&loop, close_handle, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    CHECK(uv_loop_close(&loop) == 0);
    notify_free(&d, d.notify);
    task_queue_free(d.tasks);
    homes_stop(homes);
    homes_free(homes);
    close(manager);
    unlink(path);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
}

/* A file of which each call changes what the one before has not. */
static void change_file(int fd, int call)
{
    static char page[4096];
    memset(page, call, sizeof page);
    CHECK(pwrite(fd, page, sizeof page, (off_t)call * (off_t)sizeof page) == sizeof page);
}

static int looks_left;

static void count_look(uv_timer_t *timer)
{
    const int *fd = timer->data;
    if (*fd >= 0)
        change_file(*fd, looks_left);
    if (--looks_left == 0)
        uv_stop(&loop);
}

/* So many were told in some twenty looks, while a file is changed before each (fd: -1: none is). */
static int told(int fd)
{
    uv_timer_t timer;
    char text[64];
    int count = 0;
    ssize_t n;
    timer.data = &fd;
    looks_left = LOOKS;
    uv_timer_init(&loop, &timer);
    uv_timer_start(&timer, count_look, PERIOD_MS, PERIOD_MS);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
    while ((n = recv(manager, text, sizeof text - 1, 0)) > 0) {
        text[n] = '\0';
        count += strcmp(text, "WATCHDOG=1") == 0;
    }
    return count;
}

/* How often, in what has come since. */
static int told_ready(void)
{
    char text[64];
    int count = 0;
    ssize_t n;
    while ((n = recv(manager, text, sizeof text - 1, 0)) > 0) {
        text[n] = '\0';
        count += strcmp(text, "READY=1\nSTATUS=Serving") == 0;
    }
    return count;
}

static int new_file(void)
{
    char name[] = "/var/tmp/shd-notify-XXXXXX";
    const int fd = mkostemp(name, O_CLOEXEC);
    CHECK(fd >= 0 && unlink(name) == 0);
    return fd;
}

TEST(what_moves_to_a_disk_is_a_sign_of_life_where_models_are_on_files)
{
    const int fd = new_file();
    start("file:/var/tmp");
    EXPECT_EQ(told(-1), 0); /* a device that hangs, and nothing moves */
    EXPECT(told(fd) > 1);
    EXPECT(told(-1) <= 1); /* what moved last */
    stop();
    close(fd);
}

TEST(it_is_none_where_all_is_in_memory)
{
    const int fd = new_file();
    start("memory");
    EXPECT_EQ(told(fd), 0);
    stop();
    close(fd);
}

/* A manager waits for this word: it has it as soon as it reads again, once, and nobody has waited.
 */
TEST(ready_is_told_when_there_is_room)
{
    int why;
    start("memory");
    while ((why = manager_tell("STATUS=filling", -1, 0)) == 0)
        continue;
    EXPECT_EQ(why, EAGAIN);
    notify_ready(d.notify);
    for (int i = 0; i < 3; i++)
        uv_run(&loop, UV_RUN_ONCE);
    EXPECT_EQ(told_ready(), 0);
    EXPECT_SOON((uv_run(&loop, UV_RUN_NOWAIT), told_ready() == 1));
    for (int i = 0; i < LOOKS; i++)
        uv_run(&loop, UV_RUN_ONCE); /* the watchdog's looks go on */
    EXPECT_EQ(told_ready(), 0);
    stop();
}

TEST_MAIN()
