/* fail.h: filling the shd_err of shd.h. */
#ifndef GPT_FAIL_H
#define GPT_FAIL_H

#include "client/shd.h"

/* Put a sentence into *e (may be NULL) and return code. */
int fail(struct shd_err *e, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* As fail(), with ": <strerror(errno)>" behind the text. */
int fail_errno(struct shd_err *e, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#endif
