/* Settings: what is changed of a model while it trains. They lie over the spec's hyperparameters
 * and over what workers pass with a step (struct decide_args); the spec itself stays as it was.
 *
 * Owner 0 keeps them (struct settings_kept): those in force, and those that wait for their step. It
 * tells them with Prepared; whoever decides the step makes its rates and its factor of them, which
 * all owners record. So what a setting does is of a step, the same everywhere, and once.
 *
 * Pure; settings_text.h has them as text. */
#ifndef SHD_SPEC_SETTINGS_H
#define SHD_SPEC_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/base/status.h"
#include "proto/spec/layout.h"

struct spec;

/* Numbers, in this order: clip_norm, then of each group of the spec its rates. NaN: not set. */
enum setting_rate { SETTING_LR_SCALE, SETTING_WEIGHT_DECAY, SETTING_BETA1, SETTING_BETA2 };
#define SETTINGS_RATES     4u
#define SETTINGS_CLIP_NORM 0u
#define SETTINGS_MAX       (1 + SHD_GROUPS_MAX * SETTINGS_RATES)
#define SETTINGS_BACK      (-1.0) /* in a change: not set any more */

struct settings {
    uint32_t count; /* of the numbers; 0: nothing is set */
    double numbers[SETTINGS_MAX];
};

static inline uint32_t setting_of(uint32_t group, enum setting_rate rate)
{
    return 1 + group * SETTINGS_RATES + (uint32_t)rate;
}

/* A number's value; NaN also where nothing is set. */
double setting_get(const struct settings *settings, uint32_t index);

/* All of the spec's numbers, none of them set. */
void settings_init(struct settings *settings, const struct spec *spec);

/* Is it one of this spec? change: may have SETTINGS_BACK. Errors: SHD_EINVAL a number that the
 * group does not have, or another count; SHD_ERANGE; they name it with its limits. */
int settings_check(const struct spec *spec, const struct settings *settings, bool change,
                   struct shd_err *e);

/* The same without a spec: a count and numbers that settings of some model can have. */
bool settings_plausible(const struct settings *settings, bool change);

/* From a message: doubles, in any place. Errors: SHD_EPROTO they are not plausible. */
int settings_unpack(const uint8_t *data, size_t bytes, bool change, struct settings *ret_settings,
                    struct shd_err *e);

struct settings_kept {
    uint64_t from;                /* the step that `next` holds from, */
    struct settings now, next;    /* a change of `now`; count 0: none waits */
    uint64_t since[SETTINGS_MAX]; /* of each number of `now`: the step from which on it is so */
};

/* Both parts of what a ledger has. Errors: SHD_ESEGMENT. */
int settings_check_kept(const struct spec *spec, const struct settings_kept *kept,
                        struct shd_err *e);

/* Is anything set, or going to be? */
bool settings_any(const struct settings_kept *kept);

/* Those in force at `step`, which is not before one that `now` was in force at. since: of each
 * number; may be NULL. */
void settings_at(const struct settings_kept *kept, uint64_t step, struct settings *ret_settings,
                 uint64_t *ret_since);

struct settings_when {
    uint64_t open;     /* the first step without a decision: settings_at() is asked for it still */
    uint64_t earliest; /* the first step that is not about to be decided: open, or the next */
    uint64_t at;       /* the step to change it from; 0: the earliest */
};

/* What is kept after a change. *ret_from: the step from which on all of it is so. A change that is
 * there already, given twice, changes nothing. Errors: SHD_ESTEP `at` is too early; SHD_EBUSY
 * others wait for another step. */
int settings_give(const struct settings_kept *kept, const struct settings *change,
                  const struct settings_when *when, struct settings_kept *ret_kept,
                  uint64_t *ret_from, struct shd_err *e);

/* "clip_norm", "momentum.decay": buf[bytes] holds any where bytes is SETTING_NAME_BYTES. */
#define SETTING_NAME_BYTES 160u
const char *setting_name(const struct spec *spec, uint32_t index, char *buf, uint32_t bytes);

#endif
