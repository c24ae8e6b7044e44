/* Internal to spec_json.c: the optimizer of a spec, from JSON and back. */
#ifndef SHD_SPEC_OPTIMIZER_JSON_H
#define SHD_SPEC_OPTIMIZER_JSON_H

#include <jansson.h>

#include "proto/base/status.h"

struct node;
struct spec;

int spec_optimizer_parse(struct spec *s, const struct node *n, struct shd_err *e);

/* NULL: no memory. What is not in torch's order is written as by builds that know no other. */
json_t *spec_optimizer_json(const struct spec *spec);

#endif
