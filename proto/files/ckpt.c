/* See ckpt.h. */
#include "proto/files/ckpt.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <openssl/evp.h>

#include "proto/base/check.h"
#include "proto/base/status.h"
#include "proto/base/sys.h"
#include "proto/spec/layout.h"
#include "proto/spec/spec.h"

/* Which of the names below: an average has the last one, however many moments there are. */
static uint32_t name_of(const struct spec *spec, uint32_t array)
{
    CHECK(array < spec_arrays(spec));
    return array == spec_ema_array(spec) ? CKPT_ARRAYS_MAX - 1 : array;
}

const char *ckpt_stem(const struct spec *spec, uint32_t array)
{
    static const char *const stems[CKPT_ARRAYS_MAX] = { "model", "optimizer-m", "optimizer-v",
                                                        "ema" };
    return stems[name_of(spec, array)];
}

const char *ckpt_array_name(const struct spec *spec, uint32_t array)
{
    static const char *const names[CKPT_ARRAYS_MAX] = { "parameters", "first moments",
                                                        "second moments", "moving average" };
    return names[name_of(spec, array)];
}

uint32_t ckpt_arrays(const struct spec *spec, const struct spec_tensor *tensor)
{
    return spec_unit_arrays(spec, tensor->unit);
}

/* -- Leaves -------------------------------------------------------------------------------------
 */

uint64_t ckpt_leaf_count(const struct spec_tensor *tensor)
{
    CHECK(tensor->elems > 0);
    const uint64_t last = tensor->offset_elems + tensor->elems - 1;
    return last / SHD_BLOCK_ELEMS - tensor->offset_elems / SHD_BLOCK_ELEMS + 1;
}

uint64_t ckpt_leaf_elems(const struct spec_tensor *tensor, uint64_t first_leaf, uint64_t leaves,
                         uint64_t *ret_first)
{
    CHECK(leaves > 0 && first_leaf + leaves <= ckpt_leaf_count(tensor));
    const uint64_t first_block = tensor->offset_elems / SHD_BLOCK_ELEMS + first_leaf;
    const struct slice blocks = { first_block * SHD_BLOCK_ELEMS, leaves * SHD_BLOCK_ELEMS };
    return layout_intersect(blocks, tensor->offset_elems, tensor->elems, ret_first);
}

int ckpt_leaf_index(const struct spec *spec, uint64_t **ret_first, uint64_t *ret_total,
                    struct shd_err *e)
{
    uint64_t *first = sys_calloc(spec->tensor_count, sizeof *first);
    if (first == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " tensors", spec->tensor_count);
    uint64_t total = 0;
    for (uint32_t t = 0; t < spec->tensor_count; t++) {
        first[t] = total;
        total += ckpt_leaf_count(&spec->tensors[t]) * ckpt_arrays(spec, &spec->tensors[t]);
    }
    *ret_first = first;
    *ret_total = total;
    return SHD_OK;
}

int ckpt_open_leaves(int dir_fd, const struct spec *spec, bool writable, int *ret_fd,
                     uint64_t **ret_first, struct shd_err *e)
{
    struct stat st;
    uint64_t *first = NULL, total = 0;
    int r = ckpt_leaf_index(spec, &first, &total, e);
    if (r != SHD_OK)
        return r;
    int fd = -1;
    r = ckpt_open_file(dir_fd, CKPT_LEAVES, (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW, &fd, e);
    if (r == SHD_ENOENT)
        r = err_set(e, SHD_EIO, "there is no '" CKPT_LEAVES "'");
    else if (r == SHD_OK && fstat(fd, &st) != 0)
        r = err_sys(e, SHD_EIO, "open '" CKPT_LEAVES "'");
    else if (r == SHD_OK && (uint64_t)st.st_size != total * CKPT_LEAF_BYTES)
        r = err_set(e, SHD_EINVAL, "'" CKPT_LEAVES "' has %jd bytes, the spec makes it %" PRIu64,
                    (intmax_t)st.st_size, total * CKPT_LEAF_BYTES);
    if (r == SHD_OK) {
        *ret_fd = fd;
        *ret_first = first;
        return SHD_OK;
    }
    if (fd >= 0)
        close(fd);
    free(first);
    return r;
}

struct ckpt_hasher {
    EVP_MD_CTX *ctx; /* owned; initialized: re-initialization finds the algorithm there */
};

int ckpt_hasher_new(struct ckpt_hasher **ret_hasher, struct shd_err *e)
{
    struct ckpt_hasher *hasher = sys_calloc(1, sizeof *hasher);
    if (hasher == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a hash");
    hasher->ctx = EVP_MD_CTX_new();
    if (hasher->ctx == NULL || EVP_DigestInit_ex2(hasher->ctx, EVP_sha256(), NULL) != 1) {
        ckpt_hasher_free(hasher);
        return err_set(e, SHD_EINTERNAL, "libcrypto's SHA-256 failed");
    }
    *ret_hasher = hasher;
    return SHD_OK;
}

void ckpt_hasher_free(struct ckpt_hasher *hasher)
{
    if (hasher == NULL)
        return;
    EVP_MD_CTX_free(hasher->ctx);
    free(hasher);
}

bool ckpt_hash(struct ckpt_hasher *hasher, const float *x, uint64_t elems,
               uint8_t ret_leaf[CKPT_LEAF_BYTES])
{
    return EVP_DigestInit_ex2(hasher->ctx, NULL, NULL) == 1 &&
           EVP_DigestUpdate(hasher->ctx, x, elems * sizeof *x) == 1 &&
           EVP_DigestFinal_ex(hasher->ctx, ret_leaf, NULL) == 1;
}

bool ckpt_part_of(const struct spec *spec, uint32_t tensor, struct slice slice,
                  struct ckpt_part *ret_part)
{
    const struct spec_tensor *t = &spec->tensors[tensor];
    uint64_t first = 0;
    const uint64_t elems = layout_intersect(slice, t->offset_elems, t->elems, &first);
    if (elems == 0)
        return false;
    const uint64_t block = first / SHD_BLOCK_ELEMS;
    *ret_part = (struct ckpt_part){
        .tensor = tensor,
        .first_elem = first,
        .elems = elems,
        .first_leaf = block - t->offset_elems / SHD_BLOCK_ELEMS,
        .leaves = (first + elems - 1) / SHD_BLOCK_ELEMS - block + 1,
    };
    return true;
}

bool ckpt_hash_part(struct ckpt_hasher *hasher, const struct ckpt_part *part, const float *x,
                    uint8_t (*ret_leaves)[CKPT_LEAF_BYTES])
{
    uint64_t done = 0;
    for (uint64_t leaf = 0; leaf < part->leaves; leaf++) {
        const uint64_t room = SHD_BLOCK_ELEMS - (part->first_elem + done) % SHD_BLOCK_ELEMS;
        const uint64_t left = part->elems - done;
        const uint64_t elems = room < left ? room : left;
        if (!ckpt_hash(hasher, x + done, elems, ret_leaves[leaf]))
            return false;
        done += elems;
    }
    CHECK(done == part->elems);
    return true;
}

/* -- Files --------------------------------------------------------------------------------------
 */

int ckpt_open_dir(const char *path, int *ret_fd, struct shd_err *e)
{
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open directory '%.150s'", path);
    *ret_fd = fd;
    return SHD_OK;
}

static int not_regular(const char *name, struct shd_err *e)
{
    return err_set(e, SHD_EINVAL, "'%s' is not a regular file", name);
}

int ckpt_open_file(int dir_fd, const char *name, int flags, int *ret_fd, struct shd_err *e)
{
    const int at = (flags & O_NOFOLLOW) != 0 ? AT_SYMLINK_NOFOLLOW : 0;
    struct stat st;
    if (fstatat(dir_fd, name, &st, at) == 0 && !S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
        return not_regular(name, e);
    /* It may be another one by now: a FIFO must not hang us, a terminal not become ours. */
    const int fd = openat(dir_fd, name, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return err_sys(e, errno == ENOENT ? SHD_ENOENT : SHD_EIO, "open '%s'", name);
    int r = SHD_OK;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode))
        r = not_regular(name, e);
    else if ((flags & O_ACCMODE) != O_RDONLY && st.st_nlink > 1)
        r = err_set(e, SHD_EINVAL, "'%s' has %ju names: it is another file, too", name,
                    (uintmax_t)st.st_nlink);
    if (r == SHD_OK)
        *ret_fd = fd;
    else
        close(fd);
    return r;
}

static int read_whole(int fd, const char *name, uint64_t bytes, char **ret_text, struct shd_err *e)
{
    char *text = sys_malloc(bytes + 1);
    if (text == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for the %" PRIu64 " bytes of '%s'", bytes, name);
    const int r = ckpt_pread(fd, text, bytes, 0, name, e);
    if (r != SHD_OK) {
        free(text);
        return r;
    }
    text[bytes] = '\0';
    *ret_text = text;
    return SHD_OK;
}

int ckpt_read_text(int dir_fd, const char *name, bool links, uint64_t bytes_max, char **ret_text,
                   size_t *ret_bytes, struct shd_err *e)
{
    struct stat st;
    int fd = -1;
    int r = ckpt_open_file(dir_fd, name, O_RDONLY | (links ? 0 : O_NOFOLLOW), &fd, e);
    if (r != SHD_OK)
        return r;
    if (fstat(fd, &st) < 0)
        r = not_regular(name, e);
    else if ((uint64_t)st.st_size > bytes_max)
        r = err_set(e, SHD_ERANGE, "'%s' has %jd bytes, at most %" PRIu64, name,
                    (intmax_t)st.st_size, bytes_max);
    else
        r = read_whole(fd, name, (uint64_t)st.st_size, ret_text, e);
    close(fd);
    if (r == SHD_OK)
        *ret_bytes = (size_t)st.st_size;
    return r;
}

int ckpt_pread(int fd, void *buf, uint64_t bytes, uint64_t at, const char *name, struct shd_err *e)
{
    uint64_t done = 0;
    while (done < bytes) {
        const ssize_t n = pread(fd, (char *)buf + done, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return err_sys(e, SHD_EIO, "read '%s' at byte %" PRIu64, name, at + done);
        if (n == 0)
            return err_set(e, SHD_EIO, "'%s' ends at byte %" PRIu64 ", needed are %" PRIu64, name,
                           at + done, at + bytes);
        done += (uint64_t)n;
    }
    return SHD_OK;
}

int ckpt_pwrite(int fd, const void *buf, uint64_t bytes, uint64_t at, const char *name,
                struct shd_err *e)
{
    uint64_t done = 0;
    while (done < bytes) {
        const ssize_t n = pwrite(fd, (const char *)buf + done, bytes - done, (off_t)(at + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return err_sys(e, SHD_EIO, "write '%s' at byte %" PRIu64, name, at + done);
        done += (uint64_t)n;
    }
    return SHD_OK;
}
