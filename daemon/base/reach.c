/* See reach.h. */
#include "daemon/base/reach.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct hindrance {
    char path[PATH_MAX];
    const char *what; /* "enter": what may not be done there; NULL: all may */
    int error;        /* errno of it */
};

static bool may(struct hindrance *h, int mode, const char *what)
{
    if (access(h->path, mode) == 0) /* the daemon is not setuid: its real user is its user */
        return true;
    h->what = what;
    h->error = errno;
    return false;
}

/* "/", "/data", "/data/run1": h->path is cut behind each, and left at the first that hinders. */
static bool may_enter_all(struct hindrance *h, const char *path)
{
    for (const char *slash = strchr(path, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        snprintf(h->path, sizeof h->path, "%.*s", slash == path ? 1 : (int)(slash - path), path);
        if (!may(h, X_OK, "enter"))
            return false;
    }
    snprintf(h->path, sizeof h->path, "%s", path);
    return true;
}

static void look_inside(struct hindrance *h, const char *path, int mode, const char *what)
{
    const struct dirent *entry;
    DIR *dir = opendir(path);
    while (dir != NULL && h->what == NULL && (entry = readdir(dir)) != NULL) {
        if (entry->d_name[0] == '.') /* no file of ours, or the saver's own */
            continue;
        const int n = snprintf(h->path, sizeof h->path, "%s/%s", path, entry->d_name);
        if (n > 0 && (size_t)n < sizeof h->path)
            (void)may(h, mode, what);
    }
    if (dir != NULL)
        closedir(dir);
}

static void find(struct hindrance *h, const char *path, bool write)
{
    struct stat st;
    h->what = NULL;
    if (!may_enter_all(h, path) || !may(h, F_OK, "find") || stat(path, &st) != 0)
        return;
    if (!S_ISDIR(st.st_mode))
        (void)may(h, write ? W_OK : R_OK, write ? "write" : "read");
    else if (may(h, R_OK | X_OK, "enter"))
        look_inside(h, path, write ? R_OK | W_OK : R_OK, write ? "write" : "read");
}

static const char *user_name(char *buf, size_t bytes)
{
    struct passwd entry, *found = NULL;
    char text[1024];
    if (getpwuid_r(geteuid(), &entry, text, sizeof text, &found) == 0 && found != NULL)
        snprintf(buf, bytes, "%s", found->pw_name);
    else
        snprintf(buf, bytes, "%u", (unsigned)geteuid());
    return buf;
}

int reach_explain(int status, const char *path, bool write, struct shd_err *e)
{
    struct hindrance h;
    char user[40];
    if (status != SHD_EIO && status != SHD_ENOENT)
        return status; /* all could be opened */
    find(&h, path, write);
    if (h.what == NULL)
        return status;
    return err_set(e, status,
                   "as user %.32s it may not %s '%.100s' (%s): %s (under systemd: in "
                   "/var/lib/shardd)",
                   user_name(user, sizeof user), h.what, h.path, strerror(h.error),
                   write ? "save in a directory of that user's"
                         : "let that user read it, or a copy");
}
