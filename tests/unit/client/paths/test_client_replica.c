/* A session whose owner's host is out, and who learns of it late: what has come in that host's
 * place is none of this session's, which goes on with the replica. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/paths/replica.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "proto/base/clock.h"
#include "proto/files/arbiter.h"
#include "proto/files/replicas.h"
#include "tests/lib/client_remote.h"

static char arbiter_dir[300];
static bool later; /* the replica has not come as far yet */

static bool succeed(void *ctx, uint32_t owner, bool gone)
{
    return !later && replica_succeed(ctx, owner, gone);
}

/* Hosts a and b have cpu0 and cpu1. */
static void begin(void)
{
    char text[320];
    struct shd_err e;
    struct replicas_host hosts[] = { { .name = "a", .devices = "cpu0" },
                                     { .name = "b", .devices = "cpu1" } };
    const struct replicas r = {
        .arbiter = text, .cluster = "c0", .hosts = hosts, .host_count = 2, .device_count = 2
    };
    make_ckpts();
    fixture_start_kept(&daemons, 2, ";"); /* one successor, with another state */
    snprintf(arbiter_dir, sizeof arbiter_dir, "%s/arbiter", daemons.dir);
    snprintf(text, sizeof text, "file:%s", arbiter_dir);
    EXPECT_EQ(mkdir(arbiter_dir, 0700), 0);
    EXPECT_OK(replicas_write(daemons.dir, &r, &e), &e);
}

static void end(void)
{
    char path[400];
    snprintf(path, sizeof path, "%s/c0.1", arbiter_dir);
    EXPECT_EQ(unlink(path), 0);
    EXPECT_EQ(rmdir(arbiter_dir), 0);
    snprintf(path, sizeof path, "%s/" REPLICAS_FILE, daemons.dir);
    unlink(path);
    fixture_stop(&daemons);
    remove_ckpts();
}

static shd_session *connect_to(const char *devices)
{
    char address[400];
    struct shd_err e;
    shd_session *s = NULL;
    snprintf(address, sizeof address, "%s?%s", daemons.dir, devices);
    const struct shd_options options = { .size = sizeof options,
                                         .address = address,
                                         .name = "test" };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    return s;
}

static void put_out(const char *host)
{
    struct arbiter *arbiter;
    struct arbiter_view view = { 0 }, next = { 0 };
    char text[320];
    struct shd_err e;
    snprintf(text, sizeof text, "file:%s", arbiter_dir);
    EXPECT_OK(arbiter_open(text, "c0", &arbiter, &e), &e);
    EXPECT_OK(arbiter_view_next(&view, host, &next, &e), &e);
    EXPECT_OK(arbiter_claim(arbiter, &next, &e), &e);
    arbiter_view_free(&next);
    arbiter_close(arbiter);
}

static void replace(const char *devices)
{
    const struct shd_restore_options options = { .size = sizeof options,
                                                 .replace = true,
                                                 .force = true };
    struct shd_err e;
    shd_session *s = connect_to(devices);
    EXPECT_OK(shd_restore(s, ckpts, &options, NULL, &e), &e);
    shd_close(s);
}

static void poll_until(struct hub *hub, bool (*is_so)(const struct hub *hub))
{
    struct shd_err e;
    while (!is_so(hub))
        EXPECT_OK(hub_poll(hub, 10 * NS_PER_MS, &e), &e);
}

static bool is_refused(const struct hub *hub)
{
    return strstr(hub->links[0].last.text, "restored in place of what this session has") != NULL;
}

static bool has_one(const struct hub *hub)
{
    return hub_lost(hub, 1);
}

TEST(a_host_that_is_out_and_has_another_state_is_let_go_of)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    char hex[65], whole[65];
    setenv("SHARDD_REPLICA_PATIENCE", "60", 1);
    toy_reference(spec, 4, whole);
    begin();
    shd_session *s = connect_to("cpu0+cpu1");
    shd_model *m = open_toy(s, spec);
    train_steps(m, 2);
    save_ok(m, 0);
    train_steps(m, 1);
    s->hub->members.succeed = succeed;
    later = true;
    put_out("a");
    replace("cpu0");
    poll_until(s->hub, is_refused);
    later = false;
    poll_until(s->hub, has_one);
    EXPECT_STR(s->hub->links[0].device, "cpu1");
    train_steps(m, 1);
    digest_of(m, hex);
    EXPECT_STR(hex, whole);
    shd_close(s);
    end();
}

static void rewind_alone(const char *devices, uint64_t to)
{
    shd_model *m;
    uint64_t step;
    struct shd_err e;
    shd_session *s = connect_to(devices);
    EXPECT_OK(shd_model_attach(s, "toy", &m, &e), &e);
    EXPECT_OK(shd_model_rewind(m, to, &step, &e), &e);
    EXPECT_EQ(step, to);
    shd_close(s);
}

/* The replica never comes as far as this session has read, unless that goes along. */
TEST(a_replica_that_went_back_is_gone_on_with)
{
    const char *spec = toy_spec("f32", TOY_ADAMW);
    char hex[65], whole[65];
    uint64_t kept;
    struct shd_err e;
    setenv("SHARDD_REPLICA_PATIENCE", "60", 1);
    toy_reference(spec, 4, whole);
    begin();
    shd_session *s = connect_to("cpu0+cpu1");
    shd_model *m = open_toy(s, spec);
    train_steps(m, 2);
    EXPECT_OK(shd_snapshot(m, &kept, &e), &e);
    EXPECT_EQ(kept, 2);
    train_steps(m, 2);
    rewind_alone("cpu1", 2);
    put_out("a");
    poll_until(s->hub, has_one);
    struct shd_result result = { .size = sizeof result };
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(m), 2);
    train_steps(m, 2);
    digest_of(m, hex);
    EXPECT_STR(hex, whole);
    shd_close(s);
    end();
}

TEST_MAIN()
