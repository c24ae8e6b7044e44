/* See blame.h. */
#include "client/session/blame.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/headline.h"
#include "proto/base/process.h"
#include "proto/base/sys.h"

/* After the others: it repeats parts of them. */
#include "client/shd.h"

#define ANSWER_NS NS_PER_S

struct answer { /* a daemon's */
    bool asked;
    json_t *doc; /* owned; NULL: none came */
};

struct blame {
    struct hub *hub;   /* borrowed; it may be gone first */
    uint64_t every_ns; /* between two lines of a wait */
    struct blame_sink sink;
    uint64_t start_ns;                           /* of the wait that is looked into */
    uint64_t due_ns;                             /* of it: ask then */
    uint64_t asked_ns;                           /* 0: nobody was asked */
    uint32_t waiting;                            /* answers to come */
    bool hasty;                                  /* they have had less than ANSWER_NS */
    uint64_t exchange_start_ns, exchange_due_ns; /* the same of a link that comes up */
    uint32_t count;
    struct answer *answers; /* owned, [count] */
};

/* -- Asking ---------------------------------------------------------------------------------- */

static int make_status(struct link *link, const struct call *call, struct wire_request *ret_request,
                       struct shd_err *e)
{
    (void)link;
    (void)call;
    (void)e;
    ret_request->type = WIRE_STATUS;
    return SHD_OK;
}

static void take_status(struct link *link, const struct call *call, const struct wire_reply *reply)
{
    struct blame *b = call->ctx;
    const struct wire_bytes *text = &reply->status_text.json;
    CHECK(b->waiting > 0);
    b->waiting--;
    if (reply->status == SHD_OK && reply->type == WIRE_STATUS_TEXT &&
        b->answers[link->index].doc == NULL)
        b->answers[link->index].doc = json_loadb((const char *)text->data, text->bytes, 0, NULL);
}

static void forget(struct blame *b)
{
    for (uint32_t i = 0; i < b->count; i++) {
        json_decref(b->answers[i].doc);
        b->answers[i].doc = NULL;
        b->answers[i].asked = false;
    }
    b->waiting = 0;
    b->asked_ns = 0;
}

/* A link whose table is full is left out: asking there would wait. */
static void ask_all(struct blame *b, uint64_t now_ns)
{
    const struct call call = { .make = make_status, .fn = take_status, .ctx = b };
    struct shd_err ignored;
    for (uint32_t i = 0; i < b->count; i++) {
        struct link *link = &b->hub->links[i];
        if (link->state != LINK_UP || link->call_count == HUB_CALLS_MAX)
            continue;
        b->waiting++; /* it may be answered before it returns */
        b->answers[i].asked = hub_ask(link, &call, &ignored) == SHD_OK;
        b->waiting -= !b->answers[i].asked;
    }
    b->asked_ns = now_ns;
}

/* -- What they say --------------------------------------------------------------------------- */

static struct headline_process process_of(const json_t *json)
{
    const json_int_t pid = json_integer_value(json_object_get(json, "pid"));
    return (struct headline_process){ .pid = pid > 0 && pid <= INT32_MAX ? pid : 0,
                                      .name = json_string_value(json_object_get(json, "name")),
                                      .state = json_string_value(json_object_get(json, "state")) };
}

static struct headline_wait wait_of(const json_t *json)
{
    const json_t *on = json_object_get(json, "on");
    struct headline_wait w = {
        .who = process_of(json_object_get(json, "who")),
        .text = json_string_value(json_object_get(json, "text")),
        .since_s = json_number_value(json_object_get(json, "since_s")),
    };
    while (w.on_count < HEADLINE_ON_MAX && w.on_count < json_array_size(on)) {
        w.on[w.on_count] = process_of(json_array_get(on, w.on_count));
        w.on_count++;
    }
    return w;
}

static struct headline_daemon daemon_of(const struct blame *b, uint32_t i)
{
    const struct link *link = &b->hub->links[i];
    const bool up = link->state == LINK_UP;
    const char *state = up ? process_state_now(link->pid) : "";
    const bool had_time = !b->hasty || strcmp(state, "stopped") == 0;
    return (struct headline_daemon){
        .process = { .pid = up ? link->pid : 0, .name = link->device, .state = state },
        .answers = link->state == LINK_GONE || /* nobody waits for it */
                   (up && (!b->answers[i].asked || b->answers[i].doc != NULL || !had_time)),
        .why = up ? "" : link->last.text,
    };
}

/* False: they name nobody. */
static bool make_headline(const struct blame *b, struct headline *ret_headline)
{
    struct headline_wait *waits = sys_calloc(HEADLINE_WAITS_MAX, sizeof *waits);
    struct headline_daemon *daemons = sys_calloc(b->count, sizeof *daemons);
    struct headline_view view = { daemons, waits, b->count, 0 };
    bool found = false;
    if (waits != NULL && daemons != NULL) {
        for (uint32_t i = 0; i < b->count; i++) {
            const json_t *list = json_object_get(b->answers[i].doc, "waits");
            daemons[i] = daemon_of(b, i);
            for (size_t k = 0; k < json_array_size(list) && view.wait_count < HEADLINE_WAITS_MAX;
                 k++)
                waits[view.wait_count++] = wait_of(json_array_get(list, k));
        }
        found = headline_make(&view, ret_headline);
    }
    free(waits);
    free(daemons);
    return found;
}

/* Names and units come from others: what moves a cursor does not go on. */
static void clean(char *text)
{
    for (char *c = text; *c != '\0'; c++)
        if ((unsigned char)*c < ' ' || *c == '\x7f')
            *c = '?';
}

/* The first daemon that owes an answer, when they blame nobody: it is at work, as far as they know.
 */
static const char *whom(const struct blame *b)
{
    for (uint32_t l = 0; l < b->count; l++)
        for (uint32_t i = 0; i < HUB_CALLS_MAX; i++) {
            const struct call *call = &b->hub->links[l].calls[i];
            if (call->used && call->ctx != NULL && call->ctx != b)
                return b->hub->links[l].device;
        }
    return "its daemons";
}

void blame_say(const struct blame *b, const char *line)
{
    if (b != NULL && b->sink.say != NULL)
        b->sink.say(b->sink.ctx, line);
    else
        fprintf(stderr, "%s\n", line);
}

void blame_waits(const struct blame *b, uint64_t waited_ns, const char *line)
{
    event_say(&b->hub->events, &(struct shd_event){ .kind = SHD_EVENT_WAITS,
                                                    .daemon = "",
                                                    .text = line,
                                                    .seconds = (double)waited_ns * S_PER_NS });
    if (b->sink.say != NULL || b->hub->events.fn == NULL)
        blame_say(b, line);
}

static void say(const struct blame *b, uint64_t waited_ns, const struct headline *h)
{
    char line[2 * HEADLINE_BYTES + 80];
    const uint64_t waited_s = waited_ns / NS_PER_S;
    if (h != NULL)
        snprintf(line, sizeof line, "shd: waiting for %" PRIu64 " s: %.300s; %.300s", waited_s,
                 h->text, h->remedy);
    else
        snprintf(line, sizeof line,
                 "shd: waiting for %" PRIu64 " s for %s: nobody is known to hold it up", waited_s,
                 whom(b));
    clean(line);
    blame_waits(b, waited_ns, line);
}

static void conclude(struct blame *b, uint64_t waited_ns)
{
    struct headline h;
    const bool found = make_headline(b, &h);
    snprintf(b->hub->held_up, sizeof b->hub->held_up, "%.127s", found ? h.text : "");
    clean(b->hub->held_up);
    if (waited_ns >= b->every_ns)
        say(b, waited_ns, found ? &h : NULL);
    hub_forget(b->hub, b);
    forget(b);
}

/* -- Looking in ------------------------------------------------------------------------------ */

/* A limit that ends the wait sooner than a line is due: a little before it, so that the error
 * knows.
 */
static uint64_t first_due_ns(const struct blame *b)
{
    const struct hub *hub = b->hub;
    const uint64_t limit_ns = hub->timeout_ns;
    const uint64_t before_ns = limit_ns > 4 * ANSWER_NS ? limit_ns - 2 * ANSWER_NS : limit_ns / 2;
    return hub->patient || before_ns > b->every_ns ? b->every_ns : before_ns;
}

static void look(struct hub *hub, uint64_t start_ns, uint64_t now_ns)
{
    struct blame *b = hub->blame;
    const uint64_t every_ns = b->every_ns;
    CHECK(every_ns > 0);
    const uint64_t waited_ns = now_ns > start_ns ? now_ns - start_ns : 0;
    if (start_ns != b->start_ns) {
        if (b->asked_ns != 0)
            hub_forget(hub, b);
        forget(b);
        b->start_ns = start_ns;
        b->due_ns = first_due_ns(b);
        hub->held_up[0] = '\0';
    }
    if (b->asked_ns != 0) {
        const bool over = !hub->patient && waited_ns >= hub->timeout_ns;
        b->hasty = now_ns - b->asked_ns < ANSWER_NS;
        if (b->waiting == 0 || !b->hasty || over)
            conclude(b, waited_ns);
    } else if (waited_ns >= b->due_ns) {
        b->due_ns = (waited_ns / every_ns + 1) * every_ns;
        ask_all(b, now_ns);
    }
}

/* A link that comes up: nobody but its daemon is waited for, and none of the others can be heard.
 */
static void look_at_exchange(const struct link *link, uint64_t start_ns, uint64_t now_ns)
{
    struct blame *b = link->hub->blame;
    const uint64_t waited_ns = now_ns > start_ns ? now_ns - start_ns : 0;
    CHECK(b->every_ns > 0);
    if (start_ns != b->exchange_start_ns) {
        b->exchange_start_ns = start_ns;
        b->exchange_due_ns = b->every_ns;
    }
    if (waited_ns < b->exchange_due_ns)
        return;
    b->exchange_due_ns = (waited_ns / b->every_ns + 1) * b->every_ns;
    const struct headline_daemon silent = {
        .process = { .pid = link->pid,
                     .name = link->device,
                     .state = process_state_now(link->pid) },
        .answers = false,
    };
    const struct headline_view view = { .daemons = &silent, .daemon_count = 1 };
    struct headline h;
    const bool found = headline_make(&view, &h);
    CHECK(found);
    say(b, waited_ns, &h);
}

int blame_new(struct hub *hub, struct blame_sink sink, struct blame **ret_blame, struct shd_err *e)
{
    struct blame *b = sys_calloc(1, sizeof *b);
    if (b != NULL)
        *b = (struct blame){ .hub = hub,
                             .every_ns = BLAME_NS,
                             .sink = sink,
                             .count = hub->link_count,
                             .answers = sys_calloc(hub->link_count, sizeof *b->answers) };
    if (b == NULL || b->answers == NULL) {
        blame_free(b);
        return err_set(e, SHD_ENOMEM, "no memory for a session");
    }
    hub->on_wait = look;
    hub->on_exchange = look_at_exchange;
    hub->blame = b;
    *ret_blame = b;
    return SHD_OK;
}

struct blame_sink blame_sink_of(const struct blame *b)
{
    return b->sink;
}

void blame_every(struct blame *b, uint64_t every_ns)
{
    b->every_ns = every_ns;
}

void blame_free(struct blame *b)
{
    if (b == NULL)
        return;
    if (b->answers != NULL)
        forget(b);
    free(b->answers);
    free(b);
}
