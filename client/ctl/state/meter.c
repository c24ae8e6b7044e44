/* See meter.h. */
#include "client/ctl/state/meter.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/text.h"
#include "client/ctl/watch/status_node.h"
#include "client/session/where.h"
#include "proto/base/clock.h"

#define LIVE_NS     (200 * NS_PER_MS)
#define FIRST_NS    (2 * NS_PER_S)
#define EVERY_NS    (10 * NS_PER_S)
#define LOOK_NS     (500 * NS_PER_MS) /* between two looks where no line is due */
#define ANSWER_MS   1000u
#define LINE_BYTES  200u
#define PARTS_BYTES (NODE_DAEMONS_MAX * sizeof(struct meter_part))

struct meter {
    struct meter_ask ask;
    struct node node; /* owned */
    struct meter_part *parts;
    struct meter_count count;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t ends;
    bool over;        /* under the mutex */
    bool live, shown; /* a terminal; a line is on it */
};

/* -- Counting -----------------------------------------------------------------------------------
 */

static const char *verb_of(const struct meter_ask *ask)
{
    return ask->of == METER_CHECKPOINT ? "checkpoint" : "restore";
}

void meter_take(struct meter_part *part, enum meter_of of, const struct doc *doc)
{
    double done = NAN, all = NAN;
    if (doc == NULL)
        return;
    if (of == METER_RESTORE) {
        done = doc->read;
        all = doc->to_read;
    }
    for (uint32_t i = 0; of == METER_CHECKPOINT && i < doc->model_count; i++)
        if (doc->models[i].to_write > 0) { /* one at a time: we save it */
            done = doc->models[i].written;
            all = doc->models[i].to_write;
        }
    if (all > 0 && done >= 0 && done <= all)
        *part = (struct meter_part){ done, all };
    else
        part->done = part->all;
}

bool meter_sum(struct meter_count *c, const struct meter_part *parts, uint32_t count, double now_s)
{
    c->done = c->all = 0;
    for (uint32_t i = 0; i < count; i++) {
        c->done += parts[i].done;
        c->all += parts[i].all;
    }
    if (!(c->all > 0))
        return false;
    if (isnan(c->begun_s) || c->done < c->first) { /* or the next one has begun */
        c->begun_s = now_s;
        c->first = c->done;
    }
    return true;
}

void meter_text(const struct meter_count *c, const struct meter_ask *ask, double now_s, char *text,
                size_t bytes)
{
    char done[TEXT_BYTES], all[TEXT_BYTES], rate[TEXT_BYTES], left[TEXT_BYTES] = "";
    const double seconds = now_s - c->begun_s;
    const double per_s = seconds > 0 ? (c->done - c->first) / seconds : 0;
    if (ask->json) {
        snprintf(text, bytes,
                 "{\"progress\":\"%s\",\"bytes\":%.0f,\"bytes_total\":%.0f,"
                 "\"bytes_per_s\":%.0f}",
                 verb_of(ask), c->done, c->all, per_s);
        return;
    }
    if (per_s > 0)
        snprintf(left, sizeof left, ", %.0f s left", ceil((c->all - c->done) / per_s));
    snprintf(text, bytes, "%s: %s of %s (%.0f %%), %s/s%s", verb_of(ask), text_bytes(c->done, done),
             text_bytes(c->all, all), 100 * c->done / c->all, text_bytes(per_s, rate), left);
}

/* -- The thread ---------------------------------------------------------------------------------
 */

static void clear_line(struct meter *p)
{
    if (p->shown && write(STDERR_FILENO, "\r\033[K", 4) < 0)
        p->live = false; /* the terminal has gone */
    p->shown = false;
}

static void show(struct meter *p, double now_s)
{
    char text[LINE_BYTES], line[LINE_BYTES + 8];
    meter_text(&p->count, &p->ask, now_s, text, sizeof text);
    if (p->live)
        snprintf(line, sizeof line, "\r\033[K%s", text);
    else if (p->ask.json)
        snprintf(line, sizeof line, "%s\n", text);
    if (!p->live && !p->ask.json)
        ctl_say("%s", text);
    else if (write(STDERR_FILENO, line, strlen(line)) > 0)
        p->shown = p->live;
}

/* True: it is over. */
static bool wait_until(struct meter *p, uint64_t at_ns)
{
    const struct timespec at = clock_timespec(at_ns);
    pthread_mutex_lock(&p->mutex);
    while (!p->over && pthread_cond_timedwait(&p->ends, &p->mutex, &at) == 0)
        continue;
    const bool over = p->over;
    pthread_mutex_unlock(&p->mutex);
    return over;
}

static void *report(void *arg)
{
    struct meter *p = arg;
    uint64_t look_ns = clock_now_ns(), due_ns = look_ns + (p->live ? LIVE_NS : FIRST_NS);
    while (!wait_until(p, look_ns)) {
        node_ask_once(&p->node);
        for (uint32_t i = 0; i < p->node.count; i++)
            meter_take(&p->parts[i], p->ask.of,
                       p->node.daemons[i].up ? p->node.daemons[i].doc : NULL);
        const uint64_t now_ns = clock_now_ns();
        const double now_s = (double)now_ns * 1e-9;
        const bool known = meter_sum(&p->count, p->parts, p->node.count, now_s);
        if (known && now_ns >= due_ns) {
            show(p, now_s);
            due_ns = now_ns + (p->live ? LIVE_NS : EVERY_NS);
        }
        look_ns = now_ns + (p->live ? LIVE_NS : LOOK_NS);
    }
    clear_line(p);
    return NULL;
}

static void meter_free(struct meter *p)
{
    node_close(&p->node);
    free(p->parts);
    free(p);
}

static int begin_thread(struct meter *p)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->ends, &clock);
    pthread_condattr_destroy(&clock);
    return pthread_create(&p->thread, NULL, report, p);
}

struct meter *meter_begin(const struct meter_ask *ask)
{
    const char *term = getenv("TERM");
    struct shd_err ignored;
    struct where *where = malloc(sizeof *where);
    struct meter *p = calloc(1, sizeof *p);
    int r = where != NULL && p != NULL ? SHD_OK : SHD_ENOMEM;
    if (r == SHD_OK)
        r = where_find(ask->address, where, &ignored);
    if (r == SHD_OK)
        r = node_open_at(where->address, &p->node, &ignored);
    free(where);
    if (r != SHD_OK) {
        free(p);
        return NULL;
    }
    if (p->node.timeout_ms > ANSWER_MS)
        p->node.timeout_ms = ANSWER_MS;
    p->ask = *ask;
    p->count.begun_s = NAN;
    p->live = !ask->json && isatty(STDERR_FILENO) && (term == NULL || strcmp(term, "dumb") != 0);
    p->parts = calloc(1, PARTS_BYTES);
    if (p->parts != NULL && begin_thread(p) == 0)
        return p;
    meter_free(p);
    return NULL;
}

void meter_end(struct meter *p)
{
    if (p == NULL)
        return;
    pthread_mutex_lock(&p->mutex);
    p->over = true;
    pthread_cond_signal(&p->ends);
    pthread_mutex_unlock(&p->mutex);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->ends);
    pthread_mutex_destroy(&p->mutex);
    meter_free(p);
}
