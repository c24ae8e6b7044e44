/* A model's spec as canonical JSON: what a ledger keeps of it, and what Layout says; where that is
 * too large for a message, in a segment that sessions are given. */
#ifndef SHD_MODEL_JSON_H
#define SHD_MODEL_JSON_H

struct model_json;
struct shd_err;
struct spec;

/* Errors: SHD_ERANGE, SHD_ENOMEM, SHD_EIO. */
int model_json_make(struct model_json *json, const struct spec *spec, struct shd_err *e);

void model_json_free(struct model_json *json);

#endif
