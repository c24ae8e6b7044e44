/* plan_file.h: the file of shd-gpt's --plan. */
#ifndef GPT_PLAN_FILE_H
#define GPT_PLAN_FILE_H

#include "proto/base/status.h"

/* The text of a file, with a NUL, of at most as many bytes as a plan may have and one more; the
 * caller's to free. Errors: SHD_ENOENT, SHD_EIO, SHD_ENOMEM, SHD_EINVAL it has a NUL. */
int plan_file_read(const char *path, char **ret_text, struct shd_err *e);

#endif
