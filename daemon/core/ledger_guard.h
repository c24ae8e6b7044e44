/* What a guard (proto/spec/guard.h) did, in a ledger, from version 7 on. */
#ifndef SHD_LEDGER_GUARD_H
#define SHD_LEDGER_GUARD_H

#include <stdatomic.h>
#include <stdint.h>

struct ledger_veto {
    uint64_t commits; /* 1 + the step; 0: none */
    uint32_t what;    /* enum guard_what */
    uint32_t stop;    /* enum ledger_veto_stop */
    double value, bound;
};

enum ledger_veto_stop {
    LEDGER_VETO_SKIPS,
    LEDGER_VETO_STOPS,
    LEDGER_VETO_REWINDS, /* from version 8 on: stops, until it has gone back */
};

struct ledger_guarded {
    struct ledger_veto last;    /* of the decision; `what` 0: the guard did not skip it */
    struct ledger_veto stopped; /* the last one that stopped training */
};

struct ledger_guard {
    struct ledger_guarded record[2]; /* as ledger_head.record */
    _Alignas(
        64) _Atomic uint64_t go_on; /* what was stopped with so many commits is trained again */
};

#endif
