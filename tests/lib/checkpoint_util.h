/* What tests of checkpoints share: a directory for them, a toy model on daemons, small tricks with
 * files. */
#ifndef SHD_CHECKPOINT_UTIL_H
#define SHD_CHECKPOINT_UTIL_H

#include "client/checkpoint/dir.h"
#include "client/checkpoint/files.h"
#include "client/checkpoint/restore.h"
#include "client/checkpoint/save.h"
#include "tests/lib/client_remote.h"

extern char ckpts[300]; /* the directory; gone at the end of each test that calls remove_ckpts() */

__attribute__((format(printf, 1, 2))) int shell(const char *fmt, ...);

void remove_ckpts(void);

/* A new empty directory; that of the test before goes. */
void make_ckpts(void);

struct shd_checkpointed save_ok(shd_model *m, uint32_t keep);

void train(shd_model *m, uint32_t steps);

/* Restore the latest checkpoint onto the running daemons and attach. */
shd_model *restore_ok(shd_session *s, const char *path);

/* Change one byte of a file in a checkpoint; offset < 0 counts from the end. */
void flip_byte(const char *checkpoint, const char *file, off_t at);

bool exists(const char *name);

void expect_latest(const char *name);

/* Every complete checkpoint is whole, LATEST (if it is there) names one of them. Returns how many
 * there are. */
uint32_t expect_all_good(void);

#endif
