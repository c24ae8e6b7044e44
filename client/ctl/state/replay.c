/* See replay.h.
 *
 * Daemons cannot compute a gradient, so a worker program does: it is started with $SHARDD_REPLAY
 * (client/session/replay.h) and trains a fork of the snapshot, one worker for all micro-batches, up
 * to the step. Then the fork's history is compared with the run's, row by row, and its state with
 * that of the snapshot behind the step, or of the model where that is its open step.
 *
 * The fork goes whatever happens, but for a SIGKILL of this process: then `shardctl drop` takes it.
 * The worker is killed with us. */
#include "client/ctl/state/replay.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/ctl/base/child.h"
#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/state/replay_judge.h"
#include "client/ctl/state/replay_state.h"
#include "client/session/replay.h"
#include "client/session/where.h"
#include "client/shd.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define STEPS_MAX   65535u /* of a history */
#define LOOK_NS     (50 * NS_PER_MS)
#define LEAVE_NS    (5 * NS_PER_S) /* between SIGTERM and SIGKILL */
#define REASON      320u
#define CTL_UNKNOWN 3

static const char replay_about[] =
    "Compute step K of a model again, beside its training, and say whether the bits agree: a fork\n"
    "is made of the last snapshot before K, COMMAND trains it up to K, and what steps came to "
    "(norm\n"
    "of the gradient, loss), and the state after K where that is kept, are compared with what is\n"
    "recorded. Steps are counted as `shardctl log` does: the first one is 1. Then the fork is "
    "dropped.\n"
    "COMMAND is what the run's workers were started with; it finds the fork by itself, and "
    "computes\n"
    "all micro-batches. What it writes goes to stderr. The model that trains is left alone, but "
    "for\n"
    "copies in memory.";

static const char replay_more[] = VERB_WHERE
    "\n"
    "example: the loss went up at step 1200; was that the machine?\n"
    "  shardctl snapshots gpt\n"
    "  shardctl replay gpt --step 1200 -- shd-gpt --steps 20000\n"
    "\n"
    "exit codes:\n"
    "  0        the bits agree\n"
    "  1        they differ: the first step, and the unit, are named\n"
    "  2        the command line was wrong\n"
    "  3        cannot say: no snapshot, no room, COMMAND failed or is another one; the reason is "
    "on\n"
    "           stderr\n"
    "  128 + N  signal N (Ctrl-C: 130) ended it; the fork is dropped\n";

struct replay {
    const char *name, *address; /* borrowed, with command */
    char *const *command;
    uint64_t step;
    bool json;
    shd_session *session, *aside; /* owned; the run's, and its own for the fork: a drop ends that */
    shd_model *model, *fork;      /* borrowed from them */
    uint64_t from;                /* the snapshot */
    uint32_t count;               /* steps from there */
    struct shd_step_row *was, *now;    /* owned, [count] */
    uint32_t done;                     /* of now */
    struct replay_state before, after; /* owned: of the run, of the fork */
    char changed[REPLAY_KEY_BYTES];
    char fork_name[SPEC_NAME_BYTES_MAX], reason[REASON]; /* "": there is none */
};

static volatile sig_atomic_t stopped;

static void on_signal(int sig)
{
    stopped = sig;
}

static void catch_signals(void)
{
    static const int signals[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT };
    struct sigaction action = { .sa_handler = on_signal };
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
        sigaction(signals[i], &action, NULL);
}

static int is_stopped(void *ctx)
{
    (void)ctx;
    return stopped != 0;
}

static int connect_to(const struct replay *r, bool may_stop, shd_session **ret_session,
                      struct shd_err *e)
{
    const struct shd_options options = { .size = sizeof options,
                                         .address = r->address,
                                         .name = "shardctl replay",
                                         .idle = may_stop ? is_stopped : NULL,
                                         .timeout_ms = VERB_TIMEOUT_MS };
    return shd_connect(&options, ret_session, e);
}

/* -- Before ------------------------------------------------------------------------------------ */

/* The last one from which the step can be computed. */
static int find_snapshot(struct replay *r, bool *ret_after, struct shd_err *e)
{
    struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX] = { { .size = sizeof *rows } };
    char list[SHD_SNAPSHOTS_MAX * 24] = "";
    uint32_t count = 0;
    bool found = false;
    const int status = shd_snapshots(r->model, rows, SHD_SNAPSHOTS_MAX, &count, e);
    if (status != SHD_OK)
        return status;
    for (uint32_t i = 0; i < count; i++) {
        const size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, "%s%" PRIu64, i > 0 ? ", " : "", rows[i].step);
        if (rows[i].step < r->step) {
            r->from = rows[i].step;
            found = true;
        }
        *ret_after = *ret_after || rows[i].step == r->step;
    }
    if (found)
        return SHD_OK;
    return err_set(e, SHD_ENOENT,
                   "step %" PRIu64 " of model '%.60s' needs a snapshot of a step before it, and "
                   "there are %s%s; keep some: shardctl snapshot %.60s --every STEPS",
                   r->step, shd_model_name(r->model), count > 0 ? "those of " : "none", list,
                   shd_model_name(r->model));
}

/* Rows of the steps from r->from on, as many as there are. */
static int read_rows(const struct replay *r, shd_model *m, struct shd_step_row *rows,
                     uint32_t *ret_count, struct shd_err *e)
{
    uint64_t from = r->from;
    uint32_t count = 0;
    rows[0].size = sizeof *rows;
    const int status = shd_history(m, &from, rows, r->count, &count, e);
    if (status == SHD_OK)
        *ret_count = count;
    return status;
}

static int read_history(struct replay *r, struct shd_err *e)
{
    uint32_t count = 0;
    if (r->step - r->from > STEPS_MAX)
        return err_set(e, SHD_ERANGE,
                       "%" PRIu64 " steps from the snapshot of step %" PRIu64 " to step %" PRIu64
                       ", the history has the last %u",
                       r->step - r->from, r->from, r->step, STEPS_MAX);
    r->count = (uint32_t)(r->step - r->from);
    r->was = sys_calloc(r->count, sizeof *r->was);
    r->now = sys_calloc(r->count, sizeof *r->now);
    if (r->was == NULL || r->now == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for %" PRIu32 " steps", r->count);
    const int status = read_rows(r, r->model, r->was, &count, e);
    if (status != SHD_OK)
        return status;
    if (count < r->count || r->was[0].step != r->from)
        return err_set(e, SHD_ENOENT,
                       "the history of model '%.60s' has %" PRIu32 " of the steps %" PRIu64
                       " to %" PRIu64 ": it begins later, or the model went back",
                       shd_model_name(r->model), count, r->from + 1, r->step);
    return SHD_OK;
}

static int drop(const struct replay *r, const char *name)
{
    const struct shd_drop_options how = { .size = sizeof how, .force = true };
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    int status = connect_to(r, /* may_stop= */ false, &s, &e);
    if (status == SHD_OK)
        status = shd_model_drop(s, name, &how, &e);
    shd_close(s);
    if (status == SHD_OK || status == SHD_ENOENT)
        return SHD_OK;
    ctl_say("the fork is there still: %s; shardctl drop --yes --force %s", e.text, name);
    return status;
}

/* In a session of its own, which ends with the fork. */
static int fork_at(struct replay *r, uint64_t step, struct shd_err *e)
{
    const struct shd_fork_options how = { .size = sizeof how, .exact = true, .step = step };
    shd_model *m;
    int status = connect_to(r, /* may_stop= */ true, &r->aside, e);
    if (status == SHD_OK)
        status = shd_model_attach(r->aside, shd_model_name(r->model), &m, e);
    if (status == SHD_OK)
        status = shd_model_fork_with(m, r->fork_name, &how, NULL, e);
    return status == SHD_OK ? shd_model_attach(r->aside, r->fork_name, &r->fork, e) : status;
}

static int drop_fork(struct replay *r)
{
    shd_close(r->aside);
    r->aside = NULL;
    r->fork = NULL;
    return r->fork_name[0] != '\0' ? drop(r, r->fork_name) : SHD_OK;
}

/* What the state was after the step, by a fork of that, which goes at once. Without it the step's
 * numbers are compared alone, which is said. */
static int read_before(struct replay *r, bool kept, struct shd_err *e)
{
    struct shd_err why = { 0 };
    if (!kept && shd_step(r->model) != r->step) {
        ctl_say("there is no snapshot of step %" PRIu64
                ", and the model is past it: norms and losses are compared, not the state",
                r->step);
        return SHD_OK;
    }
    int status = fork_at(r, r->step, &why);
    if (status == SHD_OK)
        status = replay_state_read(r->fork, &r->before, &why);
    if (drop_fork(r) != SHD_OK)
        return err_set(e, SHD_EIO, "a copy of step %" PRIu64 " could not be dropped", r->step);
    if (status == SHD_ECANCELED || status == SHD_EGONE)
        return err_copy(&why, e);
    if (status != SHD_OK)
        ctl_say("norms and losses are compared, not the state after step %" PRIu64 ": %s", r->step,
                why.text);
    return SHD_OK;
}

static int prepare(struct replay *r, struct shd_err *e)
{
    bool kept = false;
    int status = connect_to(r, /* may_stop= */ true, &r->session, e);
    if (status == SHD_OK)
        status = shd_model_attach(r->session, r->name, &r->model, e);
    if (status == SHD_OK && r->step > shd_step(r->model))
        status = err_set(e, SHD_ESTEP,
                         "step %" PRIu64 " of model '%.60s' is not made yet: %" PRIu64 " are",
                         r->step, shd_model_name(r->model), shd_step(r->model));
    if (status == SHD_OK)
        status = find_snapshot(r, &kept, e);
    if (status == SHD_OK)
        status = read_history(r, e);
    if (status != SHD_OK)
        return status;
    snprintf(r->fork_name, sizeof r->fork_name, "%.80s.replay-%ld", shd_model_name(r->model),
             (long)getpid());
    status = read_before(r, kept, e);
    if (status == SHD_OK)
        status = fork_at(r, r->from, e);
    return status == SHD_OK ? replay_sets(r->model, r->fork, r->from, r->step, r->changed, e)
                            : status;
}

/* -- The worker -------------------------------------------------------------------------------- */

static int make_environ(const struct replay *r, struct environ *env, struct shd_err *e)
{
    static const char *const of_one[][2] = {
        { "RANK", "0" }, { "WORLD_SIZE", "1" }, { "LOCAL_RANK", "0" }, { "LOCAL_WORLD_SIZE", "1" }
    };
    int status = environ_set(env, e, REPLAY_ENV, "%" PRIu64 " %s %s", r->step, r->fork_name,
                             shd_model_name(r->model));
    if (status == SHD_OK && r->address != NULL)
        status = environ_set(env, e, WHERE_ENV, "%s", r->address);
    for (size_t i = 0; status == SHD_OK && i < ARRAY_SIZE(of_one); i++)
        status = environ_set(env, e, of_one[i][0], "%s", of_one[i][1]);
    return status;
}

static int start_worker(const struct replay *r, pid_t *ret_pid, struct shd_err *e)
{
    struct environ env = { 0 };
    char **list = NULL;
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    int status = null >= 0 ? environ_new(&env, e) : err_sys(e, SHD_EIO, "open /dev/null");
    if (status == SHD_OK)
        status = make_environ(r, &env, e);
    if (status == SHD_OK)
        status = environ_list(&env, &list, e);
    const struct child_spawn spawn = {
        .argv = r->command, .envp = list, .in = null, .out = STDERR_FILENO, .err = STDERR_FILENO
    };
    if (status == SHD_OK)
        status = child_spawn(&spawn, ret_pid, e);
    free(list);
    environ_free(&env);
    if (null >= 0)
        close(null);
    return status;
}

/* It has done its part, or will not: it may tidy up for a moment. */
static void end_worker(pid_t pid)
{
    const uint64_t start_ns = clock_now_ns();
    const struct timespec pause = clock_timespec(LOOK_NS);
    pid_t gone = 0;
    child_signal(pid, SIGTERM);
    while (gone == 0 && clock_now_ns() - start_ns < LEAVE_NS) {
        gone = waitpid(pid, NULL, WNOHANG);
        if (gone == 0)
            nanosleep(&pause, NULL);
    }
    child_signal(pid, SIGKILL); /* what it has started, too */
    if (gone == 0)
        waitpid(pid, NULL, 0);
}

/* Until the fork has made the step, or the worker has ended, or we are told to. */
static int watch_worker(struct replay *r, pid_t pid, struct shd_err *e)
{
    const struct timespec pause = clock_timespec(LOOK_NS);
    char how[64];
    int status = SHD_OK, ended = 0;
    pid_t gone = 0;
    while (status == SHD_OK && r->done < r->count && gone == 0 && !stopped) {
        nanosleep(&pause, NULL);
        gone = waitpid(pid, &ended, WNOHANG);
        status = read_rows(r, r->fork, r->now, &r->done, e);
    }
    if (gone == 0)
        end_worker(pid);
    if (status == SHD_OK && stopped)
        return err_set(e, SHD_ECANCELED, "stopped");
    if (status == SHD_OK && r->done < r->count)
        snprintf(r->reason, sizeof r->reason,
                 "%.100s %s after step %" PRIu64 ", and the replay is of step %" PRIu64
                 ": what it wrote says why",
                 r->command[0], child_describe(ended, how, sizeof how), r->from + r->done, r->step);
    return status;
}

static int work(struct replay *r, struct shd_err *e)
{
    pid_t pid;
    const int status = start_worker(r, &pid, e);
    return status == SHD_OK ? watch_worker(r, pid, e) : status;
}

/* -- The finding ------------------------------------------------------------------------------- */

/* The first unit whose gradient's norm differs in that step; UINT32_MAX: not known. */
static uint32_t find_unit(const struct replay *r, uint64_t step)
{
    const uint32_t units = shd_units(r->model);
    for (uint32_t u = 0; u < units; u++) {
        struct shd_unit_stats was = { .size = sizeof was }, now = { .size = sizeof now };
        if (shd_unit_stats(r->model, step - 1, u, 1, &was, NULL, NULL) != SHD_OK ||
            shd_unit_stats(r->fork, step - 1, u, 1, &now, NULL, NULL) != SHD_OK)
            return UINT32_MAX;
        if (memcmp(&was.grad_norm, &now.grad_norm, sizeof was.grad_norm) != 0)
            return u;
    }
    return UINT32_MAX;
}

static void say_unknown(struct replay *r, const struct replay_finding *f)
{
    if (strcmp(f->what, "guard") == 0)
        snprintf(r->reason, sizeof r->reason,
                 "step %" PRIu64 " was skipped by a rule of the guard that has a window, which a "
                 "fork fills anew: a snapshot behind that step is needed",
                 f->step);
    else if (strcmp(f->what, "put") == 0)
        snprintf(r->reason, sizeof r->reason,
                 "step %" PRIu64 " %s a put of values: a snapshot behind that step is needed",
                 f->step, f->was > 0 ? "of the run was" : "is not, as the command has it,");
    else
        snprintf(r->reason, sizeof r->reason,
                 "step %" PRIu64 " was made with another %s (%.17g) than the command's (%.17g): "
                 "it has to be the run's own command line, options and all",
                 f->step, f->what, f->was, f->now);
}

/* The last word, on stdout. unit: UINT32_MAX: none is named. Returns the exit code. */
static int tell(const struct replay *r, const struct replay_finding *f, const char *unit)
{
    static const char *const words[] = { "agrees", "differs", "unknown" };
    const bool state = r->before.known && r->after.known;
    const enum replay_verdict verdict = r->reason[0] != '\0' ? REPLAY_UNKNOWN : f->verdict;
    if (r->json) {
        json_t *o = json_pack("{s:s, s:s, s:I, s:I, s:I, s:b}", "model", shd_model_name(r->model),
                              "verdict", words[verdict], "step", (json_int_t)r->step, "from",
                              (json_int_t)r->from, "steps", (json_int_t)r->done, "state", state);
        if (verdict == REPLAY_UNKNOWN)
            json_object_set_new(o, "reason", json_string(r->reason));
        if (verdict == REPLAY_DIFFERS)
            json_object_set_new(o, "first",
                                json_pack("{s:I, s:s, s:s?}", "step", (json_int_t)f->step, "what",
                                          f->what, "unit", unit));
        if (verdict == REPLAY_DIFFERS && r->changed[0] != '\0')
            json_object_set_new(o, "changed", json_string(r->changed));
        verb_json(o, JSON_COMPACT, stdout);
    } else if (verdict != REPLAY_UNKNOWN) {
        printf("%s model=%s step=%" PRIu64 " from=%" PRIu64 " compared=norm,loss%s", words[verdict],
               shd_model_name(r->model), r->step, r->from, state ? ",state" : "");
        if (verdict == REPLAY_DIFFERS)
            printf(" first=%" PRIu64 " what=%s%s%s", f->step, f->what, unit != NULL ? " unit=" : "",
                   unit != NULL ? unit : "");
        if (verdict == REPLAY_DIFFERS && strcmp(f->what, "state") != 0)
            printf(" was=%.17g now=%.17g", f->was, f->now);
        printf("\n");
    }
    if (verdict == REPLAY_DIFFERS && r->changed[0] != '\0')
        ctl_say("settings (%s, for one) were changed since the snapshot of step %" PRIu64
                ": if one was more than once, that may be the difference, for only its last value "
                "is known",
                r->changed, r->from);
    if (verdict == REPLAY_UNKNOWN)
        ctl_say("cannot say whether step %" PRIu64 " agrees: %s", r->step, r->reason);
    return verdict == REPLAY_AGREES ? CTL_OK : verdict == REPLAY_DIFFERS ? CTL_FAILED : CTL_UNKNOWN;
}

static int judge(struct replay *r, int *ret_code, struct shd_err *e)
{
    bool comparable;
    const char *unit = NULL;
    struct replay_finding f = replay_judge(r->was, r->now, r->done, &comparable);
    int status = SHD_OK;
    if (f.verdict == REPLAY_DIFFERS)
        r->reason[0] = '\0'; /* whyever the worker ended: it had differed by then */
    if (f.verdict == REPLAY_UNKNOWN)
        say_unknown(r, &f);
    if (f.verdict == REPLAY_DIFFERS)
        unit = shd_unit_name(r->model, find_unit(r, f.step));
    if (f.verdict == REPLAY_AGREES && r->reason[0] == '\0' && comparable && r->before.known)
        status = replay_state_read(r->fork, &r->after, e);
    if (status != SHD_OK)
        return status;
    if (r->after.known && strcmp(r->before.digest, r->after.digest) != 0) {
        f = (struct replay_finding){ REPLAY_DIFFERS, r->step, "state", 0, 0 };
        unit = shd_unit_name(r->model, replay_state_unit(&r->before, &r->after));
    }
    *ret_code = tell(r, &f, unit);
    return SHD_OK;
}

/* -- The verb ---------------------------------------------------------------------------------- */

static int replay(struct replay *r)
{
    struct shd_err e = { 0 };
    int code = CTL_UNKNOWN;
    int status = prepare(r, &e);
    if (status == SHD_OK)
        status = work(r, &e);
    if (status == SHD_OK)
        status = judge(r, &code, &e);
    if (drop_fork(r) != SHD_OK && code == CTL_OK)
        code = CTL_UNKNOWN;
    if (status != SHD_OK && !stopped) {
        snprintf(r->reason, sizeof r->reason, "%s", e.text);
        if (r->model != NULL)
            tell(r, &(struct replay_finding){ .verdict = REPLAY_UNKNOWN }, NULL);
        else
            ctl_say("%s", e.text);
    }
    shd_close(r->session);
    replay_state_free(&r->before);
    replay_state_free(&r->after);
    free(r->was);
    free(r->now);
    if (stopped)
        ctl_say("got SIG%s: not replayed", sigabbrev_np(stopped));
    return stopped ? 128 + stopped : code;
}

int verb_replay(int argc, char **argv)
{
    struct replay r = { .name = NULL };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(r.address),
        { "step", 0, FLAG_U64, "K", "the step, as `shardctl log` counts", &r.step, 1, 0x1p33 },
        { "json", 'j', FLAG_BOOL, NULL,
          "one JSON object: model, verdict, step, from, steps, state, first or reason", &r.json, 0,
          0 },
    };
    const struct flags flags = VERB_FLAGS(
        replay, "shardctl replay MODEL --step K -- COMMAND [ARGS...]", table);
    int count = 0;
    const int code = verb_start_words(&flags, argc, argv, &count);
    if (code >= 0)
        return code;
    if (count < 1)
        return ctl_usage("which model? %s", flags.usage);
    if (r.step == 0)
        return ctl_usage("which step? %s", flags.usage);
    if (count < 2)
        return ctl_usage("a replay needs a worker, as the run had it: %s", flags.usage);
    r.name = argv[1];
    argv[1 + count] = NULL; /* words behind it have been moved to the front */
    r.command = argv + 2;
    catch_signals();
    return replay(&r);
}
