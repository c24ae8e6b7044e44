/* The state of one `shardctl run` or `shardctl up`: its options, its children, its phase.
 *
 *     STARTING   daemons run, not all have said READY=1     --timeout bounds each start
 *     WORKING    all were ready; workers run
 *     STOPPING   something failed for good, or a signal came: workers are told to stop, after
 *                --grace killed
 *     SAVING     no worker runs; the saver saves what is new, and has deadlines of its own
 *     KEEPING    it could not: the daemons stay until a signal
 *     ENDING     nobody needs the daemons: they are told to stop, after --grace killed
 *     DONE       nothing runs; the loop ends
 */
#ifndef SHD_CTL_RUN_STATE_H
#define SHD_CTL_RUN_STATE_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <uv.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/devices.h"
#include "client/ctl/base/down_note.h"
#include "client/ctl/base/rundir.h"
#include "client/ctl/base/say.h"
#include "client/ctl/run/keeper.h"
#include "client/ctl/run/relay.h"
#include "proto/base/flags.h"
#include "proto/base/status.h"

#define RUN_DAEMONS_MAX  DEVICES_MAX
#define RUN_WORKERS_MAX  1024u
#define RUN_THREADS_MAX  256u /* as shardd --threads takes */
#define RUN_RESTARTS_MAX 1000u
#define RUN_SIGNALS      8u

/* The relay to other hosts, a child beside the daemons (shardd --relay). */
struct run_far {
    const char *cluster, *host; /* borrowed */
    bool files;                 /* checkpoints for others */
};

struct run_options {
    uint32_t daemons;              /* 1..RUN_DAEMONS_MAX: devices->count; 0: with `far` alone */
    const struct devices *devices; /* borrowed */
    struct flag_range workers;     /* 1..RUN_WORKERS_MAX; 0: none, serve until a signal */
    bool elastic;                  /* workers may join and leave; else both ends are the same */
    const struct run_far *far;     /* borrowed; NULL: no relay */
    uint32_t threads_per_daemon;   /* 0: our processors / daemons, at least 1 */
    /* Borrowed: where daemons make these, as shardd(8) takes it. */
    const char *state, *publish, *snapshots;
    uint32_t timeout_s, grace_s;
    uint32_t watchdog_s;   /* 0: none */
    uint32_t max_restarts; /* of one child within REVIVE_WINDOW; 0: never start again */
    bool verbose;
    const char *restore;       /* borrowed: what to begin with; NULL: nothing */
    const char *checkpoint;    /* borrowed: where to save; NULL: nowhere */
    const char *resume;        /* borrowed: where a saver saves and restores that stays beside
                                * daemons, also other hosts'; NULL: none does */
    const char *address;       /* borrowed: its; NULL: that of the devices */
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
    uint32_t index;               /* of its kind; a worker's rank */
    enum child_state state;
    bool ready;     /* daemons: said so since they were started */
    bool drained;   /* daemons: said that it ends so (shardctl drain) */
    bool leaving;   /* workers: asked to; their end is no failure */
    uint64_t order; /* workers: of joining; the newest has the highest */
    pid_t pid;
    uv_timer_t timer; /* WAITING, or until ready, or until killed for not leaving */
    struct relay relay;
    struct kept kept;      /* daemons: what they stored */
    uint64_t *started_ns;  /* borrowed, [max_restarts]: when it was started again, the last times */
    uint32_t starts;       /* how often it was started again */
    uint32_t early;        /* tries in a row that did not succeed; daemons: ends before READY */
    char ended[96];        /* how the one before ended: "(pid 12) was killed by ..."; "": none */
    struct down_note down; /* daemons: since_ns 0: nothing keeps it from being started */
    uint64_t said_ns;      /* when that was last said */
    uint32_t silent;       /* looks of the watchdog since it was well */
    bool stopped;          /* workers, helpers: as the look found that goes on */
};

struct run_children {
    struct run_child *list; /* owned, [count] */
    uint32_t count;
    const char *what;     /* "daemon", "worker" */
    uint64_t *started_ns; /* owned: those of the list, in one piece */
};
/* The helpers: `shardctl restore` before the workers start, `shardctl checkpoint --every` while
 * they work. It saves once more before the daemons are stopped. */
enum { RUN_RESTORER, RUN_SAVER, RUN_HELPERS };

enum run_phase {
    RUN_STARTING,
    RUN_WORKING,
    RUN_STOPPING,
    RUN_SAVING,
    RUN_KEEPING,
    RUN_ENDING,
    RUN_DONE
};

struct run_save {
    bool worked;    /* workers were started, so what daemons hold is worth saving */
    bool done;      /* all that they hold, at the end */
    bool room_said; /* that there may be none for a checkpoint */
    uint32_t tries; /* of the last save, that failed */
};

struct run {
    const struct run_options *options; /* borrowed */
    enum run_phase phase;
    int code;       /* exit code so far */
    bool impatient; /* it was told to kill what still runs */
    struct run_save save;
    uint64_t signal_ns;          /* when the first signal came; 0: none did */
    struct run_children daemons; /* options->daemons of them; behind them the relay */
    struct run_children workers; /* options->workers.last of them */
    struct run_children helpers; /* RUN_HELPERS of them */
    uint32_t workers_wanted;     /* while STARTING: how many to begin with */
    uint64_t order;              /* the newest worker's */
    const char *path;            /* borrowed: the runtime directory */
    struct rundir dir;           /* owned, when it is private */
    struct rlimit files;         /* RLIMIT_NOFILE as we got it; workers get it back */
    char shardd[PATH_MAX];       /* the daemon's binary */
    uint32_t daemon_threads;
    struct environ daemon_env, worker_env;
    int notify_fd;
    int down_fd;             /* owned: DOWN_NOTE_FILE; -1: it could not be made */
    uv_timer_cb child_timer; /* a child's timer has fired: revive.c's */
    uv_loop_t loop;
    uv_signal_t signals[RUN_SIGNALS];
    uv_timer_t deadline, watchdog;
    uv_poll_t notify;
    uv_timer_t notify_again;  /* runs while descriptors are too few to take a message */
    uv_timer_cb notify_timer; /* it has fired: supervise.c's */
    uint64_t notify_late_ns;  /* since when they are; 0: they are not */
};

/* ctl_say() when --verbose is on. */
#define run_note(r, ...)           \
    do {                           \
        if ((r)->options->verbose) \
            ctl_say(__VA_ARGS__);  \
    } while (0)

#endif
