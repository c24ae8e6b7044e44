/* A step of which the owners hand out the work. See shd_run_step_elastic().
 *
 * Happy path: owner 0 leases groups of micro-batches one by one until all are in there; then the
 * others are asked in turn, which normally have all of them too; then the step is committed. A
 * group that an owner still lacks (something died between its returns) is computed and returned to
 * all once more: what they have already is dropped.
 *
 * Overtaken: another worker may return and commit while this one computes, because its lease was
 * taken for lost. Then the owners say that the step is over, or a unit is found a step ahead: the
 * micro-batch is dropped, for it counted already, and the commit tells how the step ended. */
#include "client/paths/path.h"
#include "client/run/policy.h"
#include "client/run/run_step.h"
#include "client/session/hub.h"
#include "proto/base/clock.h"

static int run_group(struct run *run, uint32_t group, struct shd_err *e)
{
    const uint32_t a = run->m->spec->accumulate;
    uint32_t *micros = run->exec->micros;
    for (uint32_t i = 0; i < a; i++)
        micros[i] = group * a + i;
    return run_step_micros(run, micros, a, e);
}

static int lease(struct run *run, uint32_t owner, struct wire_leased *ret_leased, struct shd_err *e)
{
    struct shd_model *m = run->m;
    const uint64_t start_ns = clock_now_ns();
    const int r = m->session->control->lease(m, owner, ret_leased, e);
    m->session->wait_ns += clock_now_ns() - start_ns;
    return r;
}

void shd_leave(shd_model *m)
{
    m->leaving = true;
}

/* Until nothing is left to be done, or this worker leaves. SHD_ESTEP: overtaken. */
static int run_leases(struct run *run, struct shd_err *e)
{
    const uint32_t owners = shd_owners(run->m->session);
    struct wire_leased leased = { .step = 0 };
    for (uint32_t owner = 0; owner < owners && !run->m->leaving;) {
        int r = lease(run, owner, &leased, e);
        if (r == SHD_OK && leased.what == WIRE_LEASED_GROUP)
            r = run_group(run, leased.group, e);
        if (r != SHD_OK)
            return r;
        if (leased.what == WIRE_LEASED_OVER)
            return SHD_ESTEP;
        if (leased.what == WIRE_LEASED_ALL_IN)
            owner++;
    }
    return SHD_OK;
}

static int run_elastic(struct run *run, struct shd_err *e)
{
    run->m->leaving = false;
    const int r = run->m->sealed ? SHD_OK : run_leases(run, e);
    return run_step_commit(run, r, run->m->leaving, e);
}

int shd_run_step_elastic(shd_model *m, const struct shd_compute *compute,
                         const struct shd_update *update, struct shd_result *ret_result,
                         struct shd_err *e)
{
    struct run run = { .m = m };
    int r = exec_begin(m, compute, update, &run, e);
    if (r == SHD_OK)
        r = policy_start(m, e);
    if (r == SHD_OK)
        r = run_elastic(&run, e);
    if (r == SHD_OK && ret_result != NULL)
        *ret_result = run.result;
    return r;
}
