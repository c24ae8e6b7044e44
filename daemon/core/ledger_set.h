/* Settings (proto/spec/settings.h) in a ledger: what is kept, and what was before. */
#ifndef SHD_LEDGER_SET_H
#define SHD_LEDGER_SET_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/spec/settings.h"

struct ledger;

struct ledger_set { /* in versions 6 and 7 */
    struct settings_old_kept kept[2];
    _Alignas(64) _Atomic uint64_t given; /* written last: kept[given & 1] counts */
};

struct ledger_settings { /* from version 8 on */
    struct settings_kept kept[2];
    _Alignas(64) _Atomic uint64_t given; /* likewise */
};

/* In an older version there is no room for any. */
bool ledger_settings_room(const struct ledger *l);

/* What is kept: in the ledger, or put into *room; NULL: no room for any. */
const struct settings_kept *ledger_settings(const struct ledger *l, struct settings_kept *room);

/* What an older version kept, as it is kept now. */
void ledger_settings_from_old(const struct settings_old_kept *old, struct settings_kept *ret_kept);

/* This is kept from here on. Errors: SHD_ENOTSUP an older version has no room for it. */
int ledger_settings_keep(const struct ledger *l, const struct settings_kept *kept,
                         struct shd_err *e);

/* Of a ledger that is not trusted. */
bool ledger_settings_plausible(const struct ledger *l);

#endif
