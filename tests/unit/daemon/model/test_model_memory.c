/* Daemons in a cgroup that is too small for what is asked of them: refused with the numbers, nobody
 * killed, and what was there before goes on (daemon/model/memory.h, spare.h). Needs root and a
 * memory controller, of version 1 or 2; skipped elsewhere. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/memory.h"
#include "proto/share/fdpass.h"
#include "proto/share/owner_bytes.h"
#include "proto/share/shardmap.h"
#include "proto/share/spec_segment.h"
#include "proto/spec/spec_json.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/raw_client.h"

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

/* The same spec by several sessions at the same time, in segments: parsing takes sixteen times its
 * bytes, of each. */
#define AT_ONCE 4

static void pass_spec(struct raw *r, const struct segment *segment, const struct spec_stub *stub)
{
    struct shd_err e = { 0 };
    uint8_t frame[512];
    const struct side_msg msg = {
        .type = SIDE_SEGMENT, .ticket = 7, .kind = SEGMENT_SPEC, .bytes = segment->bytes
    };
    struct wire_request open = {
        .type = WIRE_OPEN_MODEL,
        .open_model = { .name = "",
                        .owners = 1,
                        .spec_at = { .ticket = 7, .bytes = stub->bytes, .sum = { stub->sum, 32 } } }
    };
    EXPECT_OK(side_send(r->side, &msg, segment->fd, &e), &e);
    raw_send(r, frame, raw_pack(r, &open, frame, sizeof frame));
}

TEST(specs_that_are_parsed_at_the_same_time_share_the_room)
{
    static struct raw r[AT_ONCE];
    const size_t bytes = 2 * MIB;
    struct shd_err e = { 0 };
    struct spec_stub stub;
    struct segment segment;
    char *json = malloc(bytes);
    int served = 0, busy = 0;
    if (!enter_cgroup())
        SKIP("no cgroup with a limit of memory can be made here");
    set_limit(1000000 * MIB);
    fixture_start(&daemons, 1, NULL);
    fixture = daemons;
    memset(json, ' ', bytes);
    memcpy(json, spec_of("padded", 1), strlen(spec_of("padded", 1)));
    EXPECT_OK(spec_stub_of(json, bytes, &stub, &e), &e);
    EXPECT_OK(spec_segment_new(json, bytes, &segment, &e), &e);
    for (int i = 0; i < AT_ONCE; i++)
        raw_enter(&r[i]);
    leave_room(100 * MIB);
    kill(daemons.pids[0], SIGSTOP);
    for (int i = 0; i < AT_ONCE; i++)
        pass_spec(&r[i], &segment, &stub);
    kill(daemons.pids[0], SIGCONT);
    for (int i = 0; i < AT_ONCE; i++) {
        struct wire_reply reply;
        raw_recv(&r[i], &reply);
        served += reply.status == SHD_OK;
        if (reply.status == SHD_OK)
            continue;
        busy++;
        EXPECT_STATUS(reply.status, SHD_EBUSY);
        EXPECT(reply.retry_ms > 0);
        EXPECT_HAS(reply.text, "and parsing takes 16 times as many: ask again");
    }
    EXPECT(served >= 1 && busy >= 1);
    for (int i = 0; i < AT_ONCE; i++)
        raw_close(&r[i]);
    segment_close(&segment);
    free(json);
    fixture_stop(&daemons);
    leave_cgroup();
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
    leave_room(250 * MIB);
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

/* What processes need beside the model, which is more with a sanitizer's shadows: far less than
 * what is spare. */
#define OTHERWISE_MIB (TEST_SANITIZED ? 40 : 20)

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
    const int filler = fill_all_but(OTHERWISE_MIB * MIB);
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

/* -- What is predicted --------------------------------------------------------------------------
 */

#define SHAPES 20

static uint64_t below(uint64_t *seed, uint64_t limit)
{
    return test_random(seed) % limit;
}

/* A model of one to six units of odd sizes, some frozen. */
static void random_spec(uint64_t *seed, int number, char *json, size_t bytes)
{
    static const char *const optimizers[] = { TOY_ADAMW, TOY_SGD, TOY_LION };
    static const char *const dtypes[] = { "f32", "bf16", "f16" };
    const uint64_t micros = 1 + below(seed, 8), units = 1 + below(seed, 6);
    int n = snprintf(json, bytes,
                     "{ \"name\": \"m%d\", \"seed\": 1, \"micro_batches\": %" PRIu64
                     ", \"accumulate\": %" PRIu64
                     ", \"publish\": \"%s\", \"optimizer\": { %s }, \"units\": [",
                     number, micros, below(seed, 2) == 0 ? micros : 1, dtypes[below(seed, 3)],
                     optimizers[below(seed, 3)]);
    for (uint64_t u = 0; u < units; u++)
        n += snprintf(json + n, bytes - (size_t)n,
                      "%s { \"name\": \"u%" PRIu64 "\", \"tensors\": [ { \"name\": \"t%" PRIu64
                      "\", \"shape\": [%" PRIu64 "], \"trainable\": %s } ] }",
                      u > 0 ? "," : "", u, u, 1 + below(seed, 300000),
                      u > 0 && below(seed, 4) == 0 ? "false" : "true");
    snprintf(json + n, bytes - (size_t)n, " ] }");
}

#define TEXT_BYTES (2 * MIB)

/* A unit with so many small tensors that the canonical JSON is larger than a message. */
static void add_tensors(char *json)
{
    char *at = json + strlen(json) - strlen(" ] }");
    at += sprintf(at, ", { \"name\": \"many\", \"tensors\": [");
    for (int i = 0; i < 12000; i++)
        at += sprintf(at, "%s{ \"name\": \"%048d\", \"shape\": [1] }", i > 0 ? "," : "", i);
    strcpy(at, " ] } ] }");
    CHECK(strlen(json) < TEXT_BYTES);
}

/* Whether /status of an owner says of a model what was predicted. */
static bool status_says(int owner, const char *name, const struct owner_bytes *want)
{
    struct http_reply reply = http_get(&daemons, owner, "/status");
    json_t *root = reply.body != NULL ? json_loads(reply.body, 0, NULL) : NULL, *m;
    bool same = false;
    size_t i;
    json_array_foreach(json_object_get(root, "models"), i, m)
    {
        json_int_t state, publish, inbox, board, ledger, spec, spill, spare;
        if (strcmp(json_string_value(json_object_get(m, "name")), name) == 0 &&
            json_unpack(m, "{s:{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}}", "bytes", "state", &state,
                        "publish", &publish, "inbox", &inbox, "board", &board, "ledger", &ledger,
                        "spec", &spec, "spill", &spill, "spare", &spare) == 0)
            same = (uint64_t)state == want->state && (uint64_t)publish == want->publish &&
                   (uint64_t)inbox == want->inbox && (uint64_t)board == want->board &&
                   (uint64_t)ledger == want->ledger && (uint64_t)spare == want->spare &&
                   (uint64_t)spec == want->spec &&
                   (uint64_t)(state + publish + inbox + board + ledger + spec + spare) == want->all;
    }
    json_decref(root);
    free(reply.text);
    return same;
}

static struct owner_bytes predict(const char *text, uint32_t owner, uint32_t owners,
                                  uint32_t sessions, uint32_t slots)
{
    struct shd_err e = { 0 };
    struct spec *spec;
    struct shardmap *map;
    char *json;
    EXPECT_OK(spec_parse(text, strlen(text), &spec, &e), &e);
    EXPECT_OK(spec_dump(spec, &json, &e), &e);
    EXPECT_OK(shardmap_new(spec, owner, owners, &map, &e), &e);
    const struct owner_ask ask = { .spec_bytes = strlen(json),
                                   .returns = spec_returns(spec),
                                   .sessions = sessions,
                                   .slots = slots,
                                   .keeper = true };
    const struct owner_bytes b = owner_bytes(map, &ask);
    shardmap_free(map);
    free(json);
    spec_free(spec);
    return b;
}

static void expect_predicted(uint64_t *seed, int number)
{
    char *text = calloc(1, TEXT_BYTES), name[16];
    struct shd_err e = { 0 };
    const uint32_t sessions = 1 + (uint32_t)below(seed, 2), slots = 1 + (uint32_t)below(seed, 5);
    shd_session *s[2] = { NULL };
    shd_model *m;
    random_spec(seed, number, text, 4096);
    if (number == SHAPES - 1) /* a spec that no message holds */
        add_tensors(text);
    snprintf(name, sizeof name, "m%d", number);
    for (uint32_t i = 0; i < sessions; i++) {
        const struct shd_options options = { .size = sizeof options,
                                             .address = daemons.address,
                                             .timeout_ms = PATIENT_MS,
                                             .slots = slots };
        EXPECT_OK(shd_connect(&options, &s[i], &e), &e);
        EXPECT_OK(shd_model_open(s[i], text, &m, &e), &e);
    }
    for (int owner = 0; owner < 2; owner++) {
        const struct owner_bytes want = predict(text, (uint32_t)owner, 2, sessions, slots);
        EXPECT_SOON(status_says(owner, name, &want));
    }
    for (uint32_t i = 0; i < sessions; i++)
        shd_close(s[i]);
    free(text);
}

TEST(status_says_what_was_predicted_to_the_byte)
{
    uint64_t seed = test_seed(20261122);
    fixture_start_kept(&daemons, 2, "");
    for (int i = 0; i < SHAPES; i++)
        expect_predicted(&seed, i);
    fixture_stop(&daemons);
}

int main(int argc, char **argv)
{
    atexit(leave_cgroup);
    return test_run_all(argc, argv);
}
