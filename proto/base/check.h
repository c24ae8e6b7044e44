/* CHECK(): an assertion on our own logic that stays on in release builds. Never for input from
 * messages, files, shared pages or peers: those get an error. A daemon that fails a CHECK exits;
 * its keeper has the state. */
#ifndef SHD_CHECK_H
#define SHD_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(expr)                                                                  \
    do {                                                                             \
        if (!(expr)) {                                                               \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #expr); \
            abort();                                                                 \
        }                                                                            \
    } while (0)

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

#endif
