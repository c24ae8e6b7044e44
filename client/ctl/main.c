/* shardctl: starts, shows and checks shard daemons. Finds the verb in a table and hands over. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/ctl/doctor/doctor.h"
#include "client/ctl/plan/plan.h"
#include "client/ctl/run/host.h"
#include "client/ctl/run/logs.h"
#include "client/ctl/run/run.h"
#include "client/ctl/state/checkpoint.h"
#include "client/ctl/state/drain.h"
#include "client/ctl/state/export.h"
#include "client/ctl/state/hosts.h"
#include "client/ctl/state/keys.h"
#include "client/ctl/state/model.h"
#include "client/ctl/state/replay.h"
#include "client/ctl/state/reshard.h"
#include "client/ctl/state/rewind.h"
#include "client/ctl/state/set.h"
#include "client/ctl/watch/dashboard.h"
#include "client/ctl/watch/exporter.h"
#include "client/ctl/watch/log.h"
#include "client/ctl/watch/show.h"
#include "client/ctl/watch/status.h"
#include "client/ctl/watch/top.h"
#include "client/ctl/watch/trace.h"
#include "client/shd.h"
#include "proto/base/check.h"
#include "proto/base/flags.h"

static int verb_completion(int argc, char **argv);
static int verb_help(int argc, char **argv);

static const struct verb verbs[] = {
    { "run", "run a command as workers beside daemons of its own, on this host", verb_run },
    { "up", "start daemons that stay, with a keeper", verb_up },
    { "host", "this host's daemons and relay in a cluster, in the foreground", verb_host },
    { "hosts", "which hosts of a cluster with replicas are in and out", verb_hosts },
    { "drain", "finish the step, save, and end daemons; training can go on later", verb_drain },
    { "down", "stop what `up` started", verb_down },
    { "logs", "what the daemons of `up` and their keeper have written", verb_logs },
    { "status", "show daemons: models, memory, sessions, who waits for whom", verb_status },
    { "top", "the same on a full screen, live", verb_top },
    { "log", "what each step came to: loss, norm, learning rate", verb_log },
    { "trace", "what daemons and workers did, for Perfetto", verb_trace },
    { "dashboard", "a page that shows all daemons of this machine", verb_dashboard },
    { "exporter", "the metrics of all daemons of this machine, for Prometheus", verb_exporter },
    { "show", "the tensors of a model, and what the values of one come to", verb_show },
    { "digest", "SHA-256 over a model's parameters and optimizer state", verb_digest },
    { "plan", "what a policy does to a model and costs, before it is run", verb_plan },
    { "checkpoint", "save a model, once or as training goes on; list, verify", verb_checkpoint },
    { "restore", "make daemons open a model from a checkpoint or from weights", verb_restore },
    { "export", "write a model's weights as safetensors, once or as training goes on",
      verb_export },
    { "set", "change what is trained, with moments kept", verb_set },
    { "fork", "make a second model of what one is, in memory", verb_fork },
    { "snapshot", "keep the open step of a model in memory", verb_snapshot },
    { "snapshots", "list the steps that are kept so", verb_snapshots },
    { "replay", "compute a step again, and say whether the bits agree", verb_replay },
    { "rewind", "go back to one of them", verb_rewind },
    { "reshard", "give a model more, fewer or other daemons, while it is trained", verb_reshard },
    { "drop", "end a model at all its daemons, and give its memory back", verb_drop },
    { "keys", "which hosts may talk to each other: the cluster file and its keys", verb_keys },
    { "doctor", "what of this host is in the way, and the remedy", verb_doctor },
    { "completion", "print the completion script of a shell", verb_completion },
    { "help", "this text, or `shardctl help VERB`", verb_help },
};

/* -- completion: scripts made from the verbs' own tables, so that they cannot lag behind --------
 */

static const char bash_tail[] =
    "_shardctl()\n"
    "{\n"
    "    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} flag word list=\n"
    "    COMPREPLY=()\n"
    "    if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
    "        mapfile -t COMPREPLY < <(compgen -W \"$_shardctl_verbs --help --version\" -- "
    "\"$cur\")\n"
    "        return\n"
    "    fi\n"
    "    for word in \"${COMP_WORDS[@]:2:COMP_CWORD-2}\"; do\n"
    "        if [ \"$word\" = -- ]; then # a worker's command line\n"
    "            mapfile -t COMPREPLY < <(compgen -c -f -- \"$cur\")\n"
    "            return\n"
    "        fi\n"
    "    done\n"
    "    if [ \"$cur\" = '=' ]; then # --flag=\n"
    "        cur=\n"
    "    elif [ \"$prev\" = '=' ]; then\n"
    "        prev=${COMP_WORDS[COMP_CWORD-2]}\n"
    "    fi\n"
    "    for flag in $(_shardctl_flags \"${COMP_WORDS[1]}\"); do\n"
    "        list=\"$list ${flag%%:*}\"\n"
    "        [ \"${flag%%:*}\" = \"$prev\" ] || continue\n"
    "        case $flag in\n"
    "        *:FILE) mapfile -t COMPREPLY < <(compgen -f -- \"$cur\"); return ;;\n"
    "        *:DIR) mapfile -t COMPREPLY < <(compgen -d -- \"$cur\"); return ;;\n"
    "        *:*) return ;;\n"
    "        esac\n"
    "    done\n"
    "    mapfile -t COMPREPLY < <(compgen -W \"$list\" -- \"$cur\")\n"
    "}\n"
    "complete -F _shardctl shardctl\n";

static const char zsh_tail[] = "    esac\n"
                               "    for flag in $flags; do\n"
                               "        [[ ${flag%%:*} == $words[CURRENT-1] ]] || continue\n"
                               "        case $flag in\n"
                               "        *:FILE) _files; return ;;\n"
                               "        *:DIR) _files -/; return ;;\n"
                               "        *:*) _message ${flag#*:}; return ;;\n"
                               "        esac\n"
                               "    done\n"
                               "    compadd -- ${flags%%:*}\n"
                               "}\n"
                               "_shardctl \"$@\"\n";

/* A shell's command that prints what the verb says of its flags. The words of `help` and
 * `completion` are no flags. */
static void print_echo(const struct verb *v)
{
    char name[32], list[] = VERB_LIST_FLAGS;
    if (strcmp(v->name, "help") == 0) {
        printf("echo \"$_shardctl_verbs\"");
        return;
    }
    if (strcmp(v->name, "completion") == 0) {
        printf("echo 'bash zsh --help -h'");
        return;
    }
    snprintf(name, sizeof(name), "%s", v->name);
    printf("echo '");
    v->fn(2, (char *[]){ name, list, NULL });
    printf("'");
}

static void print_bash(void)
{
    printf("# bash completion of shardctl, written by `shardctl completion bash`.\n"
           "_shardctl_verbs='");
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++)
        printf("%s%s", i > 0 ? " " : "", verbs[i].name);
    printf("'\n\n_shardctl_flags()\n{\n    case $1 in\n");
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
        printf("    %s) ", verbs[i].name);
        print_echo(&verbs[i]);
        printf(" ;;\n");
    }
    printf("    esac\n}\n\n%s", bash_tail);
}

static void print_zsh(void)
{
    printf("#compdef shardctl\n# written by `shardctl completion zsh`\n_shardctl()\n{\n"
           "    local flag\n    local -a flags verbs\n    verbs=(\n");
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
        printf("        '%s:", verbs[i].name);
        text_quote(verbs[i].summary, stdout);
        printf("'\n");
    }
    printf("    )\n    if (( CURRENT == 2 )) || [[ $words[2] == help ]]; then\n"
           "        _describe verb verbs\n        return\n    fi\n    case $words[2] in\n");
    for (size_t i = 0; i < ARRAY_SIZE(verbs); i++) {
        if (strcmp(verbs[i].name, "help") == 0)
            continue;
        printf("    %s) flags=($(", verbs[i].name);
        print_echo(&verbs[i]);
        printf(")) ;;\n");
    }
    fputs(zsh_tail, stdout);
}

static int verb_completion(int argc, char **argv)
{
    const struct flags flags = {
        .usage = "shardctl completion bash|zsh",
        .about = "Print the script that completes shardctl's verbs and flags in this shell.",
        .more = "examples:\n"
                "  . <(shardctl completion bash)\n"
                "  shardctl completion zsh >~/.zfunc/_shardctl   # a directory of your fpath\n"
    };
    int rest;
    const int code = verb_start(&flags, argc, argv, &rest);
    if (code >= 0)
        return code;
    if (rest + 1 == argc && strcmp(argv[rest], "bash") == 0) {
        print_bash();
        return CTL_OK;
    }
    if (rest + 1 == argc && strcmp(argv[rest], "zsh") == 0) {
        print_zsh();
        return CTL_OK;
    }
    return ctl_usage("which shell? usage: %s", flags.usage);
}

/* -- help -------------------------------------------------------------------------------------- */

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
    char near[256];
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
