#include "client/ctl/run/keeper.h"

#include <assert.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "proto/base/check.h"

/* As systemd's fdname_is_valid(): it must survive a list separated by ':'. */
static bool name_is_valid(const char *name)
{
    size_t bytes = 0;
    for (; name[bytes] != '\0'; bytes++)
        if (name[bytes] < ' ' || name[bytes] > '~' || name[bytes] == ':')
            return false;
    return bytes > 0 && bytes <= KEPT_NAME_BYTES_MAX;
}

static bool same_file(int a, int b)
{
    struct stat x, y;
    return fstat(a, &x) == 0 && fstat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino &&
           fcntl(a, F_GETFL) == fcntl(b, F_GETFL);
}

static bool is_kept(const struct kept *k, const char *name, int fd)
{
    for (uint32_t i = 0; i < k->count; i++)
        if (strcmp(k->names[i], name) == 0 && same_file(k->fds[i], fd))
            return true;
    return false;
}

static bool make_room(struct kept *k)
{
    if (k->count < k->room)
        return true;
    const uint32_t room = k->room == 0 ? 16 : 2 * k->room;
    int *fds = realloc(k->fds, room * sizeof(*fds));
    if (fds != NULL)
        k->fds = fds;
    char **names = fds != NULL ? realloc(k->names, room * sizeof(*names)) : NULL;
    if (names == NULL)
        return false;
    k->names = names;
    k->room = room;
    return true;
}

/* Keep one. NULL: done, fd is ours; else why not. */
static const char *keep(struct kept *k, const char *name, int fd)
{
    const size_t bytes = strlen(name) + 1;
    if (k->count == KEPT_FDS_MAX)
        return "a daemon's limit is 4096";
    if (k->names_bytes + bytes > KEPT_NAMES_BYTES_MAX)
        return "all names together are limited to 127 KiB";
    char *copy = make_room(k) ? strdup(name) : NULL;
    if (copy == NULL)
        return "out of memory";
    k->fds[k->count] = fd;
    k->names[k->count] = copy;
    k->count++;
    k->names_bytes += bytes;
    return NULL;
}

static void store(struct kept *k, struct notify_message *m, const char *name, const char *daemon)
{
    static_assert(KEPT_FDS_MAX == 4096 && KEPT_NAMES_BYTES_MAX == 127 * 1024, "said in keep()");
    for (uint32_t i = 0; i < m->fd_count; i++) {
        if (is_kept(k, name, m->fds[i]))
            continue;
        const char *why = keep(k, name, m->fds[i]);
        if (why != NULL) {
            ctl_say("daemon %s: cannot keep %" PRIu32 " of its descriptors, '%s': %s", daemon,
                    m->fd_count - i, name, why);
            return;
        }
        m->fds[i] = -1;
    }
}

static void drop_name(struct kept *k, const char *name)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < k->count; i++) {
        if (strcmp(k->names[i], name) == 0) {
            k->names_bytes -= strlen(name) + 1;
            close(k->fds[i]);
            free(k->names[i]);
            continue;
        }
        k->fds[left] = k->fds[i];
        k->names[left] = k->names[i];
        left++;
    }
    k->count = left;
}

void keeper_take(struct kept *kept, struct notify_message *message, const char *daemon)
{
    const char *name = message->name != NULL ? message->name : "stored"; /* as systemd says */
    if (!message->store && !message->remove)
        return;
    if (message->fds_lost)
        ctl_say("daemon %s: descriptors it wanted kept did not arrive: too many open files here",
                daemon);
    if (!name_is_valid(name))
        ctl_say("daemon %s: refused FDNAME '%.64s': 1 to %u printable ASCII characters, no ':'",
                daemon, name, KEPT_NAME_BYTES_MAX);
    else if (message->remove)
        drop_name(kept, name);
    else
        store(kept, message, name, daemon);
}

int keeper_names(const struct kept *kept, char **ret_names, struct shd_err *e)
{
    char *names = malloc(kept->names_bytes + 1);
    if (names == NULL)
        return err_set(e, SHD_ENOMEM, "out of memory for %" PRIu32 " names", kept->count);
    char *at = names;
    for (uint32_t i = 0; i < kept->count; i++) {
        const size_t bytes = strlen(kept->names[i]);
        memcpy(at, kept->names[i], bytes);
        at[bytes] = ':';
        at += bytes + 1;
    }
    CHECK(at == names + kept->names_bytes);
    at[kept->count > 0 ? -1 : 0] = '\0';
    *ret_names = names;
    return SHD_OK;
}

void keeper_free(struct kept *kept)
{
    for (uint32_t i = 0; i < kept->count; i++) {
        close(kept->fds[i]);
        free(kept->names[i]);
    }
    free(kept->fds);
    free(kept->names);
    *kept = (struct kept){ 0 };
}
