/* See export_memory.h. */
#include "client/ctl/state/export_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/checkpoint/dir.h"
#include "client/ctl/state/weights.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"

#define LINK_PART  ".memory.export.partial" /* before it has its name */
#define NAME_BYTES (CHECKPOINT_NAME_BYTES + 16)
#define PLACE      "{}"

struct file {
    int fd; /* owned */
    char name[NAME_BYTES];
    char path[EXPORT_MEMORY_BYTES];
};

struct export_memory {
    int dir_fd; /* borrowed; -1: no links */
    uint32_t keep, count;
    int next_fd;         /* the least for the next file */
    struct file files[]; /* [keep + 1], the newest last */
};

int export_memory_new(uint32_t keep, int dir_fd, struct export_memory **ret_memory,
                      struct shd_err *e)
{
    CHECK(keep > 0 && keep <= EXPORT_MEMORY_MAX);
    struct export_memory *x = sys_calloc(1, sizeof *x + (keep + 1) * sizeof *x->files);
    if (x == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to keep %u files", (unsigned)keep);
    x->dir_fd = dir_fd;
    x->keep = keep;
    *ret_memory = x;
    return SHD_OK;
}

/* -- Links ------------------------------------------------------------------------------------- */

/* Nobody's file is replaced by what goes with this process. */
static int check_name(int dir_fd, const char *name, struct shd_err *e)
{
    struct stat st;
    if (fstatat(dir_fd, name, &st, AT_SYMLINK_NOFOLLOW) != 0 || S_ISLNK(st.st_mode))
        return SHD_OK;
    return err_set(e, SHD_EEXIST,
                   "'%s' is a file there already, which --memory does not replace: name another "
                   "directory, or remove it",
                   name);
}

static int link_file(int dir_fd, const struct file *f, struct shd_err *e)
{
    if (unlinkat(dir_fd, LINK_PART, 0) != 0 && errno != ENOENT)
        return err_sys(e, SHD_EIO, "remove '%s'", LINK_PART);
    if (symlinkat(f->path, dir_fd, LINK_PART) != 0)
        return err_sys(e, SHD_EIO, "link '%s' to '%s'", f->name, f->path);
    if (renameat(dir_fd, LINK_PART, dir_fd, f->name) != 0)
        return err_sys(e, SHD_EIO, "rename '%s' to '%s'", LINK_PART, f->name);
    return SHD_OK;
}

/* Another process may have written a file of this name since, or linked it to its own. */
static void unlink_file(int dir_fd, const struct file *f)
{
    char to[EXPORT_MEMORY_BYTES];
    const ssize_t bytes = readlinkat(dir_fd, f->name, to, sizeof to);
    if (bytes == (ssize_t)strlen(f->path) && memcmp(to, f->path, (size_t)bytes) == 0)
        unlinkat(dir_fd, f->name, 0);
}

/* -- Files ------------------------------------------------------------------------------------- */

static void drop(const struct export_memory *x, struct file *f)
{
    if (x->dir_fd >= 0)
        unlink_file(x->dir_fd, f);
    close(f->fd);
}

/* A path that somebody may still have is not soon another step's: numbers go up as far as there are
 * any. */
static int give_number(struct export_memory *x, struct file *f, struct shd_err *e)
{
    int fd = fcntl(f->fd, F_DUPFD_CLOEXEC, x->next_fd);
    if (fd < 0)
        fd = fcntl(f->fd, F_DUPFD_CLOEXEC, 0);
    const int r = fd >= 0 ? SHD_OK : err_sys(e, SHD_EIO, "a descriptor for '%s'", f->name);
    close(f->fd);
    f->fd = fd;
    x->next_fd = fd + 1;
    snprintf(f->path, sizeof f->path, "/proc/%d/fd/%d", (int)getpid(), fd);
    return r;
}

static int make(struct export_memory *x, const shd_model *m, struct file *f, uint64_t *ret_bytes,
                struct shd_err *e)
{
    struct weights w;
    int r = weights_new(m, &w, e);
    if (r != SHD_OK)
        return r;
    *ret_bytes = w.header.file_bytes;
    r = weights_memory(&w, f->name, &f->fd, e);
    weights_free(&w);
    return r == SHD_OK ? give_number(x, f, e) : r;
}

int export_memory_add(struct export_memory *x, const shd_model *m, const char *name,
                      uint64_t *ret_bytes, struct shd_err *e)
{
    struct file *f = &x->files[x->count];
    snprintf(f->name, sizeof f->name, "%s", name);
    int r = x->dir_fd >= 0 ? check_name(x->dir_fd, name, e) : SHD_OK;
    if (r == SHD_OK)
        r = make(x, m, f, ret_bytes, e);
    if (r != SHD_OK)
        return r;
    if (x->dir_fd >= 0 && (r = link_file(x->dir_fd, f, e)) != SHD_OK) {
        close(f->fd);
        return r;
    }
    if (++x->count <= x->keep)
        return SHD_OK;
    drop(x, &x->files[0]);
    x->count--;
    memmove(x->files, x->files + 1, x->count * sizeof *x->files);
    return SHD_OK;
}

const char *export_memory_path(const struct export_memory *x)
{
    return x->count > 0 ? x->files[x->count - 1].path : "";
}

void export_memory_free(struct export_memory *x)
{
    for (uint32_t i = 0; x != NULL && i < x->count; i++)
        drop(x, &x->files[i]);
    free(x);
}

/* -- The command ------------------------------------------------------------------------------- */

/* A copy of word with the path in each of its places. */
static char *put_path(const char *word, const char *path)
{
    size_t places = 0;
    for (const char *at = word; (at = strstr(at, PLACE)) != NULL; at += strlen(PLACE))
        places++;
    char *text = sys_malloc(strlen(word) + places * strlen(path) + 1), *to = text;
    if (text == NULL)
        return NULL;
    for (const char *at = word; *at != '\0';) {
        const bool here = strncmp(at, PLACE, strlen(PLACE)) == 0;
        const char *from = here ? path : at;
        const size_t bytes = here ? strlen(path) : 1;
        memcpy(to, from, bytes);
        to += bytes;
        at += here ? strlen(PLACE) : 1;
    }
    *to = '\0';
    return text;
}

int export_memory_exec(const struct export_memory *x, char **argv, struct shd_err *e)
{
    CHECK(x->count > 0 && argv[0] != NULL);
    const struct file *f = &x->files[x->count - 1];
    if (fcntl(f->fd, F_SETFD, 0) != 0)
        return err_sys(e, SHD_EIO, "keep '%s' for the command", f->path);
    for (char **word = argv; *word != NULL; word++)
        if ((*word = put_path(*word, f->path)) == NULL) /* the process is another one's soon */
            return err_set(e, SHD_ENOMEM, "no memory for a command line");
    signal(SIGXFSZ, SIG_DFL);
    execvp(argv[0], argv);
    return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "cannot run '%s'", argv[0]);
}
