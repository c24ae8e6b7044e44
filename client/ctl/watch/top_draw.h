/* The picture of `shardctl top`, drawn onto a screen of any size. Pure, but for the time of day. */
#ifndef SHD_CTL_TOP_DRAW_H
#define SHD_CTL_TOP_DRAW_H

#include <stdbool.h>

#include "client/ctl/watch/status_join.h"
#include "client/ctl/watch/status_node.h"
#include "client/ctl/watch/top_screen.h"

enum top_list { TOP_DAEMONS, TOP_WORKERS, TOP_LISTS };

struct top_picture {
    const struct node *node; /* borrowed */
    const struct join *join; /* borrowed, sorted */
    enum join_sort sort;
    enum top_list focus;       /* the list that keys scroll */
    unsigned first[TOP_LISTS]; /* row on top; draw brings it back into the list */
    unsigned page[TOP_LISTS];  /* set by draw: rows shown */
    bool paused, help;
    bool utf8;           /* bars of blocks, else of ASCII */
    const char *trouble; /* borrowed, cleaned: why the directory cannot be read; NULL */
    uint64_t now_ns;
};

void top_draw(struct top_picture *p, struct screen *s);

#endif
