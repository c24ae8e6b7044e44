/* Whether what a daemon holds is well (/healthz): nothing was refused, no model has failed. */
#ifndef SHD_HEALTH_H
#define SHD_HEALTH_H

#include <stdbool.h>
#include <stddef.h>

struct daemon;
struct view_snapshot;

/* The first reason not to be well, a line; false: none. Any thread; s may be NULL. */
bool health_trouble(const struct daemon *d, const struct view_snapshot *s, char *text,
                    size_t bytes);

#endif
