/* See completion.h. */
#include "client/ctl/completion.h"

#include <stdio.h>
#include <string.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/verb.h"
#include "proto/base/check.h"

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

/* Inside single quotes of a shell. */
static void print_quoted(const char *text)
{
    for (; *text != '\0'; text++)
        if (*text == '\'')
            fputs("'\\''", stdout);
        else
            putchar(*text);
}

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

static void print_bash(const struct verb *verbs, size_t count)
{
    printf("# bash completion of shardctl, written by `shardctl completion bash`.\n"
           "_shardctl_verbs='");
    for (size_t i = 0; i < count; i++)
        printf("%s%s", i > 0 ? " " : "", verbs[i].name);
    printf("'\n\n_shardctl_flags()\n{\n    case $1 in\n");
    for (size_t i = 0; i < count; i++) {
        printf("    %s) ", verbs[i].name);
        print_echo(&verbs[i]);
        printf(" ;;\n");
    }
    printf("    esac\n}\n\n%s", bash_tail);
}

static void print_zsh(const struct verb *verbs, size_t count)
{
    printf("#compdef shardctl\n# written by `shardctl completion zsh`\n_shardctl()\n{\n"
           "    local flag\n    local -a flags verbs\n    verbs=(\n");
    for (size_t i = 0; i < count; i++) {
        printf("        '%s:", verbs[i].name);
        print_quoted(verbs[i].summary);
        printf("'\n");
    }
    printf("    )\n    if (( CURRENT == 2 )) || [[ $words[2] == help ]]; then\n"
           "        _describe verb verbs\n        return\n    fi\n    case $words[2] in\n");
    for (size_t i = 0; i < count; i++) {
        if (strcmp(verbs[i].name, "help") == 0)
            continue;
        printf("    %s) flags=($(", verbs[i].name);
        print_echo(&verbs[i]);
        printf(")) ;;\n");
    }
    fputs(zsh_tail, stdout);
}

int completion(int argc, char **argv, const struct verb *verbs, size_t count)
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
        print_bash(verbs, count);
        return CTL_OK;
    }
    if (rest + 1 == argc && strcmp(argv[rest], "zsh") == 0) {
        print_zsh(verbs, count);
        return CTL_OK;
    }
    return ctl_usage("which shell? usage: %s", flags.usage);
}
