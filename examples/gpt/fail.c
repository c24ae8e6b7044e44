/* fail.c: see fail.h. */
#include "examples/gpt/fail.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int fail(struct shd_err *e, int code, const char *fmt, ...)
{
    if (e == NULL)
        return code;
    va_list args;
    va_start(args, fmt);
    e->code = code;
    vsnprintf(e->text, sizeof e->text, fmt, args);
    va_end(args);
    return code;
}

int fail_errno(struct shd_err *e, int code, const char *fmt, ...)
{
    const int number = errno;
    if (e == NULL)
        return code;
    va_list args;
    va_start(args, fmt);
    e->code = code;
    vsnprintf(e->text, sizeof e->text, fmt, args);
    va_end(args);
    const size_t used = strlen(e->text);
    snprintf(e->text + used, sizeof e->text - used, ": %s", strerror(number));
    return code;
}
