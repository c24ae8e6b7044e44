/* See plan_clock.h. */
#include "client/ctl/plan/plan_clock.h"

#include <inttypes.h>
#include <stdlib.h>

#include "client/ctl/base/say.h"
#include "client/ctl/plan/trace_read.h"
#include "client/plan/plan_cost.h"
#include "client/session/address.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define TRACE_S   60u
#define TIME_CELL 24u

/* -- Compute ----------------------------------------------------------------------------------- */

/* A forward is a third of a unit's time, and time goes by parameters: what a multiplication costs.
 */
static void share_out(const struct spec *spec, double compute_s, struct plan_clock *c)
{
    const double ns = compute_s * (double)NS_PER_S / (double)spec->elems;
    for (uint32_t u = 0; u < spec->unit_count; u++) {
        const uint64_t elems_of_unit = plan_unit_param_bytes(spec, u) / dtype_bytes(spec->publish);
        const double elems = (double)elems_of_unit;
        c->forward_ns[u] = elems * ns / 3;
        c->backward_ns[u] = elems * ns * 2 / 3;
    }
    c->compute_from = "given";
}

/* Workers say what they do to owner 0. */
static int ask_workers(const struct plan_ask *ask, const struct spec *spec, struct plan_clock *c,
                       struct shd_err *e)
{
    struct address address;
    char path[256];
    json_t *events = NULL;
    int r = address_parse(ask->address, &address, e);
    if (r != SHD_OK)
        return r;
    if (address.local || address.count == 0)
        r = err_set(e, SHD_ENOENT, "owners inside a process have no trace");
    else if (snprintf(path, sizeof path, "%s/%s.status", address.dir, address.devices[0]) >=
             (int)sizeof path)
        r = err_set(e, SHD_ERANGE, "the path of the daemons is too long");
    address_free(&address);
    if (r == SHD_OK)
        r = trace_read(path, TRACE_S, &events, e);
    if (r == SHD_OK)
        r = trace_compute(events, spec, c->forward_ns, c->backward_ns, e);
    json_decref(events);
    if (r == SHD_OK)
        c->compute_from = "trace";
    return r;
}

static int find_compute(const struct plan_ask *ask, const struct spec *spec, struct plan_clock *c)
{
    const bool open_model = ask->spec == NULL && ask->safetensors == NULL;
    c->forward_ns = sys_calloc(spec->unit_count, sizeof *c->forward_ns);
    c->backward_ns = sys_calloc(spec->unit_count, sizeof *c->backward_ns);
    if (c->forward_ns == NULL || c->backward_ns == NULL)
        return err_set(&c->why, SHD_ENOMEM, "no memory for %" PRIu32 " units", spec->unit_count);
    if (ask->compute_s > 0)
        share_out(spec, ask->compute_s, c);
    else if (open_model)
        return ask_workers(ask, spec, c, &c->why);
    else
        err_set(&c->why, SHD_ENOENT, "a file does not say it");
    return SHD_OK;
}

/* -- Opening ----------------------------------------------------------------------------------- */

static int find_rates(const struct plan_ask *ask, struct plan_clock *c, struct shd_err *e)
{
    char path[RATES_PATH_BYTES];
    int r = rates_path(ask->rates, path, &c->why);
    if (r == SHD_OK)
        r = rates_load(path, &c->rates, c->date, &c->why);
    c->has_rates = r == SHD_OK;
    if (r == SHD_OK)
        c->why = (struct shd_err){ 0 };
    else if (ask->rates != NULL)
        return err_copy(&c->why, e);
    else if (r != SHD_ENOENT)
        ctl_say("no seconds: %s", c->why.text);
    return SHD_OK;
}

int plan_clock_open(const struct plan_ask *ask, const struct spec *spec,
                    struct plan_clock *ret_clock, struct shd_err *e)
{
    struct plan_clock c = { .has_rates = false };
    const int r = find_rates(ask, &c, e);
    if (r == SHD_OK && c.has_rates)
        find_compute(ask, spec, &c);
    *ret_clock = c;
    return r;
}

void plan_clock_close(struct plan_clock *c)
{
    free(c->forward_ns);
    free(c->backward_ns);
    *c = (struct plan_clock){ .has_rates = false };
}

/* -- Time -------------------------------------------------------------------------------------- */

static uint32_t threads_of(const struct plan_ask *ask)
{
    const uint32_t share = sys_processors() / ask->daemons;
    return ask->threads > 0 ? ask->threads : share > 0 ? share : 1;
}

int plan_clock_time(const struct plan_clock *c, const struct spec *spec, const struct plan_ask *ask,
                    const struct plan_policy *policy, const struct plan *plan,
                    struct plan_time *ret_time, struct shd_err *e)
{
    const struct plan_shape shape = { .workers = ask->workers,
                                      .daemons = ask->daemons,
                                      .threads = threads_of(ask),
                                      .slots = ask->copies ? 2 : plan_slots(spec, policy, plan),
                                      .copies = ask->copies };
    const struct plan_compute compute = { c->forward_ns, c->backward_ns };
    CHECK(c->has_rates);
    return plan_time(spec, plan, &c->rates, &shape, c->compute_from != NULL ? &compute : NULL,
                     policy->grad_dtype, ret_time, e);
}

static const char *time_text(double ns, char buf[TIME_CELL])
{
    const double s = ns * 1e-9;
    if (s >= 1)
        snprintf(buf, TIME_CELL, "%.3g s", s);
    else if (s >= 1e-3)
        snprintf(buf, TIME_CELL, "%.3g ms", s * 1e3);
    else
        snprintf(buf, TIME_CELL, "%.3g us", s * 1e6);
    return buf;
}

void plan_clock_print(const struct plan_clock *c, const struct spec *spec,
                      const struct plan_ask *ask, const struct plan *plan, FILE *out)
{
    struct plan_time t;
    struct shd_err e;
    char step[TIME_CELL], compute[TIME_CELL], fetch[TIME_CELL], returned[TIME_CELL];
    char update[TIME_CELL], wait[TIME_CELL];
    if (!c->has_rates) {
        fprintf(out, "\n  Seconds are shown once `shardctl plan --calibrate` has measured this "
                     "machine.\n");
        return;
    }
    if (plan_clock_time(c, spec, ask, &ask->policy, plan, &t, &e) != SHD_OK) {
        fprintf(out, "\n  No seconds: %s.\n", e.text);
        return;
    }
    fprintf(out,
            "\n  A step takes %s, most of it %s: compute %s + fetch %s + return %s + update %s\n"
            "  + wait %s; by rates of %s, daemons of %" PRIu32 " thread%s, path %s.\n",
            time_text(t.step_ns, step), plan_time_bound(&t), time_text(t.compute_ns, compute),
            time_text(t.fetch_ns, fetch), time_text(t.return_ns, returned),
            time_text(t.update_ns, update), time_text(t.wait_ns, wait), c->date, threads_of(ask),
            threads_of(ask) == 1 ? "" : "s", ask->copies ? "copy" : "map");
    if (c->compute_from == NULL)
        fprintf(out,
                "  Compute is not counted, %s: give --compute SECONDS, or ask while the "
                "model trains.\n",
                c->why.text);
}

json_t *plan_clock_json(const struct plan_clock *c, const struct spec *spec,
                        const struct plan_ask *ask, const struct plan_policy *policy,
                        const struct plan *plan)
{
    struct plan_time t;
    struct shd_err e;
    if (!c->has_rates || plan_clock_time(c, spec, ask, policy, plan, &t, &e) != SHD_OK)
        return NULL;
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:s, s:s, s:I, s:s, s:s}", "step_s",
                     t.step_ns * 1e-9, "compute_s", t.compute_ns * 1e-9, "fetch_s",
                     t.fetch_ns * 1e-9, "return_s", t.return_ns * 1e-9, "update_s",
                     t.update_ns * 1e-9, "wait_s", t.wait_ns * 1e-9, "bound", plan_time_bound(&t),
                     "compute_from", c->compute_from != NULL ? c->compute_from : "none",
                     "threads_per_daemon", (json_int_t)threads_of(ask), "path",
                     ask->copies ? "copy" : "map", "rates_date", c->date);
}
