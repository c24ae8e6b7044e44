/* shardctl's verbs and the little they share. One verb, one file: verb_NAME() in NAME.c, and a
 * row in main.c's table.
 *
 * Exit codes, also shown by `shardctl --help`: CTL_OK, CTL_FAILED, CTL_USAGE; `run` passes on the
 * code of the first worker that failed (128 + N when signal N ended it or the run itself).
 */
#ifndef SHD_CTL_H
#define SHD_CTL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"

enum ctl_exit { CTL_OK = 0, CTL_FAILED = 1, CTL_USAGE = 2 };

/* argv[0] is the verb's own name. Returns the exit code. */
struct verb {
    const char *name;
    const char *summary; /* one line, for --help */
    int (*fn)(int argc, char **argv);
};

/* All of them, `help` last. */
const struct verb *ctl_verbs(size_t *ret_count);

int verb_run(int argc, char **argv);
int verb_up(int argc, char **argv);
int verb_down(int argc, char **argv);
int verb_dashboard(int argc, char **argv);
int verb_status(int argc, char **argv);
int verb_top(int argc, char **argv);
int verb_trace(int argc, char **argv);
int verb_digest(int argc, char **argv);
int verb_plan(int argc, char **argv);
int verb_checkpoint(int argc, char **argv);
int verb_restore(int argc, char **argv);
int verb_doctor(int argc, char **argv);
int verb_drain(int argc, char **argv);
int verb_completion(int argc, char **argv);

/* checkpoint.c: save the only model there is, as `shardctl checkpoint DIR` does, by s. */
struct shd_session;
int checkpoint_save(struct shd_session *s, const char *dir, struct shd_err *e);

/* "shardctl: <text>\n" to stderr, in one write so that lines of several processes stay whole. */
void ctl_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
