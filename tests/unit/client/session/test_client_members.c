/* Sessions with the pairs of two hosts, one of which was never there: who begins puts it out. */
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/session/address.h"
#include "client/session/hub_open.h"
#include "proto/base/clock.h"
#include "proto/files/replicas.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

static struct fixture fx;
static char arbiter[300];

/* Host a has the daemon that is there, cpu0; host b had cpu1. */
static void begin(void)
{
    char text[320];
    struct shd_err e;
    struct replicas_host hosts[] = { { .name = "a", .devices = "cpu0" },
                                     { .name = "b", .devices = "cpu1" } };
    const struct replicas r = {
        .arbiter = text, .cluster = "c0", .hosts = hosts, .host_count = 2, .device_count = 2
    };
    fixture_start(&fx, 1, NULL);
    snprintf(arbiter, sizeof arbiter, "%s/arbiter", fx.dir);
    snprintf(text, sizeof text, "file:%s", arbiter);
    EXPECT_EQ(mkdir(arbiter, 0700), 0);
    EXPECT_OK(replicas_write(fx.dir, &r, &e), &e);
}

static void end(void)
{
    char path[400];
    snprintf(path, sizeof path, "%s/c0.1", arbiter);
    EXPECT_EQ(unlink(path), 0); /* the view was made */
    EXPECT_EQ(rmdir(arbiter), 0);
    snprintf(path, sizeof path, "%s/" REPLICAS_FILE, fx.dir);
    unlink(path);
    fixture_stop(&fx);
}

/* A wait without an end, of which timeout_ns bounds what is no host's loss. */
static int open_hub(const char *pair, struct hub **ret_hub, struct shd_err *e)
{
    const struct hub_options options = {
        .name = "test", .role = WIRE_TRAINER, .timeout_ns = NS_PER_S / 2, .patient = true
    };
    char text[400];
    struct address address;
    snprintf(text, sizeof text, "%s?%s", fx.dir, pair);
    int r = address_parse(text, &address, e);
    if (r != SHD_OK)
        return r;
    r = hub_new(&address, &options, ret_hub, e);
    address_free(&address);
    return r;
}

static void expect_out(const char *pair)
{
    struct hub *hub = NULL;
    struct shd_err e;
    begin();
    EXPECT_OK(open_hub(pair, &hub, &e), &e);
    EXPECT_STR(hub->links[0].device, "cpu0");
    EXPECT(hub->links[0].state == LINK_UP && hub_lost(hub, 1));
    hub_free(hub);
    end();
}

TEST(a_host_that_was_never_there_is_put_out_though_the_patience_is_longer_than_a_wait)
{
    setenv("SHARDD_REPLICA_PATIENCE", "0.4", 1); /* three times that: for who was never met */
    expect_out("cpu0+cpu1");
    expect_out("cpu1+cpu0");
}

TEST_MAIN()
