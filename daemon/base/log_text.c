/* See log_text.h. */
#include "daemon/base/log_text.h"

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

#include "proto/base/check.h"

#define SPEC_BYTES   24u
#define NUMBER_BYTES 400u /* a double's digits before the point */

struct out {
    char *at;
    size_t left; /* with the NUL */
    bool full;   /* what did not fit ends the text: a later word would stand for another one */
};

static void put(struct out *o, const char *part, size_t bytes)
{
    o->full |= bytes >= o->left;
    if (o->full)
        return;
    memcpy(o->at, part, bytes);
    o->at += bytes;
    o->left -= bytes;
}

/* Bytes of the UTF-8 character at s, of which max may be read; 0: it is none, or a control
 * character. */
static size_t utf8_bytes(const uint8_t *s, size_t max)
{
    const size_t bytes = s[0] < 0x80 ? 1 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    if (bytes == 1)
        return s[0] >= ' ' && s[0] != 0x7f;
    if (s[0] < 0xc2 || s[0] > 0xf4 || bytes > max)
        return 0;
    for (size_t i = 1; i < bytes; i++)
        if ((s[i] & 0xc0) != 0x80)
            return 0;
    const bool control = s[0] == 0xc2 && s[1] < 0xa0;
    const bool overlong = (s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xf0 && s[1] < 0x90);
    const bool beyond = (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf4 && s[1] > 0x8f);
    return control || overlong || beyond ? 0 : bytes;
}

/* The escape of what is at s goes to text; 0: it needs none. */
static size_t escape(const uint8_t *s, size_t max, char text[8])
{
    static const char from[] = "\n\r\t\"\\", to[] = "nrt\"\\";
    const char *at = memchr(from, *s, sizeof from - 1);
    if (at != NULL)
        return (size_t)snprintf(text, 8, "\\%c", to[at - from]);
    return utf8_bytes(s, max) > 0 ? 0 : (size_t)snprintf(text, 8, "\\x%02x", *s);
}

static bool needs_quotes(const char *value, size_t bytes)
{
    char ignored[8];
    const uint8_t *s = (const uint8_t *)value;
    for (size_t i = 0; i < bytes; i++)
        if (s[i] == ' ' || s[i] == '=' || (s[i] < 0x80 && escape(s + i, bytes - i, ignored) > 0))
            return true;
    return false;
}

static void put_value(struct out *o, const char *value, size_t bytes, bool inside)
{
    const bool quotes = !inside && needs_quotes(value, bytes);
    const uint8_t *s = (const uint8_t *)value;
    put(o, "\"", quotes);
    for (size_t i = 0; i < bytes;) {
        char text[8];
        const size_t escaped = escape(s + i, bytes - i, text);
        const size_t taken = escaped > 0 ? 1 : utf8_bytes(s + i, bytes - i);
        put(o, escaped > 0 ? text : value + i, escaped > 0 ? escaped : taken);
        i += taken;
    }
    put(o, "\"", quotes);
}

static void put_number(struct out *o, const char *spec, va_list *ap)
{
    char text[NUMBER_BYTES];
    const size_t end = strlen(spec) - 1;
    const bool is_real = strchr("fg", spec[end]) != NULL;
    CHECK(is_real || strchr("diuxc", spec[end]) != NULL);
    int n;
    if (is_real) /* NOLINTNEXTLINE(bugprone-branch-clone): va_arg() of three types */
        n = snprintf(text, sizeof text, spec, va_arg(*ap, double));
    else if (spec[end - 1] == 'l' || spec[end - 1] == 'z' || spec[end - 1] == 'j')
        n = snprintf(text, sizeof text, spec, va_arg(*ap, long)); /* all have 64 bits */
    else
        n = snprintf(text, sizeof text, spec, va_arg(*ap, int));
    CHECK(n >= 0 && (size_t)n < sizeof text);
    put(o, text, (size_t)n);
}

/* The conversion at fmt, which begins with '%'; what is behind it. */
static const char *put_one(struct out *o, const char *fmt, bool inside, va_list *ap)
{
    static_assert(sizeof(long) == sizeof(long long) && sizeof(long) == sizeof(size_t),
                  "put_number()");
    char spec[SPEC_BYTES];
    const size_t bytes = 1 + strspn(fmt + 1, "0123456789.*lzjh-") + 1;
    CHECK(bytes < sizeof spec && fmt[bytes - 1] != '\0');
    memcpy(spec, fmt, bytes);
    spec[bytes] = '\0';
    if (spec[bytes - 1] == '%') {
        put(o, "%", 1);
    } else if (spec[bytes - 1] == 's') {
        const char *dot = strchr(spec, '.');
        long most = -1;
        if (dot != NULL && dot[1] == '*')
            most = va_arg(*ap, int);
        else if (dot != NULL)
            sscanf(dot + 1, "%ld", &most);
        const char *value = va_arg(*ap, const char *);
        value = value != NULL ? value : "(null)";
        put_value(o, value, most >= 0 ? strnlen(value, (size_t)most) : strlen(value), inside);
    } else {
        put_number(o, spec, ap);
    }
    return fmt + bytes;
}

void log_text(char *text, size_t bytes, const char *fmt, va_list ap)
{
    struct out o = { .at = text, .left = bytes };
    va_list rest;
    bool inside = false;
    va_copy(rest, ap);
    while (*fmt != '\0') {
        if (*fmt == '%') {
            fmt = put_one(&o, fmt, inside, &rest);
            continue;
        }
        inside ^= *fmt == '"';
        put(&o, fmt++, 1);
    }
    va_end(rest);
    *o.at = '\0';
}
