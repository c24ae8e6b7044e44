#include "tests/lib/spec_text.h"

#include <stdarg.h>

struct spec *parse(const char *json)
{
    struct shd_err e;
    struct spec *spec = NULL;
    EXPECT_OK(spec_parse(json, strlen(json), &spec, &e), &e);
    return spec;
}

char *quoted(const char *fmt, ...)
{
    static char text[20000];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (char *p = text; *p != 0; p++)
        if (*p == '\'')
            *p = '"';
    return text;
}
