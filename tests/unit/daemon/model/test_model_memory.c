/* Daemons in a cgroup that is too small for what is asked of them: refused with the numbers, nobody
 * killed, and what was there before goes on (daemon/model/memory.h, spare.h). Needs root and a
 * memory controller, of version 1 or 2; skipped elsewhere. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/memory.h"
#include "tests/lib/client_remote.h"

#define MIB (UINT64_C(1) << 20)

/* -- The cgroup ---------------------------------------------------------------------------------
 */

static char cgroup[128]; /* its folder; "": none */
static bool second;      /* of version 2 */
static pid_t maker;

static bool put(const char *file, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", cgroup, file);
    const int fd = open(path, O_WRONLY | O_CLOEXEC);
    const bool done = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0)
        close(fd);
    return done;
}

static void leave_cgroup(void)
{
    char up[sizeof cgroup + 32];
    if (cgroup[0] == '\0' || getpid() != maker)
        return;
    snprintf(up, sizeof up, "%s/../cgroup.procs", cgroup);
    FILE *f = fopen(up, "we");
    if (f != NULL) {
        fprintf(f, "%d\n", (int)getpid());
        fclose(f);
    }
    for (int i = 0; i < 500 && rmdir(cgroup) != 0; i++)
        usleep(10000); /* until who was killed in it is gone */
    cgroup[0] = '\0';
}

/* This process, and all that it starts from here on, in a cgroup without a limit yet. */
static bool enter_cgroup(void)
{
    static const char *const roots[] = { "/sys/fs/cgroup/memory", "/sys/fs/cgroup" };
    char pid[32];
    if (cgroup[0] != '\0') /* a test that failed has left it */
        return true;
    maker = getpid();
    snprintf(pid, sizeof pid, "%d\n", (int)maker);
    for (int i = 0; i < 2; i++) {
        second = i == 1;
        snprintf(cgroup, sizeof cgroup, "%s/shd-test-%d", roots[i], (int)maker);
        if (mkdir(cgroup, 0700) != 0)
            continue;
        char limit[sizeof cgroup + 32];
        snprintf(limit, sizeof limit, "%s/%s", cgroup,
                 second ? "memory.max" : "memory.limit_in_bytes");
        if (access(limit, W_OK) == 0 && put("cgroup.procs", pid))
            return true;
        rmdir(cgroup);
    }
    cgroup[0] = '\0';
    return false;
}

static void set_limit(uint64_t bytes)
{
    char text[32];
    snprintf(text, sizeof text, "%" PRIu64 "\n", bytes);
    CHECK(put(second ? "memory.max" : "memory.limit_in_bytes", text));
}

/* From here on so many bytes are left. */
static void leave_room(uint64_t bytes)
{
    set_limit(1000000 * MIB);
    set_limit(memory_room().used_bytes + bytes);
}

#define BEGIN(count)                                                   \
    do {                                                               \
        if (!enter_cgroup())                                           \
            SKIP("no cgroup with a limit of memory can be made here"); \
        set_limit(1000000 * MIB);                                      \
        fixture_start_kept(&daemons, count, "");                       \
    } while (0)

static void end(int daemons_count)
{
    for (int i = 0; i < daemons_count; i++)
        EXPECT_EQ(fixture_ask(&daemons, KEEPER_STARTS, i, ""), 1);
    fixture_stop(&daemons);
    leave_cgroup();
}

/* -- Models -------------------------------------------------------------------------------------
 */

/* One unit, AdamW, fp32: 16 bytes of state for each parameter, 4 published, 4 spare. */
static const char *spec_of(const char *name, uint64_t mib)
{
    static _Thread_local char json[512];
    snprintf(json, sizeof json,
             "{ \"name\": \"%s\", \"seed\": 1, \"micro_batches\": 1, \"publish\": \"f32\","
             "  \"optimizer\": { " TOY_ADAMW " }, \"units\": [ { \"name\": \"u\", \"tensors\": ["
             "    { \"name\": \"w\", \"shape\": [%" PRIu64
             "], \"init\": [\"normal\", 0, 1] } ] } ] }",
             name, mib * MIB / 24);
    return json;
}

static int open_on(int index, const char *spec, shd_session **ret_session, struct shd_err *e)
{
    char address[300];
    shd_model *m;
    snprintf(address, sizeof address, "%s?cpu%d", daemons.dir, index);
    const int r = try_connect(address, PATIENT_MS, ret_session, e);
    return r == SHD_OK ? shd_model_open(*ret_session, spec, &m, e) : r;
}

TEST(model_that_does_not_fit_is_refused_and_the_other_stays)
{
    struct shd_err e = { 0 };
    shd_model *m;
    char want[65], got[65];
    BEGIN(1);
    shd_session *s = attach(PATIENT_MS);
    shd_model *toy = open_toy(s, toy_spec("f32", TOY_ADAMW));
    train_steps(toy, 1);
    digest_of(toy, want);
    leave_room(150 * MIB);
    EXPECT_STATUS(shd_model_open(s, spec_of("large", 480), &m, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "'large'");
    EXPECT_HAS(e.text, " MiB are needed");
    EXPECT_HAS(e.text, " MiB are free");
    EXPECT_HAS(e.text, second ? "memory.max" : "memory.limit_in");
    digest_of(toy, got);
    EXPECT_STR(got, want);
    train_steps(toy, 2);
    EXPECT_OK(shd_model_open(s, spec_of("small", 60), &m, &e), &e); /* this one does */
    shd_close(s);
    end(1);
}

struct opener {
    int index, status;
    struct shd_err e;
};

static void *open_large(void *arg)
{
    struct opener *o = arg;
    shd_session *s = NULL;
    o->status = open_on(o->index, spec_of("large", 120), &s, &o->e);
    shd_close(s);
    return NULL;
}

TEST(two_daemons_never_take_the_same_room)
{
    struct opener o[2] = { { .index = 0 }, { .index = 1 } };
    pthread_t threads[2];
    BEGIN(2);
    leave_room(220 * MIB);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, open_large, &o[i]) == 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    const int refused = o[0].status == SHD_OK ? 1 : 0;
    EXPECT_OK(o[1 - refused].status, &o[1 - refused].e);
    EXPECT_STATUS(o[refused].status, SHD_ENOMEM);
    EXPECT_HAS(o[refused].e.text, " MiB are free");
    end(2);
}

static int fill_all_but(uint64_t bytes)
{
    const int fd = memfd_create("test-filler", MFD_CLOEXEC);
    const uint64_t room = memory_room().bytes;
    CHECK(fd >= 0 && room > bytes && fallocate(fd, 0, 0, (off_t)(room - bytes)) == 0);
    return fd;
}

TEST(session_that_finds_no_room_for_its_inbox_is_refused_alone)
{
    struct shd_err e = { 0 };
    BEGIN(1);
    shd_session *s = attach(PATIENT_MS), *other = NULL;
    shd_model *m;
    EXPECT_OK(shd_model_open(s, spec_of("large", 240), &m, &e), &e); /* slots of 40 MiB */
    leave_room(70 * MIB);
    EXPECT_STATUS(open_on(0, spec_of("large", 240), &other, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "inbox");
    EXPECT_HAS(e.text, " MiB are free");
    shd_close(other);
    EXPECT_OK(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &m, &e), &e);
    train_steps(m, 1);
    shd_close(s);
    end(1);
}

/* Whoever fills the cgroup leaves a successor what it needs: publish and inboxes are there twice
 * while the worker holds the old ones. */
TEST(successor_finds_the_memory_that_was_spare_for_it)
{
    struct shd_err e = { 0 };
    BEGIN(1);
    shd_session *s = attach(PATIENT_MS);
    shd_model *large, *toy = open_toy(s, toy_spec("f32", TOY_ADAMW));
    char want[65], got[65];
    EXPECT_OK(shd_model_open(s, spec_of("large", 360), &large, &e), &e); /* 60 MiB are published */
    train_steps(toy, 2);
    digest_of(large, want);
    leave_room(60 * MIB);
    const int filler = fill_all_but(20 * MIB);
    for (int i = 0; i < 2; i++)
        fixture_restart(&daemons, 0);
    digest_of(large, got);
    EXPECT_STR(got, want);
    train_steps(toy, 4);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_STARTS, 0, ""), 3);
    close(filler);
    shd_close(s);
    fixture_stop(&daemons);
    leave_cgroup();
}

int main(int argc, char **argv)
{
    atexit(leave_cgroup);
    return test_run_all(argc, argv);
}
