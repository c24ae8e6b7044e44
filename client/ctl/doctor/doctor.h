/* shardctl doctor: checks of this host, by area. Each check looks at one thing, changes nothing,
 * and reports what it found; doctor.c has the table of them and prints the findings.
 *
 * A check never fails itself: what it cannot look at is a finding too (ok with "cannot be read"
 * where nothing depends on it).
 */
#ifndef SHD_CTL_DOCTOR_H
#define SHD_CTL_DOCTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum doctor_level {
    DOCTOR_OK,
    DOCTOR_WARN, /* works, but slower, smaller or less safe than it could */
    DOCTOR_FAIL, /* something will not work */
};
#define DOCTOR_LEVELS 3

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

/* -- The checks ------------------------------------------------------------------------------ */

void doctor_kernel(struct doctor *d);    /* doctor_kernel.c: system calls */
void doctor_limits(struct doctor *d);    /* doctor_limits.c: mappings, descriptors, locked memory */
void doctor_memory(struct doctor *d);    /* doctor_memory.c: how much there is, huge pages */
void doctor_cpu(struct doctor *d);       /* doctor_cpu.c: instruction sets */
void doctor_gemm(struct doctor *d);      /* doctor_gemm.c: the workers' matrix products */
void doctor_systemd(struct doctor *d);   /* doctor_systemd.c: manager, fd store, user */
void doctor_runtime(struct doctor *d);   /* doctor_runtime.c: directory and locks */
void doctor_daemons(struct doctor *d);   /* doctor_daemons.c: each socket, each daemon */
void doctor_leftovers(struct doctor *d); /* doctor_leftovers.c: run directories, memory */
void doctor_checkpoint(struct doctor *d); /* doctor_checkpoint.c: can it be written */
void doctor_gpu(struct doctor *d);        /* doctor_gpu.c: driver, devices, libraries, MPS */

/* -- What they share (doctor_look.c) ---------------------------------------------------------- */

#define DOCTOR_TEXT_BYTES 512u

/* The first line of a file, without its end; false when it cannot be read. */
bool doctor_read_line(const char *path, char *buf, size_t bytes);

/* A whole number in a file. */
bool doctor_read_u64(const char *path, uint64_t *ret_n);

/* The field "key:  N kB" of /proc/meminfo, in bytes; 0 when it is not there. */
uint64_t doctor_meminfo(const char *key);

/* "1.5 GiB". Returns buf. */
const char *doctor_bytes(uint64_t bytes, char buf[24]);

/* The name of a process; false when it is gone. */
bool doctor_process_name(pid_t pid, char *buf, size_t bytes);

/* Run fn in a child, which may crash or hang (foreign libraries do), and take the line it prints.
 * False: it crashed, hung (10 s) or printed nothing. */
bool doctor_probe(void (*fn)(FILE *out), char *buf, size_t bytes);

/* dlopen() the first of these names (NULL-terminated); NULL: none is there. For doctor_probe(). */
void *doctor_library(const char *const *names);

/* The GPUs a program has kernels for, "sm_90, compute_90 (PTX)"; empty: for none. False: the file
 * cannot be read. doctor_fatbin.c */
bool doctor_fatbin(const char *path, char *buf, size_t bytes);

#endif
