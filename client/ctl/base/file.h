/* Whole files. */
#ifndef SHD_CTL_FILE_H
#define SHD_CTL_FILE_H

#include <stddef.h>

#include "proto/base/status.h"

/* A whole file of at most bytes_max bytes, NUL behind it; the caller's to free. Errors: SHD_ENOENT,
 * SHD_ERANGE it has more, SHD_ENOMEM, SHD_EIO. */
int file_read(const char *path, size_t bytes_max, char **ret_text, size_t *ret_bytes,
              struct shd_err *e);

#endif
