/* See paired_toy.h. */
#include "tests/lib/paired_toy.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/session/hub.h"
#include "client/session/membership.h"
#include "client/session/session.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"

char paired_heard[4096];

static void hear(void *ctx, const char *line)
{
    const size_t n = strlen(paired_heard);
    (void)ctx;
    snprintf(paired_heard + n, sizeof paired_heard - n, "%s\n", line);
}

shd_session *paired_connect(const char *devices)
{
    char address[400];
    struct shd_err e;
    shd_session *s = NULL;
    snprintf(address, sizeof address, "%s?%s", daemons.dir, devices);
    const struct shd_options options = {
        .size = sizeof options, .address = address, .name = "test", .waits = hear
    };
    EXPECT_OK(shd_connect(&options, &s, &e), &e);
    return s;
}

shd_model *paired_begin(const char *patience, const char *starts, void (*keep)(shd_model *m))
{
    setenv("SHARDD_REPLICA_PATIENCE", patience, 1);
    paired_heard[0] = '\0';
    make_ckpts();
    paired_start(&daemons, 2, 2, starts);
    shd_model *m = open_toy(paired_connect("cpu0+cpu1"), toy_spec("f32", TOY_ADAMW));
    train_steps(m, 2);
    keep(m);
    return m;
}

void paired_end(shd_model *m, const char *device, uint32_t steps)
{
    char hex[65], whole[65];
    struct shd_session *s = m->session;
    EXPECT_STR(s->hub->links[0].device, device);
    train_steps(m, steps);
    digest_of(m, hex);
    shd_close(s);
    toy_reference(toy_spec("f32", TOY_ADAMW), 4, whole);
    EXPECT_STR(hex, whole);
    paired_remove(&daemons);
    fixture_stop(&daemons);
    remove_ckpts();
}

bool paired_has_one(const struct hub *hub)
{
    return hub_lost(hub, 1);
}

void paired_lose(struct hub *hub, const char *host)
{
    struct shd_err e = { 0 };
    paired_put_out(host);
    EXPECT_OK(membership_refresh(hub, &e), &e);
    poll_until(hub, paired_has_one);
}

void paired_snapshot(shd_model *m)
{
    uint64_t kept;
    struct shd_err e;
    EXPECT_OK(shd_snapshot(m, &kept, &e), &e);
    EXPECT_EQ(kept, 2);
}

void paired_rewind_alone(const char *devices, const char *name, uint64_t to)
{
    shd_model *m;
    uint64_t step;
    struct shd_err e;
    shd_session *s = paired_connect(devices);
    EXPECT_OK(shd_model_attach(s, name, &m, &e), &e);
    EXPECT_OK(shd_model_rewind(m, to, &step, &e), &e);
    EXPECT_EQ(step, to);
    shd_close(s);
}

shd_model *paired_without_b(const char *patience)
{
    shd_model *m = paired_begin(patience, "", paired_snapshot);
    paired_put_out("b");
    poll_until(m->session->hub, paired_has_one);
    return m;
}
