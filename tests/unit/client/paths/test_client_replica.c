/* A session whose owner's host is out, and who learns of it late: what has come in that host's
 * place is none of this session's, which goes on with the replica. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/paths/replica.h"
#include "client/session/hub.h"
#include "client/session/session.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"

static bool later; /* the replica has not come as far yet */

static bool succeed(void *ctx, uint32_t owner, bool gone)
{
    return !later && replica_succeed(ctx, owner, gone);
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

/* Hosts a and b have cpu0 and cpu1, with the toy at step 2, of which something is kept by `keep`,
 * in a session with the one as owner and the other as its replica. */
static shd_model *begin(void (*keep)(shd_model *m))
{
    setenv("SHARDD_REPLICA_PATIENCE", "60", 1);
    make_ckpts();
    fixture_start_kept(&daemons, 2, ";"); /* one successor, with another state */
    paired_make(&daemons, 2);
    shd_model *m = open_toy(connect_to("cpu0+cpu1"), toy_spec("f32", TOY_ADAMW));
    train_steps(m, 2);
    keep(m);
    return m;
}

/* Goes on with cpu1 alone to step 4, as if nothing had been. */
static void end(shd_model *m, uint32_t steps)
{
    char hex[65], whole[65];
    struct shd_session *s = m->session;
    EXPECT_STR(s->hub->links[0].device, "cpu1");
    train_steps(m, steps);
    digest_of(m, hex);
    shd_close(s);
    toy_reference(toy_spec("f32", TOY_ADAMW), 4, whole);
    EXPECT_STR(hex, whole);
    paired_remove(&daemons);
    fixture_stop(&daemons);
    remove_ckpts();
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

static bool is_refused(const struct hub *hub)
{
    return strstr(hub->links[0].last.text, "restored in place of what this session has") != NULL;
}

static bool has_one(const struct hub *hub)
{
    return hub_lost(hub, 1);
}

static void save(shd_model *m)
{
    save_ok(m, 0);
}

TEST(a_host_that_is_out_and_has_another_state_is_let_go_of)
{
    shd_model *m = begin(save);
    struct hub *hub = m->session->hub;
    train_steps(m, 1);
    hub->members.succeed = succeed;
    later = true;
    paired_put_out("a");
    replace("cpu0");
    poll_until(hub, is_refused);
    later = false;
    poll_until(hub, has_one);
    end(m, 1);
}

static void snapshot(shd_model *m)
{
    uint64_t kept;
    struct shd_err e;
    EXPECT_OK(shd_snapshot(m, &kept, &e), &e);
    EXPECT_EQ(kept, 2);
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
    struct shd_err e;
    struct shd_result result = { .size = sizeof result };
    shd_model *m = begin(snapshot);
    train_steps(m, 2);
    rewind_alone("cpu1", 2);
    paired_put_out("a");
    poll_until(m->session->hub, has_one);
    EXPECT_OK(toy_step(m, toy_all_micros, TOY_MICROS, &result, &e), &e);
    EXPECT(result.rewound);
    EXPECT_EQ(shd_step(m), 2);
    end(m, 2);
}

TEST_MAIN()
