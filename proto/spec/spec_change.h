/* The spec of a fork: that of the model which it is made of, under another name, with what is asked
 * to be other. That can be whatever lays out no array of the state; what is set beside it
 * (settings.h) is told apart here. */
#ifndef SHD_SPEC_CHANGE_H
#define SHD_SPEC_CHANGE_H

#include "proto/base/status.h"
#include "proto/spec/settings.h"

struct spec;

struct spec_changed {
    struct spec *spec;      /* owned */
    char *json;             /* owned: the same, as spec_dump() writes it */
    struct settings change; /* of settings, by its groups; count 0: none */
};

/* text: KEY=VALUE words, or a JSON object, as settings_parse() takes; NULL: nothing is other.
 * Beside settings a key may be a field of the spec, with a value as there
 * ("guard=[{\"norm_above\":1}]", "publish=bf16", "eps=1e-6"); null: not given. A value has blanks
 * within brackets and quotes alone. Errors say what is wrong and what would be right: SHD_EINVAL,
 * SHD_ERANGE; SHD_ENOMEM. */
int spec_change(const struct spec *spec, const char *name, const char *text,
                struct spec_changed *ret_changed, struct shd_err *e);
void spec_changed_free(struct spec_changed *changed); /* zeroed: a no-op */

#endif
