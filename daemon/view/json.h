/* A snapshot as JSON: the status document, schema 2 of docs/status.md. Holds no tensor data and no
 * token. */
#ifndef SHD_VIEW_JSON_H
#define SHD_VIEW_JSON_H

#include <stddef.h>
#include <stdint.h>

struct view_snapshot;

#define VIEW_SCHEMA 2

/* The document, to be freed; without its long lists when it would have more than bytes_max bytes
 * with them. NULL: no memory. */
char *view_json(const struct view_snapshot *s, uint64_t now_ns, size_t bytes_max,
                size_t *ret_bytes);

#endif
