/* See trace_json.h. */
#include "daemon/view/trace_json.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <uv.h>

#include "daemon/model/metrics.h"
#include "daemon/view/snapshot.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define LANE_LOOP   1
#define LANE_KERNEL 2
#define LANE_STEP   3 /* and one more for each further model */
#define LANE_WORKER 1

struct returned {                     /* an entry of the table of what workers say they returned */
    const struct activity_span *span; /* NULL: empty */
    const struct view_session *session;
};

struct writer {
    FILE *out;
    const struct view_snapshot *s;
    uint64_t since_ns;
    int pid;
    bool any;                 /* an event was written: a comma is due */
    struct returned *returns; /* owned, [return_mask + 1]: what workers say they returned */
    uint64_t return_mask;
};

/* -- Pieces -------------------------------------------------------------------------------------
 */

static void write_string(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\')
            fputc('\\', out);
        fputc(*text >= ' ' && *text <= '~' ? *text : '?', out);
    }
    fputc('"', out);
}

static void begin_event(struct writer *w, const char *name)
{
    fputs(w->any ? ",\n{\"name\":" : "\n{\"name\":", w->out);
    write_string(w->out, name);
    w->any = true;
}

struct place {
    int pid, lane;
    uint64_t begin_ns, duration_ns;
};

static void write_place(const struct writer *w, struct place p)
{
    fprintf(w->out, ",\"pid\":%d,\"tid\":%d,\"ts\":%.3f", p.pid, p.lane,
            (double)p.begin_ns * US_PER_NS);
    if (p.duration_ns > 0)
        fprintf(w->out, ",\"ph\":\"X\",\"dur\":%.3f", (double)p.duration_ns * US_PER_NS);
    else
        fputs(",\"ph\":\"i\",\"s\":\"t\"", w->out);
}

static void write_name(struct writer *w, const char *what, int pid, int lane, const char *name)
{
    begin_event(w, what);
    fprintf(w->out, ",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"ts\":0,\"args\":{\"name\":", pid, lane);
    write_string(w->out, name);
    fputs("}}", w->out);
}

static void write_unit(const struct writer *w, const struct spec *spec, uint32_t unit)
{
    if (unit >= spec->unit_count)
        return;
    fputs(",\"unit\":", w->out);
    write_string(w->out, spec->units[unit].name);
}

struct flow {
    const char *what;
    const struct trace_event *event;
    struct place from, to;
};

/* Both ends of a flow are written at once, so that none is ever alone. Each is at the beginning of
 * its event. */
static void write_flow(struct writer *w, struct flow f)
{
    const struct place ends[] = { f.from, f.to };
    for (int i = 0; i < 2; i++) {
        begin_event(w, f.what);
        fprintf(w->out,
                ",\"cat\":\"flow\",\"id\":\"%s.%d.%" PRIu32 ".%" PRIu64 ".%" PRIu32 ".%" PRIu32
                "\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,%s}",
                f.what, w->pid, f.event->model, f.event->step, f.event->group, f.event->unit,
                ends[i].pid, ends[i].lane, (double)ends[i].begin_ns * US_PER_NS,
                i == 0 ? "\"ph\":\"s\"" : "\"ph\":\"f\",\"bp\":\"e\"");
    }
}

/* -- What workers returned, by place ------------------------------------------------------------
 */

static uint64_t hash(uint32_t session, uint32_t unit, uint32_t group, uint64_t step)
{
    uint64_t h = (uint64_t)session << 48 ^ (uint64_t)unit << 32 ^ (uint64_t)group << 16 ^ step;
    h *= UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 29;
}

static uint32_t group_of(const struct writer *w, const struct returned *r)
{
    return r->span->micro / view_model_find(w->s, r->session->model)->spec->accumulate;
}

static int index_returns(struct writer *w, struct shd_err *e)
{
    uint64_t count = 0, places = 16;
    for (uint32_t i = 0; i < w->s->session_count; i++)
        count += w->s->sessions[i].span_count;
    while (places < 2 * count)
        places *= 2;
    w->returns = sys_calloc(places, sizeof *w->returns);
    if (w->returns == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a trace");
    w->return_mask = places - 1;
    for (uint32_t i = 0; i < w->s->session_count; i++) {
        const struct view_session *vs = &w->s->sessions[i];
        for (uint32_t k = 0; k < vs->span_count; k++) {
            const struct activity_span *span = &vs->spans[k];
            const struct returned r = { span, vs };
            if (span->what != ACTIVITY_RETURN || span->micro == ACTIVITY_NONE ||
                view_model_find(w->s, vs->model) == NULL)
                continue;
            uint64_t at = hash(vs->index, span->unit, group_of(w, &r), span->step);
            while (w->returns[at & w->return_mask].span != NULL)
                at++;
            w->returns[at & w->return_mask] = r;
        }
    }
    return SHD_OK;
}

static const struct returned *find_return(const struct writer *w, const struct trace_event *e)
{
    uint64_t at = hash(e->session, e->unit, e->group, e->step);
    for (;; at++) {
        const struct returned *r = &w->returns[at & w->return_mask];
        if (r->span == NULL)
            return NULL;
        if (r->session->index == e->session &&
            view_model_find(w->s, r->session->model) == view_model_at(w->s, e->model) &&
            r->span->unit == e->unit && group_of(w, r) == e->group && r->span->step == e->step &&
            r->span->begin_ns <= e->begin_ns)
            return r;
    }
}

/* -- The daemon ---------------------------------------------------------------------------------
 */

static const struct {
    const char *name;
    int lane;
} kinds[TRACE_WHATS] = {
    [TRACE_ARRIVED] = { "arrived", LANE_LOOP },
    [TRACE_CREDIT] = { "credit", LANE_LOOP },
    [TRACE_STALE] = { "stale", LANE_LOOP },
    [TRACE_SUM] = { "sum", LANE_KERNEL },
    [TRACE_SUMSQ] = { "sum of squares", LANE_KERNEL },
    [TRACE_APPLY] = { "update", LANE_KERNEL },
    [TRACE_PUBLISH] = { "publish", LANE_LOOP },
    [TRACE_COLLECT] = { "collect", LANE_STEP },
    [TRACE_DECIDE] = { "decide", LANE_STEP },
    [TRACE_UPDATE] = { "apply", LANE_STEP },
    [TRACE_SESSION] = { "session", LANE_LOOP },
    [TRACE_SESSION_END] = { "session end", LANE_LOOP },
};

static struct place place_of(const struct writer *w, const struct trace_event *e)
{
    const int lane = kinds[e->what].lane;
    const struct view_model *vm = view_model_at(w->s, e->model);
    const bool more = lane == LANE_STEP && vm != NULL;
    return (struct place){ w->pid, more ? lane + (int)(vm - w->s->models) : lane, e->begin_ns,
                           e->duration_ns };
}

static void write_args(struct writer *w, const struct trace_event *e)
{
    const struct view_model *vm = view_model_at(w->s, e->model);
    const struct spec *spec = vm != NULL ? vm->spec : NULL;
    const struct view_session *vs = NULL;
    for (uint32_t i = 0; i < w->s->session_count && e->session != TRACE_NOBODY; i++)
        if (w->s->sessions[i].index == e->session && w->s->sessions[i].since_ns <= e->begin_ns)
            vs = &w->s->sessions[i];
    fprintf(w->out, ",\"args\":{\"step\":%" PRIu64, e->step);
    if (spec != NULL) {
        fputs(",\"model\":", w->out);
        write_string(w->out, spec->name);
    }
    if (spec != NULL)
        write_unit(w, spec, e->unit);
    if (spec != NULL && e->group != TRACE_NONE)
        fprintf(w->out, ",\"micro\":%" PRIu32, e->group * spec->accumulate);
    if (vs != NULL)
        fprintf(w->out, ",\"worker\":%d", (int)vs->pid);
    fputs("}}", w->out);
}

static void write_return_flow(struct writer *w, const struct trace_event *e)
{
    const struct returned *from = find_return(w, e);
    if (from == NULL || from->span->begin_ns + from->span->duration_ns < w->since_ns)
        return;
    const struct place worker = { (int)from->session->pid, LANE_WORKER, from->span->begin_ns, 0 };
    write_flow(w, (struct flow){ "return", e, worker, place_of(w, e) });
}

/* decided: the last commit of each model, by its place. */
static void write_event(struct writer *w, const struct trace_event *e, struct trace_event *decided)
{
    if (e->what >= TRACE_WHATS)
        return;
    begin_event(w, kinds[e->what].name);
    write_place(w, place_of(w, e));
    write_args(w, e);
    if (e->what == TRACE_SUM && e->session != TRACE_NOBODY)
        write_return_flow(w, e);
    if (e->what == TRACE_DECIDE)
        decided[e->model] = *e;
    const struct trace_event *commit = &decided[e->model];
    if (e->what == TRACE_APPLY && commit->duration_ns > 0 && commit->step == e->step)
        write_flow(w, (struct flow){ "commit", e, place_of(w, commit), place_of(w, e) });
}

static int write_daemon(struct writer *w, const struct trace *t, struct shd_err *e)
{
    struct trace_event decided[UINT8_MAX + 1] = { { .duration_ns = 0 } };
    char name[64];
    struct trace_event *events = sys_calloc(TRACE_EVENTS, sizeof *events);
    if (events == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a trace of %u events", TRACE_EVENTS);
    snprintf(name, sizeof name, "shardd %s", w->s->daemon.device);
    write_name(w, "process_name", w->pid, LANE_LOOP, name);
    write_name(w, "thread_name", w->pid, LANE_LOOP, "loop");
    write_name(w, "thread_name", w->pid, LANE_KERNEL, "kernels");
    for (uint32_t i = 0; i == 0 || i < w->s->model_count; i++)
        write_name(w, "thread_name", w->pid, LANE_STEP + (int)i, "step");
    const uint32_t count = trace_copy(t, w->since_ns, events);
    for (uint32_t i = 0; i < count; i++)
        write_event(w, &events[i], decided);
    free(events);
    return SHD_OK;
}

/* -- Workers ------------------------------------------------------------------------------------
 */

static void write_span(struct writer *w, const struct view_session *vs,
                       const struct activity_span *span)
{
    const struct view_model *vm = view_model_find(w->s, vs->model);
    const uint64_t duration_ns = span->duration_ns > 0 ? span->duration_ns : 1;
    begin_event(w, activity_name(span->what));
    write_place(w, (struct place){ (int)vs->pid, LANE_WORKER, span->begin_ns, duration_ns });
    fprintf(w->out, ",\"args\":{\"step\":%" PRIu64, span->step);
    if (vm != NULL)
        write_unit(w, vm->spec, span->unit);
    if (span->micro != ACTIVITY_NONE)
        fprintf(w->out, ",\"micro\":%" PRIu32, span->micro);
    fputs("}}", w->out);
}

static void write_workers(struct writer *w)
{
    for (uint32_t i = 0; i < w->s->session_count; i++) {
        const struct view_session *vs = &w->s->sessions[i];
        if (vs->span_count == 0)
            continue;
        write_name(w, "process_name", (int)vs->pid, LANE_WORKER, vs->name);
        write_name(w, "thread_name", (int)vs->pid, LANE_WORKER, "worker");
        for (uint32_t k = 0; k < vs->span_count; k++)
            if (vs->spans[k].begin_ns + vs->spans[k].duration_ns >= w->since_ns)
                write_span(w, vs, &vs->spans[k]);
    }
}

int trace_json(const struct trace *t, const struct view_snapshot *s, uint32_t seconds,
               char **ret_text, size_t *ret_bytes, struct shd_err *e)
{
    const uint64_t now_ns = uv_hrtime(), span_ns = seconds * NS_PER_S;
    char *text = NULL;
    size_t bytes = 0;
    struct writer w = { .s = s,
                        .pid = getpid(),
                        .since_ns = now_ns > span_ns ? now_ns - span_ns : 0 };
    w.out = open_memstream(&text, &bytes);
    if (w.out == NULL)
        return err_set(e, SHD_ENOMEM, "no memory for a trace");
    fprintf(w.out, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"sessions_left_out\":%" PRIu32 "},",
            s->spans_left_out);
    fputs("\"traceEvents\":[", w.out);
    int r = index_returns(&w, e);
    if (r == SHD_OK)
        r = write_daemon(&w, t, e);
    if (r == SHD_OK)
        write_workers(&w);
    fputs("\n]}\n", w.out);
    free(w.returns);
    if (r == SHD_OK && ferror(w.out) != 0)
        r = err_set(e, SHD_ENOMEM, "no memory for a trace");
    if (fclose(w.out) != 0 && r == SHD_OK)
        r = err_set(e, SHD_ENOMEM, "no memory for a trace");
    if (r != SHD_OK) {
        free(text);
        return r;
    }
    *ret_text = text;
    *ret_bytes = bytes;
    return SHD_OK;
}
