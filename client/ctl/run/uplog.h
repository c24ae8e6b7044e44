/* The log of a keeper in the background: our stderr, in DIR/up.log. What would make it larger than
 * UPLOG_BYTES_MAX goes to a new one; the old one becomes DIR/up.log.1, the one before is gone. So
 * both have at most twice that. One per process, as stderr is. */
#ifndef SHD_CTL_UPLOG_H
#define SHD_CTL_UPLOG_H

#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define UPLOG_BYTES_MAX (UINT64_C(16) << 20)

/* Make stderr the log of dir, empty. Errors: SHD_EIO. */
int uplog_open(const char *dir, struct shd_err *e);

/* Before bytes are written to stderr. Nothing to do before uplog_open(); where no new log can be
 * made the old one goes on. */
void uplog_room(size_t bytes);

#endif
