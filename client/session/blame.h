/* Who a long wait of this session is for. Every BLAME_NS of a wait, and once before a limit ends
 * it, all daemons are asked for their status, and what they say of waits is put together: a line
 * for whoever reads the program's log, and words for the error of a wait that ends.
 *
 * One that does not answer within a second is the culprit itself, as is one that is attached to
 * anew and stops in the middle of that. Nothing waits here: the wait goes on meanwhile, and looks
 * in. One thread.
 */
#ifndef SHD_BLAME_H
#define SHD_BLAME_H

#include "client/session/hub.h"

#define BLAME_NS (10 * UINT64_C(1000000000))

struct blame;

struct blame_sink {                           /* where lines go */
    void (*say)(void *ctx, const char *line); /* NULL: stderr */
    void *ctx;
};

/* From here on the waits of hub are looked into. Errors: SHD_ENOMEM. */
int blame_new(struct hub *hub, struct blame_sink sink, struct blame **ret_blame, struct shd_err *e);

/* Where its lines go. */
struct blame_sink blame_sink_of(const struct blame *b);

/* A line for whoever reads the program's log; NULL: stderr. */
void blame_say(const struct blame *b, const char *line);

/* The line of a wait that is for nobody of the daemons'. */
void blame_waits(const struct blame *b, uint64_t waited_ns, const char *line);

/* Lines at another distance than BLAME_NS: for tests. */
void blame_every(struct blame *b, uint64_t every_ns);

/* After hub_free(). NULL is a no-op. */
void blame_free(struct blame *b);

#endif
