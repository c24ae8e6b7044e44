/* See status_show.h. */
#include "client/ctl/watch/status_show.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/base/text.h"
#include "client/ctl/watch/status_join.h"
#include "proto/base/check.h"

#define CELL TABLE_CELL_BYTES_MAX

_Static_assert(TEXT_BYTES <= CELL && DOC_NAME_BYTES <= CELL, "texts fit a table's cell");

int show_interval(const char *text, uint64_t *ret_ms, struct shd_err *e)
{
    char *end;
    const double s = strtod(text, &end);
    if (text[0] < '0' || text[0] > '9' || *end != '\0')
        return err_set(e, SHD_EINVAL,
                       "an interval is a number of seconds, as 2 or 0.5, not '%.40s'", text);
    if (!(s >= 0.1 && s <= 3600))
        return err_set(e, SHD_ERANGE, "an interval of %.40s s: its limits are 0.1 and 3600", text);
    *ret_ms = (uint64_t)(s * 1000);
    return SHD_OK;
}

/* -- Cells ----------------------------------------------------------------------------------- */

static const char *or_dash(const char *text)
{
    return text[0] != '\0' ? text : "-";
}

/* "12/24". buf[CELL]; returns buf. */
static const char *cell_of(double part, double whole, char *buf)
{
    char a[TEXT_BYTES], b[TEXT_BYTES];
    snprintf(buf, CELL, "%.18s/%.18s", text_count(part, a), text_count(whole, b));
    return buf;
}

static const char *cell_returned(const struct doc_model *m, char *buf)
{
    const double expected = isnan(m->expected) ? m->units * m->micro_batches : m->expected;
    return isnan(expected) ? text_count(m->returned, buf) : cell_of(m->returned, expected, buf);
}

/* -- One daemon ------------------------------------------------------------------------------ */

static void show_models(const struct doc *d, FILE *out)
{
    static const char *const headings[] = { "MODEL",   "STEP",     "PHASE",  "OWNER",
                                            "UNITS",   "RETURNED", "STEP/S", "STATE",
                                            "PUBLISH", "INBOX",    "SPILL",  "SAVING" };
    struct table t;
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (uint32_t i = 0; i < d->model_count; i++) {
        const struct doc_model *m = &d->models[i];
        char b[ARRAY_SIZE(headings)][CELL];
        table_row(
            &t, (const char *[]){ or_dash(m->name), text_count(m->step, b[0]), or_dash(m->phase),
                                  cell_of(m->owner, m->owners, b[1]), text_count(m->units, b[2]),
                                  cell_returned(m, b[3]), text_number(m->steps_per_s, b[4]),
                                  text_bytes(m->bytes[DOC_STATE], b[5]),
                                  text_bytes(m->bytes[DOC_PUBLISH], b[6]),
                                  text_bytes(m->bytes[DOC_INBOX], b[7]),
                                  text_bytes(m->bytes[DOC_SPILL], b[8]), or_dash(m->checkpoint) });
    }
    table_print(&t, "  ", out);
    table_deinit(&t);
}

static void show_sessions(const struct doc *d, FILE *out)
{
    static const char *const headings[] = { "SESSION", "PID",    "UID",  "ROLE", "PROCESS",
                                            "SLOTS",   "IN USE", "PATH", "NOW",  "SINCE" };
    struct table t;
    table_init(&t, headings, ARRAY_SIZE(headings));
    for (uint32_t i = 0; i < d->session_count; i++) {
        const struct doc_session *s = &d->sessions[i];
        char b[ARRAY_SIZE(headings)][CELL], now[CELL];
        table_row(&t, (const char *[]){
                          or_dash(s->name), text_count(s->pid, b[0]), text_count(s->uid, b[1]),
                          or_dash(s->role), or_dash(s->state), text_count(s->slots, b[2]),
                          text_count(s->slots_waiting, b[3]), or_dash(s->path),
                          join_now(s, now, sizeof(now)), text_time(s->since_s, b[4]) });
    }
    table_print(&t, "  ", out);
    table_deinit(&t);
}

static void show_daemon(const struct node_daemon *n, FILE *out)
{
    char why[DOC_TEXT_BYTES], b[3][TEXT_BYTES];
    const bool healthy = node_healthy(n, why, sizeof(why));
    if (!n->up) {
        fprintf(out, "%s  unreachable: %s\n", n->device, why);
        return;
    }
    const struct doc *d = n->doc;
    fprintf(out, "%s  pid %s  up %s  threads %s  %s  shardd %s\n", n->device,
            text_count(d->pid, b[0]), text_time(d->uptime_s, b[1]), text_count(d->threads, b[2]),
            or_dash(d->isa), or_dash(d->version));
    if (!healthy)
        fprintf(out, "  NOT WELL: %s\n", why);
    if (d->error[0] != '\0')
        fprintf(out, "  last warning: %s\n", d->error);
    show_models(d, out);
    show_sessions(d, out);
}

/* -- The node -------------------------------------------------------------------------------- */

static void show_waits(const struct join *j, FILE *out)
{
    char since[TEXT_BYTES];
    if (j->wait_count == 0)
        return;
    fputs("waits, the longest first:\n", out);
    for (uint32_t i = 0; i < j->wait_count; i++)
        fprintf(out, "  %8s  %s\n", text_time(j->waits[i].w.since_s, since),
                or_dash(j->waits[i].w.text));
    if (j->slowest[0] != '\0')
        fprintf(out, "slowest: %s\n", j->slowest);
}

void show_node(const struct node *n, FILE *out)
{
    struct join j;
    for (uint32_t i = 0; i < n->count; i++)
        show_daemon(&n->daemons[i], out);
    join_make(n, &j);
    show_waits(&j, out);
    join_free(&j);
}

/* Take the fields of a daemon that has no document. */
static json_t *json_of_down(const struct node_daemon *d)
{
    return json_pack("{s:s, s:s, s:s}", "device", d->device, "error", d->why.text, "status",
                     status_name(d->why.code));
}

/* jansson escapes all but DEL. */
static void put_json(const char *text, FILE *out)
{
    for (; *text != '\0'; text++)
        if (*text == '\x7f')
            fputs("\\u007f", out);
        else
            fputc(*text, out);
    fputc('\n', out);
}

int show_json(const struct node *n, FILE *out)
{
    json_t *all = json_array();
    for (uint32_t i = 0; i < n->count; i++) {
        const struct node_daemon *d = &n->daemons[i];
        json_array_append_new(all, d->up ? json_incref(d->json) : json_of_down(d));
    }
    char *text = json_dumps(all, JSON_INDENT(2) | JSON_ENSURE_ASCII);
    const bool whole = text != NULL && json_array_size(all) == n->count;
    if (whole)
        put_json(text, out);
    free(text);
    json_decref(all);
    return whole ? SHD_OK : SHD_ENOMEM;
}
