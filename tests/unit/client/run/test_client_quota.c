/* Quotas of a model, and of who made it: what is refused is refused with the numbers, and nothing
 * stays of it; what is given back can be taken again; a successor counts as its predecessor did;
 * nobody gets beyond a limit by asking for several things at once. */
#include <inttypes.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/session/session.h"
#include "proto/base/check.h"
#include "tests/lib/child.h"
#include "tests/lib/client_remote.h"

#define TOY toy_spec("f32", TOY_ADAMW)

/* A number of a daemon's /status behind this text; UINT64_MAX: it is not there. */
static uint64_t number(int daemon, const char *text)
{
    struct http_reply r = http_get(&daemons, daemon, "/status");
    EXPECT_EQ(r.code, 200);
    const char *at = strstr(r.body, text);
    const uint64_t n = at != NULL ? strtoull(at + strlen(text), NULL, 10) : UINT64_MAX;
    free(r.text);
    return n;
}

static uint64_t counted(int daemon)
{
    return number(daemon, "\"counted\":");
}

/* What a model of the toy's takes at each of two owners, with nobody who trains it. */
static uint64_t toy_bytes(void)
{
    uint64_t bytes = 0;
    daemons.quota = (struct quota_config){ 0 };
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    open_toy(s, TOY);
    shd_close(s);
    for (int i = 0; i < 2; i++) {
        uint64_t now = 0;
        EXPECT_SOON((now = counted(i)) > 0 && number(i, "\"inbox\":") == 0 &&
                    now == counted(i) + number(i, "\"inbox\":"));
        bytes = now > bytes ? now : bytes;
    }
    fixture_stop(&daemons);
    return bytes;
}

static void limit(const char *who, uint64_t bytes)
{
    char text[80];
    struct shd_err e = { 0 };
    daemons.quota = (struct quota_config){ 0 };
    if (strcmp(who, "model") == 0)
        quota_models(bytes, &daemons.quota);
    snprintf(text, sizeof text, "%s=%" PRIu64, who, bytes);
    if (strcmp(who, "model") != 0)
        EXPECT_OK(quota_parse(text, &daemons.quota, &e), &e);
}

static const char *own(const char *kind)
{
    static char text[32];
    snprintf(text, sizeof text, "%s:%u", kind,
             strcmp(kind, "uid") == 0 ? (unsigned)geteuid() : (unsigned)getegid());
    return text;
}

TEST(what_is_counted_is_what_there_is)
{
    struct shd_err e = { 0 };
    uint64_t step;
    daemons.quota = (struct quota_config){ 0 };
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    train_steps(m, 1);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    EXPECT_OK(shd_pin(m, NULL, &step, &e), &e);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 2; i++) {
            const pid_t pids[] = { daemons.pids[i] };
            uint64_t held = 0; /* less the session's rings, and its connection's pages */
            EXPECT_SOON((held = memfd_bytes(pids, 1)) >= counted(i) &&
                        held - counted(i) <= 4 * 72 * 1024);
            EXPECT_EQ(number(i, "\"made_by\":{\"uid\":"), geteuid());
        }
        for (int i = 0; i < 2 && round == 0; i++)
            fixture_restart(&daemons, i);
        train_steps(m, 1);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_model_beyond_its_quota_is_refused_and_nothing_of_it_stays)
{
    const uint64_t bytes = toy_bytes();
    struct shd_err e = { 0 };
    char want[120];
    shd_model *m;
    limit("model", bytes / 2);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_open(s, TOY, &m, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "bytes for the state of model 'toy' are asked for, 0 are used, ");
    EXPECT_HAS(e.text, "is the limit of each model");
    for (int i = 0; i < 2; i++) {
        EXPECT_SOON(fixture_ask(&daemons, KEEPER_COUNT, i, "") == 0);
        EXPECT_EQ(number(i, "\"who\":\"model\",\"used\":"), 0);
        EXPECT_EQ(number(i, "\"limit\":"), bytes / 2);
        struct http_reply r = http_get(&daemons, i, "/metrics");
        snprintf(want, sizeof want,
                 "shardd_quota_limit_bytes{device=\"cpu%d\",who=\"model\"} %" PRIu64 "\n", i,
                 bytes / 2);
        EXPECT_HAS(r.body, want);
        free(r.text);
    }
    shd_close(s);
    fixture_stop(&daemons);
}

/* One model and no fork, no second one, until it is dropped; also of a successor. */
static void expect_one_model(const char *kind)
{
    const uint64_t bytes = toy_bytes();
    struct shd_err e = { 0 };
    char want[80];
    limit(own(kind), bytes + bytes / 2 + bytes / 4);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    for (int round = 0; round < 2; round++) {
        EXPECT_STATUS(shd_model_fork(m, "twin", NULL, &e), SHD_ENOMEM);
        EXPECT_HAS(e.text, "of model 'twin' are asked for");
        snprintf(want, sizeof want, "is the limit of %s", own(kind));
        EXPECT_HAS(e.text, want);
        train_steps(m, 1);
        for (int i = 0; i < 2 && round == 0; i++)
            fixture_restart(&daemons, i);
        train_steps(m, 1);
    }
    shd_close(s);
    s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_drop(s, "toy", NULL, &e), &e);
    m = open_toy(s, TOY);
    train_steps(m, 1);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST(a_user_has_as_much_as_the_quota_says_in_all_models)
{
    expect_one_model("uid");
}

TEST(a_group_of_users_has_as_much_as_the_quota_says)
{
    expect_one_model("gid");
}

TEST(others_are_under_the_limit_of_others)
{
    const uint64_t bytes = toy_bytes();
    char who[32];
    struct shd_err e = { 0 };
    snprintf(who, sizeof who, "uid:%u", (unsigned)geteuid() + 1);
    limit(who, bytes / 4);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    EXPECT_OK(shd_model_fork(m, "twin", NULL, &e), &e);
    shd_close(s);
    fixture_stop(&daemons);
}

/* The model is there and trained, with room for one snapshot more: what asks for more is refused,
 * training goes on, and it is not more than allowed at any time. */
TEST(snapshots_pins_and_slots_count)
{
    struct shd_err e = { 0 };
    uint64_t step;
    shd_model *other_m;
    daemons.quota = (struct quota_config){ 0 };
    fixture_start_kept(&daemons, 1, "");
    shd_session *s = attach(PATIENT_MS), *others[8] = { NULL };
    shd_model *m = open_toy(s, TOY);
    const uint64_t without = counted(0);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    const uint64_t most = counted(0) + 4096;
    EXPECT(most > without + 4096);
    shd_close(s);
    fixture_stop(&daemons);
    limit(own("uid"), most);
    fixture_start_kept(&daemons, 1, "");
    s = attach(PATIENT_MS);
    m = open_toy(s, TOY);
    EXPECT_OK(shd_snapshot(m, &step, &e), &e);
    train_steps(m, 1);
    EXPECT_STATUS(shd_snapshot(m, &step, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "bytes for a snapshot of model 'toy' are asked for");
    EXPECT_STATUS(shd_pin(m, NULL, &step, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "bytes for a pin of model 'toy' are asked for");
    others[0] = attach(PATIENT_MS);
    EXPECT_STATUS(shd_model_open(others[0], TOY, &other_m, &e), SHD_ENOMEM);
    EXPECT_HAS(e.text, "of model 'toy' are asked for");
    EXPECT(counted(0) <= most);
    train_steps(m, 1);
    EXPECT_OK(shd_model_rewind(m, SHD_REWIND_LATEST, &step, &e), &e);
    shd_close(others[0]);
    shd_close(s); /* its slots are free: a reader's pin fits */
    s = attach(PATIENT_MS);
    EXPECT_OK(shd_model_attach(s, "toy", &m, &e), &e);
    EXPECT_SOON(shd_pin(m, NULL, &step, &e) == SHD_OK);
    shd_unpin(m);
    shd_close(s);
    fixture_stop(&daemons);
}

/* Pins and slots by many processes at once: counted is never more than the limit. */
static void ask_for_all(int seed)
{
    struct shd_err e = { 0 };
    for (int i = 0; i < 40; i++) {
        shd_session *s;
        shd_model *m;
        uint64_t step;
        const struct shd_pin_options options = { .size = sizeof options, .step = 0 };
        if (try_connect(daemons.address, PATIENT_MS, &s, &e) != SHD_OK)
            _exit(1);
        int r = shd_model_open(s, TOY, &m, &e);
        if (r == SHD_OK)
            r = shd_pin(m, &options, &step, &e);
        if (r == SHD_OK && (i + seed) % 3 == 0)
            r = shd_snapshot(m, &step, &e);
        shd_close(s);
        if (r != SHD_OK && r != SHD_ENOMEM && r != SHD_EBUSY)
            _exit(2);
    }
    _exit(0);
}

TEST(nobody_gets_beyond_a_limit_by_asking_at_the_same_time)
{
    const uint64_t bytes = toy_bytes(), most = bytes + bytes / 2;
    pid_t pids[4];
    limit(own("uid"), most);
    fixture_start_kept(&daemons, 2, "");
    shd_session *s = attach(PATIENT_MS);
    shd_model *m = open_toy(s, TOY);
    for (int i = 0; i < 4; i++) {
        pids[i] = test_fork();
        if (pids[i] == 0)
            ask_for_all(i);
    }
    uint64_t seen = 0;
    for (int left = 4; left > 0;) {
        for (int i = 0; i < 4; i++) {
            int status;
            if (pids[i] == 0 || waitpid(pids[i], &status, WNOHANG) != pids[i])
                continue;
            EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            pids[i] = 0;
            left--;
        }
        for (int i = 0; i < 2; i++) {
            const uint64_t now = number(i, "\"used\":");
            EXPECT(now <= most);
            seen = now > seen ? now : seen;
        }
    }
    EXPECT(seen > bytes);
    train_steps(m, 1);
    shd_close(s);
    fixture_stop(&daemons);
}

TEST_MAIN()
