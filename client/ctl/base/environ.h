/* The environment of a child: ours, with some variables set and some taken out. */
#ifndef SHD_CTL_ENVIRON_H
#define SHD_CTL_ENVIRON_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/base/status.h"

struct environ {
    char **vars; /* owned, NULL-terminated "NAME=value", each owned */
    size_t count;
};

/* A copy of this process's environment without what a service manager set for us alone
 * (NOTIFY_SOCKET, LISTEN_FDS ...). Errors: SHD_ENOMEM. */
int environ_new(struct environ *ret_env, struct shd_err *e);
void environ_free(struct environ *env);

bool environ_has(const struct environ *env, const char *name);

/* Set name to the formatted value, replacing an old one. Errors: SHD_ENOMEM. */
int environ_set(struct environ *env, struct shd_err *e, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* The value inside env, until it is set again; NULL when it is not there. */
char *environ_value(const struct environ *env, const char *name);

/* Take a variable out; no-op when it is not there. */
void environ_unset(struct environ *env, const char *name);

#endif
