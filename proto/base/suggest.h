/* "Did you mean": the known names nearest to a mistyped one. Pure. */
#ifndef SHD_SUGGEST_H
#define SHD_SUGGEST_H

#include <stddef.h>

/* Fill buf with what to say after "unknown X": "; did you mean 'status'?" when known names come
 * near, else "; known: run, status, digest". names[count] without NULLs; prefix ("--") is put
 * before each. Always terminated; cut when too long. Returns buf. */
const char *suggest(const char *word, const char *const *names, size_t count, const char *prefix,
                    char *buf, size_t bytes);

#endif
