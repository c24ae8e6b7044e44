/* Whom a session may have put out: hosts that are missed, where each slice has a member elsewhere.
 */

#include "client/session/membership.h"
#include "tests/lib/test.h"

#define HOSTS 3u

struct cut { /* of slices 0 to 2, on hosts 0+1, 1+2, 2+0 */
    struct membership_link links[6];
};

static struct cut all_up(void)
{
    struct cut c = { { { 0 } } };
    for (uint32_t i = 0; i < 6; i++)
        c.links[i] = (struct membership_link){ .slice = i % 3,
                                               .host = (i % 3 + i / 3) % HOSTS,
                                               .up = true };
    return c;
}

static void miss(struct cut *c, uint32_t host)
{
    for (uint32_t i = 0; i < 6; i++)
        if (c->links[i].host == host) {
            c->links[i].up = false;
            c->links[i].missed = true;
        }
}

static void put_out(struct cut *c, uint32_t host)
{
    for (uint32_t i = 0; i < 6; i++)
        c->links[i].out = c->links[i].out || c->links[i].host == host;
}

static uint32_t judge(const struct cut *c, bool *out)
{
    return membership_judge(c->links, 6, HOSTS, out);
}

TEST(a_host_that_is_missed_is_to_be_out)
{
    bool out[HOSTS];
    for (uint32_t host = 0; host < HOSTS; host++) {
        struct cut c = all_up();
        EXPECT_EQ(judge(&c, out), 0);
        miss(&c, host);
        EXPECT_EQ(judge(&c, out), 1);
        for (uint32_t h = 0; h < HOSTS; h++)
            EXPECT(out[h] == (h == host));
    }
}

TEST(one_daemon_that_stays_away_is_its_host)
{
    bool out[HOSTS];
    struct cut c = all_up();
    c.links[1].up = false;
    EXPECT_EQ(judge(&c, out), 0); /* not for long */
    c.links[1].missed = true;
    EXPECT_EQ(judge(&c, out), 1);
    EXPECT(out[1] && !out[0] && !out[2]);
}

TEST(nobody_is_put_out_whose_slice_has_no_other)
{
    bool out[HOSTS];
    struct cut c = all_up();
    miss(&c, 0);
    miss(&c, 1); /* this side of the cut has host 2 alone */
    EXPECT_EQ(judge(&c, out), 0);
    EXPECT(!out[0] && !out[1] && !out[2]);
}

/* Two hosts, the cable between them cut: this is the side that came second. Its own daemons are up,
 * and count no more. */
TEST(who_is_out_puts_nobody_out)
{
    bool out[2];
    struct membership_link links[] = { { .slice = 0, .host = 0, .up = true },
                                       { .slice = 1, .host = 1, .missed = true },
                                       { .slice = 0, .host = 1, .missed = true },
                                       { .slice = 1, .host = 0, .up = true } };
    EXPECT_EQ(membership_judge(links, 4, 2, out), 1);
    EXPECT(!out[0] && out[1]);
    links[0].out = links[3].out = true;
    EXPECT_EQ(membership_judge(links, 4, 2, out), 0);
    EXPECT(!out[0] && !out[1]);
}

TEST(another_host_is_lost_after_one_is_out)
{
    bool out[HOSTS];
    struct cut c = all_up();
    miss(&c, 0);
    put_out(&c, 0);
    EXPECT_EQ(judge(&c, out), 0);
    miss(&c, 1); /* of slice 0 nobody is left */
    EXPECT_EQ(judge(&c, out), 0);
}

/* Its daemons are there, and may lack steps. */
TEST(nobody_is_put_out_while_the_other_of_a_slice_is_filled)
{
    bool out[HOSTS];
    for (uint32_t filled = 0; filled < HOSTS; filled++)
        for (uint32_t host = 0; host < HOSTS; host++) {
            struct cut c = all_up();
            for (uint32_t i = 0; i < 6; i++)
                c.links[i].up = c.links[i].host != filled;
            EXPECT_EQ(judge(&c, out), 0);
            miss(&c, host);
            EXPECT_EQ(judge(&c, out), host == filled ? 1 : 0); /* it goes out again, if it goes */
        }
}

/* Whatever is up: who goes on has a member of each slice. */
TEST(at_random_each_slice_keeps_a_member)
{
    uint64_t seed = test_seed(20261127);
    uint32_t claims = 0;
    for (uint32_t n = 0; n < 20000; n++) {
        bool out[HOSTS];
        struct cut c = all_up();
        for (uint32_t i = 0; i < 6; i++) {
            c.links[i].up = test_random(&seed) >> 62 != 0;
            c.links[i].missed = !c.links[i].up && test_random(&seed) >> 63 == 0;
        }
        for (uint32_t h = 0; h < HOSTS; h++)
            if (test_random(&seed) >> 61 == 0)
                put_out(&c, h);
        const uint32_t count = judge(&c, out);
        claims += count > 0;
        for (uint32_t slice = 0; count > 0 && slice < 3; slice++) {
            const struct membership_link *a = &c.links[slice], *b = &c.links[slice + 3];
            EXPECT((a->up && !a->out && !out[a->host]) || (b->up && !b->out && !out[b->host]));
        }
    }
    EXPECT(claims > 1000);
}

/* Pairs of which nobody knows whose they are would be replicas in name alone. */
TEST(pairs_without_hosts_are_refused)
{
    struct membership *m = NULL;
    struct shd_err e = { 0 };
    EXPECT_STATUS(membership_open("/nonexistent/shardd", &m, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "'/nonexistent/shardd' has no replicas.json");
}

TEST_MAIN()
