/* Addresses: the grammar, and listing a runtime directory. */
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/session/address.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "tests/lib/test.h"

static char dir[64];

static void make_dir(void)
{
    strcpy(dir, "/tmp/shd-address-XXXXXX");
    EXPECT(mkdtemp(dir) != NULL);
}

static void put_file(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    const int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    EXPECT(fd >= 0);
    close(fd);
}

static void remove_dir(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", dir);
    EXPECT_EQ(system(command), 0);
}

static int parse(const char *text, struct address *a, struct shd_err *e)
{
    *e = (struct shd_err){ 0 };
    return address_parse(text, a, e);
}

TEST(natural_order)
{
    static const char *const sorted[] = { "cpu",    "cpu0",  "cpu1", "cpu2",   "cpu9",   "cpu10",
                                          "cpu10a", "cpu11", "gpu0", "gpu0.1", "gpu00.2" };
    for (size_t i = 0; i < ARRAY_SIZE(sorted); i++)
        for (size_t j = 0; j < ARRAY_SIZE(sorted); j++) {
            const int order = address_compare(sorted[i], sorted[j]);
            EXPECT(i < j ? order < 0 : i > j ? order > 0 : order == 0);
        }
    EXPECT(address_compare("cpu1", "cpu01") != 0);
}

TEST(bare_directory_lists_its_daemons_in_order)
{
    struct address a;
    struct shd_err e;
    make_dir();
    put_file("cpu10.sock");
    put_file("cpu2.sock");
    put_file("cpu2.zmq");
    put_file("cpu2.lock");
    put_file(".hidden.sock");
    put_file(".sock");
    put_file("cpu0.sock");
    EXPECT_OK(parse(dir, &a, &e), &e);
    EXPECT_EQ(a.count, 3);
    EXPECT_STR(a.devices[0], "cpu0");
    EXPECT_STR(a.devices[1], "cpu2");
    EXPECT_STR(a.devices[2], "cpu10");
    EXPECT_STR(a.dir, dir);
    address_free(&a);
    address_free(&a);
    remove_dir();
}

TEST(device_list_keeps_its_order)
{
    struct address a;
    struct shd_err e;
    EXPECT_OK(parse("/run/x?cpu1,cpu0,gpu-0.a_b", &a, &e), &e);
    EXPECT(!a.local && a.count == 3);
    EXPECT_STR(a.devices[0], "cpu1");
    EXPECT_STR(a.devices[2], "gpu-0.a_b");
    EXPECT_STR(a.dir, "/run/x");
    address_free(&a);
}

TEST(local)
{
    struct address a;
    struct shd_err e;
    EXPECT_OK(parse("local:", &a, &e), &e);
    EXPECT(a.local && a.count == 0);
    address_free(&a);
    EXPECT_STATUS(parse("local:2", &a, &e), SHD_EINVAL);
}

TEST(null_is_the_environment_then_the_default)
{
    struct address a;
    struct shd_err e;
    setenv(ADDRESS_ENV, "local:", 1);
    EXPECT_OK(parse(NULL, &a, &e), &e);
    EXPECT(a.local);
    setenv(ADDRESS_ENV, "", 1);
    EXPECT(parse(NULL, &a, &e) != SHD_OK || strcmp(a.dir, ADDRESS_DEFAULT) == 0);
    unsetenv(ADDRESS_ENV);
}

TEST(bad_addresses_say_what_would_be_right)
{
    static const struct {
        const char *text;
        int status;
        const char *has;
    } cases[] = {
        { "?cpu0", SHD_EINVAL, "names no directory" },
        { "/run/x?", SHD_EINVAL, "DIR?cpu0,cpu1" },
        { "/run/x?cpu0,", SHD_EINVAL, "empty device name" },
        { "/run/x?cpu0,cpu0", SHD_EINVAL, "'cpu0' is in the address twice" },
        { "/run/x?cpu0/../y", SHD_EINVAL, "only letters" },
        { "/nowhere/at/all", SHD_ENOENT, "'/nowhere/at/all'" },
        { "/etc/passwd", SHD_ENOENT, "'/etc/passwd'" },
    };
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        struct address a = { .count = 99 };
        struct shd_err e;
        EXPECT_STATUS(parse(cases[i].text, &a, &e), cases[i].status);
        EXPECT_HAS(e.text, cases[i].has);
        EXPECT_EQ(a.count, 99);
    }
}

TEST(empty_directory_names_the_command)
{
    struct address a;
    struct shd_err e;
    make_dir();
    EXPECT_STATUS(parse(dir, &a, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, "shardd --device cpu0 --runtime-dir");
    EXPECT_HAS(e.text, dir);
    remove_dir();
}

TEST(socket_paths_have_a_limit)
{
    struct address a;
    struct shd_err e;
    char text[200];
    snprintf(text, sizeof text, "/%0100d?cpu0", 0); /* 101 + "/cpu0.sock" */
    EXPECT_STATUS(parse(text, &a, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "at most 107");
}

static int fail_at;

static int fail_nth(enum sys_kind kind)
{
    return kind == SYS_ALLOC && --fail_at == 0 ? ENOMEM : 0;
}

TEST(nth_failed_allocation_is_an_error)
{
    int n = 0, r;
    do {
        struct address a = { 0 };
        struct shd_err e;
        fail_at = ++n;
        sys_fault = fail_nth;
        r = parse("/run/x?cpu0,cpu1", &a, &e);
        sys_fault = NULL;
        EXPECT(r == SHD_OK || r == SHD_ENOMEM);
        address_free(&a);
    } while (r != SHD_OK);
    EXPECT(n > 4);
}

TEST_MAIN()
