/* A spec as JSON. */
#ifndef SHD_SPEC_DUMP_H
#define SHD_SPEC_DUMP_H

#include "proto/spec/spec.h"

/* The spec as compact canonical JSON that spec_parse() takes; *ret_json is the caller's to free.
 * Errors: SHD_ENOMEM; SHD_ERANGE when it would exceed SPEC_JSON_BYTES_MAX. */
int spec_dump(const struct spec *spec, char **ret_json, struct shd_err *e);

#endif
