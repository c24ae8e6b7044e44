/* See hostsum_file.h.
 *
 * Locks are the open file description's (F_OFD_SETLK): the kernel drops them as the last
 * descriptor of it is closed, so however a process ends. */
#include "client/run/hostsum_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/paths/map.h"
#include "client/session/hub.h"
#include "proto/base/check.h"
#include "proto/base/sys.h"
#include "proto/share/reserve.h"

#define SHARED "/dev/shm"
#define PREFIX "shardd-sums-"
#define MAGIC  UINT64_C(0x31736d7573646873) /* "shdsums1" */

struct hostsum_head {
    uint64_t magic;
    uint64_t bytes;
    uint64_t instance; /* of the model; 0: not known */
    uint32_t accumulate, units;
    uint8_t layout[32]; /* its spec's shapes: a fold */
};

enum { BYTE_LOCK = 0, BYTE_MEMBER = 1 }; /* of the file: what is locked */

/* -- Locks ------------------------------------------------------------------------------------- */

static int lock_bytes(int fd, int how, short type, uint64_t first, uint64_t count)
{
    struct flock lock = {
        .l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)first, .l_len = (off_t)count
    };
    int r;
    do
        r = fcntl(fd, how, &lock);
    while (r != 0 && errno == EINTR);
    return r == 0 && how == F_OFD_GETLK && lock.l_type != F_UNLCK ? 1 : r;
}

int hostsum_file_lock(struct hostsum_file *f, struct shd_err *e)
{
    if (lock_bytes(f->fd, F_OFD_SETLKW, F_WRLCK, BYTE_LOCK, 1) == 0)
        return SHD_OK;
    return err_sys(e, SHD_EIO, "%s: lock it", f->path);
}

void hostsum_file_unlock(struct hostsum_file *f)
{
    lock_bytes(f->fd, F_OFD_SETLK, F_UNLCK, BYTE_LOCK, 1);
}

bool hostsum_file_lives(const struct hostsum_file *f, uint32_t member)
{
    if (member == f->member)
        return true;
    return member < HOSTSUM_MEMBERS_MAX &&
           lock_bytes(f->fd, F_OFD_GETLK, F_WRLCK, BYTE_MEMBER + member, 1) == 1;
}

static bool somebody_lives(int fd)
{
    return lock_bytes(fd, F_OFD_GETLK, F_WRLCK, BYTE_MEMBER, HOSTSUM_MEMBERS_MAX) == 1;
}

/* -- The file ---------------------------------------------------------------------------------- */

static uint64_t fold(uint64_t hash, const char *text) /* FNV-1a, with its end */
{
    do
        hash = (hash ^ (uint8_t)*text) * UINT64_C(0x100000001b3);
    while (*text++ != '\0');
    return hash;
}

/* Workers of one host are those that attach by the same directory. */
static int name_file(struct hostsum_file *f, const struct shd_model *m, struct shd_err *e)
{
    char *dir = sys_strdup(m->session->hub->links[0].path), *real;
    if (dir == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a path");
    *strrchr(dir, '/') = '\0';
    real = realpath(dir, NULL);
    const uint64_t hash = fold(fold(UINT64_C(0xcbf29ce484222325), real != NULL ? real : dir),
                               m->spec->name);
    snprintf(f->path, sizeof f->path, SHARED "/" PREFIX "%u-%016" PRIx64, (unsigned)geteuid(),
             hash);
    free(real);
    free(dir);
    return SHD_OK;
}

static int check_own(const struct hostsum_file *f, struct shd_err *e)
{
    struct stat st;
    if (fstat(f->fd, &st) != 0)
        return err_sys(e, SHD_EIO, "%s", f->path);
    if (S_ISREG(st.st_mode) && st.st_uid == geteuid() && (st.st_mode & 077) == 0)
        return SHD_OK;
    return err_set(e, SHD_EAUTH,
                   "%s is of user %u, mode %03o: must be a file of user %u that nobody else may "
                   "read or write; remove it",
                   f->path, (unsigned)st.st_uid, (unsigned)(st.st_mode & 07777),
                   (unsigned)geteuid());
}

bool hostsum_file_is_there(const struct hostsum_file *f)
{
    struct stat own, there;
    return fstat(f->fd, &own) == 0 && stat(f->path, &there) == 0 && own.st_ino == there.st_ino &&
           own.st_dev == there.st_dev;
}

static void close_file(struct hostsum_file *f)
{
    close(f->fd);
    f->fd = -1;
}

/* With the lock held. */
static int open_file(struct hostsum_file *f, struct shd_err *e)
{
    for (;;) {
        f->fd = sys_open_at(AT_FDCWD, f->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (f->fd < 0)
            return err_sys(e, errno == EACCES || errno == ELOOP ? SHD_EAUTH : SHD_EIO,
                           "%s, in which workers of this host sum", f->path);
        int r = check_own(f, e);
        if (r == SHD_OK)
            r = hostsum_file_lock(f, e);
        if (r == SHD_OK && hostsum_file_is_there(f)) /* not removed between open() and the lock */
            return SHD_OK;
        close_file(f);
        if (r != SHD_OK)
            return r;
    }
}

static uint64_t whole_pages(uint64_t bytes)
{
    return (bytes + SHD_PAGE_BYTES - 1) / SHD_PAGE_BYTES * SHD_PAGE_BYTES;
}

static int lay_out(struct hostsum_file *f, const struct shd_model *m, struct shd_err *e)
{
    f->accumulate = m->spec->accumulate;
    f->units = m->spec->unit_count;
    f->done_bytes = (m->spec->micro_batches / f->accumulate + 7) / 8;
    f->offsets = sys_calloc(f->units, sizeof *f->offsets);
    f->strides = sys_calloc(f->units, sizeof *f->strides);
    if (f->offsets == NULL || f->strides == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the sums of %" PRIu32 " units", f->units);
    uint64_t at = whole_pages(sizeof *f->head) +
                  whole_pages((uint64_t)f->units * sizeof *f->lanes) +
                  whole_pages((uint64_t)f->units * f->done_bytes) +
                  whole_pages((uint64_t)f->units * f->accumulate * sizeof *f->cells);
    for (uint32_t u = 0; u < f->units; u++) {
        f->offsets[u] = at;
        f->strides[u] = whole_pages(m->spec->units[u].elems * sizeof(float));
        at += m->spec->units[u].frozen ? 0 : f->strides[u] * f->accumulate;
    }
    f->bytes = at;
    return SHD_OK;
}

static struct hostsum_head head_of(const struct hostsum_file *f, const struct shd_model *m)
{
    const bool replicated = m->map->member_count > m->map->owner_count; /* each has its own */
    struct hostsum_head head = { .magic = MAGIC,
                                 .bytes = f->bytes,
                                 .instance = replicated ? 0 : m->map->first,
                                 .accumulate = f->accumulate,
                                 .units = f->units };
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (uint32_t u = 0; u < f->units; u++)
        hash = (fold(hash, m->spec->units[u].name) ^ m->spec->units[u].elems) *
               UINT64_C(0x100000001b3);
    memcpy(head.layout, &hash, sizeof hash);
    return head;
}

static int map_file(struct hostsum_file *f, struct shd_err *e)
{
    void *base = sys_mmap(NULL, f->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, f->fd, 0);
    if (base == MAP_FAILED)
        return err_sys(e, SHD_ENOMEM, "%s: map %" PRIu64 " bytes", f->path, f->bytes);
    f->head = base;
    f->lanes = (struct hostsum_lane *)((uint8_t *)base + whole_pages(sizeof *f->head));
    f->done = (uint8_t *)f->lanes + whole_pages((uint64_t)f->units * sizeof *f->lanes);
    f->cells = (struct hostsum_cell *)(f->done + whole_pages((uint64_t)f->units * f->done_bytes));
    return SHD_OK;
}

/* Nobody is there: whatever the file holds is of no use. */
static int begin_file(struct hostsum_file *f, const struct hostsum_head *head, struct shd_err *e)
{
    struct shd_err why = { 0 };
    if (ftruncate(f->fd, 0) != 0)
        return err_sys(e, SHD_EIO, "%s: cut it", f->path);
    reserve_lock();
    int r = reserve_check(f->bytes, RESERVE_SPARED, &why);
    if (r == SHD_OK)
        r = reserve_pages(f->fd, 0, f->bytes, NULL, &why);
    reserve_unlock();
    if (r != SHD_OK) {
        unlink(f->path);
        return err_set(e, r,
                       "workers of this host cannot sum together in %s, which takes %" PRIu64
                       " MiB (%" PRIu32 " micro-batches of the model in fp32): %s",
                       SHARED, (f->bytes >> 20) + 1, f->accumulate, why.text);
    }
    r = map_file(f, e);
    if (r != SHD_OK)
        return r;
    *f->head = *head;
    for (uint32_t u = 0; u < f->units; u++)
        f->lanes[u].group = HOSTSUM_FREE;
    return SHD_OK;
}

static int check_same(const struct hostsum_file *f, const struct hostsum_head *head,
                      const struct shd_model *m, struct shd_err *e)
{
    struct hostsum_head there;
    struct stat st;
    if (fstat(f->fd, &st) != 0 || pread(f->fd, &there, sizeof there, 0) != sizeof there)
        return err_sys(e, SHD_EIO, "%s: read it", f->path);
    if ((uint64_t)st.st_size == head->bytes && there.magic == head->magic &&
        there.bytes == head->bytes && there.accumulate == head->accumulate &&
        there.units == head->units &&
        memcmp(there.layout, head->layout, sizeof there.layout) == 0 &&
        (there.instance == head->instance || there.instance == 0 || head->instance == 0))
        return SHD_OK;
    return err_set(e, SHD_EBUSY,
                   "other workers of this host sum a model '%s' of another shape, or one that was "
                   "dropped (accumulate %" PRIu32 ", %" PRIu32 " units; this one has %" PRIu32
                   ", %" PRIu32 "): end them first",
                   m->spec->name, there.accumulate, there.units, head->accumulate, head->units);
}

static int be_member(struct hostsum_file *f, struct shd_err *e)
{
    for (f->member = 0; f->member < HOSTSUM_MEMBERS_MAX; f->member++)
        if (lock_bytes(f->fd, F_OFD_SETLK, F_WRLCK, BYTE_MEMBER + f->member, 1) == 0)
            return SHD_OK;
    return err_set(e, SHD_EBUSY, "%u workers of this host sum together already, and no more can",
                   HOSTSUM_MEMBERS_MAX);
}

/* -- What killed teams leave ------------------------------------------------------------------- */

static void remove_left(int dir_fd, const char *name)
{
    const int fd = openat(dir_fd, name, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return;
    if (lock_bytes(fd, F_OFD_SETLK, F_WRLCK, BYTE_LOCK, 1) == 0 && !somebody_lives(fd))
        unlinkat(dir_fd, name, 0);
    close(fd);
}

static void remove_all_left(const struct hostsum_file *f)
{
    char own[40];
    DIR *dir = opendir(SHARED);
    const struct dirent *entry;
    const int bytes = snprintf(own, sizeof own, PREFIX "%u-", (unsigned)geteuid());
    while (dir != NULL && (entry = readdir(dir)) != NULL)
        if (strncmp(entry->d_name, own, (size_t)bytes) == 0 &&
            strcmp(entry->d_name, f->path + sizeof SHARED) != 0)
            remove_left(dirfd(dir), entry->d_name);
    if (dir != NULL)
        closedir(dir);
}

/* -- Joining ----------------------------------------------------------------------------------- */

static void free_layout(struct hostsum_file *f)
{
    free(f->offsets);
    free(f->strides);
    f->offsets = f->strides = NULL;
}

static int join_locked(struct hostsum_file *f, const struct shd_model *m, struct shd_err *e)
{
    const struct hostsum_head head = head_of(f, m);
    int r;
    if (somebody_lives(f->fd)) {
        r = check_same(f, &head, m, e);
        if (r == SHD_OK)
            r = map_file(f, e);
    } else {
        r = begin_file(f, &head, e);
    }
    return r == SHD_OK ? be_member(f, e) : r;
}

int hostsum_file_join(struct hostsum_file *f, const struct shd_model *m, struct shd_err *e)
{
    int r = name_file(f, m, e);
    if (r == SHD_OK)
        r = lay_out(f, m, e);
    if (r == SHD_OK)
        remove_all_left(f);
    if (r == SHD_OK)
        r = open_file(f, e);
    if (r == SHD_OK) {
        r = join_locked(f, m, e);
        hostsum_file_unlock(f);
    }
    if (r == SHD_OK)
        return SHD_OK;
    if (f->head != NULL)
        munmap(f->head, f->bytes);
    f->head = NULL;
    if (f->fd >= 0)
        close_file(f);
    free_layout(f);
    return r;
}

void hostsum_file_leave(struct hostsum_file *f)
{
    struct shd_err ignored;
    if (f->head != NULL)
        munmap(f->head, f->bytes);
    f->head = NULL;
    if (f->fd >= 0 && hostsum_file_lock(f, &ignored) == SHD_OK && !somebody_lives(f->fd))
        unlink(f->path); /* own locks are not in one's own way */
    if (f->fd >= 0)
        close_file(f);
    free_layout(f);
}

/* -- Places ------------------------------------------------------------------------------------ */

struct hostsum_lane *hostsum_lane(const struct hostsum_file *f, uint32_t unit)
{
    CHECK(unit < f->units);
    return &f->lanes[unit];
}

uint8_t *hostsum_done(const struct hostsum_file *f, uint32_t unit)
{
    CHECK(unit < f->units);
    return f->done + (size_t)unit * f->done_bytes;
}

struct hostsum_cell *hostsum_cell(const struct hostsum_file *f, uint32_t unit, uint32_t index)
{
    CHECK(unit < f->units && index < f->accumulate);
    return &f->cells[(size_t)unit * f->accumulate + index];
}

float *hostsum_array(const struct hostsum_file *f, uint32_t unit, uint32_t index)
{
    CHECK(unit < f->units && index < f->accumulate);
    return (float *)((uint8_t *)f->head + f->offsets[unit] + index * f->strides[unit]);
}
