/* progress.c: see progress.h. */
#include "examples/gpt/progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/base/clock.h"
#include "proto/base/status.h"

int progress_init(struct progress *p, FILE *out, const char *json_path, struct shd_err *e)
{
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    FILE *json = NULL;
    if (json_path != NULL) {
        json = fopen(json_path, "we");
        if (json == NULL)
            return err_sys(e, SHD_EIO, "write --json %s", json_path);
    }
    *p = (struct progress){ .out = out, .json = json };
    p->live = isatty(fileno(out)) && (term == NULL || strcmp(term, "dumb") != 0);
    p->colour = p->live && (no_color == NULL || no_color[0] == '\0');
    return SHD_OK;
}

void progress_deinit(struct progress *p)
{
    if (p->shown)
        fputc('\n', p->out);
    fflush(p->out);
    if (p->json != NULL)
        fclose(p->json);
    p->json = NULL;
    p->shown = false;
}

void progress_mark(struct progress *p, uint64_t step, uint64_t wait_ns)
{
    p->mark_step = step;
    p->mark_ns = clock_now_ns();
    p->mark_wait_ns = wait_ns;
}

void progress_begin(struct progress *p, uint64_t first_step, uint64_t wait_ns)
{
    p->first_step = first_step;
    p->start_ns = p->last_ns = clock_now_ns();
    progress_mark(p, first_step, wait_ns);
}

static const char *style(const struct progress *p, const char *code)
{
    return p->colour ? code : "";
}

static void progress_clear(struct progress *p)
{
    if (p->shown)
        fputs("\r\033[K", p->out);
    p->shown = false;
}

static double seconds(uint64_t ns)
{
    return (double)ns * 1e-9;
}

/* Shares and rates over [mark, end]. */
struct progress_rate {
    double bytes_per_s, wait_percent;
};

static struct progress_rate progress_rate(const struct progress *p, const struct progress_step *s)
{
    const double elapsed = seconds(s->end_ns - p->mark_ns) + 1e-9;
    const double text = (double)((s->step - p->mark_step) * p->step_bytes);
    return (struct progress_rate){
        .bytes_per_s = text / elapsed,
        .wait_percent = 100 * seconds(s->end.wait_ns - p->mark_wait_ns) / elapsed,
    };
}

static void progress_live(struct progress *p, const struct progress_step *s)
{
    const struct progress_rate rate = progress_rate(p, s);
    const double per_step = seconds(s->end_ns - p->start_ns) / (double)(s->step - p->first_step);
    const uint64_t left = (uint64_t)(per_step * (double)(p->steps - s->step) + 0.5);
    progress_clear(p);
    fprintf(p->out, "%sstep %ju/%ju%s  loss %s%.3f%s  %.0f tok/s  wait %.0f%%  %ju:%02ju left",
            style(p, "\033[1m"), (uintmax_t)s->step, (uintmax_t)p->steps, style(p, "\033[0m"),
            style(p, "\033[32m"), s->loss, style(p, "\033[0m"), rate.bytes_per_s, rate.wait_percent,
            (uintmax_t)(left / 60), (uintmax_t)(left % 60));
    p->shown = true;
    fflush(p->out);
}

static void progress_line(struct progress *p, const struct progress_step *s)
{
    const struct progress_rate rate = progress_rate(p, s);
    progress_clear(p);
    fprintf(p->out, "step %ju/%ju loss %.4f norm %.3f lr %.2e %.0f tok/s", (uintmax_t)s->step,
            (uintmax_t)p->steps, s->loss, s->norm, s->lr, rate.bytes_per_s);
    if (!s->by_others)
        fprintf(p->out, " wait %.1f%%", rate.wait_percent);
    if (s->loss_scale > 1)
        fprintf(p->out, " scale %.0f", s->loss_scale);
    fprintf(p->out, "%s\n", s->skipped ? " SKIPPED: the gradient is not finite" : "");
    fflush(p->out);
    p->mark_ns = s->end_ns;
    if (!s->by_others)
        p->mark_wait_ns = s->end.wait_ns;
    p->mark_step = s->step;
}

/* JSON has no NaN. */
static void json_number(FILE *out, const char *name, double value)
{
    if (isfinite(value))
        fprintf(out, ",\"%s\":%.17g", name, value);
    else
        fprintf(out, ",\"%s\":null", name);
}

static void json_whole(FILE *out, const char *name, uint64_t value)
{
    fprintf(out, ",\"%s\":%ju", name, (uintmax_t)value);
}

static void json_array(FILE *out, const char *name, const uint64_t *values, uint32_t count)
{
    fprintf(out, ",\"%s\":[", name);
    for (uint32_t i = 0; i < count; i++)
        fprintf(out, "%s%ju", i > 0 ? "," : "", (uintmax_t)values[i]);
    fputc(']', out);
}

static void json_counters(FILE *out, const struct progress_step *s)
{
    json_whole(out, "wait_ns", s->end.wait_ns - s->begin.wait_ns);
    json_whole(out, "bytes_fetched", s->end.bytes_fetched - s->begin.bytes_fetched);
    json_whole(out, "bytes_copied", s->end.bytes_copied - s->begin.bytes_copied);
    json_whole(out, "bytes_returned", s->end.bytes_returned - s->begin.bytes_returned);
    json_whole(out, "live_bytes_max", s->end.live_bytes_max);
    json_whole(out, "plan_misses", s->end.plan_misses - s->begin.plan_misses);
    json_array(out, "forward_ns", s->forward_ns, s->units);
    json_array(out, "backward_ns", s->backward_ns, s->units);
}

static void progress_json(struct progress *p, const struct progress_step *s)
{
    FILE *out = p->json;
    fprintf(out, "{\"step\":%ju", (uintmax_t)s->step);
    json_number(out, "loss", s->loss);
    json_number(out, "norm", s->norm);
    json_number(out, "lr", s->lr);
    json_number(out, "loss_scale", s->loss_scale);
    fprintf(out, ",\"skipped\":%s", s->skipped ? "true" : "false");
    json_whole(out, "step_ns", s->end_ns - s->begin_ns);
    json_whole(out, "tokens", p->step_bytes);
    if (!s->by_others)
        json_counters(out, s);
    fputs("}\n", out);
    fflush(out);
}

void progress_held_out(struct progress *p, uint64_t step, double loss)
{
    if (p->json == NULL)
        return;
    fprintf(p->json, "{\"eval_step\":%ju", (uintmax_t)step);
    json_number(p->json, "held_out_loss", loss);
    fputs("}\n", p->json);
    fflush(p->json);
}

/* Steps that others finished before this worker had begun come first, with times of before. */
static void progress_reach_back(struct progress *p, const struct progress_step *s)
{
    if (s->step <= p->first_step) {
        p->first_step = p->mark_step = s->step - 1;
        p->start_ns = p->mark_ns = s->begin_ns;
    } else if (s->end_ns < p->mark_ns) {
        p->mark_ns = s->begin_ns;
    }
    p->last_ns = s->end_ns;
}

void progress_step(struct progress *p, const struct progress_step *s)
{
    progress_reach_back(p, s);
    const bool first = s->step == p->first_step + 1, last = s->step >= p->steps;
    if (p->json != NULL)
        progress_json(p, s);
    if (first || last || s->skipped || s->step % p->log_every == 0)
        progress_line(p, s);
    else if (p->live)
        progress_live(p, s);
}

void progress_note(struct progress *p, const char *fmt, ...)
{
    va_list args;
    progress_clear(p);
    va_start(args, fmt);
    vfprintf(p->out, fmt, args);
    va_end(args);
    fputc('\n', p->out);
    fflush(p->out);
}

void progress_text(struct progress *p, const uint8_t *text, uint64_t count)
{
    progress_clear(p);
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t c = text[i];
        fputc((c >= 32 && c < 127) || c == '\n' || c == '\t' ? c : '?', p->out);
    }
    if (count > 0 && text[count - 1] != '\n')
        fputc('\n', p->out);
    fflush(p->out);
}
