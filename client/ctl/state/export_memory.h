/* shardctl export --memory: weights as files in memory, which this process has: /proc/PID/fd/N is
 * the path of each, and DIR/step-N.safetensors, where there is a DIR, a symbolic link to that. They
 * go with the process, whatever ends it; the links go when it ends by itself.
 *
 * Who may open such a path: this user's processes, and root's. What was mapped stays with who
 * mapped it. */
#ifndef SHD_CTL_EXPORT_MEMORY_H
#define SHD_CTL_EXPORT_MEMORY_H

#include <stdint.h>

#include "client/shd.h"

#define EXPORT_MEMORY_KEEP  2u /* files, unless it is said */
#define EXPORT_MEMORY_MAX   1024u
#define EXPORT_MEMORY_BYTES 48u /* of a path "/proc/PID/fd/N", with NUL */

struct export_memory;

/* keep: in 1..EXPORT_MEMORY_MAX. dir_fd: borrowed; -1: no links. Errors: SHD_ENOMEM. */
int export_memory_new(uint32_t keep, int dir_fd, struct export_memory **ret_memory,
                      struct shd_err *e);

/* The pinned step; the oldest goes when there are more than `keep`. name: of the link, that is not
 * a file of somebody's. Errors: SHD_ENOMEM with the numbers, SHD_EIO, SHD_EEXIST. */
int export_memory_add(struct export_memory *x, const shd_model *m, const char *name,
                      uint64_t *ret_bytes, struct shd_err *e);

/* Of the newest; "": there is none. */
const char *export_memory_path(const struct export_memory *x);

/* Become the command argv, "{}" in whose words is the newest file's path: that process has the file
 * then. Returns only when it fails. */
int export_memory_exec(const struct export_memory *x, char **argv, struct shd_err *e);

void export_memory_free(struct export_memory *x); /* files, links; NULL is a no-op */

#endif
