/* A node for people, as text on a stream; parts of `shardctl status`. */
#ifndef SHD_CTL_STATUS_SHOW_H
#define SHD_CTL_STATUS_SHOW_H

#include <stdint.h>
#include <stdio.h>

#include "client/ctl/watch/status_node.h"

/* "2", "0.5": seconds from 0.1 to 3600, as milliseconds. Errors: SHD_EINVAL, SHD_ERANGE. */
int show_interval(const char *text, uint64_t *ret_ms, struct shd_err *e);

/* Daemons with their models and sessions, then who waits for what. */
void show_node(const struct node *n, FILE *out);

/* One array: each daemon's document, or {"device", "error", "status"} of one without. Only
 * printable ASCII is written. */
int show_json(const struct node *n, FILE *out);

#endif
