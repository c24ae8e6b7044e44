/* See where.h. */
#include "client/session/where.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/base/dir.h"

#define NAMED_MAX 3u /* of several */

bool where_base(unsigned index, char *buf, size_t bytes)
{
    const char *xdg = getenv("XDG_RUNTIME_DIR");
    const char *home = getenv("HOME");
    int n = -1;
    if (index == 0)
        n = snprintf(buf, bytes, "%s", xdg != NULL ? xdg : "");
    else if (index == 1)
        n = snprintf(buf, bytes, "%s",
                     geteuid() == 0 && (xdg == NULL || strcmp(xdg, "/run") != 0) ? "/run" : "");
    else if (index == 2)
        n = home == NULL ? 0 : snprintf(buf, bytes, "%s/.cache/shardd", home);
    if (n <= 0 || n >= (int)bytes)
        buf[0] = '\0';
    return n >= 0;
}

static bool has_prefix(const char *name, const char *prefix)
{
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

void where_each(const char *base, void (*fn)(const char *path, void *arg), void *arg)
{
    DIR *dir = opendir(base);
    for (const char *name = dir_next(&dir); name != NULL; name = dir_next(&dir)) {
        char path[PATH_MAX];
        struct stat st;
        if ((has_prefix(name, WHERE_RUN_PREFIX) || has_prefix(name, WHERE_UP_PREFIX)) &&
            snprintf(path, sizeof path, "%s/%s", base, name) < (int)sizeof path &&
            lstat(path, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid())
            fn(path, arg);
    }
}

/* -- What goes on ------------------------------------------------------------------------------ */

struct running {
    struct where *first;
    uint32_t count;
    char names[NAMED_MAX * 100u]; /* of the first few, for the error */
};

/* The address that the owner of path has written down; path itself when it has not. */
static void read_address(const char *path, char address[WHERE_BYTES])
{
    char file[PATH_MAX];
    int fd = -1;
    if (snprintf(file, sizeof file, "%s/" WHERE_LOCK, path) < (int)sizeof file)
        fd = open(file, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    const ssize_t n = fd >= 0 ? read(fd, address, WHERE_BYTES - 1) : 0;
    address[n > 0 ? n : 0] = '\0';
    if (fd >= 0)
        close(fd);
    if (address[0] == '\0')
        snprintf(address, WHERE_BYTES, "%s", path);
}

static void note(const char *path, void *arg)
{
    struct running *running = arg;
    struct where later;
    struct where *w = running->count == 0 ? running->first : &later;
    if (lock_look(path, WHERE_LOCK) != LOCK_HELD)
        return;
    read_address(path, w->address);
    const size_t used = strlen(running->names);
    if (running->count++ < NAMED_MAX)
        snprintf(running->names + used, sizeof running->names - used, "%s%.90s",
                 used > 0 ? ", " : "", w->address);
}

/* This user's, and nobody else can put anything there. */
static bool is_ours(const char *base)
{
    struct stat st;
    return base[0] == '/' && stat(base, &st) == 0 && S_ISDIR(st.st_mode) &&
           st.st_uid == geteuid() && (st.st_mode & 022) == 0;
}

static void look(struct running *running)
{
    char base[PATH_MAX];
    for (unsigned i = 0; where_base(i, base, sizeof base); i++)
        if (is_ours(base)) {
            where_each(base, note, running);
            return;
        }
}

/* -- The rule ---------------------------------------------------------------------------------- */

static int take(const char *address, enum where_by by, struct where *w, struct shd_err *e)
{
    const size_t bytes = strlen(address);
    if (bytes >= sizeof w->address)
        return err_set(e, SHD_ERANGE, "the address '%.60s...' has %zu bytes, at most %u", address,
                       bytes, WHERE_BYTES - 1);
    memcpy(w->address, address, bytes + 1);
    w->by = by;
    return SHD_OK;
}

int where_find(const char *given, struct where *ret_where, struct shd_err *e)
{
    const char *env = getenv(WHERE_ENV);
    struct running running = { .first = ret_where };
    if (given != NULL && given[0] != '\0')
        return take(given, WHERE_GIVEN, ret_where, e);
    if (env != NULL && env[0] != '\0')
        return take(env, WHERE_BY_ENV, ret_where, e);
    look(&running);
    ret_where->by = WHERE_ONLY;
    if (running.count == 0)
        return take(WHERE_DEFAULT, WHERE_BY_DEFAULT, ret_where, e);
    if (running.count == 1)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "%" PRIu32 " `shardctl up` or `run` of yours go on (%.120s%s): say which by "
                   "--address or " WHERE_ENV,
                   running.count, running.names, running.count > NAMED_MAX ? ", ..." : "");
}

const char *where_said(enum where_by by)
{
    switch (by) {
    case WHERE_GIVEN:
        break;
    case WHERE_BY_ENV:
        return " ($" WHERE_ENV ")";
    case WHERE_ONLY:
        return " (where your only `shardctl up` or `run` is)";
    case WHERE_BY_DEFAULT:
        return " (the default: no `shardctl up` or `run` of yours goes on)";
    }
    return "";
}
