/* See memory.h. */
#include "proto/base/memory.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PATH_SHOWN 64u
#define UNLIMITED  (UINT64_C(1) << 62) /* version 1 writes "no limit" as 2^63 less a page */

/* A limit and the usage that counts towards it, of one version. */
struct limit_files {
    const char *limit, *usage;
};

struct version {
    const char *fstype;
    struct limit_files limits[2];
    const char *cache[2],
        *busy[2]; /* of memory.stat: file pages, and those of them to be written */
};

static const struct version versions[] = {
    { "cgroup2",
      { { "memory.max", "memory.current" }, { "memory.high", "memory.current" } },
      { "inactive_file", "active_file" },
      { "file_dirty", "file_writeback" } },
    { "cgroup",
      { { "memory.limit_in_bytes", "memory.usage_in_bytes" },
        { "memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes" } },
      { "total_inactive_file", "total_active_file" },
      { "total_dirty", "total_writeback" } },
};

static void ignore(struct memory_room *room, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

static void ignore(struct memory_room *room, const char *fmt, ...)
{
    va_list args;
    if (room->ignored[0] != '\0')
        return; /* the first says enough */
    va_start(args, fmt);
    vsnprintf(room->ignored, sizeof room->ignored, fmt, args);
    va_end(args);
}

static FILE *open_below(const char *root, const char *path)
{
    char name[PATH_MAX];
    const int n = snprintf(name, sizeof name, "%s%s", root, path);
    return n > 0 && (size_t)n < sizeof name ? fopen(name, "re") : NULL;
}

static uint64_t host_available(const char *root)
{
    FILE *f = open_below(root, "/proc/meminfo");
    if (f == NULL)
        return UINT64_MAX;
    char line[128];
    uint64_t kib = UINT64_MAX;
    while (fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) == 1)
            break;
    fclose(f);
    return kib < UINT64_MAX / 1024 ? kib * 1024 : UINT64_MAX;
}

/* A file with one number or "max". False: it is not there, or it is malformed (which is noted). */
static bool read_number(const char *root, const char *dir, const char *name,
                        struct memory_room *room, uint64_t *ret_n)
{
    char path[PATH_MAX], text[64] = "", *end;
    const int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = n > 0 && (size_t)n < sizeof path ? open_below(root, path) : NULL;
    if (f == NULL)
        return false;
    const bool got = fgets(text, sizeof text, f) != NULL;
    fclose(f);
    text[strcspn(text, "\n")] = '\0';
    if (got && strcmp(text, "max") == 0) {
        *ret_n = UINT64_MAX;
        return true;
    }
    errno = 0;
    *ret_n = strtoull(text, &end, 10);
    if (text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0)
        return true;
    ignore(room, "'%.300s' says '%.60s', neither a number nor max", path, text);
    return false;
}

/* Bytes that the kernel takes back before anything else: clean pages of files. */
static uint64_t reclaimable(const char *root, const char *dir, const struct version *v)
{
    char path[PATH_MAX], line[256], key[128];
    uint64_t n, cache = 0, busy = 0;
    const int chars = snprintf(path, sizeof path, "%s/memory.stat", dir);
    FILE *f = chars > 0 && (size_t)chars < sizeof path ? open_below(root, path) : NULL;
    if (f == NULL)
        return 0;
    while (fgets(line, sizeof line, f) != NULL) {
        if (sscanf(line, "%127s %" SCNu64, key, &n) != 2)
            continue;
        for (int i = 0; i < 2; i++) {
            cache += strcmp(key, v->cache[i]) == 0 ? n : 0;
            busy += strcmp(key, v->busy[i]) == 0 ? n : 0;
        }
    }
    fclose(f);
    return cache > busy ? cache - busy : 0;
}

/* The limits of one cgroup. */
static void look_at(const char *root, const char *dir, const struct version *v,
                    struct memory_room *room)
{
    for (int i = 0; i < 2; i++) {
        uint64_t limit, used;
        if (!read_number(root, dir, v->limits[i].limit, room, &limit) || limit >= UNLIMITED ||
            !read_number(root, dir, v->limits[i].usage, room, &used))
            continue;
        const uint64_t cache = reclaimable(root, dir, v);
        used -= used < cache ? used : cache;
        const uint64_t left = limit > used ? limit - used : 0;
        if (room->limit_bytes != UINT64_MAX && left >= room->cgroup_bytes)
            continue;
        room->limit_bytes = limit;
        room->used_bytes = used;
        room->cgroup_bytes = left;
        snprintf(room->limit_path, sizeof room->limit_path, "%.400s/%s", dir, v->limits[i].limit);
    }
}

/* A path of mountinfo: space, tab, newline and backslash stand there as three octal digits. */
static void unescape(char *text)
{
    char *to = text;
    for (const char *from = text; *from != '\0'; to++) {
        unsigned code;
        if (from[0] == '\\' && sscanf(from + 1, "%3o", &code) == 1) {
            *to = (char)code;
            from += 4;
        } else {
            *to = *from++;
        }
    }
    *to = '\0';
}

static bool has_word(const char *list, const char *word)
{
    const size_t chars = strlen(word);
    for (const char *at = list; at != NULL; at = strchr(at, ',')) {
        at += *at == ',';
        if (strncmp(at, word, chars) == 0 && (at[chars] == ',' || at[chars] == '\0'))
            return true;
    }
    return false;
}

/* The path of this process's cgroup in that version's hierarchy: "ID:CONTROLLERS:PATH", version 2
 * without an ID of its own and without controllers. False: it has none. */
static bool own_path(const char *root, bool second, char path[PATH_MAX], struct memory_room *room)
{
    FILE *f = open_below(root, "/proc/self/cgroup");
    if (f == NULL)
        return false;
    char line[PATH_MAX + 256];
    bool found = false;
    while (!found && fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        char *list = strchr(line, ':');
        char *at = list != NULL ? strchr(list + 1, ':') : NULL;
        if (at == NULL || at[1] != '/') {
            ignore(room, "'/proc/self/cgroup' says '%.100s', not ID:CONTROLLERS:PATH", line);
            continue;
        }
        *list++ = *at++ = '\0';
        if (second ? strcmp(line, "0") == 0 && *list == '\0' : has_word(list, "memory")) {
            found = true;
            snprintf(path, PATH_MAX, "%.*s", PATH_MAX - 1, at);
        }
    }
    fclose(f);
    return found;
}

struct mount {
    char root[PATH_MAX];  /* the cgroup that is mounted: "/", in a container perhaps another */
    char point[PATH_MAX]; /* where */
};

/* Whether a line of mountinfo is the mount of that version's memory hierarchy: "ID PARENT DEVICE
 * ROOT POINT OPTIONS [FIELD...] - TYPE SOURCE OPTIONS". */
static bool parse_mount(const char *line, const struct version *v, bool second, struct mount *ret)
{
    char type[64], options[1024];
    const char *rest = strstr(line, " - ");
    if (rest == NULL || sscanf(rest, " - %63s %*s %1023s", type, options) != 2 ||
        strcmp(type, v->fstype) != 0 || (!second && !has_word(options, "memory")))
        return false;
    if (sscanf(line, "%*s %*s %*s %4095s %4095s", ret->root, ret->point) != 2)
        return false;
    unescape(ret->root);
    unescape(ret->point);
    return true;
}

static bool find_mount(const char *root, const struct version *v, bool second, struct mount *ret)
{
    FILE *f = open_below(root, "/proc/self/mountinfo");
    if (f == NULL)
        return false;
    char *line = NULL;
    size_t bytes = 0;
    bool found = false;
    while (!found && getline(&line, &bytes, f) > 0)
        found = parse_mount(line, v, second, ret);
    free(line);
    fclose(f);
    return found;
}

/* The part of the process's path below what is mounted; "" when it lies elsewhere: then the mounted
 * one is the nearest that is visible. */
static const char *below_mount(const char *path, const char *mounted)
{
    const size_t chars = strcmp(mounted, "/") == 0 ? 0 : strlen(mounted);
    if (strncmp(path, mounted, chars) != 0 || (path[chars] != '/' && path[chars] != '\0') ||
        strstr(path, "/..") != NULL)
        return "";
    return strcmp(path + chars, "/") == 0 ? "" : path + chars;
}

static void look_at_version(const char *root, const struct version *v, struct memory_room *room)
{
    const bool second = v == &versions[0];
    char path[PATH_MAX], dir[2 * PATH_MAX];
    struct mount mount;
    if (!own_path(root, second, path, room) || !find_mount(root, v, second, &mount))
        return;
    const size_t top = strlen(mount.point);
    snprintf(dir, sizeof dir, "%s%s", mount.point, below_mount(path, mount.root));
    for (;;) {
        look_at(root, dir, v, room);
        char *slash = strrchr(dir, '/');
        if (slash == NULL || (size_t)(slash - dir) < top)
            return;
        *slash = '\0';
    }
}

void memory_room_below(const char *root, struct memory_room *ret_room)
{
    struct memory_room room = { .host_bytes = host_available(root),
                                .limit_bytes = UINT64_MAX,
                                .cgroup_bytes = UINT64_MAX };
    for (size_t i = 0; i < sizeof versions / sizeof *versions; i++)
        look_at_version(root, &versions[i], &room);
    room.bytes = room.host_bytes < room.cgroup_bytes ? room.host_bytes : room.cgroup_bytes;
    *ret_room = room;
}

const char *memory_room_text(const struct memory_room *room, char buf[MEMORY_TEXT_BYTES])
{
    const size_t chars = strlen(room->limit_path);
    const bool long_path = chars > PATH_SHOWN;
    if (room->limit_bytes != UINT64_MAX && room->cgroup_bytes <= room->host_bytes)
        snprintf(buf, MEMORY_TEXT_BYTES,
                 "%" PRIu64 " MiB are free: %" PRIu64 " of %" PRIu64 " MiB are used, by %s%.*s",
                 room->bytes >> 20, room->used_bytes >> 20, room->limit_bytes >> 20,
                 long_path ? "..." : "", (int)PATH_SHOWN,
                 long_path ? room->limit_path + chars - PATH_SHOWN : room->limit_path);
    else
        snprintf(buf, MEMORY_TEXT_BYTES, "%" PRIu64 " MiB are free on this host",
                 room->bytes >> 20);
    return buf;
}
