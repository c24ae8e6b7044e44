/* Internal to spec_json.c: the guard of a spec, from JSON and back. */
#ifndef SHD_SPEC_GUARD_JSON_H
#define SHD_SPEC_GUARD_JSON_H

#include <jansson.h>

#include "proto/base/status.h"

struct guard;
struct node;
struct spec;

/* n: [{"norm_zscore": 6, "window": 100, "action": "stop"}, ...]; absent: NULL. The caller's to
 * free.
 */
int spec_guard_parse(struct guard **ret_guard, const struct node *n, struct shd_err *e);

/* Once units are known: those that rules are of. Errors: SHD_EINVAL a rule is of none. */
int spec_guard_units(struct spec *spec, struct shd_err *e);

/* NULL: no memory. */
json_t *spec_guard_json(const struct guard *guard);

#endif
