/* See flags.h. */
#include "proto/base/flags.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "proto/base/check.h"

#define SUGGEST_WORD_BYTES_MAX 48u
#define MORE                   ", ..."

static size_t min3(size_t a, size_t b, size_t c)
{
    const size_t ab = a < b ? a : b;
    return ab < c ? ab : c;
}

/* Levenshtein distance, one row at a time; words are cut to SUGGEST_WORD_BYTES_MAX. */
static size_t distance(const char *a, const char *b)
{
    const size_t a_bytes = strnlen(a, SUGGEST_WORD_BYTES_MAX);
    const size_t b_bytes = strnlen(b, SUGGEST_WORD_BYTES_MAX);
    size_t row[SUGGEST_WORD_BYTES_MAX + 1];
    for (size_t j = 0; j <= b_bytes; j++)
        row[j] = j;
    for (size_t i = 1; i <= a_bytes; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b_bytes; j++) {
            const size_t up = row[j];
            row[j] = min3(up + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]));
            diagonal = up;
        }
    }
    return row[b_bytes];
}

/* Letters and digits in lower case: people differ in what they put between words. The first
 * letters of the words go to initials: "lr" of "learning-rate". */
static void plain(const char *word, char ret_plain[SUGGEST_WORD_BYTES_MAX + 1],
                  char ret_initials[SUGGEST_WORD_BYTES_MAX + 1])
{
    size_t used = 0, words = 0;
    bool begins = true;
    for (; *word != '\0' && used < SUGGEST_WORD_BYTES_MAX; word++) {
        const char c = (char)tolower((unsigned char)*word);
        if (c == '-' || c == '_' || c == ' ') {
            begins = true;
            continue;
        }
        if (begins)
            ret_initials[words++] = c;
        begins = false;
        ret_plain[used++] = c;
    }
    ret_plain[used] = '\0';
    ret_initials[words > 1 ? words : 0] = '\0';
}

static bool near(const char *word, const char *name)
{
    char a[SUGGEST_WORD_BYTES_MAX + 1] = "", b[SUGGEST_WORD_BYTES_MAX + 1] = "";
    char a_initials[SUGGEST_WORD_BYTES_MAX + 1], b_initials[SUGGEST_WORD_BYTES_MAX + 1];
    plain(word, a, a_initials);
    plain(name, b, b_initials);
    const size_t bytes = strlen(a);
    if (bytes >= 2 && (strncmp(a, b, bytes) == 0 || strcmp(a, b_initials) == 0))
        return true;
    return strcmp(a_initials, b) == 0 ||
           distance(a, b) <= (bytes < 6 ? 1 + bytes / 4 : 2 + bytes / 8);
}

/* Append to buf at *used, or nothing: false when it does not fit with `room` behind it. */
static bool append(char *buf, size_t bytes, size_t *used, size_t room, const char *const parts[3])
{
    const size_t more = strlen(parts[0]) + strlen(parts[1]) + strlen(parts[2]);
    if (*used + more + room >= bytes)
        return false;
    *used += (size_t)snprintf(buf + *used, bytes - *used, "%s%s%s", parts[0], parts[1], parts[2]);
    return true;
}

const char *suggest(const char *word, const char *const *names, size_t count, const char *prefix,
                    char *buf, size_t bytes)
{
    CHECK(bytes > 0);
    buf[0] = '\0';
    size_t used = 0;
    for (size_t i = 0; i < count; i++)
        if (names[i] != NULL && near(word, names[i]))
            append(buf, bytes, &used, 1,
                   (const char *[]){ used == 0 ? "; did you mean " : " or ", prefix, names[i] });
    if (used > 0) {
        append(buf, bytes, &used, 0, (const char *[]){ "?", "", "" });
        return buf;
    }
    for (size_t i = 0; i < count; i++) {
        const char *const next[] = { used == 0 ? "; known: " : ", ", prefix, names[i] };
        if (names[i] != NULL && !append(buf, bytes, &used, strlen(MORE), next)) {
            append(buf, bytes, &used, 0, (const char *[]){ used == 0 ? "" : MORE, "", "" });
            break;
        }
    }
    return buf;
}

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
    return err_set(e, SHD_EINVAL, "unknown flag '%.48s'%s", word,
                   suggest(word + strspn(word, "-"), names, f->count, "--", near, sizeof(near)));
}

static int outside(const struct flag *flag, const char *text, struct shd_err *e)
{
    return err_set(e, SHD_ERANGE, "--%s is %s, its limits are %.16g and %.16g", flag->name, text,
                   flag->min, flag->max);
}

static int parse_whole(const struct flag *flag, const char *text, uint64_t *ret_n,
                       struct shd_err *e)
{
    char *end;
    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0')
        return err_set(e, SHD_EINVAL, "--%s takes a whole number%s, got '%s'", flag->name,
                       flag->kind == FLAG_RANGE ? " or A..B" : "", text);
    if (errno == ERANGE || (double)n < flag->min || (double)n > flag->max)
        return outside(flag, text, e);
    *ret_n = n;
    return SHD_OK;
}

static int parse_u32(const struct flag *flag, const char *text, uint32_t *ret_n, struct shd_err *e)
{
    uint64_t n = 0;
    CHECK(flag->max <= UINT32_MAX);
    const int r = parse_whole(flag, text, &n, e);
    if (r == SHD_OK)
        *ret_n = (uint32_t)n;
    return r;
}

static int flag_store_real(const struct flag *flag, const char *text, struct shd_err *e)
{
    char *end;
    const double n = strtod(text, &end);
    if (end == text || *end != '\0' || !isfinite(n))
        return err_set(e, SHD_EINVAL, "--%s takes a number, got '%s'", flag->name, text);
    if (n < flag->min || n > flag->max)
        return outside(flag, text, e);
    *(double *)flag->value = n;
    return SHD_OK;
}

static int flag_store_list(const struct flag *flag, const char *text, struct shd_err *e)
{
    struct flag_list *list = flag->value;
    if (list->count == FLAG_LIST_MAX)
        return err_set(e, SHD_ERANGE, "--%s is given more than %u times", flag->name,
                       FLAG_LIST_MAX);
    list->items[list->count++] = text;
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

/* More than 2^60 is a slip. */
int flags_bytes(const char *text, uint64_t *ret_bytes, struct shd_err *e)
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
            return err_set(e, SHD_ERANGE, "is %.40s, its limits are 1 and 2^60 bytes", text);
        *ret_bytes = (uint64_t)(n * units[i].bytes);
        return SHD_OK;
    }
    return err_set(e, SHD_EINVAL, "takes bytes, as 512, 1.5GiB or 24GB, got '%.40s'", text);
}

static int flag_store_bytes(const struct flag *flag, const char *text, struct shd_err *e)
{
    struct shd_err why = { 0 };
    const int r = flags_bytes(text, flag->value, &why);
    return r == SHD_OK ? r : err_set(e, r, "--%s %s", flag->name, why.text);
}

static int flag_store(const struct flag *flag, const char *text, struct shd_err *e)
{
    switch (flag->kind) {
    case FLAG_BOOL:
        *(bool *)flag->value = true;
        return SHD_OK;
    case FLAG_U32:
        return parse_u32(flag, text, flag->value, e);
    case FLAG_U64:
        return parse_whole(flag, text, flag->value, e);
    case FLAG_REAL:
        return flag_store_real(flag, text, e);
    case FLAG_RANGE:
        return flag_store_range(flag, text, e);
    case FLAG_STRING:
        *(const char **)flag->value = text;
        return SHD_OK;
    case FLAG_LIST:
        return flag_store_list(flag, text, e);
    case FLAG_BYTES:
        break;
    }
    return flag_store_bytes(flag, text, e);
}

void flags_add(struct flag_table *table, const struct flag *rows, size_t count)
{
    CHECK(count <= FLAGS_MAX - table->count);
    memcpy(table->rows + table->count, rows, count * sizeof *rows);
    table->count += count;
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
