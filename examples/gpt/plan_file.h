/* plan_file.h: --plan FILE of shd-gpt. */
#ifndef GPT_PLAN_FILE_H
#define GPT_PLAN_FILE_H

#include "client/shd.h"

/* Have the model's steps run by the operations in a file. Errors: SHD_ENOENT, SHD_EIO, SHD_ENOMEM;
 * those of shd_set_plan(), with the file's name. */
int plan_file_set(shd_model *m, const char *path, struct shd_err *e);

#endif
