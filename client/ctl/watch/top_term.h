/* The terminal of `shardctl top`: ncurses, put back as it was on every way out that can be caught,
 * fatal signals among them. */
#ifndef SHD_CTL_TOP_TERM_H
#define SHD_CTL_TOP_TERM_H

#include <stdbool.h>

#include "client/ctl/watch/top_screen.h"
#include "proto/base/status.h"

enum term_key {
    KEY_IS_NONE,
    KEY_IS_QUIT,
    KEY_IS_UP,
    KEY_IS_DOWN,
    KEY_IS_PAGE_UP,
    KEY_IS_PAGE_DOWN,
    KEY_IS_FIRST,
    KEY_IS_LAST,
    KEY_IS_TAB,
    KEY_IS_SORT,
    KEY_IS_PAUSE,
    KEY_IS_HELP,
    KEY_IS_REDRAW, /* none: the size has changed */
    KEY_IS_OTHER,
};

/* Take the terminal. One that cannot place its cursor (TERM=dumb) is taken as it is: frames follow
 * each other, and keys work after Enter. Errors: SHD_ENOTSUP its kind is unknown. */
int term_open(struct shd_err *e);

/* Put it back. A no-op when it is. */
void term_close(void);

bool term_is_full_screen(void);
void term_size(unsigned *ret_rows, unsigned *ret_cols);
void term_show(const struct screen *s);

/* The next key, without waiting. */
enum term_key term_key(void);

/* The signal that asked us to end; 0: none. term_close() first, then pass it on. */
int term_signal(void);

#endif
