/* `shardctl run` and `shardctl up` at work: N daemons, then for `run` workers beside them until the
 * last is done, for `up` none until a signal.
 *
 *     STARTING   daemons run, not all have said READY=1     --timeout bounds each start
 *     WORKING    all were ready; workers run
 *     STOPPING   something failed for good, or a signal came: workers are told to stop, after
 *                --grace killed
 *     ENDING     no worker runs; daemons are told to stop, after --grace killed
 *     DONE       nothing runs; the loop ends
 *
 * What dies while the run wants it is started again, a daemon with the descriptors it stored with
 * us: revive.c, which also says when that is given up. The first thing that goes wrong for good
 * decides the exit code and is the one that is named.
 */
#ifndef SHD_CTL_SUPERVISE_H
#define SHD_CTL_SUPERVISE_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <uv.h>

#include "client/ctl/base/environ.h"
#include "client/ctl/base/flags.h"
#include "client/ctl/run/devices.h"
#include "client/ctl/run/keeper.h"
#include "client/ctl/run/relay.h"
#include "client/ctl/run/rundir.h"
#include "proto/base/status.h"

#define RUN_DAEMONS_MAX  DEVICES_MAX
#define RUN_WORKERS_MAX  1024u
#define RUN_THREADS_MAX  256u /* as shardd --threads takes */
#define RUN_RESTARTS_MAX 1000u
#define RUN_SIGNALS      8u

struct run_options {
    uint32_t daemons;              /* 1..RUN_DAEMONS_MAX: devices->count */
    const struct devices *devices; /* borrowed */
    struct flag_range workers;     /* 1..RUN_WORKERS_MAX; 0: none, serve until a signal */
    bool elastic;                  /* workers may join and leave; else both ends are the same */
    uint32_t threads_per_daemon;   /* 0: our processors / daemons, at least 1 */
    uint32_t timeout_s, grace_s;
    uint32_t max_restarts; /* of one child within REVIVE_WINDOW; 0: never start again */
    bool verbose;
    const char *restore;       /* borrowed: what to begin with; NULL: nothing */
    const char *checkpoint;    /* borrowed: where to save; NULL: nowhere */
    uint32_t checkpoint_every; /* steps */
    uint32_t keep;             /* 0: all */
    char **command;            /* borrowed, NULL-terminated, what each worker runs */
    const char *dir;           /* borrowed, absolute, there; NULL: a private one that is removed */
    /* Called once when all daemons are ready; NULL: nobody. An error ends the run. */
    int (*ready)(void *arg, struct shd_err *e);
    void *arg;
};

/* WAITING: its timer will start it again. */
enum child_state { CHILD_GONE, CHILD_WAITING, CHILD_RUNNING };

struct run_child {
    char name[DEVICE_NAME_BYTES]; /* "cpu0", "rank 1" */
    struct run *run;              /* borrowed, the run it is of */
    const char *what;             /* "daemon", "worker" */
    uint32_t index;               /* of its kind; a worker's rank */
    enum child_state state;
    bool ready;     /* daemons: said so since they were started */
    bool drained;   /* daemons: said that it ends so (shardctl drain) */
    bool leaving;   /* workers: asked to; their end is no failure */
    uint64_t order; /* workers: of joining; the newest has the highest */
    pid_t pid;
    uv_timer_t timer; /* WAITING, or until ready, or until killed for not leaving */
    struct relay relay;
    struct kept kept;     /* daemons: what they stored */
    uint64_t *started_ns; /* owned by the run: the last max_restarts times it was started again */
    uint32_t starts;      /* how often it was started again */
    uint32_t early;       /* daemons: ends before READY, in a row */
    char ended[96];       /* how the one before ended: "(pid 12) was killed by ..."; "": none */
};

enum run_phase { RUN_STARTING, RUN_WORKING, RUN_STOPPING, RUN_ENDING, RUN_DONE };

struct run {
    const struct run_options *options; /* borrowed */
    enum run_phase phase;
    int code;                         /* exit code so far */
    uint64_t signal_ns;               /* when the first signal came; 0: none did */
    struct run_child *daemons;        /* owned, options->daemons of them */
    struct run_child *workers;        /* owned, options->workers.last of them */
    struct run_child restorer, saver; /* saver.c's */
    uint64_t *started_ns;             /* owned, the children's started_ns in one piece */
    uint32_t workers_wanted;          /* while STARTING: how many to begin with */
    uint64_t order;                   /* the newest worker's */
    const char *path;                 /* borrowed: the runtime directory */
    struct rundir dir;                /* owned, when it is private */
    struct rlimit files;              /* RLIMIT_NOFILE as we got it; workers get it back */
    char shardd[PATH_MAX];            /* the daemon's binary */
    uint32_t daemon_threads;
    struct environ daemon_env, worker_env;
    int notify_fd;
    uv_loop_t loop;
    uv_signal_t signals[RUN_SIGNALS];
    uv_timer_t deadline;
    uv_poll_t notify;
};

/* -- supervise.c ------------------------------------------------------------------------------ */

/* Run to the end. Returns shardctl's exit code; has said why if it is not 0. */
int supervise(const struct run_options *options);

/* Tell the workers to stop, by sig; the daemons follow when they have. Nothing is started again
 * from here on. No-op when that goes on already. */
void run_stop(struct run *r, int sig);

/* No worker is left: stop the daemons. No-op when that goes on already. */
void run_end(struct run *r);

/* Nobody needs the daemons any more. */
void run_end_daemons(struct run *r);

/* Workers can start: daemons are ready and have what they begin with. */
void run_work(struct run *r);

/* All is gone: let the loop end. */
void run_done(struct run *r);

/* What went wrong first is the exit code. */
void run_failed(struct run *r, int code);

/* Take all messages that daemons have sent us up to now. */
void run_take_messages(struct run *r);

/* How many are running or waiting. */
uint32_t run_count(const struct run_child *children, uint32_t count);

/* ctl_say() when --verbose is on. */
#define run_note(r, ...)           \
    do {                           \
        if ((r)->options->verbose) \
            ctl_say(__VA_ARGS__);  \
    } while (0)

/* -- launch.c --------------------------------------------------------------------------------- */

/* Fill in the command lines and environments; r->path is set. Undone by launch_free(), which is a
 * no-op before. */
int launch_prepare(struct run *r, struct shd_err *e);
void launch_free(struct run *r);

/* Start c, which is not running and whose relay is idle. On an error c is as before. */
int launch_daemon(struct run_child *c, struct shd_err *e);
int launch_worker(struct run_child *c, struct shd_err *e);
int launch_helper(struct run_child *c, char *const *argv, struct shd_err *e);

/* -- revive.c --------------------------------------------------------------------------------- */

/* Reap who has exited; start it again, or end the run, or note that it is done. */
void revive_exited(struct run *r);

/* c's timer has fired. */
void revive_timer(uv_timer_t *timer);

/* A daemon that is not ready yet goes on, and asks for ms from now on. */
void revive_later(struct run_child *c, uint64_t ms);

/* -- elastic.c -------------------------------------------------------------------------------- */

/* One worker more, or the newest asked to leave, within the limits. */
void elastic_join(struct run *r);
void elastic_leave(struct run *r);

#endif
