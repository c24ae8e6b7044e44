/* The contents of a checkpoint's directory (docs/checkpoints.md), on which daemons, coordinators
 * and tools agree: names, the order of leaves, and small file helpers.
 *
 *   model*.safetensors        fp32 master weights, whole tensors
 *   optimizer-m*, -v*         moments of tensors that have them
 *   ema*                      their moving average, where the spec has one
 *   leaves.bin                SHA-256 leaves of the digest: for each tensor in spec order, for each
 *                             of its arrays, 32 bytes a leaf
 *   shardd.json               the rest: ckpt_info.h
 */
#ifndef SHD_CKPT_H
#define SHD_CKPT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct shd_err;
struct slice;
struct spec;
struct spec_tensor;

#define CKPT_ARRAYS_MAX 4u /* parameters, two moments, an average */
#define CKPT_LEAF_BYTES 32u
#define CKPT_LEAVES     "leaves.bin"
#define CKPT_LATEST     "LATEST"

/* "model", "optimizer-m", "optimizer-v", "ema": of the arrays that spec_arrays() counts. And what
 * errors call them. */
const char *ckpt_stem(const struct spec *spec, uint32_t array);
const char *ckpt_array_name(const struct spec *spec, uint32_t array);

/* Arrays a checkpoint has of this tensor. */
uint32_t ckpt_arrays(const struct spec *spec, const struct spec_tensor *tensor);

/* -- Leaves -------------------------------------------------------------------------------------
 */

/* Leaves of a tensor's array: the blocks its elements touch. */
uint64_t ckpt_leaf_count(const struct spec_tensor *tensor);

/* Elements [*ret_first, + returned) of the unit that leaves [first_leaf, + leaves) of the tensor
 * cover. */
uint64_t ckpt_leaf_elems(const struct spec_tensor *tensor, uint64_t first_leaf, uint64_t leaves,
                         uint64_t *ret_first);

/* Index in leaves.bin of each tensor's first leaf, [tensor_count]; an array's leaves follow those
 * of the array before. *ret_first is the caller's to free. */
int ckpt_leaf_index(const struct spec *spec, uint64_t **ret_first, uint64_t *ret_total,
                    struct shd_err *e);

/* Open leaves.bin of the checkpoint in dir_fd, which must be as long as the spec makes it, and
 * ckpt_leaf_index(). The descriptor is the caller's to close. */
int ckpt_open_leaves(int dir_fd, const struct spec *spec, bool writable, int *ret_fd,
                     uint64_t **ret_first, struct shd_err *e);

/* Hashes leaf after leaf; one per thread. */
struct ckpt_hasher;
int ckpt_hasher_new(struct ckpt_hasher **ret_hasher, struct shd_err *e);
void ckpt_hasher_free(struct ckpt_hasher *hasher); /* NULL is a no-op */
/* SHA-256 of x[elems]. False: libcrypto failed. */
bool ckpt_hash(struct ckpt_hasher *hasher, const float *x, uint64_t elems,
               uint8_t ret_leaf[CKPT_LEAF_BYTES]);

/* Elements of one array of one unit, whole blocks. */
struct ckpt_piece {
    uint32_t unit, array;
    uint64_t first_elem; /* in the unit */
    uint64_t elems;
};

/* Elements [first, + elems) of a unit that belong to one tensor; cut where leaves end, but for the
 * ends of the tensor. Leaves are numbered within the tensor's array. */
struct ckpt_part {
    uint32_t tensor;
    uint64_t first_elem; /* in the unit */
    uint64_t elems;
    uint64_t first_leaf;
    uint64_t leaves;
};

/* The part of tensor inside a slice of its unit (whole blocks); false: none. */
bool ckpt_part_of(const struct spec *spec, uint32_t tensor, struct slice slice,
                  struct ckpt_part *ret_part);

/* Hash part's leaves; x is its first element. */
bool ckpt_hash_part(struct ckpt_hasher *hasher, const struct ckpt_part *part, const float *x,
                    uint8_t (*ret_leaves)[CKPT_LEAF_BYTES]);

/* -- Files --------------------------------------------------------------------------------------
 */

/* Directory path, last component no symbolic link. */
int ckpt_open_dir(const char *path, int *ret_fd, struct shd_err *e);

/* Open a regular file with these flags of open(2); what is no such file is refused before it is
 * opened, for opening alone does things to a device. With O_NOFOLLOW a link is refused, and what
 * may be written to must have no second name. Errors: SHD_EINVAL, SHD_ENOENT, SHD_EIO. */
int ckpt_open_file(int dir_fd, const char *name, int flags, int *ret_fd, struct shd_err *e);

/* Whole of a regular file of at most bytes_max bytes, with a NUL behind it; the caller's to free.
 */
int ckpt_read_text(int dir_fd, const char *name, bool links, uint64_t bytes_max, char **ret_text,
                   size_t *ret_bytes, struct shd_err *e);

/* All of it, whatever is interrupted. name: for errors. */
int ckpt_pread(int fd, void *buf, uint64_t bytes, uint64_t at, const char *name, struct shd_err *e);
int ckpt_pwrite(int fd, const void *buf, uint64_t bytes, uint64_t at, const char *name,
                struct shd_err *e);

#endif
