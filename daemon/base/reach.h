/* Explaining why a client's path cannot be used: which part of it this daemon may not enter, and as
 * which user. A client of another user sees the files itself, so that "Permission denied" alone
 * tells it nothing. */
#ifndef SHD_REACH_H
#define SHD_REACH_H

#include <stdbool.h>

#include "proto/base/status.h"

/* After opening path, or files in it, failed with `status`: when this process may not enter a
 * directory on the way, or may not read (`write`: write) path or a file directly in it, e says
 * which, as which user, and what to do; else e stays as it is. path: absolute. Returns status. For
 * libuv's pool: it looks at files. */
int reach_explain(int status, const char *path, bool write, struct shd_err *e);

#endif
