/* Internal to spec_json.c, spec_optimizer.c and spec_write.c: a group's Muon or LAMB, from JSON and
 * back, and the place of units that have its tensors. */
#ifndef SHD_SPEC_MUON_JSON_H
#define SHD_SPEC_MUON_JSON_H

#include <stdint.h>

#include <jansson.h>

#include "proto/base/status.h"
#include "proto/spec/muon.h"

struct node;
struct spec;
struct spec_lamb;

/* n: {"kind": "muon", ...}; *ret_rule: the caller's to free(). Errors: SHD_EINVAL, SHD_ERANGE,
 * SHD_ENOMEM. */
int spec_muon_parse(const struct node *n, struct muon_rule **ret_rule, struct shd_err *e);

/* Likewise: {"kind": "lamb", ...}. */
int spec_lamb_parse(const struct node *n, struct spec_lamb **ret_lamb, struct shd_err *e);

/* n: a unit whose tensors are parsed. Are those that Muon updates matrices; and the unit's "place",
 * which follows where there are any. Errors: SHD_EINVAL. */
int spec_place_parse(struct spec *s, uint32_t unit, const struct node *n, struct shd_err *e);

/* NULL: no memory. */
json_t *spec_muon_json(const struct muon_rule *rule);
json_t *spec_lamb_json(const struct spec_lamb *lamb);

#endif
