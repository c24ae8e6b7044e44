/* Pairs of devices over random clusters: whenever they can be made they are, by the rules. */
#include "client/ctl/base/pairs.h"

#include "proto/base/check.h"
#include "tests/lib/test.h"

#define TRIES 3000

static void add_host(struct cluster *c, const char *name, const char *devices)
{
    struct shd_err e = { 0 };
    struct cluster_host host = { .address = "127.0.0.1:1", .key = { 1 } };
    memcpy(host.key + 1, &c->count, sizeof c->count);
    snprintf(host.name, sizeof host.name, "%s", name);
    snprintf(host.devices, sizeof host.devices, "%s", devices);
    EXPECT_OK(cluster_add(c, &host, &e), &e);
}

/* hosts: "a=cpu0,cpu1 b=cpu2". The address of its pairs, or what is wrong with it. */
static const char *address_of(const char *hosts, int code)
{
    static char address[512];
    static struct shd_err e;
    struct cluster c = { 0 };
    struct replicas r = { 0 };
    struct pairs p = { 0 };
    char *words = strdup(hosts), *rest = words;
    for (char *word; (word = strsep(&rest, " ")) != NULL;) {
        const char *name = strsep(&word, "=");
        add_host(&c, name, word);
    }
    free(words);
    EXPECT_OK(replicas_of(&c, "file:/x", &r, &e), &e);
    EXPECT_STATUS(pairs_make(&r, &p, &e), code);
    if (code == SHD_OK)
        pairs_address(&p, "/d", address, sizeof address);
    pairs_free(&p);
    replicas_free(&r);
    cluster_free(&c);
    return code == SHD_OK ? address : e.text;
}

TEST(pairs_are_in_the_order_of_places_and_hosts)
{
    EXPECT_STR(address_of("a=cpu0 b=cpu1", SHD_OK), "/d?cpu0+cpu1");
    EXPECT_STR(address_of("a=cpu0,cpu1 b=cpu2,cpu3", SHD_OK), "/d?cpu0+cpu2,cpu3+cpu1");
    EXPECT_STR(address_of("b=cpu3,cpu2 a=cpu1,cpu0", SHD_OK), "/d?cpu0+cpu2,cpu3+cpu1");
    /* Natural, both of them: cpu9 before cpu10, h2 before h10. */
    EXPECT_STR(address_of("h10=cpu10,cpu9 h2=cpu11,cpu8", SHD_OK), "/d?cpu8+cpu9,cpu10+cpu11");
    EXPECT_STR(address_of("a=cpu0,cpu1 b=cpu2,cpu3 c=cpu4,cpu5", SHD_OK),
               "/d?cpu0+cpu2,cpu4+cpu1,cpu3+cpu5");
    /* a has half of all, and so is in each. */
    EXPECT_STR(address_of("a=cpu0,cpu1,cpu2 b=cpu3 c=cpu4 d=cpu5 w=", SHD_OK),
               "/d?cpu0+cpu3,cpu4+cpu1,cpu2+cpu5");
}

TEST(clusters_without_pairs_are_refused)
{
    EXPECT_HAS(address_of("a=cpu0,cpu1 w=", SHD_EINVAL), "'a' alone has devices");
    EXPECT_HAS(address_of("a=cpu0 b=cpu1 c=cpu2", SHD_EINVAL), "3 devices make no pairs");
    EXPECT_HAS(address_of("a=cpu0,cpu1,cpu2 b=cpu3", SHD_EINVAL), "host 'a' has 3 of 4 devices");
}

/* -- Random clusters --------------------------------------------------------------------------- */

struct plan {
    uint32_t host_count, device_count, most; /* devices of a host */
    uint32_t counts[64];
};

static void swap_hosts(struct cluster *c, uint32_t a, uint32_t b)
{
    const struct cluster_host was = c->hosts[a];
    c->hosts[a] = c->hosts[b];
    c->hosts[b] = was;
}

/* Devices of random numbers, so that places in a host have nothing to do with its name. */
static void make_cluster(uint64_t *seed, struct plan *plan, struct cluster *c)
{
    static uint32_t numbers[1024];
    *plan = (struct plan){ .host_count = 1 + (uint32_t)(test_random(seed) % 12) };
    for (uint32_t i = 0; i < 1024; i++)
        numbers[i] = i;
    const uint32_t most = 1 + (uint32_t)(test_random(seed) % 12);
    for (uint32_t i = 0; i < plan->host_count; i++) {
        char name[16], devices[CLUSTER_DEVICES_BYTES] = "";
        size_t used = 0;
        plan->counts[i] = (uint32_t)(test_random(seed) % (most + 1));
        if (i == 0 && plan->counts[i] == 0)
            plan->counts[i] = 1; /* a cluster without any is refused before */
        for (uint32_t k = 0; k < plan->counts[i]; k++) {
            const uint32_t at = plan->device_count + k;
            const uint32_t other = at + (uint32_t)(test_random(seed) % (1024 - at));
            const uint32_t number = numbers[other];
            numbers[other] = numbers[at];
            numbers[at] = number;
            used += (size_t)snprintf(devices + used, sizeof devices - used, "%scpu%u",
                                     k > 0 ? "," : "", number);
        }
        snprintf(name, sizeof name, "h%u", i);
        add_host(c, name, devices);
        plan->device_count += plan->counts[i];
        plan->most = plan->counts[i] > plan->most ? plan->counts[i] : plan->most;
    }
    for (uint32_t i = c->count; i > 1; i--)
        swap_hosts(c, i - 1, (uint32_t)(test_random(seed) % i));
}

/* Each device is in one pair, of two hosts; a host is first as often as second, or once more or
 * less where its devices are odd. */
static void expect_pairs(const struct replicas *r, const struct pairs *p)
{
    EXPECT_EQ(2 * p->count, r->device_count);
    for (uint32_t i = 0; i < r->host_count; i++) {
        char device[CLUSTER_DEVICE_BYTES];
        int32_t balance = 0;
        uint32_t devices = 0;
        for (const char *at = r->hosts[i].devices; cluster_next_device(&at, device); devices++) {
            uint32_t found = 0;
            for (uint32_t k = 0; k < p->count; k++) {
                const struct pair *pair = &p->pairs[k];
                const bool first = strcmp(pair->primary, device) == 0;
                const bool second = strcmp(pair->secondary, device) == 0;
                found += first + second;
                balance += first - second;
                EXPECT(!first || pair->primary_host == i);
                EXPECT(!second || pair->secondary_host == i);
                EXPECT(pair->primary_host != pair->secondary_host);
            }
            EXPECT_EQ(found, 1);
        }
        EXPECT(devices % 2 == 0 ? balance == 0 : balance == 1 || balance == -1);
    }
}

TEST(random_clusters_have_pairs_whenever_they_can)
{
    static char address[16384], again[16384];
    uint64_t seed = test_seed(5);
    uint32_t made = 0, refused = 0;
    for (uint32_t t = 0; t < TRIES; t++) {
        struct cluster c = { 0 };
        struct plan plan;
        struct replicas r = { 0 };
        struct pairs p = { 0 };
        struct shd_err e = { 0 };
        make_cluster(&seed, &plan, &c);
        EXPECT_OK(replicas_of(&c, "file:/x", &r, &e), &e);
        const bool can = plan.device_count % 2 == 0 && 2 * plan.most <= plan.device_count;
        const int code = pairs_make(&r, &p, &e);
        if ((code == SHD_OK) != can || (!can && code != SHD_EINVAL))
            FAIL("try %u: %s: %s", t, status_name(code), e.text);
        if (can) {
            expect_pairs(&r, &p);
            pairs_address(&p, "/d", address, sizeof address);
            pairs_free(&p);
            replicas_free(&r);
            /* The same of a file in another order. */
            for (uint32_t i = c.count; i > 1; i--)
                swap_hosts(&c, i - 1, (uint32_t)(test_random(&seed) % i));
            EXPECT_OK(replicas_of(&c, "file:/y", &r, &e), &e);
            EXPECT_OK(pairs_make(&r, &p, &e), &e);
            pairs_address(&p, "/d", again, sizeof again);
            EXPECT_STR(address, again);
        }
        made += can;
        refused += !can;
        pairs_free(&p);
        replicas_free(&r);
        cluster_free(&c);
    }
    EXPECT(made > TRIES / 4 && refused > TRIES / 4);
}

TEST(largest_cluster_has_pairs)
{
    static char address[DEVICES_ADDRESS_BYTES(8)];
    struct replicas r = { .host_count = 16, .device_count = 1024 };
    struct pairs p = { 0 };
    struct shd_err e = { 0 };
    r.hosts = calloc(r.host_count, sizeof *r.hosts);
    for (uint32_t i = 0; i < r.host_count; i++) {
        size_t used = 0;
        snprintf(r.hosts[i].name, sizeof r.hosts[i].name, "h%02u", i);
        for (uint32_t k = 0; k < 64; k++)
            used += (size_t)snprintf(r.hosts[i].devices + used, sizeof r.hosts[i].devices - used,
                                     "%scpu%u", k > 0 ? "," : "", i * 64 + k);
    }
    EXPECT_OK(pairs_make(&r, &p, &e), &e);
    expect_pairs(&r, &p);
    pairs_address(&p, "/d", address, sizeof address);
    pairs_free(&p);
    free(r.hosts);
}

TEST_MAIN()
