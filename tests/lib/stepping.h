/* Shared by the tests that step processes instruction by instruction. */
#ifndef SHD_TESTS_STEPPING_H
#define SHD_TESTS_STEPPING_H

#include <stdbool.h>
#include <stdint.h>

#define NO_PTRACE 77 /* exit code of a child that may not be traced */

/* memcmp() by words; AddressSanitizer's, by bytes, would take most of the test's time. */
__attribute__((no_sanitize("address", "undefined"))) bool
same_words(const uint8_t *a, const uint8_t *b, uint64_t bytes);

/* In the child: let the parent trace it, and wait for it. */
void child_stop(void);

#endif
