/* A set of safetensors files that together hold tensors: one file, or several with an index
 * (STEM.safetensors.index.json: {"weight_map": {tensor: file}}), as the field's tools write them.
 *
 * Opening reads every header. The index only says which files there are; where a tensor is, the
 * headers say. Errors name the file.
 */
#ifndef SHD_SAFESET_H
#define SHD_SAFESET_H

#include <stdbool.h>
#include <stdint.h>

struct safetensors;
struct safetensors_tensor;
struct shd_err;

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

/* Which files, and how they are opened. Files of ours are never symbolic links; other tools keep
 * theirs elsewhere and link to them. */
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
