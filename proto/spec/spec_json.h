/* A spec from JSON, and as JSON. */
#ifndef SHD_SPEC_JSON_H
#define SHD_SPEC_JSON_H

#include "proto/spec/spec.h"

/* Parse json[bytes] (NUL not needed). Errors: SHD_EINVAL, SHD_ERANGE, SHD_ENOMEM.
 *
 * Required: name, micro_batches, optimizer.kind, units with name and tensors, tensors with name
 * and shape ([] is a scalar), a tensor's group where there are several. Defaults: seed 0 (at most
 * 2^63-1), micro_batches_max as many as micro_batches has at most, publish "f32", adamw 0.9, 0.999,
 * 1e-8, sgd momentum 0, lion 0.9, 0.99, one group "default", lr_scale 1, weight_decay 0, uses [],
 * init ["const", 0]. Reals must be finite in fp32, betas below 1 in fp32, eps at least FLT_MIN. */
int spec_parse(const char *json, size_t bytes, struct spec **ret_spec, struct shd_err *e);

/* Whether json[bytes] has no more arrays, objects and values than a spec can have, or a file with
 * one in it: parsed they take up to a hundred times their bytes. SHD_ERANGE names both numbers. */
int spec_check_amount(const char *json, size_t bytes, struct shd_err *e);

/* The spec as compact canonical JSON that spec_parse() takes; *ret_json is the caller's to free.
 * Errors: SHD_ENOMEM; SHD_ERANGE when it would exceed SPEC_JSON_BYTES_MAX. */
int spec_dump(const struct spec *spec, char **ret_json, struct shd_err *e);

/* spec_compare(), whatever tiles each of them is cut into. */
int spec_compare_untiled(const struct spec *open, const struct spec *asked, struct shd_err *e);

#endif
