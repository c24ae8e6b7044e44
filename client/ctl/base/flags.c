#include "client/ctl/base/flags.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/suggest.h"
#include "proto/base/check.h"

#define FLAGS_MAX    32u
#define MDOC_COLUMNS 72u

/* The flag a word names ("--name", "--name=value", "-x"); NULL when none. */
static const struct flag *flag_find(const struct flags *f, const char *word)
{
    const size_t bytes = strcspn(word, "=");
    for (size_t i = 0; i < f->count; i++) {
        const struct flag *flag = &f->table[i];
        if (strncmp(word, "--", 2) == 0 && strlen(flag->name) == bytes - 2 &&
            strncmp(word + 2, flag->name, bytes - 2) == 0)
            return flag;
        if (flag->letter != 0 && word[1] == flag->letter && word[2] == '\0')
            return flag;
    }
    return NULL;
}

static int flag_unknown(const struct flags *f, const char *word, struct shd_err *e)
{
    const char *names[FLAGS_MAX];
    CHECK(f->count <= FLAGS_MAX);
    for (size_t i = 0; i < f->count; i++)
        names[i] = f->table[i].name;
    char near[160];
    return err_set(e, SHD_EINVAL, "unknown flag '%s'%s", word,
                   suggest(word + strspn(word, "-"), names, f->count, "--", near, sizeof(near)));
}

static int parse_u32(const struct flag *flag, const char *text, uint32_t *ret_n, struct shd_err *e)
{
    char *end;
    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0')
        return err_set(e, SHD_EINVAL, "--%s takes a whole number%s, got '%s'", flag->name,
                       flag->kind == FLAG_RANGE ? " or A..B" : "", text);
    if (errno == ERANGE || n < flag->min || n > flag->max)
        return err_set(e, SHD_ERANGE, "--%s is %s, its limits are %" PRIu32 " and %" PRIu32,
                       flag->name, text, flag->min, flag->max);
    *ret_n = (uint32_t)n;
    return SHD_OK;
}

static int flag_store_range(const struct flag *flag, const char *text, struct shd_err *e)
{
    struct flag_range range = { 0 };
    char first[32];
    const char *dots = strstr(text, "..");
    if (dots == NULL || dots - text >= (ptrdiff_t)sizeof(first)) {
        const int r = parse_u32(flag, text, &range.first, e);
        range.last = range.first;
        if (r == SHD_OK)
            *(struct flag_range *)flag->value = range;
        return r;
    }
    memcpy(first, text, (size_t)(dots - text));
    first[dots - text] = '\0';
    int r = parse_u32(flag, first, &range.first, e);
    if (r == SHD_OK)
        r = parse_u32(flag, dots + 2, &range.last, e);
    if (r == SHD_OK && range.first > range.last)
        r = err_set(e, SHD_ERANGE, "--%s is %s: the first may not be larger than the last",
                    flag->name, text);
    if (r == SHD_OK)
        *(struct flag_range *)flag->value = range;
    return r;
}

/* "512", "1.5GiB", "24 GB". More than 2^60 is a slip. */
static int flag_store_bytes(const struct flag *flag, const char *text, struct shd_err *e)
{
    static const struct {
        const char *name;
        double bytes;
    } units[] = { { "", 1 },         { "B", 1 },        { "KiB", 0x1p10 }, { "MiB", 0x1p20 },
                  { "GiB", 0x1p30 }, { "TiB", 0x1p40 }, { "KB", 1e3 },     { "MB", 1e6 },
                  { "GB", 1e9 },     { "TB", 1e12 } };
    char *end;
    const double n = strtod(text, &end);
    end += strspn(end, " ");
    for (size_t i = 0; i < ARRAY_SIZE(units) && text[0] >= '0' && text[0] <= '9'; i++) {
        if (strcmp(end, units[i].name) != 0)
            continue;
        if (!(n * units[i].bytes >= 1 && n * units[i].bytes <= 0x1p60))
            return err_set(e, SHD_ERANGE, "--%s is %s, its limits are 1 and 2^60 bytes", flag->name,
                           text);
        *(uint64_t *)flag->value = (uint64_t)(n * units[i].bytes);
        return SHD_OK;
    }
    return err_set(e, SHD_EINVAL, "--%s takes bytes, as 512, 1.5GiB or 24GB, got '%s'", flag->name,
                   text);
}

static int flag_store(const struct flag *flag, const char *text, struct shd_err *e)
{
    if (flag->kind == FLAG_U32)
        return parse_u32(flag, text, flag->value, e);
    if (flag->kind == FLAG_RANGE)
        return flag_store_range(flag, text, e);
    if (flag->kind == FLAG_BYTES)
        return flag_store_bytes(flag, text, e);
    if (flag->kind == FLAG_STRING)
        *(const char **)flag->value = text;
    else
        *(bool *)flag->value = true;
    return SHD_OK;
}

enum flags_result flags_parse(const struct flags *f, int argc, char **argv, int *ret_rest,
                              struct shd_err *e)
{
    int i = 1;
    for (; i < argc && argv[i][0] == '-' && argv[i][1] != '\0'; i++) {
        const char *word = argv[i];
        if (strcmp(word, "--") == 0) {
            i++;
            break;
        }
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)
            return FLAGS_HELP;
        const struct flag *flag = flag_find(f, word);
        if (flag == NULL)
            return flag_unknown(f, word, e), FLAGS_ERROR;
        const char *value = strchr(word, '=');
        if (flag->kind == FLAG_BOOL && value != NULL)
            return err_set(e, SHD_EINVAL, "--%s takes no value, got '%s'", flag->name, word),
                   FLAGS_ERROR;
        if (flag->kind != FLAG_BOOL && value == NULL && i + 1 == argc)
            return err_set(e, SHD_EINVAL, "--%s needs a value: --%s %s", flag->name, flag->name,
                           flag->arg),
                   FLAGS_ERROR;
        if (value != NULL)
            value++;
        else if (flag->kind != FLAG_BOOL)
            value = argv[++i];
        if (flag_store(flag, value, e) != SHD_OK)
            return FLAGS_ERROR;
    }
    *ret_rest = i;
    return FLAGS_OK;
}

int flags_start(const struct flags *f, int argc, char **argv, int *ret_rest)
{
    struct shd_err e = { 0 };
    int rest = argc;
    if (argc == 2 && strcmp(argv[1], FLAGS_LIST) == 0) {
        flags_list(f, stdout);
        return CTL_OK;
    }
    if (argc == 2 && strcmp(argv[1], FLAGS_MDOC) == 0) {
        flags_mdoc(f, stdout);
        return CTL_OK;
    }
    switch (flags_parse(f, argc, argv, &rest, &e)) {
    case FLAGS_HELP:
        flags_help(f, stdout);
        return CTL_OK;
    case FLAGS_ERROR:
        ctl_say("%s", e.text);
        ctl_say("`shardctl %s --help` explains", argv[0]);
        return CTL_USAGE;
    case FLAGS_OK:
        break;
    }
    if (ret_rest == NULL && rest < argc) {
        ctl_say("%s takes no further words, got '%s'", argv[0], argv[rest]);
        ctl_say("`shardctl %s --help` explains", argv[0]);
        return CTL_USAGE;
    }
    if (ret_rest != NULL)
        *ret_rest = rest;
    return -1;
}

int flags_start_word(const struct flags *f, int argc, char **argv, const char **ret_word,
                     const char **ret_more)
{
    const char *word = NULL;
    int rest = argc;
    if (argc > 1 && argv[1][0] != '-') {
        word = argv[1];
        argv[1] = argv[0];
        argc--;
        argv++;
    }
    const int code = flags_start(f, argc, argv, &rest);
    if (code >= 0)
        return code;
    if (word == NULL && rest < argc)
        word = argv[rest++];
    *ret_word = word;
    *ret_more = rest < argc ? argv[rest] : NULL;
    return -1;
}

void flags_help(const struct flags *f, FILE *out)
{
    fprintf(out, "usage: %s\n\n%s\n\nflags:\n", f->usage, f->about);
    for (size_t i = 0; i < f->count; i++) {
        const struct flag *flag = &f->table[i];
        char letter[] = { '-', flag->letter, ',', ' ', '\0' };
        char left[64];
        snprintf(left, sizeof(left), "%s--%s %s", flag->letter != 0 ? letter : "", flag->name,
                 flag->arg != NULL ? flag->arg : "");
        fprintf(out, "  %-30s%s\n", left, flag->help);
    }
    fprintf(out, "  %-30s%s\n", "-h, --help", "this text");
    if (f->more != NULL)
        fprintf(out, "\n%s", f->more);
}

void flags_list(const struct flags *f, FILE *out)
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

void flags_mdoc(const struct flags *f, FILE *out)
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
