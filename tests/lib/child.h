/* Processes of a test's own, which end with it; some are stepped instruction by instruction. */
#ifndef SHD_TESTS_CHILD_H
#define SHD_TESTS_CHILD_H

#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

#include "proto/base/status.h"

/* 0: in the child, which is killed when its parent ends; else its pid, the caller's to wait for. */
pid_t test_fork(void);

/* In a child, which cannot fail a test: say why and end with 1. */
#define MUST(cond)                                                             \
    do {                                                                       \
        if (!(cond)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #cond); \
            _exit(1);                                                          \
        }                                                                      \
    } while (0)

#define MUST_OK(expr)                                   \
    do {                                                \
        struct shd_err e = { 0 };                       \
        if ((expr) != SHD_OK) {                         \
            fprintf(stderr, "%s: %s\n", #expr, e.text); \
            _exit(1);                                   \
        }                                               \
    } while (0)

/* Wait for a child: the test fails unless it ends with exit code 0. */
void expect_well(pid_t pid);

#define NO_PTRACE 77 /* exit code of a child that may not be traced */

/* memcmp() by words; AddressSanitizer's, by bytes, would take most of the test's time. */
__attribute__((no_sanitize("address", "undefined"))) bool
same_words(const uint8_t *a, const uint8_t *b, uint64_t bytes);

/* In the child: let the parent trace it, and wait for it. */
void child_stop(void);

/* The CPUs that each thread of this name in the process may run on; returns how many there are, at
 * most max. */
uint32_t threads_cpus(pid_t pid, const char *name, cpu_set_t *ret_sets, uint32_t max);

#endif
