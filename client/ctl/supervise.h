/* `shardctl run` at work: N daemons, then W workers beside them, until the last worker is done.
 *
 *     STARTING   daemons run, not all have said READY=1     --timeout bounds it
 *     WORKING    all are ready; workers run
 *     STOPPING   a worker failed, a daemon died, or a signal came: workers are told to stop,
 *                after --grace killed
 *     ENDING     no worker runs; daemons are told to stop, after --grace killed
 *     DONE       nothing runs; the loop ends
 *
 * The first thing that goes wrong decides the exit code and is the one that is named.
 */
#ifndef SHD_CTL_SUPERVISE_H
#define SHD_CTL_SUPERVISE_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <uv.h>

#include "client/ctl/relay.h"
#include "client/ctl/rundir.h"
#include "proto/status.h"

#define RUN_DAEMONS_MAX 1024u
#define RUN_WORKERS_MAX 1024u
#define RUN_THREADS_MAX 256u /* as shardd --threads takes */
#define RUN_SIGNALS     6u

struct run_options {
    uint32_t daemons, workers;   /* 1..RUN_DAEMONS_MAX, 1..RUN_WORKERS_MAX */
    uint32_t threads_per_daemon; /* 0: our processors / daemons, at least 1 */
    uint32_t timeout_s, grace_s;
    bool verbose;
    char **command; /* borrowed, NULL-terminated, what each worker runs */
};

struct run_child {
    char name[16]; /* "cpu0", "rank 1" */
    bool ready;    /* daemons: said so */
    bool running;
    pid_t pid;
    struct relay relay;
};

enum run_phase { RUN_STARTING, RUN_WORKING, RUN_STOPPING, RUN_ENDING, RUN_DONE };

struct run {
    const struct run_options *options; /* borrowed */
    enum run_phase phase;
    int code;                  /* exit code so far */
    uint64_t signal_ns;        /* when the first signal came; 0: none did */
    struct run_child *daemons; /* owned, options->daemons of them */
    struct run_child *workers; /* owned, options->workers of them */
    uint32_t daemons_running, daemons_ready, workers_running;
    struct rundir dir;
    struct rlimit files;   /* RLIMIT_NOFILE as we got it; children get it back */
    char shardd[PATH_MAX]; /* the daemon's binary */
    int notify_fd;
    uv_loop_t loop;
    uv_signal_t signals[RUN_SIGNALS];
    uv_timer_t deadline;
    uv_poll_t notify;
};

/* Start everything; SHD_OK: r->daemons (r->workers) are all running. On an error those started so
 * far are running, and the caller stops them. */
int launch_daemons(struct run *r, struct shd_err *e);
int launch_workers(struct run *r, struct shd_err *e);

/* Run to the end. Returns shardctl's exit code; has said why if it is not 0. */
int supervise(const struct run_options *options);

/* ctl_say() when --verbose is on. */
#define run_note(r, ...)           \
    do {                           \
        if ((r)->options->verbose) \
            ctl_say(__VA_ARGS__);  \
    } while (0)

#endif
