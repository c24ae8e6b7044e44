/* What a run begins with: nothing, a checkpoint it was told, or the latest of the directory it
 * saves in; and whether it may save there. */
#ifndef SHD_CTL_RESUME_H
#define SHD_CTL_RESUME_H

#include "proto/base/status.h"

struct run_options;

/* dir of --resume, NULL when it was not given. With it: options->checkpoint is dir, and
 * options->restore what is the latest there, or NULL when nothing is; the path is *ret_path, which
 * the caller frees. Errors: SHD_EEXIST, the directory to save in holds later steps than the one
 * this run begins with. */
int resume_plan(struct run_options *options, const char *dir, char **ret_path, struct shd_err *e);

#endif
