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

/* Numbers, in this order: clip_norm, then of each group of the spec its rates, then micro_batches,
 * then of each group its eps. NaN: not set. Builds that do not know the last two have those before
 * them alone (settings_old_count()). */
enum setting_rate { SETTING_LR_SCALE, SETTING_WEIGHT_DECAY, SETTING_BETA1, SETTING_BETA2 };
#define SETTINGS_RATES     4u
#define SETTINGS_CLIP_NORM 0u
#define SETTINGS_OLD_MAX   (1 + SHD_GROUPS_MAX * SETTINGS_RATES)
#define SETTINGS_MAX       (SETTINGS_OLD_MAX + 1 + SHD_GROUPS_MAX)
#define SETTINGS_BACK      (-1.0) /* in a change: not set any more, */
#define SETTINGS_STAY      (-2.0) /* and: what waits of it is given up */

struct settings {
    uint32_t count; /* of the numbers; 0: nothing is set */
    double numbers[SETTINGS_MAX];
};

static inline uint32_t settings_count(uint32_t groups)
{
    return 1 + groups * SETTINGS_RATES + 1 + groups;
}

static inline uint32_t settings_groups(uint32_t count)
{
    return count < 2 ? 0 : (count - 2) / (SETTINGS_RATES + 1);
}

static inline uint32_t settings_old_count(uint32_t count)
{
    return count == 0 ? 0 : 1 + settings_groups(count) * SETTINGS_RATES;
}

static inline uint32_t setting_of(uint32_t group, enum setting_rate rate)
{
    return 1 + group * SETTINGS_RATES + (uint32_t)rate;
}

static inline uint32_t setting_micros(uint32_t groups)
{
    return 1 + groups * SETTINGS_RATES;
}

static inline uint32_t setting_eps(uint32_t groups, uint32_t group)
{
    return setting_micros(groups) + 1 + group;
}

/* A number's value; NaN also where nothing is set. */
double setting_get(const struct settings *settings, uint32_t index);

/* All of the spec's numbers, none of them set. */
void settings_init(struct settings *settings, const struct spec *spec);

/* Is it one of this spec? change: may have SETTINGS_BACK and SETTINGS_STAY. Errors: SHD_EINVAL a
 * number that the group does not have, or another count; SHD_ERANGE; they name it with its limits.
 */
int settings_check(const struct spec *spec, const struct settings *settings, bool change,
                   struct shd_err *e);

/* The same without a spec: a count and numbers that settings of some model can have. */
bool settings_plausible(const struct settings *settings, bool change);

/* From a message: doubles, in any place; those that older builds know, and the others, which may be
 * none. Errors: SHD_EPROTO they are not plausible. */
struct settings_bytes {
    const void *old, *more;
    size_t old_bytes, more_bytes;
};
int settings_unpack(const struct settings_bytes *bytes, bool change, struct settings *ret_settings,
                    struct shd_err *e);

/* For one: in the settings' own memory. No `more` where none of these numbers is set. */
struct settings_bytes settings_pack(const struct settings *settings);

#define SETTINGS_WAITS_MAX 384u

struct settings_wait { /* a change of one number */
    uint64_t from;     /* the step that it holds from */
    double value;      /* or SETTINGS_BACK */
    uint64_t index;
};

struct settings_kept {
    struct settings now;
    uint64_t since[SETTINGS_MAX]; /* of each number of `now`: the step from which on it is so */
    uint64_t id, id_from; /* settings_when.id of the last change, and from which step on it is so */
    uint64_t waiting;     /* changes of `now`, by ascending step, also those that hold by now: */
    struct settings_wait waits[SETTINGS_WAITS_MAX];
};

/* The same as ledgers of versions 6 and 7 have it, and snapshots of theirs: where there is room for
 * the numbers of older builds, and for one step to wait for. */
struct settings_old {
    uint32_t count; /* settings_old_count() */
    double numbers[SETTINGS_OLD_MAX];
};

struct settings_old_kept {
    uint64_t from; /* the step that `next` holds from, */
    struct settings_old now, next;
    uint64_t since[SETTINGS_OLD_MAX];
};

/* What a ledger has. Errors: SHD_ESEGMENT. */
int settings_check_kept(const struct spec *spec, const struct settings_kept *kept,
                        struct shd_err *e);

/* The same without a spec. */
bool settings_kept_plausible(const struct settings_kept *kept);

/* Is anything set, or going to be? */
bool settings_any(const struct settings_kept *kept);

/* Those in force at `step`, which is not before one that `now` was in force at; count 0: none is
 * set. since: of each number; may be NULL. */
void settings_at(const struct settings_kept *kept, uint64_t step, struct settings *ret_settings,
                 uint64_t *ret_since);

/* Micro-batches of `step`; 0: not set. */
uint32_t settings_micro_batches(const struct settings_kept *kept, uint64_t step);

/* Is any of it a number that builds of version 7 of a ledger do not know; or do changes wait for
 * several steps, which they do not know either? */
bool settings_new(const struct settings *settings);
bool settings_kept_new(const struct settings_kept *kept);

/* What holds at `step` is `now`; no step before that is asked for any more. */
void settings_settle(struct settings_kept *kept, uint64_t step);

struct settings_when {
    uint64_t open;     /* the first step without a decision: settings_at() is asked for it still */
    uint64_t earliest; /* the first step that is not about to be decided: open, or the next; of
                        * micro_batches it is never `open`, which has its number */
    uint64_t at;       /* the step to change it from; 0: the earliest */
    uint64_t id;       /* random: who is not answered asks again with the same; 0: none */
};

/* What is kept after a change. *ret_from: the step from which on all of it is so. A change that is
 * there already, given twice, changes nothing. Errors: SHD_ESTEP `at` is too early; SHD_EBUSY
 * too many wait. */
int settings_give(const struct settings_kept *kept, const struct settings *change,
                  const struct settings_when *when, struct settings_kept *ret_kept,
                  uint64_t *ret_from, struct shd_err *e);

/* A model has gone back, and has `kept`; before it had `was`. The first step, from `from` on, from
 * which on numbers are others than they were or were to be, and the change that makes them the same
 * again; given that, the next one is asked for. Of changes that are `now` the last one is known
 * alone, and of a number that was not set any more not since when: of `from`. False: none is
 * another. */
bool settings_lacks(const struct settings_kept *was, const struct settings_kept *kept,
                    uint64_t from, struct settings *ret_change, uint64_t *ret_step);

/* All of them at once, into *kept. False: more would wait than there is room for, and *kept is as
 * it was. */
bool settings_keep(const struct settings_kept *was, uint64_t from, struct settings_kept *kept);

/* "clip_norm", "momentum.decay": buf[bytes] holds any where bytes is SETTING_NAME_BYTES. */
#define SETTING_NAME_BYTES 160u
const char *setting_name(const struct spec *spec, uint32_t index, char *buf, uint32_t bytes);

#endif
