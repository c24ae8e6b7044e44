/* Adoption: going on with the models that a killed predecessor left with the keeper.
 *
 * Before anybody can connect, and so that being killed in the middle does no harm: what kernels
 * left half done is put in order, the core begins where the ledger is, what workers map is made
 * anew and filled, and what the predecessor had begun is queued again.
 *
 * Failure modes: a model whose initial values were never complete is dropped (nobody has seen it),
 * before any other needs memory. Memory that is missing is waited for (spare.h).
 * One that cannot be adopted (ledger of another version, words that contradict each other, a
 * segment missing) is refused: listed by name with the reason, its bytes stay with the keeper, the
 * daemon serves the rest.
 */
#ifndef SHD_ADOPT_H
#define SHD_ADOPT_H

#include <stdint.h>

#include "proto/base/status.h"

struct daemon;

#define ADOPT_REFUSED_MAX 64u
#define ADOPT_NAME_BYTES  128u /* LEDGER_NAME_BYTES */

struct adopt_refused {
    char name[ADOPT_NAME_BYTES]; /* of the model; of its instance when there is no ledger */
    struct shd_err why;
};

struct adopt {
    uint32_t models; /* adopted */
    double at_s;     /* when: seconds since 1970; 0: nothing was left to adopt */
    double ms;       /* how long it took */
    struct adopt_refused refused[ADOPT_REFUSED_MAX];
    uint32_t refused_count;
};

/* Adopt all that d's keeper has. d has its compute threads and no sockets yet. */
void adopt_all(struct daemon *d);

/* SHD_OK when no model of this name was refused; else why it was. */
int adopt_check_name(const struct daemon *d, const char *name, struct shd_err *e);

#endif
