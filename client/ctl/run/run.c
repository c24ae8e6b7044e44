/* shardctl run: the command line; supervise.c does the work. */
#include "client/ctl/run/run.h"

#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/run/supervise.h"
#include "proto/base/check.h"

static const char run_about[] =
    "Start N daemons in a private directory, then W workers that find them by SHARDD_ADDRESS, and\n"
    "wait. Parameters and optimizer state live in the daemons. Everything started here ends here,\n"
    "whatever happens, and the directory is removed.\n"
    "\n"
    "A daemon that dies is started again and gets its state back: its memory is kept here. A\n"
    "worker killed by a signal (SIGPIPE apart) is started again with its rank; one that exits "
    "with\n"
    "a code other than 0 ends the run. Each of that is a line on stderr. A daemon that ends 8 "
    "times in a row\n"
    "before it is ready, or anything that takes more than --max-restarts in 10 s, ends the run.\n"
    "\n"
    "COMMAND is run W times with torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE,\n"
    "LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT; OPENBLAS_NUM_THREADS and\n"
    "OMP_NUM_THREADS share out the processors unless you set them. Rank 0 has shardctl's own\n"
    "stdout and stderr; lines of other ranks ([rank 1]) and of daemons ([cpu0]) go to stderr.\n"
    "\n"
    "With --elastic workers take work as they come (SHARDD_ELASTIC=1) instead of by rank. A of\n"
    "--workers A..B are started. SIGUSR1 to shardctl adds one, up to B; SIGUSR2 asks the newest "
    "to\n"
    "leave (SIGTERM), down to A. Signals in quick succession may count once. WORLD_SIZE is B; the\n"
    "rank of one that is gone is given to the next.";

static const char run_more[] =
    "examples:\n"
    "  shardctl run --daemons 2 --workers 2 -- shd-gpt --steps 20\n"
    "  shardctl run --checkpoint /data/run1 --keep 3 -- shd-gpt --steps 20000\n"
    "  shardctl run --restore /data/run1 --checkpoint /data/run1 -- shd-gpt --steps 20000\n"
    "  shardctl run --daemons 2 --elastic --workers 1..4 -- shd-gpt --steps 200\n"
    "  shardctl run --devices gpu0,gpu1 --workers 2 -- shd-gpt --steps 20\n"
    "\n"
    "environment: SHARDD_BIN is the daemon to start (default: the shardd beside shardctl, else by\n"
    "PATH).\n"
    "\n"
    "signals: INT, TERM, HUP and QUIT are passed to the workers; a second one, at least half a\n"
    "second later, kills what still runs. TSTP (Ctrl-Z) suspends the workers with shardctl.\n"
    "\n"
    "exit codes:\n"
    "  0        every worker ended with 0\n"
    "  1        a daemon failed for good, or nothing could be started\n"
    "  2        the command line was wrong\n"
    "  C        the code of the first worker that failed for good; 128 + N if signal N killed it\n"
    "  128 + N  signal N stopped the run\n";

int verb_run(int argc, char **argv)
{
    static struct devices devices;
    const char *list = NULL;
    struct run_options o = { .devices = &devices,
                             .workers = { 1, 1 },
                             .timeout_s = 60,
                             .grace_s = 10,
                             .max_restarts = 20,
                             .checkpoint_every = 100 };
    const struct flag table[] = {
        { "daemons", 'n', FLAG_U32, "N", "daemons to start, named cpu0, cpu1, ... (1)", &o.daemons,
          1, RUN_DAEMONS_MAX },
        { "devices", 0, FLAG_STRING, "LIST", "the daemons' devices instead, as gpu0,cpu0", &list, 0,
          0 },
        { "workers", 'w', FLAG_RANGE, "W", "copies of COMMAND to run (1); A..B with --elastic",
          &o.workers, 1, RUN_WORKERS_MAX },
        { "elastic", 'e', FLAG_BOOL, NULL, "workers may join and leave (see below)", &o.elastic, 0,
          0 },
        { "threads-per-daemon", 't', FLAG_U32, "T", "compute threads (processors / N)",
          &o.threads_per_daemon, 1, RUN_THREADS_MAX },
        { "timeout", 0, FLAG_U32, "SECONDS", "how long a daemon may take to be ready (60)",
          &o.timeout_s, 1, 86400 },
        { "max-restarts", 0, FLAG_U32, "N", "of one daemon or worker in 10 s; 0: never (20)",
          &o.max_restarts, 0, RUN_RESTARTS_MAX },
        { "grace", 0, FLAG_U32, "SECONDS", "how long what is told to stop may take (10)",
          &o.grace_s, 1, 86400 },
        { "restore", 0, FLAG_STRING, "DIR", "begin with this checkpoint, or the latest in DIR",
          &o.restore, 0, 0 },
        { "checkpoint", 0, FLAG_STRING, "DIR", "save in DIR while it goes on, and at the end",
          &o.checkpoint, 0, 0 },
        { "checkpoint-every", 0, FLAG_U32, "STEPS", "steps between checkpoints (100)",
          &o.checkpoint_every, 1, UINT32_MAX },
        { "keep", 0, FLAG_U32, "N", "checkpoints to keep (all)", &o.keep, 1, 1000000 },
        { "verbose", 'v', FLAG_BOOL, NULL, "say what is started and stopped", &o.verbose, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(run, "shardctl run [FLAGS] -- COMMAND [ARGS...]", table);
    int rest = argc;
    const int code = verb_start(&flags, argc, argv, &rest);
    if (code >= 0)
        return code;
    if (rest == argc)
        return ctl_usage("run needs a command: shardctl run [FLAGS] -- COMMAND [ARGS...]");
    if (o.checkpoint == NULL && (o.keep > 0 || o.checkpoint_every != 100))
        return ctl_usage("--keep and --checkpoint-every say how: --checkpoint DIR says where");
    if (!o.elastic && o.workers.first != o.workers.last)
        return ctl_usage(
            "--workers %u..%u needs --elastic: without it each of W ranks has its own share of "
            "the work",
            (unsigned)o.workers.first, (unsigned)o.workers.last);
    struct shd_err e = { 0 };
    if (devices_parse(list, o.daemons, &devices, &e) != SHD_OK)
        return ctl_usage("%s", e.text);
    o.daemons = devices.count;
    o.command = argv + rest;
    return supervise(&o);
}
