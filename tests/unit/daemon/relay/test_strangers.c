/* strangers: who is heard, who waits, and that an address has no more than its share of either. */
#include <arpa/inet.h>
#include <netinet/in.h>

#include "daemon/relay/strangers.h"
#include "tests/lib/test.h"

static struct strangers s;

static struct stranger_source of(const char *text)
{
    struct sockaddr_in in = { .sin_family = AF_INET };
    struct sockaddr_in6 in6 = { .sin6_family = AF_INET6 };
    if (inet_pton(AF_INET, text, &in.sin_addr) == 1)
        return stranger_source((const struct sockaddr *)&in);
    EXPECT(inet_pton(AF_INET6, text, &in6.sin6_addr) == 1);
    return stranger_source((const struct sockaddr *)&in6);
}

/* How many of so many are let in; the first has that descriptor's number. */
static uint32_t come(const char *from, uint32_t count, int first)
{
    uint32_t in = 0;
    for (uint32_t i = 0; i < count; i++)
        in += strangers_come(&s, &(struct stranger){ of(from), first + (int)i });
    return in;
}

/* How many are heard now that were not. */
static uint32_t hear(void)
{
    struct stranger who;
    uint32_t heard = 0;
    while (strangers_next(&s, &who))
        heard++;
    return heard;
}

static void gone(const char *from, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        strangers_gone(&s, of(from));
}

TEST(an_address_has_its_share_and_others_the_rest)
{
    strangers_init(&s);
    EXPECT_EQ(come("10.0.0.9", 2000, 0), STRANGERS_WAITING_OF_ONE);
    EXPECT_EQ(hear(), STRANGERS_OF_ONE);
    EXPECT_EQ(come("10.0.0.9", 2000, 0), STRANGERS_OF_ONE); /* as many wait again */
    EXPECT_EQ(hear(), 0);
    EXPECT(!strangers_are_crowded(&s));
    EXPECT_EQ(come("10.0.0.1", 3, 0), 3);
    EXPECT_EQ(hear(), 3);
    gone("10.0.0.9", 2);
    EXPECT_EQ(hear(), 2);
}

TEST(who_has_waited_longest_is_next)
{
    struct stranger who;
    strangers_init(&s);
    EXPECT_EQ(come("10.0.0.9", STRANGERS_OF_ONE + 2, 100), STRANGERS_OF_ONE + 2);
    EXPECT_EQ(come("10.0.0.1", 2, 500), 2);
    for (uint32_t i = 0; i < STRANGERS_OF_ONE; i++)
        EXPECT(strangers_next(&s, &who) && who.fd == 100 + (int)i);
    EXPECT(strangers_next(&s, &who) && who.fd == 500); /* the other's turn does not come yet */
    gone("10.0.0.9", 1);
    EXPECT(strangers_next(&s, &who) && who.fd == 100 + (int)STRANGERS_OF_ONE);
    EXPECT(strangers_next(&s, &who) && who.fd == 501);
    EXPECT(!strangers_next(&s, &who) && strangers_wait(&s));
    gone("10.0.0.9", 1);
    EXPECT(strangers_next(&s, &who) && !strangers_wait(&s));
}

/* Of so many addresses that no place is left: then others wait, up to a bound. */
TEST(places_and_those_that_wait_are_bounded)
{
    static const char *const froms[] = { "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4" };
    strangers_init(&s);
    for (size_t i = 0; i < 3; i++) {
        come(froms[i], STRANGERS_OF_ONE, 0);
        EXPECT_EQ(hear(), STRANGERS_OF_ONE);
        come(froms[i], STRANGERS_WAITING_OF_ONE, 0);
    }
    EXPECT_EQ(hear(), 0);
    EXPECT(!strangers_are_crowded(&s)); /* a fourth is heard, though nobody more may wait */
    for (uint32_t i = 0; i < STRANGERS_OF_ONE; i++)
        EXPECT(come(froms[3], 1, 0) == 1 && hear() == 1);
    EXPECT(strangers_are_crowded(&s));
    EXPECT_EQ(come(froms[3], 1, 0), 0);
    EXPECT_EQ(come("10.0.0.5", 1, 0), 0);
    gone(froms[3], 1);
    EXPECT(!strangers_are_crowded(&s));
    EXPECT_EQ(come("10.0.0.5", 1, 0), 1);
    EXPECT_EQ(hear(), 1);
}

static bool same(const char *a, const char *b)
{
    const struct stranger_source x = of(a), y = of(b);
    return memcmp(&x, &y, sizeof x) == 0;
}

TEST(an_ipv6_network_is_one_address_and_ipv4_is_itself_by_either)
{
    EXPECT(same("2001:db8:1:2::3", "2001:db8:1:2:ffff:ffff:ffff:ffff"));
    EXPECT(!same("2001:db8:1:2::3", "2001:db8:1:3::3"));
    EXPECT(same("10.0.0.1", "::ffff:10.0.0.1"));
    EXPECT(!same("10.0.0.1", "10.0.0.2"));
    EXPECT(!same("::ffff:10.0.0.1", "::ffff:10.0.0.2"));
    EXPECT(!same("::1", "::ffff:0.0.0.1"));
}

TEST_MAIN()
