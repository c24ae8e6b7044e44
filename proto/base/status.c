/* See status.h. */
#include "proto/base/status.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static void put_text(struct shd_err *e, int code, const char *fmt, va_list ap)
{
    char text[SHD_ERR_TEXT_BYTES]; /* not in place: ap may hold e->text */
    vsnprintf(text, sizeof text, fmt, ap);
    e->code = code;
    memcpy(e->text, text, strlen(text) + 1);
}

int err_set(struct shd_err *e, int code, const char *fmt, ...)
{
    if (e != NULL) {
        va_list ap;
        va_start(ap, fmt);
        put_text(e, code, fmt, ap);
        va_end(ap);
    }
    return code;
}

int err_sys(struct shd_err *e, int code, const char *fmt, ...)
{
    const int saved = errno;
    if (saved == ENOMEM || saved == EMFILE || saved == ENFILE)
        code = SHD_ENOMEM;
    if (e != NULL) {
        va_list ap;
        va_start(ap, fmt);
        put_text(e, code, fmt, ap);
        va_end(ap);
        const size_t used = strlen(e->text);
        snprintf(e->text + used, sizeof e->text - used, ": %s", strerror(saved));
    }
    return code;
}

int err_prefix(struct shd_err *e, const char *fmt, ...)
{
    if (e == NULL)
        return SHD_EINTERNAL;
    char old[SHD_ERR_TEXT_BYTES];
    memcpy(old, e->text, sizeof old);
    va_list ap;
    va_start(ap, fmt);
    put_text(e, e->code, fmt, ap);
    va_end(ap);
    const size_t used = strlen(e->text);
    snprintf(e->text + used, sizeof e->text - used, ": %s", old);
    return e->code;
}

int err_copy(const struct shd_err *why, struct shd_err *e)
{
    if (why->code != SHD_OK && e != NULL)
        *e = *why;
    return why->code;
}

static const struct status_row {
    int code;
    const char *name;
    const char *meaning;
} status_rows[] = {
#define SHD_STATUS_ROW(name, value, meaning) { name, #name, meaning },
    SHD_STATUS_MAP(SHD_STATUS_ROW)
#undef SHD_STATUS_ROW
};

static const struct status_row *row_find(int code)
{
    for (size_t i = 0; i < sizeof status_rows / sizeof status_rows[0]; i++)
        if (status_rows[i].code == code)
            return &status_rows[i];
    return NULL;
}

const char *status_name(int code)
{
    const struct status_row *row = row_find(code);
    return row != NULL ? row->name : "SHD_UNKNOWN";
}

const char *status_meaning(int code)
{
    const struct status_row *row = row_find(code);
    return row != NULL ? row->meaning : "unknown status code";
}

int status_known(int code)
{
    return row_find(code) != NULL;
}
