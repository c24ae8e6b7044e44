/* data.c: see data.h. */
#include "examples/gpt/data.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "examples/gpt/rng.h"
#include "proto/base/status.h"

#define DATA_DEPTH_MAX 64

struct data {
    uint8_t *text; /* owned, [bytes], room for capacity */
    uint64_t bytes, capacity;
    uint32_t files;
    uint32_t seq;
    uint64_t sections;
    uint64_t section; /* bytes of a section */
    uint64_t train;   /* its first bytes, used for training */
};

/* -- Reading --------------------------------------------------------------------------------- */

static int data_reserve(struct data *d, uint64_t more, const char *path, struct shd_err *e)
{
    if (more <= d->capacity - d->bytes)
        return SHD_OK;
    const uint64_t doubled = d->capacity * 2;
    const uint64_t capacity = d->bytes + more > doubled ? d->bytes + more : doubled;
    uint8_t *text = realloc(d->text, capacity);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %ju bytes of text, reading %s",
                       (uintmax_t)capacity, path);
    d->text = text;
    d->capacity = capacity;
    return SHD_OK;
}

/* Append what fd holds. */
static int data_read(struct data *d, int fd, const char *path, struct shd_err *e)
{
    for (;;) {
        const int r = data_reserve(d, 1 << 16, path, e);
        if (r != SHD_OK)
            return r;
        const ssize_t got = read(fd, d->text + d->bytes, d->capacity - d->bytes);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return err_sys(e, SHD_EIO, "read %s", path);
        if (got == 0)
            return SHD_OK;
        d->bytes += (uint64_t)got;
    }
}

/* named: by the user, so that it must be text; else a binary file is skipped. */
static int data_add_file(struct data *d, int fd, const char *path, bool named, struct shd_err *e)
{
    const uint64_t start = d->bytes;
    const int r = data_read(d, fd, path, e);
    if (r != SHD_OK)
        return r;
    const uint8_t *nul = d->bytes > start ? memchr(d->text + start, 0, d->bytes - start) : NULL;
    if (nul == NULL) {
        d->files++;
        return SHD_OK;
    }
    if (named)
        return err_set(e, SHD_EINVAL, "%s is not text: it has a NUL byte at offset %td", path,
                       nul - (d->text + start));
    d->bytes = start;
    return SHD_OK;
}

static int data_open(const char *path, int flags, struct stat *ret_stat, int *ret_fd,
                     struct shd_err *e)
{
    /* O_NONBLOCK: opening a FIFO must not wait for a writer. */
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open data %s", path);
    if (fstat(fd, ret_stat) < 0) {
        const int r = err_sys(e, SHD_EIO, "stat %s", path);
        close(fd);
        return r;
    }
    *ret_fd = fd;
    return SHD_OK;
}

static int data_walk(struct data *d, const char *folder, uint32_t depth, struct shd_err *e);

static int data_add_entry(struct data *d, const char *folder, const char *name, uint32_t depth,
                          struct shd_err *e)
{
    char *path;
    struct stat st;
    int fd = -1, r = SHD_OK;
    if (asprintf(&path, "%s/%s", folder, name) < 0)
        return err_set(e, SHD_ENOMEM, "no memory, reading %s", folder);
    if (lstat(path, &st) < 0) {
        r = err_sys(e, SHD_EIO, "stat %s", path);
    } else if (S_ISDIR(st.st_mode)) {
        r = data_walk(d, path, depth + 1, e);
    } else if (S_ISREG(st.st_mode)) {
        r = data_open(path, O_NOFOLLOW, &st, &fd, e);
        if (r == SHD_OK)
            r = data_add_file(d, fd, path, /* named= */ false, e);
    }
    if (fd >= 0)
        close(fd);
    free(path);
    return r;
}

static int by_bytes(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name); /* not alphasort(): it follows the locale */
}

static int not_dots(const struct dirent *entry)
{
    return strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
}

static int data_walk(struct data *d, const char *folder, uint32_t depth, struct shd_err *e)
{
    if (depth > DATA_DEPTH_MAX)
        return err_set(e, SHD_ERANGE, "folder %s is more than %d levels deep", folder,
                       DATA_DEPTH_MAX);
    struct dirent **entries;
    const int count = scandir(folder, &entries, not_dots, by_bytes);
    if (count < 0)
        return err_sys(e, SHD_EIO, "read folder %s", folder);
    int r = SHD_OK;
    for (int i = 0; i < count; i++) {
        if (r == SHD_OK)
            r = data_add_entry(d, folder, entries[i]->d_name, depth, e);
        free(entries[i]);
    }
    free(entries);
    return r;
}

static int data_add_path(struct data *d, const char *path, struct shd_err *e)
{
    struct stat st = { 0 };
    int fd = -1, r = data_open(path, 0, &st, &fd, e);
    if (r != SHD_OK)
        return r;
    if (S_ISDIR(st.st_mode))
        r = data_walk(d, path, 0, e);
    else if (S_ISREG(st.st_mode))
        r = data_add_file(d, fd, path, /* named= */ true, e);
    else
        r = err_set(e, SHD_EINVAL, "data %s is neither a file nor a folder", path);
    close(fd);
    return r;
}

/* -- Sections -------------------------------------------------------------------------------- */

uint64_t data_bytes_needed(uint32_t seq)
{
    return (uint64_t)DATA_HELD_OUT_DIV * ((uint64_t)seq + 1); /* one held-out window */
}

/* As many sections as leave each at least eight held-out windows; at least one. */
static void data_divide(struct data *d)
{
    /* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): 160 * (seq + 1) fits in 64 bits */
    const uint64_t wanted = d->bytes / (8 * data_bytes_needed(d->seq));
    d->sections = wanted < DATA_SECTIONS_MAX ? wanted : DATA_SECTIONS_MAX;
    if (d->sections == 0)
        d->sections = 1;
    d->section = d->bytes / d->sections;
    d->train = d->section - d->section / DATA_HELD_OUT_DIV;
}

int data_load(const char *const *paths, uint32_t count, uint32_t seq, struct data **ret_data,
              struct shd_err *e)
{
    struct data *d = calloc(1, sizeof *d);
    if (d == NULL)
        return err_set(e, SHD_ENOMEM, "no memory to read data");
    d->seq = seq;
    int r = SHD_OK;
    for (uint32_t i = 0; i < count && r == SHD_OK; i++)
        r = data_add_path(d, paths[i], e);
    if (r == SHD_OK && d->bytes < data_bytes_needed(seq))
        r = err_set(e, SHD_ERANGE,
                    "data %s%s: %ju bytes of text in %u files, but --seq %u needs at least %ju "
                    "(5 %% are held out, and that must hold a window of %u)",
                    count > 0 ? paths[0] : "(none)", count > 1 ? " and others" : "",
                    (uintmax_t)d->bytes, d->files, seq, (uintmax_t)data_bytes_needed(seq), seq + 1);
    if (r != SHD_OK) {
        data_free(d);
        return r;
    }
    data_divide(d);
    *ret_data = d;
    return SHD_OK;
}

void data_free(struct data *d)
{
    if (d == NULL)
        return;
    free(d->text);
    free(d);
}

uint64_t data_bytes(const struct data *d)
{
    return d->bytes;
}

uint32_t data_files(const struct data *d)
{
    return d->files;
}

/* -- Windows --------------------------------------------------------------------------------- */

void data_batch(const struct data *d, struct data_key key, uint32_t rows, uint8_t *ret_windows)
{
    const uint64_t window = (uint64_t)d->seq + 1;
    const uint64_t starts = d->train - window + 1; /* in each section */
    uint64_t h = rng_absorb(rng_absorb(0, RNG_BATCH), key.seed);
    h = rng_absorb(rng_absorb(h, key.step), key.micro);
    for (uint32_t i = 0; i < rows; i++) {
        const uint64_t at = rng_below(rng_absorb(h, i), d->sections * starts);
        const uint64_t from = at / starts * d->section + at % starts;
        memcpy(ret_windows + i * window, d->text + from, window);
    }
}

static uint64_t data_held_out_per_section(const struct data *d)
{
    return (d->section - d->train) / ((uint64_t)d->seq + 1);
}

uint64_t data_held_out_windows(const struct data *d)
{
    return d->sections * data_held_out_per_section(d);
}

void data_held_out(const struct data *d, uint64_t first, uint32_t rows, uint8_t *ret_windows)
{
    const uint64_t window = (uint64_t)d->seq + 1, windows = data_held_out_windows(d);
    for (uint32_t i = 0; i < rows; i++) {
        const uint64_t index = (first + i) % windows;
        const uint64_t from = index % d->sections * d->section + d->train +
                              index / d->sections * window;
        memcpy(ret_windows + i * window, d->text + from, window);
    }
}
