/* Draining: the device goes out of service between two steps. While a session drains it, new
 * sessions are refused and no further step begins: what would begin one (a gradient or a lease of a
 * step of which nothing is in) is held, not refused, so that nothing is lost when the drain is
 * taken back, by the session or by its end. The step under way goes on to its end.
 *
 * Owners decide one by one, so they may hold at different steps. Who drains them all asks those
 * that hold at the lower one again: what they hold is let through, and they decide anew.
 *
 * Loop thread.
 */
#ifndef SHD_DRAIN_H
#define SHD_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/base/status.h"

struct daemon;
struct op;
struct session;

/* op is for `step` of op->model, which must not begin: true, and it is kept until it may. */
bool drain_holds(struct op *op, uint64_t step);

/* op's session drains the device: SHD_OK or, once we are between two steps, op is finished. It
 * takes that back. */
int drain_on(struct op *op);
int drain_off(struct op *op);

/* Why a new session is refused: SHD_EBUSY. */
int drain_refuse(const struct daemon *d, struct shd_err *e);

/* A model's phase has changed: the one who waits may be answered. */
void drain_look(struct daemon *d);

/* s has ended: so does its drain; and where nobody is left to finish a step, it is not waited for.
 */
void drain_forget_session(const struct session *s);

/* The daemon stops. If it was drained, tell all sessions that it does not come back. */
void drain_stop(struct daemon *d);

#endif
