/* Internal to spec_json.c: the optimizer of a spec, from JSON and back. */
#ifndef SHD_SPEC_OPTIMIZER_JSON_H
#define SHD_SPEC_OPTIMIZER_JSON_H

#include <jansson.h>

#include "proto/base/status.h"

struct node;
struct spec;
struct spec_group;

int spec_optimizer_parse(struct spec *s, const struct node *n, struct shd_err *e);

/* A group's own, when node n of the group has one; the rest of the group is parsed, and s has
 * its optimizer. */
int spec_optimizer_parse_group(const struct spec *s, struct spec_group *g, const struct node *n,
                               struct shd_err *e);

/* o with key: value, which is taken; NULL where either is. */
json_t *spec_json_with(json_t *o, const char *key, json_t *value);

/* NULL: no memory. What is not in torch's order, and moments in fp32, are written as
 * by builds that know no other. */
json_t *spec_optimizer_json(const struct spec *spec);

#endif
