/* Lines on stderr, each whole, and the exit code of a verb.
 *
 * A keeper in the background has a log for its stderr (say_to_log()). A line that would make the
 * log larger than SAY_LOG_BYTES_MAX goes to a new one. The old log gets ".1" behind its name, and
 * replaces the one before. So the two together have at most twice that. There is one log per
 * process, as there is one stderr.
 *
 * Exit codes, also shown by `shardctl --help`: CTL_OK, CTL_FAILED, CTL_USAGE; `run` passes on the
 * code of the first worker that failed (128 + N when signal N ended it or the run itself), and has
 * CTL_UNSAVED (EX_CANTCREAT of sysexits.h) for a last save that failed.
 */
#ifndef SHD_CTL_SAY_H
#define SHD_CTL_SAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

#define SAY_LOG_BYTES_MAX (UINT64_C(16) << 20)
#define SAY_LOG_OLD       ".1" /* behind the log's name */

enum ctl_exit { CTL_OK = 0, CTL_FAILED = 1, CTL_USAGE = 2, CTL_UNSAVED = 73 };

/* Variables that say how daemons and shardctl write their lines, also those of the flags below. */
#define SAY_LEVEL_ENV  "SHARDD_LOG_LEVEL"
#define SAY_FORMAT_ENV "SHARDD_LOG_FORMAT"

/* Take the values of --log-level and --log-format (NULL: not given), for what is started, too.
 * Errors: SHD_EINVAL. */
int say_options(const char *level, const char *format, struct shd_err *e);
bool say_as_json(void);

/* "shardctl: <text>\n" to stderr, in one write so that lines of several processes stay whole; with
 * the time in a log; as JSON, as the daemons' log has it, where that was asked for. */
void ctl_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* The same, then the exit code of a verb that failed, or whose command line is wrong. */
#define ctl_fail(...)  (ctl_say(__VA_ARGS__), (int)CTL_FAILED)
#define ctl_usage(...) (ctl_say(__VA_ARGS__), (int)CTL_USAGE)

/* Make stderr a new log at path. Errors: SHD_ERANGE path too long, SHD_EIO. */
int say_to_log(const char *path, struct shd_err *e);

/* Write a line with its end to stderr, in one write. A log that does not take the line (a full
 * disk) takes none of it, and says before the next line that it does take how many are missing, and
 * why. */
void say_line(const char *line, size_t bytes);

#endif
