/* The mapped path when things go wrong: other specs, nobody there, daemons killed or silent,
 * workers that come late or die in their commit. Each gets a clear error that names the daemon. */
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "client/paths/decide.h"
#include "client/paths/look.h"
#include "client/paths/map.h"
#include "client/session/hub.h"
#include "client/session/round.h"
#include "proto/share/activity.h"
#include "proto/share/board.h"
#include "proto/share/fdpass.h"
#include "tests/lib/client_remote.h"

/* -- Going wrong --------------------------------------------------------------------------------
 */

TEST(other_spec_names_the_difference)
{
    struct shd_err e = { 0 };
    shd_model *m = NULL;
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS);
    open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_session *second = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_open(second, toy_other_spec('8'), &m, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "h0.w");
    EXPECT_HAS(e.text, "4098");
    EXPECT(m == NULL);
    EXPECT_OK(shd_model_open(second, toy_spec("f32", TOY_ADAMW), &m, &e), &e); /* still usable */
    shd_close(second);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(other_order_of_daemons_is_refused)
{
    struct shd_err e = { 0 };
    shd_session *s, *swapped;
    shd_model *m;
    char address[300];
    fixture_start(&daemons, 2, NULL);
    s = attach(PATIENT_MS);
    open_toy(s, toy_spec("f32", TOY_ADAMW));
    snprintf(address, sizeof address, "%s?cpu1,cpu0", daemons.dir);
    EXPECT_OK(try_connect(address, PATIENT_MS, &swapped, &e), &e);
    EXPECT_STATUS(shd_model_open(swapped, toy_spec("f32", TOY_ADAMW), &m, &e), SHD_ESPEC);
    EXPECT_HAS(e.text, "owner");
    shd_close(swapped);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Two of one rank ----------------------------------------------------------------------------
 */

static char warned[400];

static void take_line(void *ctx, const char *line)
{
    (void)ctx;
    snprintf(warned, sizeof warned, "%s", line);
}

/* A worker of that rank opens the model, tells so, and stays. */
static pid_t start_ranked(const char *rank)
{
    int ends[2];
    char byte;
    CHECK(pipe(ends) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        setenv("RANK", rank, 1);
        open_toy(attach(PATIENT_MS), toy_spec("f32", TOY_ADAMW));
        if (write(ends[1], "o", 1) == 1)
            pause();
        _exit(1);
    }
    close(ends[1]);
    CHECK(read(ends[0], &byte, 1) == 1);
    close(ends[0]);
    return pid;
}

/* What a worker of that rank is told as it opens the model. */
static void open_ranked(const char *rank)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = daemons.address,
                                         .name = "ranked",
                                         .timeout_ms = PATIENT_MS,
                                         .waits = take_line };
    struct shd_err e = { 0 };
    shd_session *s;
    warned[0] = '\0';
    setenv("RANK", rank, 1);
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    unsetenv("RANK");
    open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_close(s);
}

/* One that died has been told nothing, nor is its successor. */
TEST(a_second_worker_of_a_rank_is_warned_of_and_a_successor_is_not)
{
    char text[80], *status = NULL;
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    const pid_t first = start_ranked("3");
    open_ranked("2");
    EXPECT_STR(warned, "");
    open_ranked("3");
    snprintf(text, sizeof text, "WARNING: process %d trains model 'toy' with RANK=3, too", first);
    EXPECT_HAS(warned, text);
    shd_session *s = attach(PATIENT_MS);
    EXPECT_OK(shd_status(s, 0, &status, &e), &e);
    EXPECT_HAS(status, "it has RANK 3, and so has test (pid ");
    EXPECT_HAS(status, "\"rank\":3");
    free(status);
    shd_close(s);
    kill(first, SIGKILL);
    EXPECT_EQ(waitpid(first, NULL, 0), first);
    open_ranked("3");
    EXPECT_STR(warned, "");
    fixture_stop(&daemons);
}

TEST(nobody_at_the_address_is_named)
{
    struct shd_err e;
    shd_session *s = NULL;
    char address[300];
    EXPECT_STATUS(try_connect("/nowhere/shardd", test_paced(1000), &s, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "/nowhere/shardd");
    fixture_start(&daemons, 1, NULL);
    snprintf(address, sizeof address, "%s?cpu0,cpu7", daemons.dir);
    EXPECT_STATUS(try_connect(address, test_paced(1000), &s, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "cpu7");
    EXPECT(s == NULL);
    kill(daemons.pids[0], SIGKILL); /* leaves its sockets behind */
    waitpid(daemons.pids[0], NULL, 0);
    EXPECT_STATUS(try_connect(daemons.address, test_paced(1000), &s, &e), SHD_EGONE);
    EXPECT_HAS(e.text, "cpu0");
    snprintf(address, sizeof address, "rm -rf %s", daemons.dir);
    EXPECT_EQ(system(address), 0);
}

/* Kill daemon 1 after a while, from a child: this thread will be waiting. */
static void kill_soon(void)
{
    fflush(stdout);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        sleep_ms(150);
        kill(daemons.pids[1], SIGKILL);
        _exit(0);
    }
}

enum waiting { IN_PREPARE, IN_ACQUIRE, IN_GRAD };

static int wait_somewhere(shd_model *m, enum waiting where, struct shd_err *e)
{
    float *grad;
    if (where == IN_PREPARE) { /* nobody returns anything */
        const struct shd_update update = toy_update(0);
        return shd_commit(m, &update, NULL, e);
    }
    if (where == IN_ACQUIRE) {
        m->step++; /* a step that will not come */
        const int r = shd_acquire(m, 1, NULL, e);
        m->step--;
        return r;
    }
    int r =
        SHD_OK; /* a daemon that does not answer: its slots fill (later ones would be spilled) */
    kill(daemons.pids[1], SIGSTOP);
    for (uint32_t micro = 3; r == SHD_OK && micro > 0; micro--)
        for (uint32_t u = 0; r == SHD_OK && u < 4; u++) {
            r = shd_grad(m, micro, u, &grad, e);
            if (r == SHD_OK)
                r = shd_return(m, micro, u, e);
        }
    return r;
}

TEST(daemon_that_does_not_come_back_is_named_in_time)
{
    for (int where = IN_PREPARE; where <= IN_GRAD; where++) {
        struct shd_err e = { 0 };
        char who[64];
        fixture_start(&daemons, 2, NULL);
        const uint64_t patience_ms = test_paced(1200);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        limit_waits(s, patience_ms);
        kill_soon();
        EXPECT_STATUS(wait_somewhere(m, (enum waiting)where, &e), SHD_EGONE);
        snprintf(who, sizeof who, "daemon cpu1 (pid %d)", (int)daemons.pids[1]);
        EXPECT_HAS(e.text, who);
        EXPECT_HAS(e.text, "/cpu1.sock is gone: lost at ");
        const char *within = strstr(e.text, "not back within ");
        EXPECT(within != NULL);
        const uint64_t ms = strtoull(within + strlen("not back within "), NULL, 10);
        EXPECT(ms >= patience_ms && ms < patience_ms + TEST_HANG_MS);
        EXPECT_STATUS(wait_somewhere(m, IN_PREPARE, &e), SHD_EGONE); /* and stays so */
        shd_close(s);
        while (waitpid(-1, NULL, WNOHANG) > 0)
            continue;
        remove_dead_fixture();
    }
}

TEST(missing_micro_batches_end_in_a_timeout_that_says_so)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    char within[64];
    const uint64_t patience_ms = test_paced(1000);
    snprintf(within, sizeof within, "Prepare of step 0 within %" PRIu64 " ms", patience_ms);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    limit_waits(s, patience_ms);
    EXPECT_STATUS(wait_somewhere(m, IN_PREPARE, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "daemon cpu0");
    EXPECT_HAS(e.text, within);
    EXPECT_HAS(e.text, "micro-batches");
    EXPECT_STATUS(wait_somewhere(m, IN_ACQUIRE, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "did not publish unit 1 'h0' of step 1");
    EXPECT_STATUS(wait_somewhere(m, IN_GRAD, &e), SHD_ETIMEDOUT);
    EXPECT_HAS(e.text, "still holds unit");
    snprintf(within, sizeof within, "daemon cpu1 (pid %d) is stopped", (int)daemons.pids[1]);
    EXPECT_HAS(e.text, within);
    kill(daemons.pids[1], SIGCONT);
    shd_close(s);
    /* What was waited for in vain has left no trace: the step can be done. */
    s = attach(PATIENT_MS);
    m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(late_worker_learns_that_its_step_is_over)
{
    struct shd_err e = { 0 };
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *late = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_model *behind = open_toy(late, toy_spec("f32", TOY_ADAMW));
    float *grad;
    EXPECT_OK(shd_grad(behind, 0, 1, &grad, &e), &e);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    const void *params = NULL;
    EXPECT_OK(shd_acquire(m, 1, &params, &e), &e); /* published */
    EXPECT_STATUS(shd_acquire(behind, 1, &params, &e), SHD_ESTEP);
    EXPECT_HAS(e.text, "that step is over");
    EXPECT_OK(shd_return(behind, 0, 1, &e), &e); /* stale: dropped */
    struct shd_result result = { .size = sizeof result };
    struct shd_update update = toy_update(0);
    update.lr = 123; /* too late to decide anything */
    EXPECT_OK(shd_commit(behind, &update, &result, &e), &e);
    EXPECT_EQ(result.step, 0);
    EXPECT_EQ(shd_step(behind), 1);
    char a[65], b[65];
    digest_of(behind, a);
    toy_reference(toy_spec("f32", TOY_ADAMW), 1, b);
    EXPECT_STR(a, b);
    shd_close(late);
    shd_close(s);
    fixture_stop(&daemons);
}

/* More workers than micro-batches: one without a part in the steps may fall behind by any number.
 */
TEST(worker_without_a_part_catches_up_at_once)
{
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    struct shd_update update = toy_update(0);
    fixture_start(&daemons, 2, NULL);
    shd_session *s = attach(PATIENT_MS), *idle = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    shd_model *behind = open_toy(idle, toy_spec("f32", TOY_ADAMW));
    for (int step = 0; step < 4; step++)
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    EXPECT_OK(shd_commit(behind, &update, &result, &e), &e);
    EXPECT(result.step == 0 && result.over);
    EXPECT_EQ(shd_step(behind), 4);
    EXPECT(decision_equal(&behind->decision, &m->decision));
    EXPECT_OK(toy_step(behind, toy_all_micros, TOY_MICROS, NULL, &e), &e);
    char a[65], b[65];
    digest_of(behind, a);
    toy_reference(toy_spec("f32", TOY_ADAMW), 5, b);
    EXPECT_STR(a, b);
    shd_close(idle);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(refused_return_surfaces_at_the_next_call)
{
    struct shd_err e = { 0 };
    float *grad;
    fixture_start(&daemons, 1, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    m->step = 5; /* not open yet: the daemon must refuse */
    EXPECT_OK(shd_grad(m, 0, 1, &grad, &e), &e);
    EXPECT_OK(shd_return(m, 0, 1, &e), &e);
    m->step = 0;
    int r = SHD_OK;
    EXPECT_SOON((r = shd_grad(m, 0, 1, &grad, &e)) != SHD_OK);
    EXPECT_STATUS(r, SHD_ESTEP);
    EXPECT_HAS(e.text, "daemon cpu0 refused a gradient");
    EXPECT_STATUS(shd_acquire(m, 0, NULL, &e), SHD_ESTEP); /* sticky */
    shd_close(s);
    fixture_stop(&daemons);
}

/* Commit step 0 to owner 0 alone, as a worker does that dies in its commit. */
struct half {
    shd_model *m;
    const char *blob;
    struct wire_prepared prepared[3];
    struct decision decision;
};

static void make_half(const struct round *round, const struct link *link,
                      struct wire_request *request)
{
    struct half *h = round->ctx;
    const uint32_t handle = h->m->map->owners[link->index].layout.handle;
    if (round->asks == WIRE_COMMIT)
        request->commit = (struct wire_commit){ .model = handle,
                                                .decision = h->decision,
                                                .has_blob = h->blob != NULL,
                                                .blob = { (const uint8_t *)h->blob,
                                                          h->blob != NULL ? strlen(h->blob) : 0 } };
    else
        request->prepare = (struct wire_prepare){ .model = handle };
}

static int take_half(const struct round *round, const struct link *link,
                     const struct wire_reply *reply, struct shd_err *e)
{
    struct half *h = round->ctx;
    (void)e;
    if (round->asks == WIRE_PREPARE)
        h->prepared[link->index] = reply->prepared;
    return SHD_OK;
}

static void commit_to_first_owner(shd_model *m, const char *blob)
{
    struct shd_err e = { 0 };
    struct decided d;
    struct hub *hub = m->session->hub;
    static struct half h;
    h = (struct half){ .m = m, .blob = blob };
    struct round round = { .what = "half",
                           .asks = WIRE_PREPARE,
                           .type = WIRE_PREPARED,
                           .make = make_half,
                           .take = take_half,
                           .ctx = &h };
    EXPECT_OK(round_all(&round, hub, /* arg= */ 0, &e), &e);
    const struct shd_update update = toy_update(0);
    const struct decide_args args = { .prepared = h.prepared,
                                      .owners = m->map->owner_count,
                                      .micro_batches = TOY_MICROS,
                                      .lr = update.lr,
                                      .clip_norm = update.clip_norm };
    EXPECT_OK(decide(&args, &d, &e), &e);
    h.decision = d.decision;
    round.asks = WIRE_COMMIT;
    round.type = WIRE_COMMITTED;
    EXPECT_OK(round_one(&round, &hub->links[0], /* arg= */ 0, &e), &e);
}

static void return_toy_micros(shd_model *m, uint32_t micros)
{
    struct shd_err e = { 0 };
    struct toy toy = { .m = m, .fail_micro = -1 };
    for (uint32_t micro = 0; micro < micros; micro++)
        for (uint32_t u = shd_units(m); u-- > 0;) {
            const void *params;
            float *grad;
            EXPECT_OK(shd_acquire(m, 0, NULL, &e), &e);
            EXPECT_OK(shd_acquire(m, u, &params, &e), &e);
            EXPECT_OK(shd_grad(m, micro, u, &grad, &e), &e);
            EXPECT_EQ(toy_backward(&toy, micro, u, params, grad), 0);
            EXPECT_OK(shd_return(m, micro, u, &e), &e);
            shd_release(m, u);
            shd_release(m, 0);
        }
}

TEST(half_committed_step_is_completed_by_whoever_attaches_next)
{
    static const char *const blobs[] = { "cursor", NULL };
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), 2, want);
    for (size_t i = 0; i < ARRAY_SIZE(blobs); i++) {
        struct shd_err e = { 0 };
        char blob[16] = "";
        size_t bytes;
        fixture_start(&daemons, 3, NULL);
        shd_session *s = attach(PATIENT_MS);
        shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        return_toy_micros(m, TOY_MICROS);
        commit_to_first_owner(m, blobs[i]);
        shd_close(s);
        s = attach(PATIENT_MS);
        m = open_toy(s, toy_spec("f32", TOY_ADAMW));
        EXPECT_EQ(shd_step(m), 1);
        for (uint32_t owner = 0; owner < 3; owner++) {
            EXPECT_OK(look_blob(m, owner, blob, sizeof blob, &bytes, &e), &e);
            EXPECT_EQ(bytes, blobs[i] != NULL ? strlen(blobs[i]) : 0);
            EXPECT(bytes == 0 || memcmp(blob, blobs[i], bytes) == 0);
        }
        EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, NULL, &e), &e);
        digest_of(m, got);
        EXPECT_STR(got, want);
        shd_close(s);
        fixture_stop(&daemons);
    }
}

/* What a worker that died had returned to all owners need not be computed again. */
TEST(successor_leaves_out_what_is_in)
{
    struct shd_err e = { 0 };
    struct shd_result result = { .size = sizeof result };
    char want[65], got[65];
    toy_reference(toy_spec("f32", TOY_ADAMW), 2, want);
    fixture_start(&daemons, 3, NULL);
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    for (uint32_t micro = 0; micro < 2; micro++) { /* as toy_step() reports */
        double metrics[SHD_METRICS_MAX];
        const uint32_t count = toy_metrics(NULL, micro, metrics);
        EXPECT_OK(shd_report(m, micro, metrics, count, &e), &e);
    }
    return_toy_micros(m, 2);
    shd_close(s);
    s = attach(PATIENT_MS);
    m = open_toy(s, toy_spec("f32", TOY_ADAMW));
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT_EQ(result.computed, 2);
    EXPECT(result.metrics[1] == 6);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT_EQ(result.computed, TOY_MICROS);
    digest_of(m, got);
    EXPECT_STR(got, want);
    shd_close(s);
    fixture_stop(&daemons);
}

/* -- Strange daemons ----------------------------------------------------------------------------
 */

/* A child that serves the side channel once with `msg` and then waits to be killed. */
static pid_t fake_daemon(const char *dir, const struct side_msg *msg)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    snprintf(a.sun_path, sizeof a.sun_path, "%s/cpu0.sock", dir);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    EXPECT(fd >= 0 && bind(fd, (const struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 4) == 0);
    fflush(stdout);
    const pid_t pid = fork();
    EXPECT(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const int peer = accept(fd, NULL, NULL);
        send(peer, msg, sizeof *msg, 0);
        pause();
        _exit(0);
    }
    close(fd);
    return pid;
}

static void expect_strange(const struct side_msg *msg, int status, const char *has)
{
    char dir[] = "/tmp/shd-fake-XXXXXX", command[128];
    struct shd_err e;
    shd_session *s = NULL;
    EXPECT(mkdtemp(dir) != NULL);
    const pid_t pid = fake_daemon(dir, msg);
    /* A refusal must arrive, silence must end. */
    EXPECT_STATUS(try_connect(dir, status == SHD_ETIMEDOUT ? 300 : PATIENT_MS, &s, &e), status);
    EXPECT_HAS(e.text, "cpu0");
    EXPECT_HAS(e.text, has);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    snprintf(command, sizeof command, "rm -rf %s", dir);
    EXPECT_EQ(system(command), 0);
}

TEST(strange_daemons_are_refused)
{
    const struct side_msg good = { .magic = SIDE_MAGIC,
                                   .protocol = SHD_PROTOCOL,
                                   .type = SIDE_WELCOME };
    struct side_msg msg = good;
    msg.protocol = 9;
    expect_strange(&msg, SHD_EPROTO, "protocol 9, this side 2");
    msg = good;
    msg.magic = 1;
    expect_strange(&msg, SHD_EPROTO, "not shardd's");
    msg = good;
    msg.type = SIDE_CLAIM;
    expect_strange(&msg, SHD_EPROTO, "instead of a welcome");
    msg = good;
    msg.type = SIDE_ERROR;
    msg.status = SHD_EBUSY;
    strcpy(msg.text, "no room today");
    expect_strange(&msg, SHD_EBUSY, "no room today");
    msg = side_welcome(good.token, WIRE_LEVEL);
    msg.magic = SIDE_MAGIC;
    msg.protocol = SHD_PROTOCOL;
    msg.bytes += 4096;
    strcpy(msg.text, "9.8.7");
    char has[200];
    snprintf(has, sizeof has,
             "its build (version 9.8.7) has a board of %u and an activity page of %u bytes, this "
             "one (version " SHD_VERSION ") of %u and %u",
             (unsigned)(msg.bytes >> 32), (unsigned)(uint32_t)msg.bytes, (unsigned)board_bytes(1),
             (unsigned)ACTIVITY_BYTES);
    expect_strange(&msg, SHD_EPROTO, has);
    msg.bytes -= 4096; /* the same sizes, whatever the version */
    expect_strange(&msg, SHD_ETIMEDOUT, "did not answer Hello within 300 ms");
    expect_strange(&good, SHD_ETIMEDOUT, "did not answer Hello within 300 ms");
}

TEST_MAIN()
