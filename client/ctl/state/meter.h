/* How far a save or a restore is: bytes done of all, and the rate, on stderr.
 *
 * The daemons do the work; what each has done is in its status. A thread of its own asks their
 * status sockets, so that who waits for the work needs to know nothing of it. On a terminal one
 * line is drawn again and again, and is gone at the end; elsewhere (or in JSON) there is a line
 * after 2 s, and then one every 10 s: what is quick says nothing. Daemons that do not answer count
 * as they last did.
 */
#ifndef SHD_CTL_METER_H
#define SHD_CTL_METER_H

#include <stdbool.h>

#include "client/ctl/base/status_doc.h"

enum meter_of { METER_CHECKPOINT, METER_RESTORE };

struct meter_ask {
    enum meter_of of;
    const char *address; /* as for shd_connect(); NULL: as where_find() says */
    bool json;
};

struct meter;

/* NULL where there is nothing to ask, or no thread: the work goes on without. */
struct meter *meter_begin(const struct meter_ask *ask);
void meter_end(struct meter *p); /* NULL is a no-op */

/* -- Counting, for who tests it -----------------------------------------------------------------
 */

struct meter_part { /* of one daemon */
    double done, all;
};

struct meter_count {
    double begun_s; /* when something was first seen to be done; NAN: not yet */
    double first;   /* what was done then */
    double done, all;
};

/* A daemon's document, NULL where it does not answer. What it does no more it has done. */
void meter_take(struct meter_part *part, enum meter_of of, const struct doc *doc);

/* Parts[count] together at now_s. False: nothing is known yet. */
bool meter_sum(struct meter_count *c, const struct meter_part *parts, uint32_t count, double now_s);

/* "checkpoint: 1.2 GiB of 4.8 GiB (25 %), 812 MiB/s, 4 s left", or the same in JSON. */
void meter_text(const struct meter_count *c, const struct meter_ask *ask, double now_s, char *text,
                size_t bytes);

#endif
