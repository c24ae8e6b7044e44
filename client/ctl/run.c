/* shardctl run: the command line; supervise.c does the work. */
#include "client/ctl/ctl.h"
#include "client/ctl/flags.h"
#include "client/ctl/supervise.h"
#include "proto/check.h"

static const char run_about[] =
    "Start N daemons in a private directory, then W workers that find them by SHARDD_ADDRESS, and\n"
    "wait. Parameters and optimizer state live in the daemons. Everything started here ends here,\n"
    "whatever happens, and the directory is removed.\n"
    "\n"
    "COMMAND is run W times with torchrun's variables: RANK, LOCAL_RANK, WORLD_SIZE,\n"
    "LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT; OPENBLAS_NUM_THREADS and\n"
    "OMP_NUM_THREADS share out the processors unless you set them. Rank 0 has shardctl's own\n"
    "stdout and stderr; lines of other ranks ([rank 1]) and of daemons ([cpu0]) go to stderr.";

static const char run_more[] =
    "example:\n"
    "  shardctl run --daemons 2 --workers 2 -- shd-gpt --steps 20\n"
    "\n"
    "signals: INT, TERM, HUP and QUIT are passed to the workers; a second one, at least half a\n"
    "second later, kills what still runs. TSTP (Ctrl-Z) suspends the workers with shardctl.\n"
    "\n"
    "exit codes:\n"
    "  0        every worker ended with 0\n"
    "  1        a daemon failed, or nothing could be started\n"
    "  2        the command line was wrong\n"
    "  C        the code of the first worker that failed; 128 + N if signal N killed it\n"
    "  128 + N  signal N stopped the run\n";

int verb_run(int argc, char **argv)
{
    struct run_options o = { .daemons = 1, .workers = 1, .timeout_s = 60, .grace_s = 10 };
    const struct flag table[] = {
        { "daemons", 'n', FLAG_U32, "N", "daemons to start, named cpu0, cpu1, ... (1)", &o.daemons,
          1, RUN_DAEMONS_MAX },
        { "workers", 'w', FLAG_U32, "W", "copies of COMMAND to run (1)", &o.workers, 1,
          RUN_WORKERS_MAX },
        { "threads-per-daemon", 't', FLAG_U32, "T", "compute threads (processors / N)",
          &o.threads_per_daemon, 1, RUN_THREADS_MAX },
        { "timeout", 0, FLAG_U32, "SECONDS", "how long daemons may take to be ready (60)",
          &o.timeout_s, 1, 86400 },
        { "grace", 0, FLAG_U32, "SECONDS", "how long what is told to stop may take (10)",
          &o.grace_s, 1, 86400 },
        { "verbose", 'v', FLAG_BOOL, NULL, "say what is started and stopped", &o.verbose, 0, 0 },
    };
    const struct flags flags = { .usage = "shardctl run [FLAGS] -- COMMAND [ARGS...]",
                                 .about = run_about,
                                 .more = run_more,
                                 .table = table,
                                 .count = ARRAY_SIZE(table) };
    int rest = argc;
    const int code = flags_start(&flags, argc, argv, &rest);
    if (code >= 0)
        return code;
    if (rest == argc) {
        ctl_say("run needs a command: shardctl run [FLAGS] -- COMMAND [ARGS...]");
        return CTL_USAGE;
    }
    o.command = argv + rest;
    return supervise(&o);
}
