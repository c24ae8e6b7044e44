/* Internal to spec_json.c, spec_optimizer.c and spec_write.c: a group's Muon, LAMB or Adafactor,
 * from JSON and back, and the place of units that have its tensors. */
#ifndef SHD_SPEC_MUON_JSON_H
#define SHD_SPEC_MUON_JSON_H

#include <stdbool.h>
#include <stdint.h>

#include <jansson.h>

#include "proto/base/status.h"
#include "proto/spec/muon.h"

struct node;
struct spec;
struct adafactor_rule;
struct spec_lamb;

/* n: {"kind": "muon", ...}; *ret_rule: the caller's to free(). Errors: SHD_EINVAL, SHD_ERANGE,
 * SHD_ENOMEM. */
int spec_muon_parse(const struct node *n, struct muon_rule **ret_rule, struct shd_err *e);

/* Likewise: {"kind": "lamb", ...}. */
int spec_lamb_parse(const struct node *n, struct spec_lamb **ret_lamb, struct shd_err *e);

/* Likewise: {"kind": "adafactor", ...}. */
int spec_adafactor_parse(const struct node *n, struct adafactor_rule **ret_rule, struct shd_err *e);

/* Is unit `unit`, n, Adafactor's, so that it has one tensor more than n says? What is wrong with n
 * is found later. And that tensor, behind the others, which are parsed and end at element `end`.
 * Errors: SHD_EINVAL, SHD_ENOMEM. */
bool spec_adafactor_has(const struct spec *s, const struct node *n);
int spec_adafactor_add(struct spec *s, uint32_t unit, const struct node *n, uint64_t end,
                       struct shd_err *e);

/* n: a unit whose tensors are parsed. Are those that Muon updates matrices; and the unit's "place",
 * which follows where there are any. Errors: SHD_EINVAL. */
int spec_place_parse(struct spec *s, uint32_t unit, const struct node *n, struct shd_err *e);

/* NULL: no memory. */
json_t *spec_muon_json(const struct muon_rule *rule);
json_t *spec_lamb_json(const struct spec_lamb *lamb);
json_t *spec_adafactor_json(const struct adafactor_rule *rule);

#endif
