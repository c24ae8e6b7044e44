/* See run_flags.h. */
#include "client/ctl/run/run_flags.h"

#include "client/ctl/base/say.h"
#include "proto/base/check.h"
#include "proto/share/segment_file.h"

void run_flags_add(struct flag_table *table, struct run_options *o, struct run_words *words)
{
    const struct flag rows[] = {
        { "threads-per-daemon", 't', FLAG_U32, "T", "compute threads (processors / N)",
          &o->threads_per_daemon, 1, RUN_THREADS_MAX },
        { "state", 0, FLAG_STRING, "WHERE",
          "daemons' state: memory, or file:DIR on a disk (memory)", &o->state, 0, 0 },
        { "publish", 0, FLAG_STRING, "WHERE", "what workers read: memory, or file:DIR (memory)",
          &o->publish, 0, 0 },
        { "snapshots", 0, FLAG_STRING, "WHERE", "their snapshots: memory, or file:DIR (memory)",
          &o->snapshots, 0, 0 },
        { "timeout", 0, FLAG_U32, "SECONDS", "how long a daemon may take to be ready (60)",
          &o->timeout_s, 1, 86400 },
        { "max-restarts", 0, FLAG_U32, "N", "of each in 10 s, then it waits; 0: none (20)",
          &o->max_restarts, 0, RUN_RESTARTS_MAX },
        { "grace", 0, FLAG_U32, "SECONDS", "how long what is told to stop may take (10)",
          &o->grace_s, 1, 86400 },
        { "watchdog", 0, FLAG_U32, "SECONDS", "kill and restart what hangs so long; 0: never (30)",
          &o->watchdog_s, 0, 86400 },
        { "log-level", 0, FLAG_STRING, "LEVEL", "of daemons: error, warn, info, debug (warn)",
          &words->level, 0, 0 },
        { "log-format", 0, FLAG_STRING, "F", "of their lines and shardctl's: text or json (text)",
          &words->format, 0, 0 },
        { "verbose", 'v', FLAG_BOOL, NULL, "say what is started and stopped", &o->verbose, 0, 0 },
    };
    FLAGS_ADD(table, rows);
}

int run_flags_take(const struct run_options *o, const struct run_words *words, struct shd_err *e)
{
    struct segment_home home;
    int r = say_options(words->level, words->format, e);
    if (r == SHD_OK)
        r = segment_home_parse("--state", o->state, &home, e);
    if (r == SHD_OK)
        r = segment_home_parse("--publish", o->publish, &home, e);
    return r == SHD_OK ? segment_home_parse("--snapshots", o->snapshots, &home, e) : r;
}
