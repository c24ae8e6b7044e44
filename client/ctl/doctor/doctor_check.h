/* Tools of the checks of `shardctl doctor`: reporting, small files of the kernel, and a child for
 * what may crash.
 *
 * A check looks at one thing, changes nothing, and reports. It never fails itself: a thing that
 * cannot be looked at is a finding too (ok with "cannot be read" where nothing depends on it). */
#ifndef SHD_CTL_DOCTOR_CHECK_H
#define SHD_CTL_DOCTOR_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum doctor_level {
    DOCTOR_OK,
    DOCTOR_WARN, /* works, but slower, smaller or less safe than it could */
    DOCTOR_FAIL, /* something will not work */
};
#define DOCTOR_LEVELS     3
#define DOCTOR_TEXT_BYTES 512u

struct doctor {
    const char *runtime_dir; /* borrowed */
    const char *nowhere;     /* borrowed: why it is only the default; NULL: it is what was meant */
    const char *checkpoint;  /* borrowed; NULL: not asked about */
    /* Takes each finding. remedy: what to do; NULL when nothing is. */
    void (*found)(struct doctor *d, enum doctor_level level, const char *what, const char *remedy);
    const char *check;              /* name of the one that runs */
    unsigned counts[DOCTOR_LEVELS]; /* findings so far */
    void *sink;                     /* found()'s own */
};

/* Report a finding; the text is one line without a full stop. */
void doctor_found(struct doctor *d, enum doctor_level level, const char *remedy, const char *fmt,
                  ...) __attribute__((format(printf, 4, 5)));
#define doctor_ok(d, ...)           doctor_found(d, DOCTOR_OK, NULL, __VA_ARGS__)
#define doctor_warn(d, remedy, ...) doctor_found(d, DOCTOR_WARN, remedy, __VA_ARGS__)
#define doctor_fail(d, remedy, ...) doctor_found(d, DOCTOR_FAIL, remedy, __VA_ARGS__)

/* The first line of a file, without its end; false when it cannot be read. */
bool doctor_read_line(const char *path, char *buf, size_t bytes);

/* A whole number in a file. */
bool doctor_read_u64(const char *path, uint64_t *ret_n);

/* The field "key:  N kB" of /proc/meminfo, in bytes; 0 when it is not there. */
uint64_t doctor_meminfo(const char *key);

/* The name of a process; false when it is gone. */
bool doctor_process_name(pid_t pid, char *buf, size_t bytes);

/* Run fn in a child, which may crash or hang (foreign libraries do), and take the line it prints.
 * False: it crashed, hung (10 s) or printed nothing. */
bool doctor_probe(void (*fn)(FILE *out), char *buf, size_t bytes);

/* dlsym() of a name in the first of these libraries (NULL-terminated) that is there; NULL: it is
 * not. For doctor_probe(). */
void *doctor_symbol(const char *const *libraries, const char *name);

#endif
