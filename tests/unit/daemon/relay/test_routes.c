/* Which devices a relay answers for, by its command line and the cluster file; and what of either
 * is refused, by name. */
#include <unistd.h>

#include "daemon/relay/relay.h"
#include "daemon/relay/routes.h"
#include "tests/lib/test.h"

static struct cluster cluster;
static struct routes routes;

static int add_host(const char *name, const char *devices, struct shd_err *e)
{
    struct cluster_host host = { .address = "127.0.0.1:1" };
    snprintf(host.name, sizeof host.name, "%s", name);
    snprintf(host.devices, sizeof host.devices, "%s", devices);
    memset(host.key, (int)cluster.count + 1, sizeof host.key);
    return cluster_add(&cluster, &host, e);
}

/* Hosts a, b and c; devices "": the file does not say. */
static void hosts(const char *a, const char *b, const char *c)
{
    struct shd_err e = { 0 };
    cluster_free(&cluster);
    EXPECT_OK(add_host("a", a, &e), &e);
    EXPECT_OK(add_host("b", b, &e), &e);
    EXPECT_OK(add_host("c", c, &e), &e);
}

/* Of host b. from: up to two. */
static int make(const char *own, const char *from, const char *also, struct shd_err *e)
{
    const char *const list[] = { from, also };
    const struct relay_config config = { .host = "b",
                                         .devices = own,
                                         .from = list,
                                         .from_count = (from != NULL ? 1u : 0u) +
                                                       (also != NULL ? 1u : 0u) };
    *e = (struct shd_err){ 0 };
    return routes_make(&cluster, &config, &routes, e);
}

static void is_refused(const char *own, const char *from, const char *also, int status,
                       const char *text)
{
    struct shd_err e;
    EXPECT_STATUS(make(own, from, also, &e), status);
    EXPECT_HAS(e.text, text);
}

static void is_routed(const char *device, const char *host)
{
    const char *to = routes_host(&routes, device);
    EXPECT_STR(to != NULL ? to : "-", host);
}

static int admit(const char *device, const char *text)
{
    struct shd_err e = { .text = "" };
    const int r = routes_admit(&routes, device, &e);
    EXPECT_HAS(e.text, text);
    return r;
}

TEST(without_names_it_lets_others_in_to_whatever_is_there)
{
    struct shd_err e;
    hosts("", "", "");
    EXPECT_OK(make(NULL, NULL, NULL, &e), &e);
    EXPECT(routes.serves);
    EXPECT_EQ(routes.count, 0);
    EXPECT_STATUS(admit("cpu7", ""), SHD_OK);
}

TEST(a_host_without_daemons_lets_nobody_in)
{
    struct shd_err e;
    hosts("", "", "");
    EXPECT_OK(make(NULL, "a:cpu0,cpu1", NULL, &e), &e);
    EXPECT(!routes.serves);
    EXPECT_EQ(routes.count, 2);
    is_routed("cpu1", "a");
    is_routed("cpu2", "-");
    EXPECT_STATUS(admit("cpu2", "no daemon for others"), SHD_ENOENT);
}

TEST(daemons_of_several_hosts_and_own_ones_at_once)
{
    struct shd_err e;
    hosts("", "", "");
    EXPECT_OK(make("cpu2,cpu4", "c:cpu3", "a:cpu0,cpu1", &e), &e);
    EXPECT(routes.serves);
    is_routed("cpu3", "c");
    is_routed("cpu0", "a");
    is_routed("cpu2", "-");
    EXPECT_STATUS(admit("cpu4", ""), SHD_OK);
    EXPECT_STATUS(admit("cpu5", "it has cpu2,cpu4"), SHD_ENOENT);
    EXPECT_STATUS(admit("cpu", "it has cpu2,cpu4"), SHD_ENOENT);
}

/* Two relays that stand in for each other's device would pass a worker on for ever. */
TEST(what_it_stands_in_for_nobody_else_gets_through_it)
{
    struct shd_err e;
    hosts("", "", "");
    EXPECT_OK(make("cpu2", "a:cpu0", NULL, &e), &e);
    EXPECT_STATUS(admit("cpu0", "is host 'a''s"), SHD_ENOENT);
}

TEST(the_file_says_it_all_where_it_names_devices)
{
    struct shd_err e;
    hosts("cpu0,cpu1", "cpu2", "cpu3");
    EXPECT_OK(make(NULL, NULL, NULL, &e), &e);
    EXPECT(routes.serves);
    EXPECT_EQ(routes.count, 3);
    is_routed("cpu0", "a");
    is_routed("cpu3", "c");
    EXPECT_STATUS(admit("cpu2", ""), SHD_OK);
    EXPECT_STATUS(admit("cpu3", "is host 'c''s"), SHD_ENOENT);
    EXPECT_OK(make(NULL, "a", NULL, &e), &e); /* this one alone, with what the file says */
    EXPECT_EQ(routes.count, 2);
    EXPECT_OK(make(NULL, "a:cpu1", NULL, &e), &e); /* and of that one a part */
    EXPECT_EQ(routes.count, 1);
    hosts("cpu0", "", "");
    EXPECT_OK(make(NULL, NULL, NULL, &e), &e); /* workers alone */
    EXPECT(!routes.serves);
    is_routed("cpu0", "a");
}

TEST(what_does_not_fit_is_refused_by_name)
{
    hosts("", "", "");
    is_refused(NULL, "x:cpu0", NULL, SHD_ENOENT, "no host 'x'");
    is_refused(NULL, ":cpu0", NULL, SHD_ENOENT, "no host ''");
    is_refused(NULL, "b:cpu0", NULL, SHD_EINVAL, "that is this host");
    is_refused(NULL, "a", NULL, SHD_EINVAL, "--from a:cpu0,cpu1");
    is_refused(NULL, "a:", NULL, SHD_EINVAL, "--from a:cpu0,cpu1");
    is_refused(NULL, "a:cpu0", "c:cpu0", SHD_EEXIST, "hosts 'a' and 'c' both have a device 'cpu0'");
    is_refused(NULL, "a:cpu0", "a:cpu0", SHD_EEXIST, "is named twice");
    is_refused(NULL, "a:cpu0,cpu0", NULL, SHD_EINVAL, "'cpu0' is in 'cpu0,cpu0' twice");
    is_refused("cpu0", "a:cpu0", NULL, SHD_EEXIST, "this host and 'a' both have a device 'cpu0'");
    is_refused(NULL, "a:../cpu0", NULL, SHD_EINVAL, "'../cpu0'");
    is_refused(NULL, "a:cpu0,", NULL, SHD_EINVAL, "''");
    is_refused("cpu0,,cpu1", NULL, NULL, SHD_EINVAL, "''");
    is_refused("CPU0", NULL, NULL, SHD_EINVAL, "'CPU0'");
    hosts("cpu0,cpu1", "cpu2", "");
    is_refused(NULL, "a:cpu7", NULL, SHD_ENOENT,
               "no device 'cpu7' in the cluster file: it has cpu0,cpu1");
    is_refused("cpu3", NULL, NULL, SHD_ENOENT, "host 'b' has no device 'cpu3'");
    is_refused(NULL, "c:cpu1", "a", SHD_EEXIST, "hosts 'c' and 'a' both have a device 'cpu1'");
}

TEST(more_devices_than_there_may_be_are_refused)
{
    char many[RELAY_DEVICES_MAX * 8] = "a:";
    struct shd_err e;
    hosts("", "", "");
    for (uint32_t i = 0; i <= RELAY_DEVICES_MAX; i++)
        snprintf(many + strlen(many), sizeof many - strlen(many), "%sd%u", i > 0 ? "," : "", i);
    EXPECT_STATUS(make(NULL, many, NULL, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "1024");
}

TEST(a_cluster_has_a_device_once)
{
    struct shd_err e = { 0 };
    char device[CLUSTER_DEVICE_BYTES];
    hosts("cpu0,cpu1", "", "");
    EXPECT_STATUS(add_host("d", "cpu5,cpu1", &e), SHD_EEXIST);
    EXPECT_HAS(e.text, "hosts 'a' and 'd' both have a device 'cpu1'");
    EXPECT_STATUS(add_host("d", "cpu5,cpu5", &e), SHD_EINVAL);
    EXPECT_STATUS(add_host("d", "cpu00000000000000000000", &e), SHD_EINVAL);
    EXPECT_OK(add_host("d", "cpu10,cpu", &e), &e); /* neither is a part of another name */
    EXPECT_STR(cluster_by_device(&cluster, "cpu10")->name, "d");
    EXPECT_STR(cluster_by_device(&cluster, "cpu1")->name, "a");
    EXPECT(cluster_by_device(&cluster, "cpu100") == NULL);
    EXPECT(cluster_by_device(&cluster, "") == NULL);
    const char *list = "cpu0,cpu1";
    EXPECT(cluster_next_device(&list, device));
    EXPECT_STR(device, "cpu0");
    EXPECT(cluster_next_device(&list, device));
    EXPECT_STR(device, "cpu1");
    EXPECT(!cluster_next_device(&list, device));
}

TEST(devices_of_a_file_come_back_as_they_were_written)
{
    static const char *const wrong[] = {
        "[\"cpu0\", 1]", "[\"cpu0\", \"\"]", "\"cpu0\"", "[\"cpu0,cpu1\"]", "[\"CPU\"]", "{}",
    };
    char path[64], text[512];
    struct cluster again;
    struct shd_err e = { 0 };
    snprintf(path, sizeof path, "/tmp/shd-routes.%d.json", (int)getpid());
    hosts("cpu0,cpu1", "", "gpu0");
    EXPECT_OK(cluster_save(path, &cluster, &e), &e);
    EXPECT_OK(cluster_load(path, &again, &e), &e);
    for (uint32_t i = 0; i < again.count; i++)
        EXPECT_STR(again.hosts[i].devices, cluster.hosts[i].devices);
    cluster_free(&again);
    for (uint32_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        FILE *file = fopen(path, "w");
        snprintf(
            text, sizeof text,
            "{\"hosts\":[{\"name\":\"a\",\"address\":\"a:1\",\"key\":\"%064d\",\"devices\":%s}]}",
            0, wrong[i]);
        EXPECT(fputs(text, file) >= 0);
        EXPECT(fclose(file) == 0);
        EXPECT_STATUS(cluster_load(path, &again, &e), SHD_EINVAL);
    }
    EXPECT(unlink(path) == 0);
}

TEST_MAIN()
