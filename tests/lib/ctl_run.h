/* Running the real shardctl in a test: in a runtime base of the test's own, its output read as it
 * comes. Every test ends with expect_clean(): nothing left in that base, no process alive. */
#ifndef SHD_CTL_RUN_H
#define SHD_CTL_RUN_H

#include "tests/lib/test.h"

#define OUTPUT_BYTES (256u * 1024u)
#define PIDS_MAX     256u
#define BIN          SHD_BIN_DIR /* where the binaries are; first in PATH */

extern char base[64]; /* the runtime base, set by main */

struct run {
    pid_t pid;
    int fds[2]; /* read ends of stdout and stderr; -1: at its end */
    char out[OUTPUT_BYTES], err[OUTPUT_BYTES];
    size_t used[2];
    int code; /* exit code, or 128 + signal */
};

/* Start program with args (NULL-terminated, without argv[0]). */
void run_start_program(struct run *r, const char *program, const char *const *args);

void run_start(struct run *r, const char *const *args);

/* Read what is there within wait_ms; false when both streams are at their end. */
bool run_read(struct run *r, int wait_ms);

/* Read until part shows up in stream, which is r->out or r->err. */
void run_await(struct run *r, const char *stream, const char *part);

/* Read to the end, reap. */
void run_finish(struct run *r);

#define ARGS(...) ((const char *const[]){ __VA_ARGS__, NULL })

extern struct run run; /* large: not on the stack */

void ctl(const char *const *args);

/* Entries in the runtime base. */
unsigned leftovers(void);

/* The pids named after each occurrence of mark in the run's stderr. */
unsigned pids_named(const char *mark, pid_t *ret_pids);

/* Who serves cpuINDEX of dir now, by its socket; 0: nobody. */
pid_t daemon_pid(const char *dir, int index);

/* Gone, or a zombie that its new parent has not reaped yet. */
bool gone(pid_t pid);

/* Every process that -v named is gone, now or (orphans of a killed shardctl) in a moment. */
void expect_gone(const char *mark, unsigned count);

void expect_clean(void);

int ctl_main(int argc, char **argv);

#endif
