/* Status codes and contextual errors, shared by every part of shardd.
 *
 * A fallible function returns SHD_OK (0) or one of the negative codes below and, on failure,
 * describes it in the caller's struct shd_err: lower-case text with the values that were wrong.
 * On success the struct is left alone. client/shd.h repeats the public part of this header so
 * that it stands alone; tests/unit/client/test_public_header.c holds the two together.
 */
#ifndef SHD_STATUS_H
#define SHD_STATUS_H

#include <stdarg.h>
#include <stddef.h>

/* X(name, value, meaning) */
#define SHD_STATUS_MAP(X)                                                  \
    X(SHD_OK, 0, "success")                                                \
    X(SHD_EINVAL, -1, "invalid argument or malformed input")               \
    X(SHD_ERANGE, -2, "value outside its limits")                          \
    X(SHD_EPROTO, -3, "message or protocol version not understood")        \
    X(SHD_EAUTH, -4, "peer is not allowed to do this")                     \
    X(SHD_ENOENT, -5, "no such model, unit, tensor or segment")            \
    X(SHD_EEXIST, -6, "already there")                                     \
    X(SHD_ESPEC, -7, "model spec differs from the open model")             \
    X(SHD_ESTEP, -8, "step is not the open step")                          \
    X(SHD_EBUSY, -9, "a limit on concurrent work is reached; retry later") \
    X(SHD_ENOMEM, -10, "out of memory, descriptors or mappings")           \
    X(SHD_EIO, -11, "system call or transport failed")                     \
    X(SHD_EGONE, -12, "peer or daemon is gone")                            \
    X(SHD_ETIMEDOUT, -13, "deadline passed")                               \
    X(SHD_ESEGMENT, -14, "segment has the wrong size or seals")            \
    X(SHD_ENOTSUP, -15, "not supported here")                              \
    X(SHD_EINTERNAL, -16, "internal error")                                \
    X(SHD_ECANCELED, -17, "broken off by the caller")                      \
    X(SHD_ERESET, -18, "the open step was reset: compute it again")        \
    X(SHD_ESTOPPED, -19, "a guard has stopped training")                   \
    X(SHD_EMOVED, -20, "the model has other owners now")

#define SHD_ERR_TEXT_BYTES 256

#ifndef SHD_PUBLIC_STATUS /* else client/shd.h came first: it has the same types */
#define SHD_PUBLIC_STATUS
enum shd_status {
#define SHD_STATUS_ENUM(name, value, meaning) name = (value),
    SHD_STATUS_MAP(SHD_STATUS_ENUM)
#undef SHD_STATUS_ENUM
};

struct shd_err {
    int code;                      /* one of enum shd_status */
    char text[SHD_ERR_TEXT_BYTES]; /* always terminated; cut when too long */
};
#endif

/* A handler's third answer: taken, the reply follows later. Never crosses the wire. */
#define SHD_PENDING 1

/* Fill e (may be NULL) and return code. */
int err_set(struct shd_err *e, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* As err_set(), with ": <strerror(errno)>" behind the text. ENOMEM, EMFILE and ENFILE turn
 * `code` into SHD_ENOMEM. errno must be that of the failed call. */
int err_sys(struct shd_err *e, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Put "<text>: " before e's text, keeping its code; returns that code. For callers that know
 * what the failed call was for. */
int err_prefix(struct shd_err *e, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Pass a failure on that was kept: *e becomes it (e may be NULL), its code is returned. SHD_OK:
 * there was none, and e is left alone. */
int err_copy(const struct shd_err *why, struct shd_err *e);

/* "SHD_ESTEP", or "SHD_UNKNOWN" for a code not in the table. */
const char *status_name(int code);

/* The table's meaning of a code. */
const char *status_meaning(int code);

/* True when code is in the table: codes from the wire must pass this before use. */
int status_known(int code);

#endif
