/* replicas.json: what `shardctl host` writes is what clients read, and nothing else is taken. */
#include "proto/files/replicas.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/files/arbiter.h"
#include "tests/lib/test.h"

static char dir[64], path[96];

static void clean_up(void)
{
    if (dir[0] == '\0')
        return;
    unlink(path);
    rmdir(path);
    rmdir(dir);
    dir[0] = '\0';
}

static void begin(void)
{
    snprintf(dir, sizeof dir, "/tmp/shd-replicas-XXXXXX");
    CHECK(mkdtemp(dir) != NULL);
    test_clean_up = clean_up;
    snprintf(path, sizeof path, "%s/" REPLICAS_FILE, dir);
}

static void add_host(struct cluster *c, const char *name, const char *devices, uint8_t key)
{
    struct shd_err e = { 0 };
    struct cluster_host host = { .address = "127.0.0.1:1", .key = { key } };
    snprintf(host.name, sizeof host.name, "%s", name);
    snprintf(host.devices, sizeof host.devices, "%s", devices);
    EXPECT_OK(cluster_add(c, &host, &e), &e);
}

TEST(what_is_written_is_read)
{
    struct cluster c = { 0 };
    struct replicas r = { 0 }, got = { 0 };
    struct shd_err e = { 0 };
    struct stat st;
    begin();
    add_host(&c, "b", "cpu2", 2);
    add_host(&c, "workers", "", 3);
    add_host(&c, "a", "cpu0,cpu1", 1);
    EXPECT_OK(replicas_of(&c, "file:/shared/\"quoted\"", &r, &e), &e);
    EXPECT_EQ(r.host_count, 2);
    EXPECT_EQ(r.device_count, 3);
    EXPECT_EQ(strlen(r.cluster), 16);
    umask(077); /* the directory says who may read it */
    EXPECT_OK(replicas_write(dir, &r, &e), &e);
    EXPECT(stat(path, &st) == 0 && (st.st_mode & 07777) == 0640);
    EXPECT_OK(replicas_write(dir, &r, &e), &e); /* in the other's place */
    EXPECT_OK(replicas_read(dir, &got, &e), &e);
    EXPECT_STR(got.arbiter, "file:/shared/\"quoted\"");
    EXPECT_STR(got.cluster, r.cluster);
    EXPECT(got.host_count == 2 && got.device_count == 3);
    EXPECT(memcmp(got.hosts, r.hosts, 2 * sizeof *r.hosts) == 0);
    EXPECT_STR(got.hosts[0].name, "a");
    EXPECT_STR(got.hosts[0].devices, "cpu0,cpu1");
    EXPECT_STR(replicas_host_of(&got, "cpu1")->name, "a");
    EXPECT_STR(replicas_host_of(&got, "cpu2")->name, "b");
    EXPECT(replicas_host_of(&got, "cpu") == NULL && replicas_host_of(&got, "cpu3") == NULL);
    EXPECT(replicas_by_name(&got, "b") == &got.hosts[1]);
    EXPECT(replicas_by_name(&got, "workers") == NULL);
    replicas_free(&got);
    replicas_free(&r);
    cluster_free(&c);
    clean_up();
}

/* The name at the arbiter is that of the hosts with devices, in whatever order a file has them. */
TEST(name_of_a_cluster_is_its_hosts_with_devices)
{
    struct cluster c = { 0 };
    struct replicas one = { 0 }, other = { 0 };
    struct shd_err e = { 0 };
    struct arbiter *arbiter;
    add_host(&c, "a", "cpu0", 1);
    EXPECT_OK(cluster_remove(&c, "a", &e), &e);
    EXPECT_STATUS(replicas_of(&c, "file:/x", &one, &e), SHD_EINVAL);
    add_host(&c, "w", "", 9);
    EXPECT_STATUS(replicas_of(&c, "file:/x", &one, &e), SHD_EINVAL);
    EXPECT_HAS(e.text, "names no devices");
    add_host(&c, "a", "cpu0", 1);
    add_host(&c, "b", "cpu1", 2);
    EXPECT_OK(replicas_of(&c, "file:/x", &one, &e), &e);
    EXPECT_OK(arbiter_open(one.arbiter, one.cluster, &arbiter, &e), &e);
    arbiter_close(arbiter);
    cluster_free(&c);
    add_host(&c, "b", "cpu1", 2);
    add_host(&c, "a", "cpu0", 1);
    EXPECT_OK(replicas_of(&c, "file:/y", &other, &e), &e);
    EXPECT_STR(one.cluster, other.cluster);
    replicas_free(&other);
    c.hosts[0].key[31] ^= 1;
    EXPECT_OK(replicas_of(&c, "file:/x", &other, &e), &e);
    EXPECT(strcmp(one.cluster, other.cluster) != 0);
    replicas_free(&other);
    replicas_free(&one);
    cluster_free(&c);
}

#define ALL(hosts) \
    "{\"schema\": 1, \"arbiter\": \"file:/x\", \"cluster\": \"c\", \"hosts\": " hosts "}"

static const struct {
    const char *text;
    int code;
    const char *says;
} wrong[] = {
    { "", SHD_EINVAL, "line 1" },
    { "{\"schema\": 1, \"arbiter\": \"file", SHD_EINVAL, "line 1" },
    { ALL("[{\"name\": \"a\", \"devices\": [\"cpu0\"]}]") " x", SHD_EINVAL,
      "end of file expected" },
    { "[]", SHD_EINVAL, "its 'schema' is not 1" },
    { "{\"schema\": true, \"arbiter\": \"file:/x\", \"cluster\": \"c\", \"hosts\": []}", SHD_EINVAL,
      "its 'schema' is not 1" },
    { "{\"schema\": 2, \"arbiter\": \"file:/x\", \"cluster\": \"c\", \"hosts\": []}", SHD_EINVAL,
      "it is of another build" },
    { "{\"schema\": 1, \"schema\": 1}", SHD_EINVAL, "duplicate" },
    { "{\"schema\": 1, \"arbiter\": 7, \"cluster\": \"c\", \"hosts\": []}", SHD_EINVAL,
      "it is no object of" },
    { "{\"schema\": 1, \"arbiter\": \"file:/x\", \"hosts\": []}", SHD_EINVAL,
      "it is no object of" },
    { "{\"schema\": 1, \"arbiter\": \"file:/x\", \"cluster\": \"c\", \"hosts\": [], \"more\": 1}",
      SHD_EINVAL, "it is no object of" },
    { "{\"schema\": 1, \"arbiter\": \"file:/x\", \"cluster\": \"../c\", \"hosts\": []}", SHD_EINVAL,
      "its 'cluster' is '../c'" },
    { ALL("{}"), SHD_EINVAL, "its 'hosts' is no array" },
    { ALL("[]"), SHD_EINVAL, "its 'hosts' is no array" },
    { ALL("[1]"), SHD_EINVAL, "hosts[0] is no object of name and devices" },
    { ALL("[{\"name\": \"a\"}]"), SHD_EINVAL, "hosts[0] is no object of name and devices" },
    { ALL("[{\"name\": \"a\", \"devices\": [\"cpu0\"], \"key\": 1}]"), SHD_EINVAL,
      "hosts[0] is no object" },
    { ALL("[{\"name\": \"a/b\", \"devices\": [\"cpu0\"]}]"), SHD_EINVAL, "hosts[0].name is 'a/b'" },
    { ALL("[{\"name\": \"\", \"devices\": [\"cpu0\"]}]"), SHD_EINVAL, "hosts[0].name is ''" },
    { ALL("[{\"name\": \"a\", \"devices\": \"cpu0\"}]"), SHD_EINVAL,
      "hosts[0].devices is no array" },
    { ALL("[{\"name\": \"a\", \"devices\": []}]"), SHD_EINVAL, "hosts[0].devices is no array" },
    { ALL("[{\"name\": \"a\", \"devices\": [3]}]"), SHD_EINVAL,
      "hosts[0].devices[0] is no device" },
    { ALL("[{\"name\": \"a\", \"devices\": [\"cpu0,cpu1\"]}]"), SHD_EINVAL,
      "hosts[0].devices[0] is no device" },
    { ALL("[{\"name\": \"a\", \"devices\": [\"../cpu0\"]}]"), SHD_EINVAL, "no device's name" },
    { ALL("[{\"name\": \"a\", \"devices\": [\"cpu0+cpu1\"]}]"), SHD_EINVAL, "no device's name" },
    { ALL("[{\"name\": \"a\", \"devices\": [\"cpu0\", \"cpu0\"]}]"), SHD_EINVAL, "twice" },
    { ALL("[{\"name\": \"a\", \"devices\": [\"cpu0\"]}, {\"name\": \"b\", \"devices\": "
          "[\"cpu0\"]}]"),
      SHD_EINVAL, "hosts 'a' and 'b' both have a device 'cpu0'" },
    { ALL("[{\"name\": \"b\", \"devices\": [\"cpu0\"]}, {\"name\": \"a\", \"devices\": "
          "[\"cpu1\"]}]"),
      SHD_EINVAL, "hosts[1] is 'a' behind 'b'" },
    { ALL("[{\"name\": \"a\", \"devices\": [\"cpu0\"]}, {\"name\": \"a\", \"devices\": "
          "[\"cpu1\"]}]"),
      SHD_EINVAL, "hosts[1] is 'a' behind 'a'" },
};

TEST(what_is_malformed_is_refused_by_name)
{
    struct replicas r = { 0 };
    struct shd_err e = { 0 };
    begin();
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        FILE *f = fopen(path, "w");
        CHECK(f != NULL && fputs(wrong[i].text, f) >= 0 && fclose(f) == 0);
        const int code = replicas_read(dir, &r, &e);
        if (code != wrong[i].code || strstr(e.text, wrong[i].says) == NULL)
            FAIL("%s: %s: %s", wrong[i].text, status_name(code), e.text);
        EXPECT_HAS(e.text, path);
    }
    clean_up();
}

static char *many_hosts(uint32_t hosts, uint32_t devices)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    CHECK(f != NULL);
    fputs("{\"schema\": 1, \"arbiter\": \"file:/x\", \"cluster\": \"c\", \"hosts\": [", f);
    for (uint32_t i = 0; i < hosts; i++) {
        fprintf(f, "%s{\"name\": \"h%04u\", \"devices\": [", i > 0 ? "," : "", i);
        for (uint32_t k = 0; k < devices; k++)
            fprintf(f, "%s\"cpu%u\"", k > 0 ? "," : "", i * devices + k);
        fputs("]}", f);
    }
    fputs("]}", f);
    CHECK(fclose(f) == 0);
    return text;
}

TEST(more_than_a_cluster_has_is_refused)
{
    static const struct {
        uint32_t hosts, devices;
        int code;
        const char *says;
    } sizes[] = {
        { 1024, 1, SHD_OK, "" },
        { 16, 64, SHD_OK, "" },
        { 1025, 1, SHD_ERANGE, "1 to 1024 hosts" },
        { 2, 513, SHD_ERANGE, "of more than 511 bytes" },
        { 25, 41, SHD_ERANGE, "more than 1024 devices" },
    };
    struct replicas r = { 0 };
    struct shd_err e = { 0 };
    for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
        char *text = many_hosts(sizes[i].hosts, sizes[i].devices);
        EXPECT_STATUS(replicas_parse(text, strlen(text), &r, &e), sizes[i].code);
        if (sizes[i].code != SHD_OK)
            EXPECT_HAS(e.text, sizes[i].says);
        free(text);
        replicas_free(&r);
    }
    char *text = malloc(REPLICAS_ARBITER_MAX + 128);
    const int head = sprintf(text, "{\"schema\": 1, \"arbiter\": \"");
    memset(text + head, 'x', REPLICAS_ARBITER_MAX + 1);
    strcpy(text + head + REPLICAS_ARBITER_MAX + 1, "\", \"cluster\": \"c\", \"hosts\": []}");
    EXPECT_STATUS(replicas_parse(text, strlen(text), &r, &e), SHD_ERANGE);
    EXPECT_HAS(e.text, "its 'arbiter' has 8193 bytes");
    free(text);
}

TEST(no_file_and_what_is_no_file)
{
    struct replicas r = { 0 };
    struct shd_err e = { 0 };
    begin();
    EXPECT_STATUS(replicas_read(dir, &r, &e), SHD_ENOENT);
    EXPECT_HAS(e.text, dir);
    EXPECT_STATUS(replicas_read("/nonexistent", &r, &e), SHD_ENOENT);
    CHECK(symlink("/etc/passwd", path) == 0);
    EXPECT_STATUS(replicas_read(dir, &r, &e), SHD_EIO);
    CHECK(unlink(path) == 0 && mkfifo(path, 0600) == 0);
    EXPECT_STATUS(replicas_read(dir, &r, &e), SHD_EINVAL);
    CHECK(unlink(path) == 0);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && ftruncate(fileno(f), (1 << 20) + 1) == 0 && fclose(f) == 0);
    EXPECT_STATUS(replicas_read(dir, &r, &e), SHD_ERANGE);
    clean_up();
}

static atomic_int calls, fails_at;

static int fail_rename(enum sys_kind kind)
{
    return kind == SYS_RENAME ? ENOSPC : 0;
}

static int fail_nth(enum sys_kind kind)
{
    return kind == SYS_ALLOC && atomic_fetch_add(&calls, 1) == atomic_load(&fails_at) ? ENOMEM : 0;
}

TEST(failures_leave_the_file_as_it_was)
{
    struct cluster c = { 0 };
    struct replicas r = { 0 }, got = { 0 };
    struct shd_err e = { 0 };
    begin();
    add_host(&c, "a", "cpu0", 1);
    add_host(&c, "b", "cpu1", 2);
    for (int at = 0;; at++) {
        calls = 0;
        fails_at = at;
        sys_fault = fail_nth;
        const int code = replicas_of(&c, "file:/x", &r, &e);
        sys_fault = NULL;
        if (code == SHD_OK)
            break;
        EXPECT_EQ(code, SHD_ENOMEM);
    }
    EXPECT_OK(replicas_write(dir, &r, &e), &e);
    strcpy(r.cluster, "other");
    sys_fault = fail_rename;
    EXPECT_STATUS(replicas_write(dir, &r, &e), SHD_EIO);
    EXPECT_HAS(e.text, "No space left");
    sys_fault = NULL;
    for (int at = 0;; at++) {
        calls = 0;
        fails_at = at;
        sys_fault = fail_nth;
        const int code = replicas_read(dir, &got, &e);
        sys_fault = NULL;
        if (code == SHD_OK)
            break;
        EXPECT_EQ(code, SHD_ENOMEM);
    }
    EXPECT(strcmp(got.cluster, "other") != 0);
    replicas_free(&got);
    replicas_free(&r);
    cluster_free(&c);
    CHECK(unlink(path) == 0 && rmdir(dir) == 0); /* nothing is left beside it */
    dir[0] = '\0';
}

TEST_MAIN()
