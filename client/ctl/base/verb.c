/* See verb.h. */
#include "client/ctl/base/verb.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/say.h"

#define MDOC_COLUMNS 72u

static void list_flags(const struct flags *f, FILE *out)
{
    for (size_t i = 0; i < f->count; i++) {
        const struct flag *flag = &f->table[i];
        const char *colon = flag->arg != NULL ? ":" : "", *arg = flag->arg != NULL ? flag->arg : "";
        fprintf(out, " --%s%s%s", flag->name, colon, arg);
        if (flag->letter != 0)
            fprintf(out, " -%c%s%s", flag->letter, colon, arg);
    }
    fprintf(out, " --help -h");
}

/* Text in lines that mandoc does not find too long; no line begins with a word of commands. */
static void print_wrapped(const char *text, FILE *out)
{
    size_t column = 0;
    while (*text != '\0') {
        const size_t bytes = strcspn(text, " ");
        if (column > 0 && column + bytes > MDOC_COLUMNS && text[0] != '.' && text[0] != '\'')
            column = 0;
        fprintf(out, "%s%.*s",
                column > 0       ? " "
                : text[0] == '.' ? "\n\\&"
                                 : "\n",
                (int)bytes, text);
        column += bytes + 1;
        text += bytes + strspn(text + bytes, " ");
    }
    fprintf(out, ".\n");
}

static void list_mdoc(const struct flags *f, FILE *out)
{
    for (size_t i = 0; i < f->count; i++) {
        const struct flag *flag = &f->table[i];
        fprintf(out, ".It");
        if (flag->letter != 0)
            fprintf(out, " Fl %c ,", flag->letter);
        fprintf(out, " Fl -%s", flag->name);
        if (flag->arg != NULL)
            fprintf(out, " Ar %s", flag->arg);
        print_wrapped(flag->help, out);
    }
}

int verb_start(const struct flags *f, int argc, char **argv, int *ret_rest)
{
    struct shd_err e = { 0 };
    int rest = argc;
    if (argc == 2 && strcmp(argv[1], VERB_LIST_FLAGS) == 0) {
        list_flags(f, stdout);
        return CTL_OK;
    }
    if (argc == 2 && strcmp(argv[1], VERB_LIST_MDOC) == 0) {
        list_mdoc(f, stdout);
        return CTL_OK;
    }
    switch (flags_parse(f, argc, argv, &rest, &e)) {
    case FLAGS_HELP:
        flags_help(f, stdout);
        return CTL_OK;
    case FLAGS_ERROR:
        ctl_say("%s", e.text);
        return ctl_usage("`shardctl %s --help` explains", argv[0]);
    case FLAGS_OK:
        break;
    }
    if (ret_rest == NULL && rest < argc) {
        ctl_say("%s takes no further words, got '%s'", argv[0], argv[rest]);
        return ctl_usage("`shardctl %s --help` explains", argv[0]);
    }
    if (ret_rest != NULL)
        *ret_rest = rest;
    return -1;
}

int verb_start_words(const struct flags *f, int argc, char **argv, int *ret_count)
{
    int count = 0;
    bool ended = false; /* by "--": words alone follow */
    for (int at = 1; at < argc;) {
        if (!ended) {
            int rest = argc;
            char *before = argv[at - 1];
            argv[at - 1] = argv[0]; /* whose help explains */
            const int code = verb_start(f, argc - at + 1, argv + at - 1, &rest);
            argv[at - 1] = before;
            if (code >= 0)
                return code;
            at += rest - 1;
            ended = rest > 1 && strcmp(argv[at - 1], "--") == 0;
        }
        if (at < argc)
            argv[1 + count++] = argv[at++]; /* what stood there has been read */
    }
    *ret_count = count;
    return -1;
}

int verb_start_word(const struct flags *f, int argc, char **argv, const char **ret_word,
                    const char **ret_more)
{
    int count;
    const int code = verb_start_words(f, argc, argv, &count);
    if (code >= 0)
        return code;
    *ret_word = count > 0 ? argv[1] : NULL;
    *ret_more = count > 1 ? argv[2] : NULL;
    return -1;
}

int verb_file(const char *path, size_t bytes_max, char **ret_text, size_t *ret_bytes,
              struct shd_err *e)
{
    FILE *f = fopen(path, "rb");
    if (f == NULL)
        return err_sys(e, SHD_ENOENT, "open '%s'", path);
    char *text = malloc(bytes_max + 2);
    if (text == NULL) {
        fclose(f);
        return err_set(e, SHD_ENOMEM, "no memory to read '%s'", path);
    }
    const size_t bytes = fread(text, 1, bytes_max + 1, f);
    int r = SHD_OK;
    if (ferror(f))
        r = err_sys(e, SHD_EIO, "read '%s'", path);
    else if (bytes > bytes_max)
        r = err_set(e, SHD_ERANGE, "'%s' has more than %zu bytes", path, bytes_max);
    fclose(f);
    if (r != SHD_OK) {
        free(text);
        return r;
    }
    text[bytes] = '\0';
    *ret_text = text;
    *ret_bytes = bytes;
    return SHD_OK;
}

void verb_json(json_t *answer, size_t flags, FILE *out)
{
    json_dumpf(answer, out, flags);
    fputc('\n', out);
    json_decref(answer);
}
