/* How much memory may be taken (proto/base/memory.h), on trees of files as kernels show them. */
#include <stdarg.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/check.h"
#include "proto/base/memory.h"
#include "tests/lib/test.h"

#define MIB (UINT64_C(1) << 20)

static char root[64];

static void run_shell(const char *fmt, const char *path)
{
    char command[400];
    snprintf(command, sizeof command, fmt, path);
    CHECK(system(command) == 0);
}

/* Put a file below the root; the folders on its way are made. */
static void put(const char *path, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void put(const char *path, const char *fmt, ...)
{
    char name[300];
    va_list args;
    snprintf(name, sizeof name, "%s%s", root, path);
    for (char *at = name + strlen(root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        mkdir(name, 0700);
        *at = '/';
    }
    FILE *f = fopen(name, "we");
    CHECK(f != NULL);
    va_start(args, fmt);
    vfprintf(f, fmt, args);
    va_end(args);
    fclose(f);
}

/* An empty root with a host of 1000 MiB available, a process in `cgroup`, and these mounts. */
static void begin(const char *cgroup, const char *mounts)
{
    const char *base = getenv("TMPDIR");
    snprintf(root, sizeof root, "%.40s/shd-memory-XXXXXX", base != NULL ? base : "/tmp");
    CHECK(mkdtemp(root) != NULL);
    put("/proc/meminfo", "MemTotal: 4096000 kB\nMemFree: 5 kB\nMemAvailable: %" PRIu64 " kB\n",
        1000 * MIB / 1024);
    put("/proc/self/cgroup", "%s", cgroup);
    put("/proc/self/mountinfo", "22 1 254:0 / / rw - ext4 /dev/vda rw\n%s", mounts);
}

static struct memory_room room_of(void)
{
    struct memory_room room;
    memory_room_below(root, &room);
    run_shell("rm -rf '%s'", root);
    return room;
}

#define V2 "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
#define V1 "33 31 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"

TEST(without_cgroups_the_host_is_the_limit)
{
    char text[MEMORY_TEXT_BYTES];
    begin("", "");
    struct memory_room room = room_of();
    EXPECT_EQ(room.bytes, 1000 * MIB);
    EXPECT_EQ(room.limit_bytes, UINT64_MAX);
    EXPECT_STR(room.ignored, "");
    EXPECT_STR(memory_room_text(&room, text), "1000 MiB are free on this host");
    snprintf(root, sizeof root, "/nowhere");
    memory_room_below(root, &room);
    EXPECT_EQ(room.bytes, UINT64_MAX);
}

TEST(smallest_room_of_all_ancestors_counts)
{
    char text[MEMORY_TEXT_BYTES];
    begin("0::/a/b/c\n", V2);
    put("/sys/fs/cgroup/a/b/c/memory.max", "max\n");
    put("/sys/fs/cgroup/a/b/c/memory.current", "1000\n");
    put("/sys/fs/cgroup/a/b/memory.max", "%" PRIu64 "\n", 700 * MIB);
    put("/sys/fs/cgroup/a/b/memory.current", "%" PRIu64 "\n", 100 * MIB);
    put("/sys/fs/cgroup/a/memory.max", "%" PRIu64 "\n", 900 * MIB);
    put("/sys/fs/cgroup/a/memory.current", "%" PRIu64 "\n", 608 * MIB);
    const struct memory_room room = room_of();
    EXPECT_EQ(room.bytes, 292 * MIB);
    EXPECT_EQ(room.host_bytes, 1000 * MIB);
    EXPECT_STR(room.limit_path, "/sys/fs/cgroup/a/memory.max");
    EXPECT_STR(memory_room_text(&room, text),
               "292 MiB are free: 608 of 900 MiB are used, by /sys/fs/cgroup/a/memory.max");
}

TEST(clean_file_cache_is_no_usage)
{
    begin("0::/a\n", V2);
    put("/sys/fs/cgroup/a/memory.max", "%" PRIu64 "\n", 500 * MIB);
    put("/sys/fs/cgroup/a/memory.current", "%" PRIu64 "\n", 480 * MIB);
    put("/sys/fs/cgroup/a/memory.stat",
        "anon 4096\nfile %" PRIu64 "\nshmem %" PRIu64 "\nfile_dirty %" PRIu64
        "\nfile_writeback %" PRIu64 "\ninactive_file %" PRIu64 "\nactive_file %" PRIu64 "\n",
        400 * MIB, 300 * MIB, 10 * MIB, 5 * MIB, 60 * MIB, 40 * MIB);
    const struct memory_room room = room_of();
    EXPECT_EQ(room.used_bytes, (480 - 85) * MIB);
    EXPECT_EQ(room.bytes, (20 + 85) * MIB);
}

TEST(high_is_a_limit_too_and_usage_above_it_leaves_nothing)
{
    begin("0::/a\n", V2);
    put("/sys/fs/cgroup/a/memory.max", "max\n");
    put("/sys/fs/cgroup/a/memory.high", "%" PRIu64 "\n", 64 * MIB);
    put("/sys/fs/cgroup/a/memory.current", "%" PRIu64 "\n", 65 * MIB);
    const struct memory_room room = room_of();
    EXPECT_EQ(room.bytes, 0);
    EXPECT_STR(room.limit_path, "/sys/fs/cgroup/a/memory.high");
}

TEST(version_1_with_its_ancestors)
{
    begin("9:name=systemd:/x\n8:cpu,memory:/a b/c\n0::/\n",
          V1 "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "7\n");
    put("/sys/fs/cgroup/memory/a b/memory.limit_in_bytes", "%" PRIu64 "\n", 200 * MIB);
    put("/sys/fs/cgroup/memory/a b/memory.usage_in_bytes", "%" PRIu64 "\n", 150 * MIB);
    put("/sys/fs/cgroup/memory/a b/memory.stat",
        "inactive_file 1\ntotal_inactive_file %" PRIu64 "\ntotal_active_file 0\ntotal_dirty 0\n",
        30 * MIB);
    put("/sys/fs/cgroup/memory/a b/c/memory.limit_in_bytes", "9223372036854771712\n");
    put("/sys/fs/cgroup/memory/a b/c/memory.usage_in_bytes", "7\n");
    const struct memory_room room = room_of();
    EXPECT_EQ(room.bytes, 80 * MIB);
    EXPECT_STR(room.limit_path, "/sys/fs/cgroup/memory/a b/memory.limit_in_bytes");
    EXPECT_STR(room.ignored, "");
}

TEST(swap_counts_where_version_1_limits_both)
{
    begin("8:memory:/a\n", V1);
    put("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "%" PRIu64 "\n", 200 * MIB);
    put("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "%" PRIu64 "\n", 100 * MIB);
    put("/sys/fs/cgroup/memory/a/memory.memsw.limit_in_bytes", "%" PRIu64 "\n", 200 * MIB);
    put("/sys/fs/cgroup/memory/a/memory.memsw.usage_in_bytes", "%" PRIu64 "\n", 190 * MIB);
    EXPECT_EQ(room_of().bytes, 10 * MIB);
}

TEST(container_sees_its_own_cgroup_as_the_mount)
{
    begin("0::/docker/abc/job\n",
          "31 23 0:28 /docker/abc /sys/fs/my\\040cgroup ro - cgroup2 cgroup2 rw\n");
    put("/sys/fs/my cgroup/memory.max", "%" PRIu64 "\n", 300 * MIB);
    put("/sys/fs/my cgroup/memory.current", "%" PRIu64 "\n", 40 * MIB);
    put("/sys/fs/my cgroup/job/memory.max", "%" PRIu64 "\n", 100 * MIB);
    put("/sys/fs/my cgroup/job/memory.current", "%" PRIu64 "\n", 40 * MIB);
    const struct memory_room room = room_of();
    EXPECT_EQ(room.bytes, 60 * MIB);
    EXPECT_STR(room.limit_path, "/sys/fs/my cgroup/job/memory.max");
}

TEST(path_outside_the_mount_counts_by_what_is_visible)
{
    static const char *const paths[] = { "0::/docker/abcdef\n", "0::/../../x\n", "0::/\n" };
    for (size_t i = 0; i < ARRAY_SIZE(paths); i++) {
        begin(paths[i], "31 23 0:28 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n");
        put("/sys/fs/cgroup/memory.max", "%" PRIu64 "\n", 300 * MIB);
        put("/sys/fs/cgroup/memory.current", "0\n");
        EXPECT_EQ(room_of().bytes, 300 * MIB);
    }
}

TEST(malformed_files_are_ignored_and_named)
{
    static const char *const bad[] = { "12x\n", "-5\n", "\n", "", "99999999999999999999999\n" };
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        begin("0::/a\n", V2);
        put("/sys/fs/cgroup/a/memory.max", "%s", bad[i]);
        put("/sys/fs/cgroup/a/memory.current", "0\n");
        const struct memory_room room = room_of();
        EXPECT_EQ(room.bytes, 1000 * MIB);
        EXPECT_HAS(room.ignored, "/sys/fs/cgroup/a/memory.max");
    }
    begin("nonsense\n0::/a\n", V2 "garbage without a dash\n");
    put("/sys/fs/cgroup/a/memory.max", "%" PRIu64 "\n", 10 * MIB);
    put("/sys/fs/cgroup/a/memory.current", "0\n");
    struct memory_room room = room_of();
    EXPECT_EQ(room.bytes, 10 * MIB);
    EXPECT_HAS(room.ignored, "nonsense");
    begin("0::/a\n", V2); /* a limit without a usage is none */
    put("/sys/fs/cgroup/a/memory.max", "%" PRIu64 "\n", 10 * MIB);
    EXPECT_EQ(room_of().bytes, 1000 * MIB);
}

TEST(long_path_shows_its_end)
{
    char text[MEMORY_TEXT_BYTES];
    struct memory_room room = { .bytes = MIB,
                                .host_bytes = 2 * MIB,
                                .limit_bytes = 3 * MIB,
                                .used_bytes = 2 * MIB,
                                .cgroup_bytes = MIB };
    memset(room.limit_path, 'a', 300);
    strcpy(room.limit_path + 300, "/end/memory.max");
    EXPECT_HAS(memory_room_text(&room, text), "...aaa");
    EXPECT_HAS(text, "/end/memory.max");
}

TEST_MAIN()
