/* Settings (settings.h) as text: what people write to change them, and JSON that says what is set.
 */
#ifndef SHD_SPEC_SETTINGS_TEXT_H
#define SHD_SPEC_SETTINGS_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "proto/spec/settings.h"

#define SETTINGS_TEXT_BYTES_MAX ((size_t)64 * 1024)

/* The keys that a change has, without groups: by their numbers, NULL after the last. And whether a
 * word's key, "lr_scale.decay", is one of them. */
#define SETTINGS_KEYS_MAX 32u
const char *settings_key(uint32_t index);
bool settings_has_key(const char *key);

/* A change, as "lr_scale.GROUP=0.5 betas.GROUP=0.9,0.95 micro_batches=8", or as a JSON object with
 * such keys ({"lr_scale.GROUP": 0.5, "betas.GROUP": [0.9, 0.95]}). A key without a group means all
 * groups that have it; instead of a value "spec" (JSON: or null) that it is not set any more, "now"
 * that what waits of it is given up. Errors say what is wrong and what would be right: SHD_EINVAL,
 * SHD_ERANGE. */
int settings_parse(const struct spec *spec, const char *text, struct settings *ret_change,
                   struct shd_err *e);

/* {"now": {"lr_scale.decay": {"value": 0.5, "from": 10}}, "next": {"from": 100, "settings":
 * {"clip_norm": 1.0, "lr_scale.decay": null}}, "later": [{"from": 200, "settings": {...}}]}: those
 * in force at `step`, each with the step from which on it is so; and those that wait, step by step,
 * null: not set any more. "next" is null where none wait, "later" is there where they wait for more
 * than one step. The caller's to free. Errors: SHD_ENOMEM. */
int settings_json(const struct spec *spec, const struct settings_kept *kept, uint64_t step,
                  char **ret_json, struct shd_err *e);

/* What settings_json() wrote. Nothing in it is trusted: SHD_EINVAL, SHD_ERANGE. */
int settings_read(const struct spec *spec, const char *json, size_t bytes,
                  struct settings_kept *ret_kept, struct shd_err *e);

#endif
