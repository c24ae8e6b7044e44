/* The norms of single units in the last steps that count, for a guard's rules of units with a
 * window (proto/spec/guard.h): owner 0 keeps them in its ledger, a row a step and a column for each
 * unit that such a rule is of. What a limit is made of, and of which steps, is as in
 * guard_window.h.
 *
 * A row is written before its step's commit is recorded, its tag last, where the oldest one but the
 * last `rows` - 1 was: a process that is killed in between has neither the commit nor the row, and
 * all that a limit of the step can be made of. Rows of steps that are not committed do not count.
 * Pure. */
#ifndef SHD_UNIT_WINDOW_H
#define SHD_UNIT_WINDOW_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct guard_rule;

struct unit_window_row {
    _Atomic uint64_t tag; /* 1 + its step; 0: none */
    uint64_t turn;        /* steps that counted up to it: turn % rows is its place */
};

struct unit_window { /* memory of unit_window_bytes(), zeroed; borrowed */
    uint32_t rows, columns;
    struct unit_window_row *row; /* [rows] */
    double *norm;                /* [columns][rows] */
};

/* rows: one more than the largest window. */
size_t unit_window_bytes(uint32_t rows, uint32_t columns);

/* In memory aligned to 8. */
struct unit_window unit_window_at(void *memory, uint32_t rows, uint32_t columns);

/* The step is about to be committed. norms: doubles, [columns], in any place; NULL: it does not
 * count. */
void unit_window_put(struct unit_window *w, uint64_t step, const void *norms);

/* What was put of the step. ret_norms: [columns]. False: its row is not there, for it did not
 * count, or is long over. */
bool unit_window_get(const struct unit_window *w, uint64_t step, double *ret_norms);

/* The largest norm of the column's unit that passes in step `commits`; infinite: any does. */
double unit_window_limit(const struct unit_window *w, const struct guard_rule *rule,
                         uint64_t commits, uint32_t column);

#endif
