/* See session.h. */
#include "client/session/session.h"

#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "client/plan/plan_cost.h"
#include "client/session/link.h"
#include "kernels/cpu/cpu.h"
#include "kernels/kern.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

uint32_t session_members(const struct shd_session *s)
{
    return s->hub != NULL ? s->hub->link_count : 1;
}

int session_check(const struct shd_session *s, struct shd_err *e)
{
    if (!s->left)
        return SHD_OK;
    return err_set(e, SHD_EINVAL,
                   "session of process %d, and this is a child of it, process %d: a child connects "
                   "for itself",
                   (int)s->pid, (int)getpid());
}

int session_check_closed(const struct shd_session *s, const char *name, struct shd_err *e)
{
    for (const struct shd_model *m = s->models; m != NULL; m = m->next)
        if (strcmp(m->spec->name, name) == 0)
            return err_set(e, SHD_EBUSY, "model '%s' is open in this session: close it first",
                           name);
    return SHD_OK;
}

struct shd_model *session_first(const struct shd_session *s)
{
    return s->opening != NULL ? s->opening : s->models;
}

struct shd_model *session_next(const struct shd_session *s, const struct shd_model *m)
{
    return m == s->opening ? s->models : m->next;
}

int session_kern(struct shd_session *s, uint32_t threads, struct shd_err *e)
{
    const struct kern_config config = { .threads = threads };
    return s->kern != NULL ? SHD_OK : kern_cpu_new(&config, &s->kern, e);
}

struct kern *session_gpu(const struct shd_session *s)
{
    return s->on_gpu ? s->kern : NULL;
}

void session_live(struct shd_session *s, uint64_t bytes, bool more)
{
    if (more) {
        s->live_bytes += bytes;
        if (s->live_bytes > s->live_bytes_max)
            s->live_bytes_max = s->live_bytes;
    } else {
        CHECK(s->live_bytes >= bytes);
        s->live_bytes -= bytes;
    }
}

int sized_take(void *to, size_t bytes, const void *from, size_t least, const char *name,
               struct shd_err *e)
{
    size_t given;
    memcpy(&given, from, sizeof given);
    if (given < least || given > bytes)
        return err_set(e, SHD_EINVAL, "%s.size is %zu, this library (%s) has %zu", name, given,
                       SHD_VERSION, bytes);
    memcpy(to, from, given);
    return SHD_OK;
}

int sized_check(const void *to, size_t bytes, const char *name, struct shd_err *e)
{
    size_t given;
    if (to == NULL)
        return SHD_OK;
    memcpy(&given, to, sizeof given);
    if (given < sizeof given || given > bytes)
        return err_set(e, SHD_EINVAL, "%s.size is %zu, this library (%s) has %zu", name, given,
                       SHD_VERSION, bytes);
    return SHD_OK;
}

void sized_give(void *to, const void *from)
{
    size_t given;
    if (to == NULL)
        return;
    memcpy(&given, to, sizeof given);
    memcpy((uint8_t *)to + sizeof given, (const uint8_t *)from + sizeof given,
           given - sizeof given);
}

/* -- Models ------------------------------------------------------------------------------------ */

int model_set_spec(struct shd_model *m, struct spec *spec, struct shd_err *e)
{
    CHECK(m->spec == NULL);
    if (m->session->on_gpu && (spec->codec != CODEC_NONE || spec->grad_codec != CODEC_NONE))
        return err_set(
            e, SHD_ENOTSUP,
            "model '%s' has codes for what travels (codec: %s, grad_codec: %s), which are "
            "of host memory alone, and this worker's arrays are on cuda:%" PRIu32,
            spec->name, codec_name(spec->codec), codec_name(spec->grad_codec), m->session->ordinal);
    m->holds = sys_calloc(spec->unit_count, sizeof *m->holds);
    m->reports = sys_calloc(spec->micro_batches, sizeof *m->reports);
    if (m->holds == NULL || m->reports == NULL)
        return err_set(e, SHD_ENOMEM,
                       "no memory for %" PRIu32 " units and %" PRIu32 " micro-batches",
                       spec->unit_count, spec->micro_batches);
    for (uint32_t u = 0; u < spec->unit_count; u++)
        m->holds[u] = (struct unit_hold){ .bytes = plan_unit_param_bytes(spec, u),
                                          .fetched_bytes = plan_unit_fetched_bytes(spec, u) };
    m->spec = spec;
    m->policy.grad_dtype = m->policy.plan.grad_dtype = spec->grad_dtype;
    return SHD_OK;
}

void model_decided(struct shd_model *m, const struct decision *decision)
{
    m->decided = true;
    m->decision = *decision;
}

void model_step_over(struct shd_model *m)
{
    m->sealed = m->in.handed = false;
    memset(m->reports, 0, m->spec->micro_batches * sizeof *m->reports);
}

struct shd_tensor model_tensor(const struct shd_model *m, uint32_t index)
{
    const struct spec_tensor *t = &m->spec->tensors[index];
    return (struct shd_tensor){ .size = sizeof(struct shd_tensor),
                                .name = t->name,
                                .unit = t->unit,
                                .offset_elems = t->offset_elems,
                                .elems = t->elems,
                                .statistics = t->statistics };
}

uint32_t model_micro_batches(const struct shd_model *m)
{
    return m->decided && m->decision.micro_batches > 0 ? m->decision.micro_batches
                                                       : spec_micro_batches(m->spec, m->step);
}

uint32_t model_returns(const struct shd_model *m)
{
    return model_micro_batches(m) / m->spec->accumulate;
}

uint32_t model_returned_units(const struct shd_model *m)
{
    return m->spec->trained_units;
}

bool model_leased(const struct shd_model *m, uint32_t group)
{
    const struct leases *l = &m->leases;
    return l->began && l->step == m->step && (l->groups[group / 8] >> group % 8 & 1) != 0 &&
           m->reports[group * m->spec->accumulate].given < model_returned_units(m);
}

bool model_leased_any(const struct shd_model *m)
{
    for (uint32_t group = 0; group < spec_returns(m->spec); group++)
        if (model_leased(m, group))
            return true;
    return false;
}

struct report model_report(const struct shd_model *m, uint32_t group)
{
    const uint32_t a = m->spec->accumulate;
    struct report sum = m->reports[group * a];
    bool all = sum.count > 0;
    for (uint32_t micro = group * a + 1; micro < group * a + a; micro++) {
        const struct report *r = &m->reports[micro];
        all = all && r->count > 0;
        for (uint32_t i = 0; i < r->count; i++)
            sum.metrics[i] += r->metrics[i];
        sum.count = r->count > sum.count ? r->count : sum.count;
    }
    if (!all && sum.given + 1 < model_returned_units(m))
        sum.count = 0; /* more may come, and owners keep the first they get */
    return sum;
}

int model_broken(struct shd_model *m, const struct shd_err *why, struct shd_err *e)
{
    m->fault = *why;
    return err_copy(why, e);
}

int model_err_past(const struct shd_model *m, const struct link *link, uint32_t unit,
                   uint64_t version, struct shd_err *e)
{
    return link_err(link, SHD_ESTEP, e,
                    "has unit %" PRIu32 " '%s' at step %" PRIu64 ", this worker is at step %" PRIu64
                    ": that step is over",
                    unit, m->spec->units[unit].name, version, m->step);
}

int model_err_unpublished(const struct shd_model *m, const struct link *link, uint32_t unit,
                          struct shd_err *e)
{
    const char *why = link->hub->held_up;
    return link_err(link, SHD_ETIMEDOUT, e,
                    "did not publish unit %" PRIu32 " '%s' of step %" PRIu64 " within %" PRIu64
                    " ms%s%s",
                    unit, m->spec->units[unit].name, m->step, m->session->timeout_ns / NS_PER_MS,
                    why[0] != '\0' ? ": " : "", why);
}

struct grad_slot *model_find_slot(struct shd_model *m, enum slot_state state)
{
    for (uint32_t i = 0; i < m->slot_count; i++)
        if (m->slots[i].state == state)
            return &m->slots[i];
    return NULL;
}

void unit_zero_gaps(const struct spec *spec, uint32_t unit, float *values)
{
    const struct spec_unit *u = &spec->units[unit];
    uint64_t at = 0;
    for (uint32_t t = u->first_tensor; t < u->first_tensor + u->tensor_count; t++) {
        const struct spec_tensor *tensor = &spec->tensors[t];
        memset(values + at, 0, (tensor->offset_elems - at) * sizeof *values);
        at = tensor->offset_elems + tensor->elems;
    }
    memset(values + at, 0, (u->elems - at) * sizeof *values);
}

int starts_fill(const struct starts *starts, const struct spec *spec, uint32_t unit, float *values,
                struct shd_err *e)
{
    const int r = starts->fill(starts->ctx, unit, values);
    if (r != 0)
        return err_set(e, SHD_EINTERNAL, "fill of unit %" PRIu32 " '%s' gave up with %d", unit,
                       spec->units[unit].name, r);
    unit_zero_gaps(spec, unit, values);
    const struct spec_unit *u = &spec->units[unit];
    const struct spec_tensor *last = &spec->tensors[u->first_tensor + u->tensor_count - 1];
    if (last->statistics)
        memset(values + last->offset_elems, 0, last->elems * sizeof *values);
    return SHD_OK;
}
