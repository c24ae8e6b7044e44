/* A shared library that a host may lack: opened at run time, once per process, its functions found
 * by name and put into a table of pointers. It stays open: what it started cannot be unloaded.
 */
#ifndef SHD_LIBRARY_H
#define SHD_LIBRARY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "proto/base/status.h"

struct library_function {
    const char *symbol;
    size_t offset; /* in the table, of the pointer */
};

/* Static; members without a comment to the contrary are set by its author and borrowed. */
struct library {
    const char *names[3]; /* tried in this order; the last is NULL */
    const char *absent;   /* when none is there: "no NVIDIA driver here" */
    const char *called;   /* in "CALLED has no SYMBOL: REMEDY" */
    const char *remedy;   /* for a library without one of the functions */
    const struct library_function *functions;
    size_t function_count;
    void *table;                     /* of pointers at the functions' offsets */
    int (*start)(struct shd_err *e); /* the table is filled: first calls; NULL: none */

    pthread_mutex_t lock; /* PTHREAD_MUTEX_INITIALIZER */
    bool loaded;          /* under lock, and library_load()'s */
};

/* Fill the table, unless an earlier call did; after SHD_OK it stays as it is. Thread-safe; a call
 * that failed may be repeated. Errors: SHD_ENOTSUP no such library here (with the dynamic linker's
 * reason), or a function is missing; what start() returned. */
int library_load(struct library *l, struct shd_err *e);

#endif
