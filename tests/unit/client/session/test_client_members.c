/* Sessions with pairs: a host that was never there is put out by who begins, and who has an older
 * view of the hosts than others is taken in again once it has read the newest. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/session/address.h"
#include "client/session/hub_open.h"
#include "proto/base/clock.h"
#include "tests/lib/client_remote.h"
#include "tests/lib/paired.h"
#include "tests/lib/test.h"

/* Hosts a, b and c have cpu0, cpu1 and cpu2; the first so many of these are there. */
static void begin(int count)
{
    paired_start(&daemons, count, 3, NULL);
}

static void end(void)
{
    paired_remove(&daemons);
    fixture_stop(&daemons);
}

/* A wait without an end, of which timeout_ns bounds what is no host's loss. */
static int open_hub(const char *pair, struct hub **ret_hub, struct shd_err *e)
{
    const struct hub_options options = {
        .name = "test",
        .role = WIRE_TRAINER,
        .timeout_ns = test_paced(500) * NS_PER_MS,
        .patient = true,
    };
    char text[400];
    struct address address;
    snprintf(text, sizeof text, "%s?%s", daemons.dir, pair);
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
    begin(1);
    EXPECT_OK(open_hub(pair, &hub, &e), &e);
    EXPECT_STR(hub->links[0].device, "cpu0");
    EXPECT(hub->links[0].state == LINK_UP && hub_lost(hub, 1));
    hub_free(hub);
    end();
}

TEST(a_host_that_was_never_there_is_put_out_though_the_patience_is_longer_than_a_wait)
{
    char patience[24]; /* three times that: for who was never met */
    snprintf(patience, sizeof patience, "%.1f", (double)test_paced(400) / 1000);
    setenv("SHARDD_REPLICA_PATIENCE", patience, 1);
    expect_out("cpu0+cpu1");
    expect_out("cpu1+cpu0");
}

static bool is_refused(const struct hub *hub)
{
    return hub->down_count == 2 && strstr(hub->links[0].last.text, "view 0 of the hosts") != NULL &&
           strstr(hub->links[1].last.text, "view 0 of the hosts") != NULL;
}

static bool is_up(const struct hub *hub)
{
    return hub->down_count == 0;
}

/* Whoever has not read that c is out acts nowhere once somebody who has is there. */
TEST(a_daemon_takes_in_nobody_with_an_older_view_than_it_was_told)
{
    struct hub *late = NULL, *early = NULL;
    struct shd_err e;
    char away[320];
    setenv("SHARDD_REPLICA_PATIENCE", "60", 1);
    begin(2);
    EXPECT_OK(open_hub("cpu0+cpu1", &late, &e), &e);
    paired_put_out("c");
    EXPECT_OK(open_hub("cpu1+cpu0", &early, &e), &e);
    snprintf(away, sizeof away, "%s.away", paired_dir);
    EXPECT_EQ(rename(paired_dir, away), 0);
    poll_until(late, is_refused);
    EXPECT_EQ(late->members.told, 1);
    EXPECT_EQ(rename(away, paired_dir), 0);
    poll_until(late, is_up);
    EXPECT_EQ(late->members.told, 2);
    EXPECT_OK(hub_poll(early, 0, &e), &e);
    EXPECT(is_up(early));
    hub_free(late);
    hub_free(early);
    end();
}

TEST_MAIN()
