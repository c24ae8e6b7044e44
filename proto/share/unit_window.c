/* See unit_window.h. */
#include "proto/share/unit_window.h"

#include <math.h>
#include <string.h>

#include "proto/base/check.h"
#include "proto/share/guard_window.h"
#include "proto/spec/guard.h"

size_t unit_window_bytes(uint32_t rows, uint32_t columns)
{
    return columns == 0 ? 0 : rows * (sizeof(struct unit_window_row) + columns * sizeof(double));
}

struct unit_window unit_window_at(void *memory, uint32_t rows, uint32_t columns)
{
    struct unit_window_row *row = memory;
    CHECK(rows > 1 && columns > 0);
    return (struct unit_window){ rows, columns, row, (double *)(void *)(row + rows) };
}

static uint64_t tag_of(const struct unit_window *w, uint32_t place)
{
    return atomic_load_explicit(&w->row[place].tag, memory_order_acquire);
}

/* The turn of the last row of a committed step; 0: there is none. */
static uint64_t last_turn(const struct unit_window *w, uint64_t commits)
{
    uint64_t turn = 0;
    for (uint32_t i = 0; i < w->rows; i++) {
        const uint64_t tag = tag_of(w, i);
        if (tag > 0 && tag <= commits && w->row[i].turn > turn)
            turn = w->row[i].turn;
    }
    return turn;
}

void unit_window_put(struct unit_window *w, uint64_t step, const void *norms)
{
    const uint64_t turn = last_turn(w, step) + 1;
    const uint32_t place = (uint32_t)(turn % w->rows);
    atomic_store_explicit(&w->row[place].tag, 0, memory_order_release);
    atomic_signal_fence(memory_order_seq_cst);
    if (norms == NULL)
        return;
    w->row[place].turn = turn;
    for (uint32_t i = 0; i < w->columns; i++)
        memcpy(&w->norm[(size_t)i * w->rows + place], (const uint8_t *)norms + i * sizeof *w->norm,
               sizeof *w->norm);
    atomic_store_explicit(&w->row[place].tag, step + 1, memory_order_release);
}

bool unit_window_get(const struct unit_window *w, uint64_t step, double *ret_norms)
{
    uint32_t place = 0;
    while (place < w->rows && tag_of(w, place) != step + 1)
        place++;
    for (uint32_t i = 0; place < w->rows && i < w->columns; i++)
        ret_norms[i] = w->norm[(size_t)i * w->rows + place];
    return place < w->rows;
}

double unit_window_limit(const struct unit_window *w, const struct guard_rule *rule,
                         uint64_t commits, uint32_t column)
{
    double x[GUARD_WINDOW_MAX];
    const uint64_t look = (uint64_t)GUARD_LOOK_BACK * rule->window;
    const uint64_t last = last_turn(w, commits);
    CHECK(column < w->columns && rule->window < w->rows && rule->window <= GUARD_WINDOW_MAX);
    if (last < rule->window)
        return (double)INFINITY;
    for (uint32_t i = 0; i < rule->window; i++) {
        const uint32_t place = (uint32_t)((last - i) % w->rows);
        const uint64_t tag = tag_of(w, place);
        if (w->row[place].turn != last - i || tag == 0 || tag > commits || tag + look <= commits)
            return (double)INFINITY;
        x[i] = w->norm[(size_t)column * w->rows + place];
    }
    return guard_window_limit(rule, x);
}
