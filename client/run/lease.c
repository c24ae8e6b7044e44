/* See lease.h. Owner 0 hands groups out until all are in there; then the others are asked in turn,
 * replicas as well, which normally have all of them too. A group that one still lacks (something
 * died between its returns) is computed and returned to all once more: what they have already is
 * dropped. */
#include "client/run/lease.h"

#include <inttypes.h>
#include <string.h>

#include "client/paths/order.h"
#include "client/paths/path.h"
#include "client/run/drop.h"
#include "client/run/move.h"
#include "client/run/policy.h"
#include "client/run/reset.h"
#include "client/run/stream.h"
#include "client/session/session.h"
#include "proto/base/clock.h"

static void begin_step(struct shd_model *m)
{
    if (m->leases.step == m->step && m->leases.began)
        return;
    m->leases = (struct leases){ .step = m->step, .began = true, .leaving = m->leases.leaving };
}

static int ask(struct shd_model *m, struct wire_leased *ret_leased, struct shd_err *e)
{
    const uint64_t start_ns = clock_now_ns();
    const bool now = model_leased_any(m);
    const int r = m->session->control->lease(m, m->leases.owner, now, ret_leased, e);
    m->session->wait_ns += clock_now_ns() - start_ns;
    return r;
}

/* Where the owner has nothing more for who holds something: what was returned here may still wait
 * for its stream. */
static int ask_again(struct shd_model *m, struct wire_leased *ret_leased, struct shd_err *e)
{
    int r = ask(m, ret_leased, e);
    while (r == SHD_OK && ret_leased->what == WIRE_LEASED_NOTHING &&
           order_returns(m, ORDER_ALL) > 0) {
        r = stream_returned(m, e);
        if (r == SHD_OK)
            r = ask(m, ret_leased, e);
    }
    return r;
}

/* An owner that was started again does not know what its predecessor handed out: what is leased
 * here already is no news. */
static bool is_news(const struct shd_model *m, const struct wire_leased *leased)
{
    return leased->what != WIRE_LEASED_GROUP || !model_leased(m, leased->group);
}

int lease_take(struct shd_model *m, struct wire_leased *ret_leased, struct shd_err *e)
{
    if (m->policy.plan.shares_sums)
        return err_set(e, SHD_ENOTSUP,
                       "model '%s' has sums of this host's workers: a leased group is computed by "
                       "one worker; take fixed shares, or sums of each worker",
                       m->spec->name);
    const int looked = reset_look(m, e);
    if (looked != SHD_OK)
        return looked;
    begin_step(m);
    struct leases *l = &m->leases;
    for (;;) {
        const uint64_t attempt = m->in.attempt;
        const uint32_t asked = l->owner;
        int r = ask_again(m, ret_leased, e);
        if (r == SHD_ERESET && m->in.attempt == attempt &&
            m->session->control->attempt(m) != attempt) {
            r = reset_look(m, e);
            if (r == SHD_OK)
                continue; /* nothing is lost: ask for work of this attempt */
        }
        if (r != SHD_OK)
            return r;
        if (ret_leased->what == WIRE_LEASED_ALL_IN && l->owner < asked) {
            continue; /* an owner was lost meanwhile: its replica is asked from the beginning */
        } else if (ret_leased->what == WIRE_LEASED_ALL_IN &&
                   l->owner + 1 < session_members(m->session)) {
            l->owner++;
        } else if (is_news(m, ret_leased)) {
            break;
        }
    }
    if (ret_leased->what == WIRE_LEASED_GROUP) {
        l->groups[ret_leased->group / 8] |= (uint8_t)(1u << ret_leased->group % 8);
        m->reports[ret_leased->group * m->spec->accumulate].given = 0; /* all of it once more */
    }
    return SHD_OK;
}

int lease_drop(struct shd_model *m, uint32_t group, struct shd_err *e)
{
    if (!model_leased(m, group))
        return SHD_OK;
    m->leases.groups[group / 8] &= (uint8_t) ~(1u << group % 8);
    return m->session->control->unlease(m, group, e);
}

/* -- Public ------------------------------------------------------------------------------------ */

int shd_lease(shd_model *m, enum shd_lease_what *ret_what, uint32_t *ret_micro, struct shd_err *e)
{
    static const enum shd_lease_what shown[] = {
        [WIRE_LEASED_GROUP] = SHD_LEASE_MICRO,
        [WIRE_LEASED_ALL_IN] = SHD_LEASE_ALL_IN,
        [WIRE_LEASED_OVER] = SHD_LEASE_OVER,
        [WIRE_LEASED_NOTHING] = SHD_LEASE_NOTHING,
    };
    struct wire_leased leased = { .what = WIRE_LEASED_ALL_IN };
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = policy_start(m, e);
    if (r == SHD_OK)
        r = m->session->control->poll(m, e);
    if (r == SHD_OK)
        r = err_copy(&m->fault, e);
    if (r == SHD_OK && !m->sealed) /* its commit broke off */
        r = lease_take(m, &leased, e);
    if (r != SHD_OK)
        return move_along(m, r, e);
    *ret_what = shown[leased.what];
    if (leased.what == WIRE_LEASED_GROUP)
        *ret_micro = leased.group * m->spec->accumulate;
    return SHD_OK;
}

int shd_unlease(shd_model *m, uint32_t micro, struct shd_err *e)
{
    const int r = session_check(m->session, e);
    if (r != SHD_OK)
        return r;
    if (micro >= model_micro_batches(m))
        return err_set(e, SHD_ERANGE, "micro-batch %" PRIu32 " of a step with %" PRIu32, micro,
                       model_micro_batches(m));
    drop_grads(m, micro / m->spec->accumulate);
    return lease_drop(m, micro / m->spec->accumulate, e);
}

bool shd_is_in(const shd_model *m, uint32_t micro)
{
    const uint32_t group = micro / m->spec->accumulate;
    return micro < model_micro_batches(m) && m->in.step == m->step &&
           (m->in.groups[group / 8] >> group % 8 & 1) != 0;
}
