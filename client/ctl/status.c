/* shardctl status: what each daemon holds and who is attached, from its own status JSON (schema:
 * docs/protocol.md). Fields that an older or newer daemon does not have are shown as "-". */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "client/ctl/ctl.h"
#include "client/ctl/flags.h"
#include "client/ctl/table.h"
#include "client/shd.h"
#include "proto/check.h"

#define CELL TABLE_CELL_BYTES_MAX

static const char status_about[] =
    "Show each daemon: its models with step, phase, gradients that are in (of units times\n"
    "micro-batches) and memory, and the sessions attached to it. shardctl's own session is left\n"
    "out.";

static const char status_more[] = "example:\n"
                                  "  shardctl status --address '/run/shardd?cpu0,cpu1'\n"
                                  "  shardctl status --json | jq '.daemons[].models[].step'\n"
                                  "\n"
                                  "exit code 1: no daemon answered, or one of several did not\n";

/* -- Cells ----------------------------------------------------------------------------------- */

/* A field as text, "-" when it is not there. buf[CELL]; returns buf. */
static const char *cell(const json_t *object, const char *key, char *buf)
{
    const json_t *v = json_object_get(object, key);
    if (json_is_string(v))
        snprintf(buf, CELL, "%s", json_string_value(v));
    else if (json_is_integer(v))
        snprintf(buf, CELL, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
    else if (json_is_real(v))
        snprintf(buf, CELL, "%.4g", json_real_value(v));
    else if (json_is_boolean(v))
        snprintf(buf, CELL, "%s", json_is_true(v) ? "yes" : "no");
    else
        snprintf(buf, CELL, "-");
    return buf;
}

static const char *cell_bytes(const json_t *object, const char *key, char *buf)
{
    static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB" };
    const json_t *v = json_object_get(object, key);
    if (!json_is_integer(v))
        return cell(NULL, key, buf);
    double n = (double)json_integer_value(v);
    size_t unit = 0;
    for (; n >= 1024 && unit + 1 < ARRAY_SIZE(units); unit++)
        n /= 1024;
    snprintf(buf, CELL, unit == 0 || n >= 100 ? "%.0f %s" : "%.1f %s", n, units[unit]);
    return buf;
}

/* "12/24": of units times micro-batches. */
static const char *cell_returned(const json_t *model, char *buf)
{
    char returned[CELL];
    const json_t *units = json_object_get(model, "units");
    const json_t *micros = json_object_get(model, "micro_batches");
    const json_int_t expected = json_integer_value(units) * json_integer_value(micros);
    if (expected > 0)
        snprintf(buf, CELL, "%.18s/%" JSON_INTEGER_FORMAT, cell(model, "returned", returned),
                 expected);
    else
        cell(model, "returned", buf);
    return buf;
}

/* "0/2": this daemon's index among the model's owners. */
static const char *cell_owner(const json_t *model, char *buf)
{
    char owner[CELL], owners[CELL];
    snprintf(buf, CELL, "%.10s/%.10s", cell(model, "owner", owner), cell(model, "owners", owners));
    return buf;
}

static const char *cell_uptime(const json_t *daemon, char *buf)
{
    const json_t *v = json_object_get(daemon, "uptime_s");
    if (!json_is_number(v))
        return cell(NULL, "uptime_s", buf);
    const double s = json_number_value(v);
    const unsigned long long whole = s > 0 ? (unsigned long long)s : 0;
    if (s < 100)
        snprintf(buf, CELL, "%.1f s", s);
    else if (whole < 86400)
        snprintf(buf, CELL, "%llu:%02llu:%02llu", whole / 3600, whole / 60 % 60, whole % 60);
    else
        snprintf(buf, CELL, "%llu d %llu h", whole / 86400, whole / 3600 % 24);
    return buf;
}

/* -- Tables ---------------------------------------------------------------------------------- */

static void print_models(const json_t *daemon)
{
    static const char *const headings[] = { "MODEL",    "STEP",  "PHASE",   "OWNER", "UNITS",
                                            "RETURNED", "STATE", "PUBLISH", "INBOX", "BOARD" };
    struct table t;
    size_t i;
    json_t *m;
    table_init(&t, headings, ARRAY_SIZE(headings));
    json_array_foreach(json_object_get(daemon, "models"), i, m)
    {
        const json_t *bytes = json_object_get(m, "bytes");
        char b[ARRAY_SIZE(headings)][CELL];
        table_row(&t, (const char *[]){
                          cell(m, "name", b[0]), cell(m, "step", b[1]), cell(m, "phase", b[2]),
                          cell_owner(m, b[3]), cell(m, "units", b[4]), cell_returned(m, b[5]),
                          cell_bytes(bytes, "state", b[6]), cell_bytes(bytes, "publish", b[7]),
                          cell_bytes(bytes, "inbox", b[8]), cell_bytes(bytes, "board", b[9]) });
    }
    table_print(&t, "  ", stdout);
    table_deinit(&t);
}

static void print_sessions(const json_t *daemon)
{
    static const char *const headings[] = { "SESSION", "NAME",  "PID",   "UID",
                                            "ROLE",    "SLOTS", "IN USE" };
    struct table t;
    size_t i;
    json_t *s;
    table_init(&t, headings, ARRAY_SIZE(headings));
    json_array_foreach(json_object_get(daemon, "sessions"), i, s)
    {
        char b[ARRAY_SIZE(headings)][CELL];
        table_row(&t, (const char *[]){ cell(s, "id", b[0]), cell(s, "name", b[1]),
                                        cell(s, "pid", b[2]), cell(s, "uid", b[3]),
                                        cell(s, "role", b[4]), cell(s, "slots", b[5]),
                                        cell(s, "slots_waiting", b[6]) });
    }
    table_print(&t, "  ", stdout);
    table_deinit(&t);
}

static void print_daemon(const json_t *d)
{
    char b[6][CELL];
    printf("%s  pid %s  up %s  threads %s  %s  shardd %s\n", cell(d, "device", b[0]),
           cell(d, "pid", b[1]), cell_uptime(d, b[2]), cell(d, "threads", b[3]),
           cell(d, "isa", b[4]), cell(d, "version", b[5]));
    print_models(d);
    print_sessions(d);
}

/* -- The verb -------------------------------------------------------------------------------- */

/* Take out administrators' sessions, our own among them. */
static void hide_own(json_t *daemon)
{
    json_t *sessions = json_object_get(daemon, "sessions");
    for (size_t i = json_array_size(sessions); i > 0; i--) {
        const json_t *s = json_array_get(sessions, i - 1);
        const char *role = json_string_value(json_object_get(s, "role"));
        const json_int_t pid = json_integer_value(json_object_get(s, "pid"));
        if (pid == (json_int_t)getpid() || (role != NULL && strcmp(role, "admin") == 0))
            json_array_remove(sessions, i - 1);
    }
}

/* One daemon's status, parsed; NULL with *e. The caller's to release. */
static json_t *ask(shd_session *s, uint32_t owner, bool all, struct shd_err *e)
{
    char *text;
    if (shd_status(s, owner, &text, e) != SHD_OK)
        return NULL;
    json_error_t why;
    json_t *d = json_loads(text, 0, &why);
    free(text);
    if (d == NULL)
        err_set(e, SHD_EPROTO, "daemon %" PRIu32 " sent a status that is no JSON: %s", owner,
                why.text);
    else if (!all)
        hide_own(d);
    return d;
}

static int print_all(shd_session *s, bool as_json, bool all)
{
    int code = CTL_OK;
    json_t *daemons = json_array();
    for (uint32_t i = 0; i < shd_owners(s); i++) {
        struct shd_err e = { 0 };
        json_t *d = ask(s, i, all, &e);
        if (d == NULL) {
            ctl_say("%s", e.text);
            code = CTL_FAILED;
        } else if (!as_json) {
            print_daemon(d);
        }
        if (d != NULL)
            json_array_append_new(daemons, d);
    }
    if (as_json) {
        json_t *root = json_pack("{s:i, s:O}", "schema", 1, "daemons", daemons);
        json_dumpf(root, stdout, JSON_INDENT(2));
        putchar('\n');
        json_decref(root);
    }
    json_decref(daemons);
    return code;
}

int verb_status(int argc, char **argv)
{
    const char *address = NULL;
    bool as_json = false, all = false;
    const struct flag table[] = {
        { "address", 'a', FLAG_STRING, "A", "where the daemons are ($SHARDD_ADDRESS, /run/shardd)",
          &address, 0, 0 },
        { "all", 0, FLAG_BOOL, NULL, "show sessions of tools (role admin) as well", &all, 0, 0 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON document: schema, daemons[]", &as_json, 0, 0 },
    };
    const struct flags flags = { .usage = "shardctl status [FLAGS]",
                                 .about = status_about,
                                 .more = status_more,
                                 .table = table,
                                 .count = ARRAY_SIZE(table) };
    const int code = flags_start(&flags, argc, argv, /* ret_rest= */ NULL);
    if (code >= 0)
        return code;
    const struct shd_options options = { .size = sizeof(options),
                                         .address = address,
                                         .name = "shardctl status" };
    struct shd_err e = { 0 };
    shd_session *s;
    if (shd_connect(&options, &s, &e) != SHD_OK) {
        ctl_say("%s", e.text);
        return CTL_FAILED;
    }
    const int done = print_all(s, as_json, all);
    shd_close(s);
    return done;
}
