/* Filling a host that was lost, and came back with empty daemons: every model of the others, while
 * it is trained. Where each slice has a replica (client/paths/replica.h) the host's daemons are the
 * replicas of those that have its slices alone, from then on.
 *
 * Happy path, for each model: the others keep a snapshot of a step S in memory, and write a
 * checkpoint of exactly S. The host's daemons restore it, each its slice, and keep a snapshot of S
 * as well. Then a view is claimed with the host in, behind the others and being filled
 * (proto/files/arbiter_view.h), and the models go back to S, at all members: a rewind as any other,
 * with which workers go along; steps after S are computed again. Whoever goes along has read the
 * view and joined the host (client/paths/rejoin.h). A last view says that the host is filled.
 *
 *     others   … S ──────────────────▶ S+9 ─┐   ┌─ S ─▶
 *     host           restore S, snapshot ───┴ in ┴─ S ─▶
 *
 * Failure: what fails before the host is in leaves things as they were, and what is restored there
 * is dropped by the next one who fills it. After that the host is put out again. Who dies in it
 * leaves a host that is being filled; whoever fills it next puts it out first, as do sessions that
 * wait for the rewind in vain.
 *
 * Bits are those of a training without a loss: they are of the steps, and those are computed anew.
 * A guard's windows, which no checkpoint holds, begin anew at the host.
 */
#ifndef SHD_CHECKPOINT_REFILL_H
#define SHD_CHECKPOINT_REFILL_H

#include "proto/base/status.h"

struct refill {
    const char *address; /* of all daemons, with pairs */
    const char *host;    /* its name in replicas.json, beside their sockets */
    const char *dir;     /* that all hosts have, to write to and to read: what is made there goes */
    void (*say)(void *ctx, const char *line); /* what it does; may be NULL */
    void *ctx;
};

/* Errors: SHD_ENOENT no such host, or no replicas there; SHD_EEXIST it is in; SHD_EBUSY somebody
 * trains what was left there; SHD_ESTEP another one rewinds a model, or the host was put out
 * meanwhile: do it again; those of the arbiter, of a checkpoint, a restore and a rewind. */
int refill_host(const struct refill *r, struct shd_err *e);

#endif
