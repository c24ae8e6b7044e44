/* What tests of the mapped path share: real daemons, attached to, with the toy model. */
#ifndef SHD_TESTS_CLIENT_REMOTE_H
#define SHD_TESTS_CLIENT_REMOTE_H

#include "client/checkpoint/dir.h"
#include "client/checkpoint/files.h"
#include "client/checkpoint/restore.h"
#include "client/checkpoint/save.h"
#include "tests/lib/client_toy.h"
#include "tests/lib/fixture.h"
#include "tests/lib/test.h"

struct hub;

extern struct fixture daemons;

/* For sessions whose limit is not what the test is about: the machine may be busy. */
#define PATIENT_MS TEST_HANG_MS

int try_connect(const char *address, uint64_t timeout_ms, shd_session **ret, struct shd_err *e);

shd_session *attach(uint64_t timeout_ms);

/* To some of the daemons, or to pairs: "cpu0+cpu1". */
shd_session *attach_devices(const char *devices);

shd_model *open_toy(shd_session *s, const char *spec);

void digest_of(shd_model *m, char hex[65]);

/* Until it is so. */
void poll_until(struct hub *hub, bool (*is_so)(const struct hub *hub));

/* After a test that killed one: the others too, and what they leave. */
void remove_dead_fixture(void);

/* For tests of checkpoints: a directory for them, small tricks with files. */
extern char ckpts[300]; /* the directory; gone at the end of each test that calls remove_ckpts() */

__attribute__((format(printf, 1, 2))) int shell(const char *fmt, ...);

void remove_ckpts(void);

/* A new empty directory; that of the test before goes. */
void make_ckpts(void);

struct shd_checkpointed save_ok(shd_model *m, uint32_t keep);

void train_steps(shd_model *m, uint32_t steps);

/* A worker: its share of each step's micro-batches until the model is at that step. Its process
 * ends with 0, or with 1 and a line that says why. */
__attribute__((noreturn)) void trainer_run(const char *spec, uint32_t rank, uint32_t workers,
                                           uint64_t steps);

/* The same in a child: expect_well() waits for it. */
pid_t trainer_fork(const char *spec, uint32_t rank, uint32_t workers, uint64_t steps);

/* Of the second toy: in "local:", attached to, trained by all micro-batches. */
shd_session *attach_here(void);
shd_model *open_pt_of(shd_session *s, const struct pt_model *model);
void train_pt(shd_model *m, uint32_t steps);

/* shd_get() of an array; free() it. */
float *array_of(shd_model *m, uint32_t unit, enum shd_array array);

/* Two models have the same digest. */
void expect_twins(shd_model *m, shd_model *twin);

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
