/* Daemons whose state and snapshots lie on files: the bits that memory has, over owners and kinds,
 * a bounded part of it in memory, and what they say of it. What else holds for them are the tests
 * that ctest runs a second time so (NAME_file). */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/share/owner_bytes.h"
#include "proto/share/segment_file.h"
#include "proto/share/shardmap.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/adopt_toy.h"

#define ON_FILES "file:/var/tmp"

static void start(int owners)
{
    daemons.state = daemons.publish = daemons.snapshots = ON_FILES;
    fixture_start_kept(&daemons, owners, "");
}

TEST(training_has_the_bits_that_it_has_in_memory)
{
    for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
        struct past want;
        reference(&kinds[i], &want);
        for (int owners = 1; owners <= 3; owners++) {
            struct past got = { .known = { false } };
            struct shd_err e = { 0 };
            start(owners);
            if (!adopt_train(daemons.address, &kinds[i], &got, &e))
                FAIL("%s", e.text);
            adopt_expect_same(&got, &want);
            for (int owner = 0; owner < owners; owner++) /* and its successors find them */
                fixture_restart(&daemons, owner);
            got = (struct past){ .known = { false } };
            if (!adopt_train(daemons.address, &kinds[i], &got, &e))
                FAIL("%s", e.text);
            EXPECT_STR(got.hex, want.hex);
            fixture_stop(&daemons);
        }
    }
}

/* -- A model of many units, which goes through a window ------------------------------------------
 */

#define UNITS      24u
#define UNIT_ELEMS 40000u

static const char *long_spec(void)
{
    static char json[8192];
    int n = snprintf(
        json, sizeof json,
        "{ \"name\": \"long\", \"seed\": 3, \"micro_batches\": 2, \"publish\": \"bf16\","
        " \"ema\": 0.9, \"optimizer\": { " TOY_ADAMW " }, \"units\": [");
    for (uint32_t u = 0; u < UNITS; u++)
        n += snprintf(json + n, sizeof json - (size_t)n,
                      "%s { \"name\": \"u%u\", \"tensors\": [ { \"name\": \"w%u\", \"shape\": [%u],"
                      " \"init\": [\"normal\", 0, 1], \"trainable\": %s } ] }",
                      u > 0 ? "," : "", u, u, UNIT_ELEMS + 1000 * (u % 3),
                      u == 5 ? "false" : "true");
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
    for (uint64_t i = 0; grad != NULL && i < UNIT_ELEMS; i++)
        grad[i] = toy_noise(shd_step(m), micro, unit, i);
    return 0;
}

static void train_long(shd_model *m, uint32_t steps)
{
    static const uint32_t micros[] = { 0, 1 };
    const struct shd_compute compute = {
        .size = sizeof compute, .ctx = m, .forward = forward, .backward = backward
    };
    struct shd_result result = { .size = sizeof result };
    struct shd_err e = { 0 };
    for (uint32_t i = 0; i < steps; i++) {
        const struct shd_update update = toy_update(shd_step(m));
        EXPECT_OK(shd_run_step(m, micros, 2, &compute, &update, &result, &e), &e);
    }
}

static void train_in_memory(uint32_t steps, char hex[65])
{
    daemons.state = daemons.publish = daemons.snapshots = NULL;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, long_spec());
    train_long(m, steps);
    digest_of(m, hex);
    shd_close(s);
    fixture_stop(&daemons);
}

static uint64_t window_of(uint32_t owner, uint32_t owners, uint64_t *ret_state)
{
    struct shd_err e = { 0 };
    struct shardmap *map;
    struct spec *spec;
    EXPECT_OK(spec_parse(long_spec(), strlen(long_spec()), &spec, &e), &e);
    EXPECT_OK(shardmap_new(spec, owner, owners, &map, &e), &e);
    const uint64_t window = owner_window_bytes(map);
    *ret_state = shardmap_state_bytes(map);
    shardmap_free(map);
    spec_free(spec);
    return window;
}

struct shown {
    json_int_t state, publish, snapshots, state_on_files, publish_on_files, snapshots_on_files;
    char state_on[16];
};

/* Of the only model. */
static struct shown shown(int owner)
{
    struct http_reply reply = http_get(&daemons, owner, "/status");
    struct shown s = { .state = -1 };
    const char *on = NULL;
    json_t *root = reply.body != NULL ? json_loads(reply.body, 0, NULL) : NULL;
    json_t *m = json_array_get(json_object_get(root, "models"), 0);
    EXPECT_EQ(json_unpack(m, "{s:s, s:{s:I, s:I, s:I, s:I, s:I, s:I}}", "state_on", &on, "bytes",
                          "state", &s.state, "publish", &s.publish, "snapshots", &s.snapshots,
                          "state_on_files", &s.state_on_files, "publish_on_files",
                          &s.publish_on_files, "snapshots_on_files", &s.snapshots_on_files),
              0);
    snprintf(s.state_on, sizeof s.state_on, "%s", on != NULL ? on : "?");
    json_decref(root);
    free(reply.text);
    return s;
}

/* Of files without a name that a daemon has mapped, in its page table. */
static uint64_t mapped_bytes(int owner)
{
    char path[64], line[512];
    bool here = false;
    uint64_t kib, sum = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps", (int)daemons.pids[owner]);
    FILE *f = fopen(path, "re");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f) != NULL) {
        unsigned long first, end;
        if (sscanf(line, "%lx-%lx ", &first, &end) == 2)
            here = strstr(line, " /var/tmp/") != NULL;
        else if (here && sscanf(line, "Rss: %" SCNu64, &kib) == 1)
            sum += kib << 10;
    }
    fclose(f);
    return sum;
}

TEST(no_more_of_the_state_is_in_memory_than_is_said)
{
    char want[65], got[65];
    uint64_t state;
    train_in_memory(3, want);
    for (int owners = 1; owners <= 2; owners++) {
        struct shown seen = { .state = 0 };
        start(owners);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, long_spec());
        const uint64_t window = window_of(0, (uint32_t)owners, &state);
        EXPECT(window < state / 3);
        for (int step = 0; step < 3; step++) {
            train_long(m, 1);
            seen = shown(0);
            EXPECT(seen.state >= 0 && (uint64_t)seen.state <= window);
        }
        EXPECT(seen.state > 0);
        EXPECT_EQ((uint64_t)seen.state_on_files, state);
        EXPECT_STR(seen.state_on, "file");
        EXPECT_SOON(mapped_bytes(0) <= window);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

TEST(snapshots_go_to_their_files_and_back)
{
    struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX] = { { .size = sizeof rows[0] } };
    struct shd_err e = { 0 };
    char two[65], three[65], got[65];
    uint64_t step = 0;
    uint32_t count = 0;
    train_in_memory(2, two);
    train_in_memory(3, three);
    for (int run = 0; run < 2; run++) {
        daemons.state = run == 0 ? "memory" : ON_FILES;
        daemons.snapshots = ON_FILES;
        fixture_start_kept(&daemons, 2, "");
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, long_spec());
        train_long(m, 2);
        EXPECT_OK(shd_snapshot(m, &step, &e), &e);
        EXPECT_OK(shd_snapshots(m, rows, SHD_SNAPSHOTS_MAX, &count, &e), &e);
        EXPECT_EQ(count, 1);
        const struct shown seen = shown(1);
        EXPECT_EQ(seen.snapshots, 0);
        EXPECT(seen.snapshots_on_files > 0);
        EXPECT_STR(seen.state_on, run == 0 ? "memory" : "file");
        if (run == 0) /* its head alone stays in memory */
            EXPECT_SOON(mapped_bytes(1) < (uint64_t)seen.snapshots_on_files / 16);
        train_long(m, 2);
        EXPECT_OK(shd_model_rewind(m, 2, &step, &e), &e);
        digest_of(m, got);
        EXPECT_STR(got, two);
        fixture_restart(&daemons, 0);
        fixture_restart(&daemons, 1);
        train_long(m, 2);
        EXPECT_OK(shd_model_rewind(m, 2, &step, &e), &e);
        train_long(m, 1);
        digest_of(m, got);
        EXPECT_STR(got, three);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* So many as are to be kept, and one for the next. */
TEST(files_of_snapshots_that_are_given_up_go)
{
    struct shd_err e = { 0 };
    struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX] = { { .size = sizeof rows[0] } };
    uint32_t count = 0;
    start(1);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, long_spec());
    EXPECT_OK(shd_snapshot_every(m, 1, 2, &e), &e);
    train_long(m, 1);
    for (int i = 0; i < 6; i++) {
        train_long(m, 1);
        EXPECT_SOON(shd_snapshots(m, rows, SHD_SNAPSHOTS_MAX, &count, &e) == SHD_OK && count > 0 &&
                    rows[count - 1].step == shd_step(m));
    }
    EXPECT_EQ(count, 2);
    EXPECT_SOON((uint64_t)shown(0).snapshots_on_files == 3 * rows[0].bytes); /* one for the next */
    EXPECT_OK(shd_snapshot_every(m, 0, 1, &e), &e);
    train_long(m, 1);
    EXPECT_SOON((uint64_t)shown(0).snapshots_on_files <= 2 * rows[0].bytes);
    shd_model_close(m);
    EXPECT_OK(shd_model_drop(s, "long", NULL, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Files without names outlive their directory; what is to be made there is refused. */
TEST(successor_goes_on_when_the_directory_is_gone)
{
    char dir[] = "/var/tmp/shd-files-XXXXXX", home[64], want[65], got[65];
    struct shd_err e = { 0 };
    uint64_t step;
    shd_model *other;
    train_in_memory(3, want);
    CHECK(mkdtemp(dir) != NULL);
    snprintf(home, sizeof home, "file:%s", dir);
    daemons.state = daemons.publish = daemons.snapshots = home;
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, long_spec());
    train_long(m, 1);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    train_long(m, 1);
    EXPECT_EQ(rmdir(dir), 0); /* nothing is in it to be seen */
    fixture_restart(&daemons, 0);
    train_long(m, 1);
    const struct shown seen = shown(0); /* it knows them for files */
    EXPECT_STR(seen.state_on, "file");
    EXPECT(seen.snapshots == 0 && seen.snapshots_on_files > 0);
    EXPECT((uint64_t)seen.state <= window_of(0, 1, &step));
    digest_of(m, got);
    EXPECT_STR(got, want);
    EXPECT_OK(shd_model_rewind(m, 1, &step, &e), &e);
    train_long(m, 2);
    digest_of(m, got);
    EXPECT_STR(got, want);
    EXPECT_STATUS(shd_snapshot(m, &step, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "directory '/var/tmp/shd-files-");
    EXPECT_HAS(e.text, "' is not there");
    EXPECT_STATUS(shd_model_open(s, toy_spec("f32", TOY_ADAMW), &other, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "' is not there");
    shd_close(s);
    fixture_stop(&daemons);
}

/* What a successor publishes in is there before, and another one for the next when it has settled.
 * Two that die before that leave none: one is made then. */
TEST(successors_publish_in_the_file_that_was_kept_for_them)
{
    char want[65], got[65];
    train_in_memory(5, want);
    daemons.state = daemons.snapshots = NULL;
    daemons.publish = ON_FILES;
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, long_spec());
    train_long(m, 1);
    struct shown seen = shown(0);
    EXPECT_STR(seen.state_on, "memory");
    EXPECT_EQ(seen.publish, 0);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 4); /* ledger, state, spare, next */
    const json_int_t two = seen.publish_on_files;
    EXPECT(two > 0);
    fixture_restart(&daemons, 0);
    train_long(m, 1);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 3);
    EXPECT_EQ(shown(0).publish_on_files, two / 2);
    EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, 0, "") == 4);
    EXPECT_SOON(shown(0).publish_on_files == two);
    for (int i = 0; i < 3; i++) {
        fixture_restart(&daemons, 0);
        train_long(m, 1);
    }
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Pages of a mapped range that are in memory, of whom nobody can tell but the file's user. */
static size_t resident(const void *base, size_t bytes)
{
    unsigned char in[UNIT_ELEMS * 4 / 4096 + 1];
    size_t count = 0;
    const size_t pages = (bytes + 4095) / 4096;
    CHECK(pages <= sizeof in && mincore((void *)base, bytes, in) == 0);
    for (size_t i = 0; i < pages; i++)
        count += in[i] & 1;
    return count;
}

/* The file that a daemon publishes in. */
static int open_published(int owner)
{
    char path[64];
    struct stat st;
    for (int i = 0; i < 256; i++) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)daemons.pids[owner], i);
        if (stat(path, &st) == 0 && S_ISREG(st.st_mode) && (st.st_mode & 07777) == 0400)
            return open(path, O_RDONLY | O_CLOEXEC);
    }
    return -1;
}

/* Before anybody computes with it. */
TEST(a_fetch_has_the_kernel_read_what_is_on_a_disk)
{
    const size_t bytes = UNIT_ELEMS * 2; /* of unit 3, in bf16 */
    struct shd_err e = { 0 };
    const void *params;
    const struct segment_home home = { .file = true, .dir = "/var/tmp" };
    bool is_memory = false;
    EXPECT_OK(segment_home_check(&home, &is_memory, &e), &e);
    if (is_memory)
        SKIP("/var/tmp is memory here, and no disk");
    start(1);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, long_spec());
    train_long(m, 1);
    EXPECT_OK(shd_acquire(m, 3, &params, &e), &e);
    shd_release(m, 3);
    const int fd = open_published(0);
    EXPECT(fd >= 0);
    EXPECT_SOON((madvise((void *)params, bytes, MADV_DONTNEED), fdatasync(fd),
                 posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), resident(params, bytes) == 0));
    close(fd);
    EXPECT_OK(shd_acquire(m, 3, &params, &e), &e);
    EXPECT_SOON(resident(params, bytes) == (bytes + 4095) / 4096);
    shd_release(m, 3);
    shd_close(s);
    fixture_stop(&daemons);
}

/* It would be zeros where parameters were. */
TEST(file_that_has_lost_blocks_is_refused_and_kept)
{
    int fd = -1;
    start(1);
    shd_session *s = attach(PATIENT_MS);
    train_long(open_toy(s, long_spec()), 1);
    shd_close(s);
    fixture_ask(&daemons, KEEPER_KILL, 0, "");
    keeper_ask(daemons.control, KEEPER_GIVE, 0, "-state", &fd);
    EXPECT_EQ(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 65536), 0);
    close(fd);
    fixture_succeed(&daemons, 0, "");
    fixture_wait_up(&daemons, 0);
    struct http_reply reply = http_get(&daemons, 0, "/status");
    EXPECT_HAS(reply.body, "state segment is a file without all of its blocks");
    free(reply.text);
    EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 4);
    fixture_stop(&daemons);
}

#ifdef SHD_FAIL_POINTS
/* Killed there, the file is nobody's: it is gone, and the model is made again. */
TEST(daemon_killed_when_it_has_made_a_file_leaves_none)
{
    static const char *const fails[] = { "model:file:after@1;", "model:segments:after@1;",
                                         "keeper:store:after@1;", "keeper:store:after@2;" };
    char want[65], got[65];
    train_in_memory(2, want);
    for (size_t i = 0; i < ARRAY_SIZE(fails); i++) {
        daemons.state = daemons.snapshots = ON_FILES;
        fixture_start_kept(&daemons, 1, fails[i]);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, long_spec());
        EXPECT_EQ(fixture_ask(&daemons, KEEPER_STARTS, 0, ""), 2);
        train_long(m, 2);
        digest_of(m, got);
        EXPECT_STR(got, want);
        EXPECT_EQ(fixture_ask(&daemons, KEEPER_COUNT, 0, ""), 3); /* state, ledger, spare */
        shd_close(s);
        fixture_stop(&daemons);
    }
}
#endif

TEST_MAIN()
