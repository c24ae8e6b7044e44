/* Shared by the tests that step processes instruction by instruction. */
#ifndef SHD_TESTS_STEPPING_H
#define SHD_TESTS_STEPPING_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/ptrace.h>
#include <time.h>
#include <unistd.h>

#define NO_PTRACE 77 /* exit code of a child that may not be traced */

/* memcmp() by words; AddressSanitizer's, by bytes, would take most of the test's time. */
__attribute__((no_sanitize("address", "undefined"))) static inline bool
same_words(const uint8_t *a, const uint8_t *b, uint64_t bytes)
{
    const uint64_t *x = (const void *)a, *y = (const void *)b;
    uint64_t differ = 0;
    for (uint64_t i = 0; i < bytes / sizeof *x; i++)
        differ |= x[i] ^ y[i];
    return differ == 0;
}

/* In the child: let the parent trace it, and wait for it. */
static inline void child_stop(void)
{
    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0)
        _exit(NO_PTRACE);
    raise(SIGSTOP);
}

#endif
