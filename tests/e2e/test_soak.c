/* A soak: daemons under a keeper, and over and over what workers and tools do to them: attach and
 * detach, open models, train, save, ask; workers that are killed, a daemon that is. Of the two
 * daemons cpu0 is never killed: what it forgets to give back piles up there, and what the keeper
 * forgets in the keeper.
 *
 * Looked at between two rounds, when nobody is attached: open descriptors, mappings of segments,
 * threads, and private memory (RssAnon). The first third of the time is for what is made once:
 * models, pools, the trace's ring. Then threads may never be more than they were, descriptors and
 * mappings by one for each model, which gets a segment for gradients that come early when the first
 * one does, and the memory's median in the last third at most RSS_MORE above that of the second.
 * Memory is judged in soaks of RSS_S_MIN seconds and more, and not under a sanitizer.
 *
 * SHD_SOAK_SECONDS: how long (8); SHD_TEST_SEED: of the order. scripts/soak.sh runs it for 30 min.
 */
#include <dirent.h>
#include <inttypes.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/share/fdpass.h"
#include "tests/lib/child.h"
#include "tests/lib/client_toy.h"
#include "tests/lib/ctl_run.h"

#define SECONDS_DEFAULT 8
#define RSS_S_MIN       300
#define RSS_MORE        (256u * 1024u)
#define MODELS          4u
#define ROUNDS_MAX      65536u
#define STEPS           2u

static char dir[80], saves[128];

/* -- Who is looked at -------------------------------------------------------------------------- */

enum who { CPU0, CPU1, KEEPER, WHO };
static const char *const names[WHO] = { "cpu0", "cpu1", "keeper" };

struct sample {
    uint64_t fds, maps, threads, rss;
};

static struct sample samples[WHO][ROUNDS_MAX];

/* A number of /proc/PID/status. */
static uint64_t status_value(pid_t pid, const char *name)
{
    char path[64], line[256];
    uint64_t value = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, name, strlen(name)) == 0)
            value = strtoull(line + strlen(name), NULL, 10);
    if (f != NULL)
        fclose(f);
    return value;
}

static uint64_t count_files(pid_t pid)
{
    char path[64];
    uint64_t count = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    while (d != NULL && readdir(d) != NULL)
        count++;
    if (d != NULL)
        closedir(d);
    return count;
}

static uint64_t count_segments(pid_t pid)
{
    char path[64], line[512];
    uint64_t count = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *f = fopen(path, "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        count += strstr(line, "memfd:") != NULL;
    if (f != NULL)
        fclose(f);
    return count;
}

static pid_t pid_of(enum who who)
{
    return who == KEEPER ? (pid_t)status_value(daemon_pid(dir, CPU0), "PPid:")
                         : daemon_pid(dir, (int)who);
}

static struct sample look_at(enum who who)
{
    const pid_t pid = pid_of(who);
    return (struct sample){ .fds = count_files(pid),
                            .maps = count_segments(pid),
                            .threads = status_value(pid, "Threads:"),
                            .rss = status_value(pid, "RssAnon:") * 1024 };
}

/* Sessions that have hung up are ended by the daemons in their own time: the least of a moment. */
static void look_at_all(uint32_t round, uint64_t most_ms)
{
    const uint64_t end_ms = test_now_ms() + most_ms;
    for (int who = 0; who < WHO; who++)
        samples[who][round] = look_at((enum who)who);
    do {
        sleep_ms(20);
        for (int who = 0; who < WHO; who++) {
            const struct sample s = look_at((enum who)who);
            if (s.fds + s.maps + s.threads <
                samples[who][round].fds + samples[who][round].maps + samples[who][round].threads)
                samples[who][round] = s;
        }
    } while (test_now_ms() < end_ms);
}

/* -- What is done to them ---------------------------------------------------------------------- */

static const char *spec_of(uint32_t model)
{
    static char json[4096];
    const char *like = toy_spec(model % 2 == 0 ? "f32" : "bf16", TOY_ADAMW);
    const char *at = strstr(like, "\"toy\"");
    CHECK(at != NULL);
    snprintf(json, sizeof json, "%.*s\"toy%" PRIu32 "\"%s", (int)(at - like), like, model,
             at + strlen("\"toy\""));
    return json;
}

static shd_session *attach(void)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = dir,
                                         .timeout_ms = TEST_HANG_MS };
    struct shd_err e = { 0 };
    shd_session *s;
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    return s;
}

static shd_model *open_model(shd_session *s, uint32_t model)
{
    struct shd_err e = { 0 };
    shd_model *m;
    EXPECT_OK(shd_model_open(s, spec_of(model), &m, &e), &e);
    return m;
}

static void take_step(shd_model *m)
{
    struct shd_err e = { 0 };
    struct toy toy = { .m = m, .fail_micro = -1 };
    const struct shd_compute compute = { sizeof compute, &toy,        toy_forward,
                                         toy_backward,   toy_metrics, NULL };
    const struct shd_update update = toy_update(shd_step(m));
    EXPECT_OK(shd_run_step_elastic(m, &compute, &update, NULL, &e), &e);
}

static void train(uint64_t random)
{
    shd_session *s = attach();
    shd_model *m = open_model(s, random % MODELS);
    for (uint32_t i = 0; i < STEPS; i++)
        take_step(m);
    shd_close(s);
}

static void attach_and_look(uint64_t random)
{
    struct shd_err e = { 0 };
    char *json, hex[65];
    uint64_t step;
    shd_session *s = attach();
    EXPECT_OK(shd_status(s, random % 2, &json, &e), &e);
    free(json);
    shd_model *m = open_model(s, random % MODELS);
    EXPECT_OK(shd_digest(m, hex, &step, &e), &e);
    shd_close(s);
}

static void save(uint64_t random)
{
    const struct shd_checkpoint_options options = { .size = sizeof options, .keep = 2 };
    struct shd_err e = { 0 };
    struct shd_checkpointed saved = { .size = sizeof saved };
    char where[192];
    const uint32_t model = random % MODELS;
    shd_session *s = attach();
    shd_model *m = open_model(s, model);
    take_step(m); /* the last one may be there already */
    snprintf(where, sizeof where, "%s/%" PRIu32, saves, model);
    EXPECT_OK(shd_checkpoint(m, where, &options, &saved, &e), &e);
    shd_close(s);
}

/* A worker that is killed wherever it is, while another one trains on. */
static void kill_worker(uint64_t random)
{
    int status;
    const pid_t pid = test_fork();
    if (pid == 0) {
        shd_session *s = attach();
        shd_model *m = open_model(s, random % MODELS);
        for (;;)
            take_step(m);
    }
    sleep_ms((long)(random >> 32) % 60);
    EXPECT(kill(pid, SIGKILL) == 0);
    train(random);
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
}

static void kill_daemon(uint64_t random)
{
    shd_session *s = attach();
    shd_model *m = open_model(s, random % MODELS);
    const pid_t pid = daemon_pid(dir, CPU1);
    EXPECT(pid > 1 && kill(pid, SIGKILL) == 0);
    for (uint32_t i = 0; i < STEPS; i++)
        take_step(m);
    shd_close(s);
}

/* Connections that say nothing, and questions over HTTP. */
static void knock(uint64_t random)
{
    static const char *const paths[] = { "/status", "/metrics", "/trace?seconds=1", "/" };
    struct shd_err e;
    char request[128], answer[4096];
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    for (int i = 0; i < 8; i++) {
        int fd;
        snprintf(a.sun_path, sizeof a.sun_path, "%s/cpu%d.sock", dir, i % 2);
        if (side_connect(a.sun_path, &fd, &e) == SHD_OK)
            close(fd);
    }
    snprintf(a.sun_path, sizeof a.sun_path, "%s/cpu%d.status", dir, (int)(random % 2));
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0);
    snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n",
             paths[random / 2 % ARRAY_SIZE(paths)]);
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) == 0 &&
        send(fd, request, strlen(request), MSG_NOSIGNAL) > 0)
        while (random % 3 != 0 && recv(fd, answer, sizeof answer, 0) > 0)
            continue; /* a third hangs up without reading */
    close(fd);
}

static void (*const acts[])(uint64_t random) = {
    train, attach_and_look, save, kill_worker, kill_daemon, knock,
};

/* Everything once, in any order. */
static void take_round(uint64_t *seed)
{
    size_t order[ARRAY_SIZE(acts)];
    for (size_t i = 0; i < ARRAY_SIZE(acts); i++)
        order[i] = i;
    for (size_t i = ARRAY_SIZE(acts); i > 1; i--) {
        const size_t k = (size_t)(test_random(seed) >> 33) % i, was = order[i - 1];
        order[i - 1] = order[k];
        order[k] = was;
    }
    for (size_t i = 0; i < ARRAY_SIZE(acts); i++)
        acts[order[i]](test_random(seed));
}

/* -- Judging ----------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static uint64_t median_rss(enum who who, uint32_t from, uint32_t to)
{
    static uint64_t values[ROUNDS_MAX];
    CHECK(from < to);
    for (uint32_t i = from; i < to; i++)
        values[i - from] = samples[who][i].rss;
    qsort(values, to - from, sizeof values[0], by_value);
    return values[(to - from) / 2];
}

static struct sample most(enum who who, uint32_t from, uint32_t to)
{
    struct sample m = { 0 };
    for (uint32_t i = from; i < to; i++) {
        const struct sample *s = &samples[who][i];
        m.fds = s->fds > m.fds ? s->fds : m.fds;
        m.maps = s->maps > m.maps ? s->maps : m.maps;
        m.threads = s->threads > m.threads ? s->threads : m.threads;
    }
    return m;
}

/* True, and says so, when it is flat. */
static bool judge(enum who who, uint32_t warm, uint32_t rounds, bool with_rss)
{
    const struct sample before = most(who, 0, warm), after = most(who, warm, rounds);
    const struct sample end = samples[who][rounds - 1];
    const uint32_t half = warm + (rounds - warm) / 2;
    const uint64_t rss = median_rss(who, warm, half), rss_end = median_rss(who, half, rounds);
    const uint64_t spills = who == KEEPER ? 2 * MODELS : MODELS;
    const bool flat = after.fds <= before.fds + spills && after.maps <= before.maps + spills &&
                      after.threads <= before.threads && (!with_rss || rss_end <= rss + RSS_MORE);
    printf("%-6s descriptors %" PRIu64 " -> %" PRIu64 " (now %" PRIu64 "), segments %" PRIu64
           " -> %" PRIu64 ", threads %" PRIu64 " -> %" PRIu64 ", RssAnon %.2f -> %.2f MiB: %s\n",
           names[who], before.fds, after.fds, end.fds, before.maps, after.maps, before.threads,
           after.threads, (double)rss / 1048576, (double)rss_end / 1048576,
           flat ? "flat" : "GROWS");
    return flat;
}

TEST(nothing_grows_however_long_it_goes_on)
{
    const char *text = getenv("SHD_SOAK_SECONDS");
    const uint64_t seconds = text != NULL ? strtoull(text, NULL, 10) : SECONDS_DEFAULT;
    uint64_t seed = test_seed(1);
    bool flat = true;
    snprintf(dir, sizeof dir, "%s/soak", base);
    snprintf(saves, sizeof saves, "%s/saves", base);
    EXPECT(mkdir(saves, 0700) == 0);
    ctl(ARGS("up", "--daemons", "2", "--max-restarts", "1000", "--runtime-dir", dir));
    EXPECT_EQ(run.code, 0);
    for (uint32_t model = 0; model < MODELS; model++)
        train(model);
    const uint64_t start_ms = test_now_ms(), third_ms = seconds * 1000 / 3;
    uint32_t rounds = 0, warm = 0;
    while (rounds < ROUNDS_MAX && (rounds < 9 || test_now_ms() < start_ms + 3 * third_ms)) {
        take_round(&seed);
        look_at_all(rounds, /* most_ms= */ 100);
        rounds++;
        if (warm == 0 && rounds >= 3 && test_now_ms() >= start_ms + third_ms)
            warm = rounds;
    }
    const bool with_rss = seconds >= RSS_S_MIN && !TEST_SANITIZED;
    printf("soak: %" PRIu32 " rounds in %" PRIu64 " s, the first %" PRIu32 " to warm up%s\n",
           rounds, (test_now_ms() - start_ms) / 1000, warm,
           with_rss ? "" : "; memory is not judged");
    for (int who = 0; who < WHO; who++)
        flat = judge((enum who)who, warm, rounds, with_rss) && flat;
    ctl(ARGS("down", "--yes", "--runtime-dir", dir));
    char command[192];
    snprintf(command, sizeof command, "rm -rf '%s'", saves);
    EXPECT_EQ(system(command), 0);
    EXPECT(flat);
    EXPECT_EQ(leftovers(), 0);
}

int main(int argc, char **argv)
{
    return ctl_main(argc, argv);
}
