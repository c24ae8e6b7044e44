/* Policies: check, take over, and what follows from them. See client/shd.h and policy.h. */
#include "client/run/policy.h"

#include <inttypes.h>
#include <string.h>

#include "client/paths/copy.h"
#include "client/paths/nccl.h"
#include "client/paths/nccl_join.h"
#include "client/paths/path.h"
#include "client/paths/whole.h"
#include "client/plan/plan_cost.h"
#include "client/plan/plan_own.h"
#include "client/run/exec.h"
#include "client/run/grads.h"
#include "client/run/hostsum.h"
#include "client/session/session.h"
#include "proto/base/check.h"

enum shd_path shd_path(const shd_model *m)
{
    return m->reader->kind;
}

/* -- Checking ---------------------------------------------------------------------------------- */

static int check_path(const struct shd_model *m, const struct shd_policy *p, struct shd_err *e)
{
    if ((unsigned)p->path > SHD_PATH_NCCL)
        return err_set(e, SHD_EINVAL, "path is %d: 0 auto, 1 map, 2 copy, 3 nccl", (int)p->path);
    if (p->path == SHD_PATH_NCCL) {
        const int r = nccl_check(m, e);
        if (r != SHD_OK)
            return r;
    }
    if (p->path == SHD_PATH_COPY && m->map == NULL)
        return err_set(e, SHD_ENOTSUP,
                       "path copy: at \"local:\" the owners are in this process, there is nothing "
                       "to copy from; take auto or map");
    if (p->path == SHD_PATH_MAP && m->map != NULL) {
        const int r = whole_check_map(m, e);
        if (r != SHD_OK)
            return r;
    }
    return SHD_OK;
}

static int check_unused(const struct shd_model *m, struct shd_err *e)
{
    if (m->started)
        return err_set(e, SHD_EINVAL,
                       "model '%s' has begun a step: its policy is set before the first gradient",
                       m->spec->name);
    for (uint32_t u = 0; u < m->spec->unit_count; u++)
        if (m->holds[u].fetched)
            return err_set(e, SHD_EINVAL, "unit %" PRIu32 " '%s' is held: release it first", u,
                           m->spec->units[u].name);
    return SHD_OK;
}

/* What gradients are rounded to is a property of the model: else the sums would depend on which
 * worker computed what. */
static int check_grad_dtype(const struct shd_model *m, const struct shd_policy *p,
                            struct shd_err *e)
{
    if (p->grad_dtype == 0 || p->grad_dtype == m->spec->grad_dtype || !dtype_valid(p->grad_dtype))
        return SHD_OK; /* one that is none is refused with the plan */
    return err_set(e, SHD_ESPEC,
                   "grad_dtype is '%s', model '%s' has '%s': leave it 0, or give the spec "
                   "\"grad_dtype\": \"%s\"",
                   dtype_name(p->grad_dtype), m->spec->name, dtype_name(m->spec->grad_dtype),
                   dtype_name(p->grad_dtype));
}

static int check_sums(const struct shd_model *m, const struct shd_policy *p, struct shd_err *e)
{
    if ((unsigned)p->sums > SHD_SUMS_HOST)
        return err_set(e, SHD_EINVAL, "sums is %d: 0 own, 1 host", (int)p->sums);
    if (p->sums == SHD_SUMS_OWN)
        return SHD_OK;
    if (m->spec->accumulate <= 1)
        return err_set(e, SHD_ESPEC,
                       "sums is host, and model '%s' has accumulate 1: its owners sum every "
                       "micro-batch; give the spec \"accumulate\", the micro-batches of a group",
                       m->spec->name);
    if (m->spec->verify_every > 0)
        return err_set(e, SHD_ENOTSUP,
                       "sums is host, and model '%s' has verify_every %" PRIu64
                       ": what workers are compared by is a group that one has computed",
                       m->spec->name, m->spec->verify_every);
    if (m->session->on_gpu)
        return err_set(e, SHD_ENOTSUP,
                       "sums is host, and this worker's arrays are on cuda:%" PRIu32
                       ": workers have host memory in common alone",
                       m->session->ordinal);
    return SHD_OK;
}

static struct policy internal(const struct shd_model *m, const struct shd_policy *p)
{
    return (struct policy){
        .plan = { .strategy = (enum plan_strategy)p->strategy,
                  .forward_prefetch = p->forward_prefetch,
                  .backward_prefetch = (enum plan_backward_prefetch)p->backward_prefetch,
                  .max_live_units = p->max_live_units,
                  .max_live_bytes = p->max_live_bytes,
                  .grad_dtype = p->grad_dtype != 0 ? p->grad_dtype : m->spec->grad_dtype,
                  .shares_sums = p->sums == SHD_SUMS_HOST && m->map != NULL },
        .path = p->path,
        .grad_dtype = m->spec->grad_dtype,
        .fetch_delay_ns = m->policy.fetch_delay_ns,
        .set = true,
    };
}

/* -- Taking over ------------------------------------------------------------------------------- */

struct most { /* held at once */
    uint32_t units, grads;
};

static uint32_t larger(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* Of the plan of one group of micro-batches, for what a worker holds does not grow with their
 * number; and of a plan that was given, whatever part of it a step is. */
static int find_most(const struct shd_model *m, const struct policy *p, struct most *ret_most,
                     struct shd_err *e)
{
    struct plan plan;
    const int r = plan_build(m->spec, &p->plan, /* trace= */ NULL, m->spec->accumulate, &plan, e);
    if (r != SHD_OK)
        return r;
    const struct plan_cost *own = p->own != NULL ? &p->own->plan.cost : &plan.cost;
    *ret_most = (struct most){ larger(plan.cost.live_units_max, own->live_units_max),
                               larger(plan.cost.live_grads_max, own->live_grads_max) };
    plan_free(&plan);
    return SHD_OK;
}

/* The copy path is taken where it was asked for, or where the owners' memory cannot be mapped. */
static bool takes_copy(const struct shd_model *m, enum shd_path path)
{
    return path >= SHD_PATH_COPY || (m->map != NULL && whole_check_map(m, /* e= */ NULL) != SHD_OK);
}

static void use_reader(struct shd_model *m, const struct reader_ops *reader)
{
    m->reader = reader;
    activity_set_path(&m->activity, reader->shown);
}

static void use_copy(struct shd_model *m, struct copy_model *copy)
{
    copy_free(m->copy);
    m->copy = copy;
    use_reader(m, m->nccl != NULL ? &reader_nccl
                  : copy != NULL  ? &reader_copy
                                  : m->session->reader);
}

/* Make what the copy and the NCCL path need, in place of what there was. Units that are let go of
 * and still on their way come into the old path's slots, so they are waited for first. */
static int make_copy(struct shd_model *m, enum shd_path path, uint32_t slots, struct shd_err *e)
{
    struct nccl_model *before = m->nccl, *nccl = NULL;
    struct copy_model *copy = NULL;
    const bool by_nccl = path == SHD_PATH_NCCL || (path == SHD_PATH_AUTO && nccl_needed(m));
    int r = before != NULL ? nccl_settle(m, e) : SHD_OK;
    if (r == SHD_OK && by_nccl && before == NULL)
        r = nccl_new(m, &nccl, e);
    if (r != SHD_OK)
        return r;
    nccl_use(m, !by_nccl ? NULL : before != NULL ? before : nccl); /* for copy_new() */
    r = copy_new(m, slots, m->policy.fetch_delay_ns, &copy, e);
    if (r == SHD_OK) {
        use_copy(m, copy);
        nccl_free(by_nccl ? NULL : before);
    } else {
        nccl_use(m, before);
        nccl_free(nccl);
    }
    return r;
}

static void drop_copy(struct shd_model *m)
{
    nccl_free(nccl_use(m, NULL));
    use_copy(m, NULL);
}

void policy_opened(struct shd_model *m)
{
    if (m->map != NULL && whole_check_map(m, /* e= */ NULL) != SHD_OK)
        use_reader(m, &reader_copy);
}

int policy_reader(struct shd_model *m, struct shd_err *e)
{
    struct most most = { 0 };
    if (m->reader->kind == SHD_PATH_MAP || m->copy != NULL)
        return SHD_OK;
    const int r = find_most(m, &m->policy, &most, e);
    return r == SHD_OK ? make_copy(m, SHD_PATH_AUTO, most.units, e) : r;
}

/* *asked, which is the caller's still where this fails. */
static int take_over(struct shd_model *m, const struct policy *asked, struct shd_err *e)
{
    struct most most = { 0 };
    int r = find_most(m, asked, &most, e);
    if (r == SHD_OK && takes_copy(m, asked->path))
        r = make_copy(m, asked->path, most.units, e);
    else if (r == SHD_OK)
        drop_copy(m);
    if (r != SHD_OK)
        return r;
    if (m->exec != NULL)
        plan_free(&m->exec->plan); /* of a step that broke off before its first gradient */
    plan_own_free(m->policy.own);
    m->policy = *asked;
    return SHD_OK;
}

int shd_set_policy(shd_model *m, const struct shd_policy *policy, struct shd_err *e)
{
    struct shd_policy p = { 0 };
    int r = session_check(m->session, e);
    if (r == SHD_OK && policy == NULL)
        r = err_set(e, SHD_EINVAL, "no policy");
    if (r == SHD_OK)
        r = sized_take(&p, sizeof p, policy, offsetof(struct shd_policy, forward_prefetch),
                       "shd_policy", e);
    if (r == SHD_OK)
        r = check_path(m, &p, e);
    if (r == SHD_OK)
        r = check_grad_dtype(m, &p, e);
    if (r == SHD_OK)
        r = check_sums(m, &p, e);
    if (r == SHD_OK)
        r = check_unused(m, e);
    if (r != SHD_OK)
        return r;
    const struct policy asked = internal(m, &p);
    return take_over(m, &asked, e);
}

int shd_set_plan(shd_model *m, const char *plan_json, struct shd_err *e)
{
    struct plan_own *own = NULL;
    if (plan_json == NULL)
        return err_set(e, SHD_EINVAL, "no plan: shd_set_policy() has plans built");
    int r = session_check(m->session, e);
    if (r == SHD_OK)
        r = check_unused(m, e);
    if (r == SHD_OK)
        r = plan_own_new(m->spec, plan_json, strlen(plan_json), &own, e);
    if (r == SHD_OK) {
        struct policy asked = m->policy;
        asked.plan = plan_own_policy(own);
        asked.plan.grad_dtype = m->spec->grad_dtype;
        asked.own = own;
        asked.set = true;
        r = take_over(m, &asked, e);
    }
    if (r != SHD_OK)
        plan_own_free(own);
    return r;
}

/* -- What follows ------------------------------------------------------------------------------ */

/* Gradients are staged where they cannot be written where the owners read them. */
static bool needs_staging(const struct shd_model *m)
{
    return m->reader->kind != SHD_PATH_MAP || m->spec->accumulate > 1 ||
           m->policy.grad_dtype != SHD_F32 || m->spec->grad_codec != CODEC_NONE;
}

int policy_slots(const struct shd_model *m, uint32_t *ret_slots, struct shd_err *e)
{
    const bool staged = needs_staging(m);
    struct most most = { 0 };
    int r = SHD_OK;
    if (m->session->slots == 0 && !staged)
        r = find_most(m, &m->policy, &most, e);
    *ret_slots = m->session->slots > 0 ? m->session->slots
                                       : plan_slots_for(m->spec, staged, most.grads);
    return r;
}

/* A caller that asked for a number of slots and set no policy counts gradients by hand. When there
 * are too few it expects an error, not gradients that are staged. */
static int decide_staging(struct shd_model *m, bool *ret_staging, struct shd_err *e)
{
    struct most most = { 0 };
    uint32_t slots = m->slot_count;
    *ret_staging = needs_staging(m);
    int r = find_most(m, &m->policy, &most, e);
    if (r == SHD_OK && slots == 0)
        r = policy_slots(m, &slots, e);
    if (r == SHD_OK && most.grads > slots && (m->policy.set || m->session->slots == 0))
        *ret_staging = true;
    return r;
}

int policy_start(struct shd_model *m, struct shd_err *e)
{
    bool staging;
    if (m->started)
        return SHD_OK;
    int r = m->session->on_gpu ? policy_reader(m, e) : SHD_OK; /* which one it is */
    if (r == SHD_OK)
        r = decide_staging(m, &staging, e);
    if (r == SHD_OK && staging)
        r = session_kern(m->session, /* threads= */ 1, e);
    if (r == SHD_OK && staging)
        r = grads_new(m, &m->grads, e);
    if (r == SHD_OK && m->policy.plan.shares_sums)
        r = hostsum_join(m, &m->grads->hostsum, e);
    if (r != SHD_OK) {
        grads_free(m->grads);
        m->grads = NULL;
    }
    m->started = r == SHD_OK;
    return r;
}

void shd_bench_delay_fetches(shd_model *m, uint64_t delay_ns)
{
    m->policy.fetch_delay_ns = delay_ns;
}
