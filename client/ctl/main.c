/* shardctl: starts, shows and checks shard daemons. Finds the verb in a table and hands over. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/completion.h"
#include "client/ctl/doctor/doctor.h"
#include "client/ctl/plan/plan.h"
#include "client/ctl/run/down.h"
#include "client/ctl/run/run.h"
#include "client/ctl/run/up.h"
#include "client/ctl/state/checkpoint.h"
#include "client/ctl/state/digest.h"
#include "client/ctl/state/drain.h"
#include "client/ctl/state/restore.h"
#include "client/ctl/watch/dashboard.h"
#include "client/ctl/watch/status.h"
#include "client/ctl/watch/top.h"
#include "client/ctl/watch/trace.h"
#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/base/suggest.h"

static int verb_completion(int argc, char **argv);
static int verb_help(int argc, char **argv);

static const struct verb verbs[] = {
    { "run", "run a command as workers beside daemons of its own, on this host", verb_run },
    { "up", "start daemons that stay, with a keeper", verb_up },
    { "drain", "finish the step, save, and end daemons; training can go on later", verb_drain },
    { "down", "stop what `up` started", verb_down },
    { "status", "show daemons: models, memory, sessions, who waits for whom", verb_status },
    { "top", "the same on a full screen, live", verb_top },
    { "trace", "what daemons and workers did, for Perfetto", verb_trace },
    { "dashboard", "a page that shows all daemons of this machine", verb_dashboard },
    { "digest", "SHA-256 over a model's parameters and optimizer state", verb_digest },
    { "plan", "what a policy does to a model and costs, before it is run", verb_plan },
    { "checkpoint", "save a model, once or as training goes on; list, verify", verb_checkpoint },
    { "restore", "make daemons open a model from a checkpoint or from weights", verb_restore },
    { "doctor", "what of this host is in the way, and the remedy", verb_doctor },
    { "completion", "print the completion script of a shell", verb_completion },
    { "help", "this text, or `shardctl help VERB`", verb_help },
};

static int verb_completion(int argc, char **argv)
{
    return completion(argc, argv, verbs, ARRAY_SIZE(verbs));
}

static const struct verb *verb_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
        if (strcmp(verbs[i].name, name) == 0)
            return &verbs[i];
    return NULL;
}

static int verb_unknown(const char *name)
{
    const char *names[ARRAY_SIZE(verbs)];
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
        names[i] = verbs[i].name;
    char near[160];
    ctl_say("unknown verb '%s'%s", name,
            suggest(name + strspn(name, "-"), names, ARRAY_SIZE(names), "", near, sizeof(near)));
    return ctl_usage("`shardctl --help` explains");
}

static void print_help(FILE *out)
{
    fprintf(out,
            "usage: shardctl VERB [FLAGS]\n\n"
            "Parameters and optimizer state live in daemons (shardd, one per device); workers\n"
            "attach to them. shardctl starts, shows and checks them.\n\nverbs:\n");
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
        fprintf(out, "  %-12s%s\n", verbs[i].name, verbs[i].summary);
    fprintf(out, "\n`shardctl VERB --help` explains one. `shardctl --version` prints the version.\n"
                 "\nexample: train a small GPT in 2 workers against 2 daemons\n"
                 "  shardctl run --daemons 2 --workers 2 -- shd-gpt --steps 20\n"
                 "\nexit codes:\n"
                 "  0  done\n"
                 "  1  failed; the reason is on stderr\n"
                 "  2  the command line was wrong\n"
                 "  `run` passes on its first failing worker's code, 128 + N for signal N\n");
}

static int verb_help(int argc, char **argv)
{
    if (argc < 2 || argv[1][0] == '-') {
        print_help(stdout);
        return CTL_OK;
    }
    const struct verb *v = verb_find(argv[1]);
    if (v == NULL)
        return verb_unknown(argv[1]);
    if (v->fn == verb_help) {
        print_help(stdout);
        return CTL_OK;
    }
    char help[] = "--help";
    char *words[] = { argv[1], help, NULL };
    return v->fn(2, words);
}

/* Closed standard streams would hand their numbers to sockets and pipes of ours. */
static void open_missing_streams(void)
{
    int fd;
    do {
        fd = open("/dev/null", O_RDWR);
    } while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd > STDERR_FILENO)
        close(fd);
}

int main(int argc, char **argv)
{
    open_missing_streams();
    if (argc < 2) {
        print_help(stderr);
        return CTL_USAGE;
    }
    if (strcmp(argv[1], "--version") == 0 || strcmp(argv[1], "-V") == 0) {
        printf("shardctl %s\n", SHD_VERSION);
        return CTL_OK;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return verb_help(1, argv);
    const struct verb *v = verb_find(argv[1]);
    if (v == NULL)
        return verb_unknown(argv[1]);
    const int code = v->fn(argc - 1, argv + 1);
    if (fflush(stdout) == 0)
        return code;
    return ctl_fail("cannot write the output: %s", strerror(errno));
}
