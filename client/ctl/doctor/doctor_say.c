/* See doctor_say.h. */
#include "client/ctl/doctor/doctor_say.h"

#include <stdarg.h>
#include <stdio.h>

static void report(struct doctor *d, enum doctor_level level, const char *remedy, const char *fmt,
                   va_list args)
{
    char what[DOCTOR_TEXT_BYTES];
    vsnprintf(what, sizeof(what), fmt, args);
    d->counts[level]++;
    d->found(d, level, what, remedy);
}

void doctor_ok(struct doctor *d, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    report(d, DOCTOR_OK, /* remedy= */ NULL, fmt, args);
    va_end(args);
}

void doctor_warn(struct doctor *d, const char *remedy, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    report(d, DOCTOR_WARN, remedy, fmt, args);
    va_end(args);
}

void doctor_fail(struct doctor *d, const char *remedy, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    report(d, DOCTOR_FAIL, remedy, fmt, args);
    va_end(args);
}
