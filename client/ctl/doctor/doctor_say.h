/* What a check of `shardctl doctor` found. Each check looks at one thing, changes nothing, and
 * reports; it never fails itself: what it cannot look at is a finding too (ok with "cannot be read"
 * where nothing depends on it). */
#ifndef SHD_CTL_DOCTOR_SAY_H
#define SHD_CTL_DOCTOR_SAY_H

#include <stdbool.h>

enum doctor_level {
    DOCTOR_OK,
    DOCTOR_WARN, /* works, but slower, smaller or less safe than it could */
    DOCTOR_FAIL, /* something will not work */
};
#define DOCTOR_LEVELS     3
#define DOCTOR_TEXT_BYTES 512u

struct doctor {
    const char *runtime_dir; /* borrowed */
    const char *checkpoint;  /* borrowed; NULL: not asked about */
    /* Takes each finding. remedy: what to do; NULL when nothing is. */
    void (*found)(struct doctor *d, enum doctor_level level, const char *what, const char *remedy);
    const char *check;              /* name of the one that runs */
    unsigned counts[DOCTOR_LEVELS]; /* findings so far */
    void *sink;                     /* found()'s own */
};

/* Report a finding; the text is one line without a full stop. */
void doctor_ok(struct doctor *d, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void doctor_warn(struct doctor *d, const char *remedy, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void doctor_fail(struct doctor *d, const char *remedy, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#endif
