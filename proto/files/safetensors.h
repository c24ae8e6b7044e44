/* safetensors files: 8 bytes little-endian header size, then JSON that gives each tensor's dtype,
 * shape and place in the data behind it (https://github.com/huggingface/safetensors). The one
 * reader and writer of their headers; tensor bytes are the caller's to read and write.
 *
 * Nothing in a file is believed: sizes are bounded, shapes multiplied with overflow in mind,
 * places checked against shape, dtype, each other and the size of the file. Errors name the tensor.
 */
#ifndef SHD_SAFETENSORS_H
#define SHD_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define SAFETENSORS_HEADER_BYTES_MAX UINT64_C(100000000) /* as the reference implementation */
#define SAFETENSORS_RANK_MAX         8u
#define SAFETENSORS_DATA_ALIGN       UINT64_C(4096) /* of the data in files written here */

/* Types whose numbers can become fp32 come first. */
enum safetensors_dtype {
    SAFETENSORS_F32,
    SAFETENSORS_BF16,
    SAFETENSORS_F16,
    SAFETENSORS_F64,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_I64,
    SAFETENSORS_I32,
    SAFETENSORS_I16,
    SAFETENSORS_I8,
    SAFETENSORS_U64,
    SAFETENSORS_U32,
    SAFETENSORS_U16,
    SAFETENSORS_U8,
    SAFETENSORS_BOOL,
};

const char *safetensors_dtype_name(enum safetensors_dtype dtype);
uint64_t safetensors_dtype_bytes(enum safetensors_dtype dtype);

struct safetensors_tensor {
    const char *name; /* borrowed from the file */
    enum safetensors_dtype dtype;
    uint32_t rank;
    uint64_t shape[SAFETENSORS_RANK_MAX];
    uint64_t elems;    /* may be 0 */
    uint64_t at_bytes; /* of the first byte, in the file */
    uint64_t bytes;
};

struct safetensors {
    struct safetensors_tensor *tensors; /* owned, [count], in order of names */
    uint32_t count;
    void *document; /* owned: what names are borrowed from */
};

/* Parse a header json[bytes] of a file with data_bytes behind it. Pure. Errors: SHD_EINVAL,
 * SHD_ERANGE, SHD_ENOMEM. */
int safetensors_parse(const char *json, size_t bytes, uint64_t data_bytes,
                      struct safetensors **ret_file, struct shd_err *e);

/* Read the header of the regular file behind fd. Errors: those, SHD_EIO. */
int safetensors_read(int fd, struct safetensors **ret_file, struct shd_err *e);

void safetensors_free(struct safetensors *file); /* NULL is a no-op */

/* The tensor called name, or NULL. */
const struct safetensors_tensor *safetensors_find(const struct safetensors *file, const char *name);

/* x[i] = raw[i], for dtypes up to SAFETENSORS_F64; fp64 is rounded to nearest. */
void safetensors_to_f32(enum safetensors_dtype dtype, const void *raw, uint64_t elems,
                        float *ret_x);

/* The header, size included, of a file with these tensors one behind the other (name, dtype, rank
 * and shape are set; elems, at_bytes and bytes are filled in). It is padded so that data begins at
 * SAFETENSORS_DATA_ALIGN. *ret_header is the caller's to free; *ret_bytes its size, *ret_file_bytes
 * that of the whole file. Errors: SHD_ENOMEM, SHD_ERANGE. */
struct safetensors_header {
    char *data;
    uint64_t bytes;
    uint64_t file_bytes;
};
int safetensors_header(struct safetensors_tensor *tensors, uint32_t count,
                       struct safetensors_header *ret_header, struct shd_err *e);

/* -- Sets of files ------------------------------------------------------------------------------
 *
 *A set of safetensors files that together hold tensors: one file, or several with an index
 * (STEM.safetensors.index.json: {"weight_map": {tensor: file}}), as the field's tools write them.
 *
 * Opening reads every header. The index only says which files there are; where a tensor is, the
 * headers say. Errors name the file. */

#define SAFESET_FILES_MAX 4096u

struct safeset_file {
    char *name; /* owned: within the directory, or the path that was asked for */
    int fd;     /* owned */
    struct safetensors *header;
};

struct safeset {
    struct safeset_file *files; /* owned, [count] */
    uint32_t count;
};

/* The set that is asked for. Files of ours are never symbolic links; other tools keep theirs
 * elsewhere and link to them. */
struct safeset_ask {
    const char *stem; /* "model" */
    bool writable;
    bool links; /* follow symbolic links */
};

/* The set of that stem in the directory dir_fd; SHD_ENOENT: there is none. */
int safeset_open_at(int dir_fd, const struct safeset_ask *ask, struct safeset **ret_set,
                    struct shd_err *e);

/* Weights of any tool: a file, or a directory with model.safetensors or its index. */
int safeset_open(const char *path, struct safeset **ret_set, struct shd_err *e);

void safeset_free(struct safeset *set); /* NULL is a no-op */

/* The place of a tensor, by its name. False: there is none. */
struct safeset_place {
    const struct safeset_file *file; /* borrowed */
    const struct safetensors_tensor *tensor;
};
bool safeset_find(const struct safeset *set, const char *name, struct safeset_place *ret_place);

#endif
