/* Settings in a ledger, from version 6 on: what is kept, and what was before. */
#ifndef SHD_LEDGER_SET_H
#define SHD_LEDGER_SET_H

#include <stdatomic.h>
#include <stdint.h>

#include "proto/spec/settings.h"

struct ledger_set {
    struct settings_kept kept[2];
    _Alignas(64) _Atomic uint64_t given; /* written last: kept[given & 1] counts */
};

#endif
