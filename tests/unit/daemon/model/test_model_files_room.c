/* A state on a file where room is short: a disk that is full is an answer with the numbers, and in
 * a cgroup with a quarter of the state's size training goes on, with the same bits. Skipped where a
 * small disk cannot be mounted, or no cgroup can be made. */
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/memory.h"
#include "proto/share/owner_bytes.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/client_remote.h"

#define MIB (UINT64_C(1) << 20)

/* -- Models of equal units -----------------------------------------------------------------------
 */

static char json[65536];

static const char *spec_of(const char *name, uint32_t units, uint64_t unit_elems)
{
    int n = snprintf(json, sizeof json,
                     "{ \"name\": \"%s\", \"seed\": 5, \"micro_batches\": 1, \"publish\": \"bf16\","
                     " \"ema\": 0.9, \"optimizer\": { " TOY_ADAMW " }, \"units\": [",
                     name);
    for (uint32_t u = 0; u < units; u++)
        n += snprintf(json + n, sizeof json - (size_t)n,
                      "%s { \"name\": \"u%u\", \"tensors\": [ { \"name\": \"w%u\", \"shape\": "
                      "[%" PRIu64 "], \"init\": [\"normal\", 0, 1] } ] }",
                      u > 0 ? "," : "", u, u, unit_elems);
    snprintf(json + n, sizeof json - (size_t)n, " ] }");
    return json;
}

static int forward(void *ctx, uint32_t micro, uint32_t unit, const void *params)
{
    (void)ctx, (void)micro, (void)unit, (void)params;
    return 0;
}

static int backward(void *ctx, uint32_t micro, uint32_t unit, const void *params, float *grad)
{
    const shd_model *m = ctx;
    (void)params;
    for (uint64_t i = 0; i < shd_unit_elems(m, unit); i++)
        grad[i] = (float)((i * 7 + unit * 13 + micro + shd_step(m)) % 33) / 16 - 1;
    return 0;
}

static void train(shd_model *m, uint32_t steps)
{
    static const uint32_t micro = 0;
    const struct shd_compute compute = {
        .size = sizeof compute, .ctx = m, .forward = forward, .backward = backward
    };
    struct shd_result result = { .size = sizeof result };
    struct shd_err e = { 0 };
    for (uint32_t i = 0; i < steps; i++) {
        const struct shd_update update = toy_update(shd_step(m));
        EXPECT_OK(shd_run_step(m, &micro, 1, &compute, &update, &result, &e), &e);
    }
}

/* -- A cgroup for daemons alone ------------------------------------------------------------------
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

static uint64_t get(const char *file)
{
    char path[256];
    unsigned long long value = 0;
    snprintf(path, sizeof path, "%s/%s", cgroup, file);
    FILE *f = fopen(path, "re");
    CHECK(f != NULL && fscanf(f, "%llu", &value) == 1);
    fclose(f);
    return value;
}

static void remove_cgroup(void)
{
    if (cgroup[0] == '\0' || getpid() != maker)
        return;
    for (int i = 0; i < 500 && rmdir(cgroup) != 0; i++)
        usleep(10000); /* until who was in it is gone */
    cgroup[0] = '\0';
}

static bool make_cgroup(uint64_t bytes)
{
    static const char *const roots[] = { "/sys/fs/cgroup/memory", "/sys/fs/cgroup" };
    char text[32];
    maker = getpid();
    snprintf(text, sizeof text, "%" PRIu64 "\n", bytes);
    for (int i = 0; i < 2; i++) {
        second = i == 1;
        snprintf(cgroup, sizeof cgroup, "%s/shd-files-%d", roots[i], (int)maker);
        if (mkdir(cgroup, 0700) != 0)
            continue;
        if (put(second ? "memory.max" : "memory.limit_in_bytes", text)) {
            atexit(remove_cgroup);
            return true;
        }
        rmdir(cgroup);
    }
    cgroup[0] = '\0';
    return false;
}

static void enter(int index)
{
    char pid[32];
    (void)index;
    snprintf(pid, sizeof pid, "%d\n", (int)getpid());
    CHECK(put("cgroup.procs", pid));
}

#define UNITS      64u
#define UNIT_ELEMS (UINT64_C(1) << 19)
#define STATE      (UNITS * UNIT_ELEMS * 5 * sizeof(float)) /* p, m, v, average, sum */

/* SHD_TEST_STEPS: more, so that a step's time can be told (docs/memory.md). */
static uint32_t steps_asked(void)
{
    const char *text = getenv("SHD_TEST_STEPS");
    return text != NULL ? (uint32_t)strtoul(text, NULL, 10) : 2;
}

/* What the daemon has read from, and is to write to the disk. */
static void count_io(uint64_t *ret_read, uint64_t *ret_written)
{
    char path[64], line[128];
    snprintf(path, sizeof path, "/proc/%d/io", (int)daemons.pids[0]);
    FILE *f = fopen(path, "re");
    *ret_read = *ret_written = 0;
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        sscanf(line, "read_bytes: %" SCNu64, ret_read);
        sscanf(line, "write_bytes: %" SCNu64, ret_written);
    }
    if (f != NULL)
        fclose(f);
}

static double train_anew(char hex[65])
{
    const uint32_t steps = steps_asked();
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, spec_of("wide", UNITS, UNIT_ELEMS));
    uint64_t read[2], written[2];
    count_io(&read[0], &written[0]);
    const uint64_t start_ms = test_now_ms();
    train(m, steps);
    const double step_s = (double)(test_now_ms() - start_ms) / 1e3 / steps;
    count_io(&read[1], &written[1]);
    printf("  %.2f s a step, with %" PRIu64 " MiB read and %" PRIu64 " MiB written\n", step_s,
           (read[1] - read[0]) / MIB / steps, (written[1] - written[0]) / MIB / steps);
    digest_of(m, hex);
    shd_close(s);
    return step_s;
}

TEST(training_goes_on_with_a_quarter_of_the_states_memory)
{
    const uint64_t limit = STATE / 4;
    char want[65], got[65];
    if (!make_cgroup(limit))
        SKIP("no cgroup with a limit of memory can be made here");
    daemons.state = NULL;
    fixture_start(&daemons, 1, NULL);
    const double memory_s = train_anew(want);
    fixture_stop(&daemons);
    daemons.state = "file:/var/tmp";
    fixture_start(&daemons, 1, enter);
    const double file_s = train_anew(got);
    const uint64_t peak = get(second ? "memory.peak" : "memory.max_usage_in_bytes");
    printf("  state %" PRIu64 " MiB, limit %" PRIu64 " MiB, peak %" PRIu64
           " MiB; a step %.2f s in memory, %.2f s on a file\n",
           STATE / MIB, limit / MIB, peak / MIB, memory_s, file_s);
    fixture_stop(&daemons);
    remove_cgroup();
    EXPECT_STR(got, want);
    EXPECT(peak <= limit);
}

/* The same in memory is refused, so the limit is one. */
TEST(so_much_state_in_memory_is_refused_there)
{
    struct shd_err e = { 0 };
    shd_model *m;
    if (!make_cgroup(STATE / 4))
        SKIP("no cgroup with a limit of memory can be made here");
    daemons.state = NULL;
    fixture_start(&daemons, 1, enter);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_open(s, spec_of("wide", UNITS, UNIT_ELEMS), &m, &e), SHD_ENOMEM);
    shd_close(s);
    fixture_stop(&daemons);
    remove_cgroup();
}

/* What is published, and as much for a successor, is more than there is. */
TEST(training_goes_on_with_less_memory_than_is_published)
{
    const uint64_t limit = STATE / 8;
    struct shd_err e = { 0 };
    char want[65], got[65];
    shd_model *m;
    if (!make_cgroup(limit))
        SKIP("no cgroup with a limit of memory can be made here");
    daemons.state = daemons.publish = NULL;
    fixture_start(&daemons, 1, NULL);
    train_anew(want);
    fixture_stop(&daemons);
    daemons.state = "file:/var/tmp"; /* that alone does not do */
    fixture_start(&daemons, 1, enter);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_open(s, spec_of("wide", UNITS, UNIT_ELEMS), &m, &e), SHD_ENOMEM);
    shd_close(s);
    fixture_stop(&daemons);
    daemons.publish = "file:/var/tmp";
    fixture_start(&daemons, 1, enter);
    const double file_s = train_anew(got);
    const uint64_t peak = get(second ? "memory.peak" : "memory.max_usage_in_bytes");
    printf("  published %" PRIu64 " MiB, limit %" PRIu64 " MiB, peak %" PRIu64
           " MiB; a step %.2f s on files\n",
           UNITS * UNIT_ELEMS * 2 / MIB, limit / MIB, peak / MIB, file_s);
    fixture_stop(&daemons);
    daemons.publish = NULL;
    remove_cgroup();
    EXPECT_STR(got, want);
    EXPECT(peak <= limit);
}

/* -- A small disk --------------------------------------------------------------------------------
 */

static char disk[64];

/* In a mount namespace of this program and its children. */
static bool mount_small_disk(void)
{
    snprintf(disk, sizeof disk, "/var/tmp/shd-disk-XXXXXX");
    CHECK(mkdtemp(disk) != NULL);
    const bool done = unshare(CLONE_NEWNS) == 0 &&
                      mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0 &&
                      mount("none", disk, "tmpfs", 0, "size=24m") == 0;
    if (!done)
        rmdir(disk);
    return done;
}

static void unmount_small_disk(void)
{
    EXPECT_EQ(umount2(disk, MNT_DETACH), 0);
    EXPECT_EQ(rmdir(disk), 0);
}

TEST(full_disk_refuses_a_model_and_a_snapshot_and_training_goes_on)
{
    struct shd_err e = { 0 };
    char on_disk[80], want[65], got[65];
    uint64_t step;
    shd_model *m, *other;
    daemons.state = daemons.snapshots = NULL;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    m = open_toy(s, spec_of("fits", 4, 1 << 17));
    train(m, 3);
    digest_of(m, want);
    shd_close(s);
    fixture_stop(&daemons);
    if (!mount_small_disk())
        SKIP("a small disk cannot be mounted here");
    snprintf(on_disk, sizeof on_disk, "file:%s", disk);
    daemons.state = daemons.snapshots = on_disk;
    fixture_start_kept(&daemons, 1, "");
    s = attach(PATIENT_MS);
    m = open_toy(s, spec_of("fits", 4, 1 << 17)); /* 10 MiB */
    EXPECT_STATUS(shd_model_open(s, spec_of("large", 4, 1 << 18), &other, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "'large'");
    EXPECT_HAS(e.text,
               "20971520 bytes (21 MiB) are needed, 14 MiB are free in '/var/tmp/shd-disk-");
    train(m, 1);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e); /* 9 MiB */
    train(m, 1);
    EXPECT_STATUS(shd_snapshot(m, &step, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, " MiB are free in '/var/tmp/shd-disk-");
    train(m, 1);
    digest_of(m, got);
    EXPECT_STR(got, want);
    fixture_restart(&daemons, 0);
    EXPECT_OK(shd_model_rewind(m, 1, &step, &e), &e);
    train(m, 2);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
    unmount_small_disk();
}

/* It has room for what is published, and none for a successor's; then for none at all. */
TEST(full_disk_refuses_what_a_successor_could_not_publish_and_holds_up_none)
{
    struct shd_err e = { 0 };
    static char block[65536];
    char on_disk[80], path[96], want[65], got[65];
    shd_model *m, *other;
    daemons.state = daemons.publish = daemons.snapshots = NULL;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    m = open_toy(s, spec_of("fits", 4, 1 << 17));
    train(m, 2);
    digest_of(m, want);
    shd_close(s);
    fixture_stop(&daemons);
    if (!mount_small_disk())
        SKIP("a small disk cannot be mounted here");
    snprintf(on_disk, sizeof on_disk, "file:%s", disk);
    daemons.publish = on_disk;
    fixture_start_kept(&daemons, 1, "");
    s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_open(s, spec_of("large", 4, 1 << 21), &other, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "for a successor: publish segment of 16777216 bytes on a file: ");
    EXPECT_HAS(e.text, "8 MiB are free in '/var/tmp/shd-disk-");
    m = open_toy(s, spec_of("fits", 4, 1 << 17));
    train(m, 1);
    snprintf(path, sizeof path, "%s/others", disk);
    const int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    while (write(fd, block, sizeof block) > 0)
        continue;
    close(fd);
    fixture_restart(&daemons, 0);
    train(m, 1);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
    daemons.publish = NULL;
    unmount_small_disk();
}

TEST_MAIN()
