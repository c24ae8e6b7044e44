/* A snapshot as JSON: /status, schema 2 of docs/status.md. Holds no tensor data and no token. */
#ifndef SHD_VIEW_JSON_H
#define SHD_VIEW_JSON_H

#include <stdint.h>

#include <jansson.h>

struct adopt;
struct view_snapshot;

#define VIEW_SCHEMA 2

/* NULL: no memory. */
json_t *view_json(const struct view_snapshot *s, uint64_t now_ns);
json_t *view_adopted(const struct adopt *a);

#endif
