#include "proto/base/suggest.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "proto/base/check.h"

#define SUGGEST_WORD_BYTES_MAX 48u

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

static bool near(const char *word, const char *name)
{
    const size_t bytes = strlen(word);
    if (bytes >= 2 && strncmp(word, name, bytes) == 0)
        return true;
    return distance(word, name) <= (bytes < 6 ? 1 + bytes / 4 : 2 + bytes / 8);
}

/* Append to buf at *used; what does not fit is cut. */
static void append(char *buf, size_t bytes, size_t *used, const char *a, const char *b,
                   const char *c)
{
    const int n = snprintf(buf + *used, bytes - *used, "%s%s%s", a, b, c);
    if (n > 0)
        *used = *used + (size_t)n < bytes ? *used + (size_t)n : bytes - 1;
}

const char *suggest(const char *word, const char *const *names, size_t count, const char *prefix,
                    char *buf, size_t bytes)
{
    CHECK(bytes > 0);
    buf[0] = '\0';
    size_t used = 0;
    for (size_t i = 0; i < count; i++)
        if (near(word, names[i]))
            append(buf, bytes, &used, used == 0 ? "; did you mean " : " or ", prefix, names[i]);
    if (used > 0) {
        append(buf, bytes, &used, "?", "", "");
        return buf;
    }
    for (size_t i = 0; i < count; i++)
        append(buf, bytes, &used, used == 0 ? "; known: " : ", ", prefix, names[i]);
    return buf;
}
