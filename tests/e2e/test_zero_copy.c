/* P5: on one host neither fetching parameters nor returning gradients moves bytes. Counted from
 * below: the linker puts the counters here in place of memcpy, memmove, sendmsg and zmq_send for
 * everything of ours in client and daemon (which runs in a forked child of this program); shared
 * pages carry the counts. A step of a model of 16 MiB may copy and send no more than messages.
 *
 * And what is done sooner than handed over wakes no thread. */
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <zmq.h>

#include "client/shd.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

#define UNITS                  4
#define UNIT_ELEMS             (1u << 20)
#define STEPS                  5           /* 2 to 6: before the next step that is measured */
#define MESSAGE_BYTES_PER_STEP (64u << 10) /* far above what requests take, far below a unit */

static _Atomic uint64_t *moved; /* shared: bytes copied or sent by any process of this test */

void *__real_memcpy(void *to, const void *from, size_t bytes);
void *__real_memmove(void *to, const void *from, size_t bytes);
ssize_t __real_sendmsg(int fd, const struct msghdr *msg, int flags);
int __real_zmq_send(void *socket, const void *buf, size_t bytes, int flags);
void *__wrap_memcpy(void *to, const void *from, size_t bytes);
void *__wrap_memmove(void *to, const void *from, size_t bytes);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *msg, int flags);
int __wrap_zmq_send(void *socket, const void *buf, size_t bytes, int flags);

static void count(uint64_t bytes)
{
    if (moved != NULL)
        atomic_fetch_add(moved, bytes);
}

void *__wrap_memcpy(void *to, const void *from, size_t bytes)
{
    count(bytes);
    return __real_memcpy(to, from, bytes);
}

void *__wrap_memmove(void *to, const void *from, size_t bytes)
{
    count(bytes);
    return __real_memmove(to, from, bytes);
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *msg, int flags)
{
    const ssize_t sent = __real_sendmsg(fd, msg, flags);
    count(sent > 0 ? (uint64_t)sent : 0);
    return sent;
}

int __wrap_zmq_send(void *socket, const void *buf, size_t bytes, int flags)
{
    count(bytes);
    return __real_zmq_send(socket, buf, bytes, flags);
}

static void one_step(shd_model *m)
{
    struct shd_err e;
    struct shd_result result = { .size = sizeof result };
    for (uint32_t u = 0; u < UNITS; u++) {
        const void *params;
        float *grad;
        EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
        EXPECT_OK(shd_grad(m, 0, u, &grad, &e), &e);
        for (uint32_t i = 0; i < UNIT_ELEMS; i++)
            grad[i] = ((const float *)params)[i];
        EXPECT_OK(shd_return(m, 0, u, &e), &e);
        shd_release(m, u);
    }
    EXPECT_OK(shd_commit(m, &(struct shd_update){ .size = sizeof(struct shd_update), .lr = 0.1 },
                         &result, &e),
              &e);
    EXPECT(result.grad_norm > 0);
}

TEST(a_step_copies_and_sends_messages_only)
{
    static struct fixture fixture;
    static const char spec[] =
        "{\"name\":\"big\",\"seed\":1,\"micro_batches\":1,\"optimizer\":{\"kind\":\"adamw\"},"
        "\"units\":["
        "{\"name\":\"a\",\"tensors\":[{\"name\":\"a\",\"shape\":[1048576],\"init\":[\"const\",1]}]}"
        ","
        "{\"name\":\"b\",\"tensors\":[{\"name\":\"b\",\"shape\":[1048576],\"init\":[\"const\",1]}]}"
        ","
        "{\"name\":\"c\",\"tensors\":[{\"name\":\"c\",\"shape\":[1048576],\"init\":[\"const\",1]}]}"
        ","
        "{\"name\":\"d\",\"tensors\":[{\"name\":\"d\",\"shape\":[1048576],\"init\":[\"const\",1]}]}"
        "]}";
    struct shd_err e;
    shd_session *s;
    shd_model *m;
    moved = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(moved != MAP_FAILED);
    fixture_start(&fixture, 3, NULL);
    EXPECT_OK(shd_connect(&(struct shd_options){ .size = sizeof(struct shd_options),
                                                 .address = fixture.dir },
                          &s, &e),
              &e);
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    /* Step 0 is one of those whose update is measured (NORMS_EVERY): its old values are kept in a
     * cache, by memcpy. A step's update is done before the next one is committed, not sooner. */
    one_step(m);
    one_step(m);
    atomic_store(moved, 0);
    for (int i = 0; i < STEPS; i++)
        one_step(m);
    const uint64_t bytes = atomic_load(moved);
    printf("  %" PRIu64 " bytes copied or sent per step, %u bytes of parameters read and as many "
           "of gradients returned\n",
           bytes / STEPS, UNITS * UNIT_ELEMS * 4);
    EXPECT(bytes > 0); /* the counters are in place: requests are sent */
    EXPECT(bytes / STEPS < MESSAGE_BYTES_PER_STEP);
    struct shd_stats stats = { .size = sizeof stats };
    shd_stats(s, &stats, NULL);
    EXPECT_EQ(stats.bytes_copied, 0);
    shd_close(s);
    fixture_stop(&fixture);
}

/* -- Threads that are not woken ------------------------------------------------------------------
 */

#define FEW_UNITS 8
#define FEW_STEPS 20

/* How often the compute thread of a daemon has gone to sleep. */
static long kernel_sleeps(pid_t pid)
{
    char command[200];
    long sleeps = -1;
    snprintf(command, sizeof command,
             "for t in /proc/%d/task/*; do grep -q shd-kern-0 $t/comm &&"
             " sed -n 's/^voluntary_ctxt_switches://p' $t/status; done",
             (int)pid);
    FILE *f = popen(command, "r");
    CHECK(f != NULL);
    EXPECT_EQ(fscanf(f, "%ld", &sleeps), 1);
    pclose(f);
    return sleeps;
}

static void few_step(shd_model *m)
{
    struct shd_err e;
    const struct shd_update update = { .size = sizeof update, .lr = 0.1 };
    for (uint32_t u = 0; u < FEW_UNITS; u++) {
        float *grad;
        EXPECT_OK(shd_grad(m, 0, u, &grad, &e), &e);
        grad[0] = 1;
        EXPECT_OK(shd_return(m, 0, u, &e), &e);
    }
    EXPECT_OK(shd_commit(m, &update, NULL, &e), &e);
}

TEST(few_elements_wake_no_compute_thread)
{
    static struct fixture fixture;
    char spec[2048];
    int at = sprintf(spec, "{\"name\":\"few\",\"seed\":1,\"micro_batches\":1,"
                           "\"optimizer\":{\"kind\":\"adamw\"},\"units\":[");
    for (int u = 0; u < FEW_UNITS; u++)
        at += sprintf(spec + at,
                      "%s{\"name\":\"u%d\",\"tensors\":[{\"name\":\"t%d\",\"shape\":[4000],"
                      "\"init\":[\"const\",1]}]}",
                      u > 0 ? "," : "", u, u);
    strcpy(spec + at, "]}");
    struct shd_err e;
    shd_session *s;
    shd_model *m;
    fixture_start(&fixture, 1, NULL);
    const struct shd_options options = { .size = sizeof options, .address = fixture.dir };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    EXPECT_OK(shd_model_open(s, spec, &m, &e), &e);
    few_step(m);
    long before = kernel_sleeps(fixture.pids[0]);
    for (long last = -1; last != before; sleep_ms(20)) { /* what it filled, it sleeps again */
        last = before;
        before = kernel_sleeps(fixture.pids[0]);
    }
    for (int i = 0; i < FEW_STEPS; i++)
        few_step(m);
    EXPECT_EQ(kernel_sleeps(fixture.pids[0]), before);
    shd_close(s);
    fixture_stop(&fixture);
}

TEST_MAIN()
