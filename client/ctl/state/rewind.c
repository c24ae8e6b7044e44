/* See rewind.h. */
#include "client/ctl/state/rewind.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "client/ctl/base/say.h"
#include "client/ctl/base/status_doc.h"
#include "client/ctl/base/text.h"
#include "client/ctl/base/verb.h"
#include "client/shd.h"
#include "proto/base/clock.h"
#include "proto/base/sys.h"

#define STEP_MAX 0x1p33

struct ask {
    const char *name, *address;
    uint64_t every, keep, to;
    bool json;
};

static int open_model(const struct ask *ask, const char *as, shd_session **ret_session,
                      shd_model **ret_model, struct shd_err *e)
{
    const struct shd_options options = {
        .size = sizeof options, .address = ask->address, .name = as, .timeout_ms = VERB_TIMEOUT_MS
    };
    const int r = shd_connect(&options, ret_session, e);
    return r == SHD_OK ? shd_model_attach(*ret_session, ask->name, ret_model, e) : r;
}

/* The exit code, or -1 to go on; a model that is not named is the only one there. */
static int start(const struct flags *flags, struct ask *ask, int argc, char **argv)
{
    const char *more;
    const int code = verb_start_word(flags, argc, argv, &ask->name, &more);
    if (code >= 0)
        return code;
    return more != NULL ? ctl_usage("one model at a time, got '%s' as well", more) : -1;
}

/* -- snapshot -----------------------------------------------------------------------------------
 */

static const char snapshot_about[] =
    "Keep the open step of a model in its daemons' memory, while training goes on: parameters, "
    "optimizer\n"
    "state, counts, the workers' own state. `shardctl rewind` goes back to it. It takes as much\n"
    "memory as the model's state, stays through restarts of daemons, and goes when there are more\n"
    "than are to be kept. With --every: from here on, each step that is a multiple of it.";

static const char snapshot_more[] = VERB_WHERE
    "\n"
    "examples:\n"
    "  shardctl snapshot gpt\n"
    "  shardctl snapshot gpt --every 500 --keep 2    by itself; --every 0: not any more\n"
    "\nexit code 1: none was made; the reason is on stderr\n";

static int snapshot(const struct ask *ask, bool options, uint64_t *ret_step, struct shd_err *e)
{
    shd_session *s = NULL;
    shd_model *m = NULL;
    int r = open_model(ask, "shardctl snapshot", &s, &m, e);
    if (r == SHD_OK)
        r = options ? shd_snapshot_every(m, ask->every, (uint32_t)ask->keep, e)
                    : shd_snapshot(m, ret_step, e);
    shd_close(s);
    return r;
}

int verb_snapshot(int argc, char **argv)
{
    struct ask ask = { .every = UINT64_MAX };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "every", 0, FLAG_U64, "STEPS", "keep each step that is a multiple of it; 0: none",
          &ask.every, 0, STEP_MAX },
        { "keep", 0, FLAG_U64, "N", "keep the last N of all (2), with --every", &ask.keep, 0,
          SHD_SNAPSHOTS_MAX - 1 },
        { "json", 'j', FLAG_BOOL, NULL, "one JSON object: step, or every and keep", &ask.json, 0,
          0 },
    };
    const struct flags flags = VERB_FLAGS(snapshot, "shardctl snapshot [MODEL] [FLAGS]", table);
    struct shd_err e = { 0 };
    uint64_t step = 0;
    const int code = start(&flags, &ask, argc, argv);
    if (code >= 0)
        return code;
    const bool options = ask.every != UINT64_MAX;
    if (ask.keep > 0 && !options)
        return ctl_usage("--keep %" PRIu64 " without --every STEPS", ask.keep);
    if (snapshot(&ask, options, &step, &e) != SHD_OK)
        return ctl_fail("%s", e.text);
    if (ask.json && options)
        verb_json(
            json_pack("{s:I, s:I}", "every", (json_int_t)ask.every, "keep", (json_int_t)ask.keep),
            JSON_COMPACT, stdout);
    else if (ask.json)
        verb_json(json_pack("{s:I}", "step", (json_int_t)step), JSON_COMPACT, stdout);
    else if (options)
        printf("snapshots every=%" PRIu64 "\n", ask.every);
    else
        printf("snapshot step=%" PRIu64 "\n", step);
    return CTL_OK;
}

/* -- snapshots ----------------------------------------------------------------------------------
 */

static const char snapshots_about[] =
    "List the steps of a model that all its daemons keep in memory: which, how large, how old.";

static const char snapshots_more[] = VERB_WHERE
    "\nexit code 1: they cannot be listed; the reason is on stderr\n";

static void print_rows(const struct ask *ask, const struct shd_snapshot_row *rows, uint32_t count)
{
    json_t *list = json_array();
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (!ask->json && count == 0)
        printf("no snapshots\n");
    else if (!ask->json)
        printf("%12s %12s %10s\n", "step", "MiB", "age");
    for (uint32_t i = 0; i < count; i++) {
        const double age_s = (double)now.tv_sec - (double)rows[i].time_ns / (double)NS_PER_S +
                             (double)now.tv_nsec / (double)NS_PER_S;
        const double mib = (double)rows[i].bytes / 0x1p20;
        if (!ask->json)
            printf("%12" PRIu64 " %12.1f %8.0f s\n", rows[i].step, mib, age_s);
        else
            json_array_append_new(list,
                                  json_pack("{s:I, s:I, s:f}", "step", (json_int_t)rows[i].step,
                                            "bytes", (json_int_t)rows[i].bytes, "age_s", age_s));
    }
    if (ask->json)
        verb_json(json_incref(list), JSON_COMPACT, stdout);
    json_decref(list);
}

int verb_snapshots(int argc, char **argv)
{
    struct ask ask = { .every = 0 };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "json", 'j', FLAG_BOOL, NULL, "a JSON array: step, bytes, age_s of each", &ask.json, 0,
          0 },
    };
    const struct flags flags = VERB_FLAGS(snapshots, "shardctl snapshots [MODEL] [FLAGS]", table);
    struct shd_snapshot_row rows[SHD_SNAPSHOTS_MAX] = { { .size = sizeof *rows } };
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    shd_model *m = NULL;
    uint32_t count = 0;
    const int code = start(&flags, &ask, argc, argv);
    if (code >= 0)
        return code;
    int r = open_model(&ask, "shardctl snapshots", &s, &m, &e);
    if (r == SHD_OK)
        r = shd_snapshots(m, rows, SHD_SNAPSHOTS_MAX, &count, &e);
    shd_close(s);
    if (r != SHD_OK)
        return ctl_fail("%s", e.text);
    print_rows(&ask, rows, count);
    return CTL_OK;
}

/* -- rewind -------------------------------------------------------------------------------------
 */

static void add_setting(json_t *list, const char *key, json_t *value, json_t *from)
{
    json_array_append_new(
        list, json_pack("{s:s, s:O, s:O}", "setting", key, "value", value, "from", from));
}

static void add_waits(json_t *list, json_t *next)
{
    json_t *v;
    const char *key;
    json_object_foreach(json_object_get(next, "settings"), key, v)
    {
        add_setting(list, key, v, json_object_get(next, "from"));
    }
}

/* [{"setting": "lr_scale.decay", "value": 0.5, "from": 950}]: what is set, and what waits; value
 * null: not any more. NULL: that cannot be told. */
static json_t *read_settings(shd_model *m)
{
    char *text = NULL;
    struct shd_err ignored;
    json_t *v;
    const char *key;
    size_t i;
    if (shd_settings(m, &text, &ignored) != SHD_OK)
        return NULL;
    json_t *root = json_loads(text, 0, NULL), *list = json_array();
    free(text);
    json_object_foreach(json_object_get(root, "now"), key, v)
    {
        add_setting(list, key, json_object_get(v, "value"), json_object_get(v, "from"));
    }
    add_waits(list, json_object_get(root, "next"));
    json_array_foreach(json_object_get(root, "later"), i, v)
    {
        add_waits(list, v);
    }
    json_decref(root);
    return list;
}

static bool has_one(json_t *list, json_t *one)
{
    size_t i;
    json_t *v;
    json_array_foreach(list, i, v) if (json_equal(v, one)) return true;
    return false;
}

/* What is in the one and not in the other, where both are known. */
static json_t *lacking(json_t *in, json_t *of)
{
    json_t *list = json_array(), *v;
    size_t i;
    json_array_foreach(of, i, v) if (in != NULL && !has_one(in, v)) json_array_append(list, v);
    return list;
}

static void print_lacking(json_t *list, const char *what)
{
    size_t i;
    json_t *v;
    json_array_foreach(list, i, v)
    {
        char name[200], number[TEXT_BYTES] = "spec";
        const json_t *value = json_object_get(v, "value");
        if (json_is_number(value))
            snprintf(number, sizeof number, "%.9g", json_number_value(value));
        ctl_say("%s: %s=%s from step %" JSON_INTEGER_FORMAT " on", what,
                text_clean(json_string_value(json_object_get(v, "setting")), name, sizeof name),
                number, json_integer_value(json_object_get(v, "from")));
    }
}

/* What was set since went with the steps, and what was in force before is so again. */
static void print_rewound(const struct ask *ask, const shd_model *m, uint64_t step, json_t *before,
                          json_t *after)
{
    json_t *gone = lacking(after, before), *again = lacking(before, after);
    if (ask->json) {
        verb_json(json_pack("{s:s, s:I, s:O, s:O}", "model", shd_model_name(m), "step",
                            (json_int_t)step, "gone", gone, "again", again),
                  JSON_COMPACT, stdout);
    } else {
        printf("rewound model=%s step=%" PRIu64 "\n", shd_model_name(m), step);
        fflush(stdout);
        print_lacking(gone, "went with the steps");
        print_lacking(again, "holds again");
    }
    json_decref(gone);
    json_decref(again);
}

static const char rewind_about[] =
    "Go back to a snapshot of a model, at all its daemons or at none: it is as it was at that "
    "step, "
    "and\n"
    "what came after it is gone. Workers that train it go on from there without a restart; what\n"
    "readers have pinned stays. Without --to: the last snapshot.";

static const char rewind_more[] = VERB_WHERE
    "\n"
    "example: the loss went away at step 1200\n"
    "  shardctl snapshots gpt\n"
    "  shardctl rewind gpt --to 1000 && shardctl set gpt lr_scale=0.5\n"
    "what was set after the snapshot goes, too, and is named\n"
    "\nexit code 1: nothing has changed, or say it again; the reason is on stderr\n";

int verb_rewind(int argc, char **argv)
{
    struct ask ask = { .to = SHD_REWIND_LATEST };
    const struct flag table[] = {
        VERB_ADDRESS_FLAGS(ask.address),
        { "to", 0, FLAG_U64, "STEP", "the step of a snapshot (the last one)", &ask.to, 0,
          STEP_MAX },
        { "json", 'j', FLAG_BOOL, NULL,
          "one JSON object: model, step, gone and again (of settings)", &ask.json, 0, 0 },
    };
    const struct flags flags = VERB_FLAGS(rewind, "shardctl rewind [MODEL] [FLAGS]", table);
    struct shd_err e = { 0 };
    shd_session *s = NULL;
    shd_model *m = NULL;
    uint64_t step = 0;
    const int code = start(&flags, &ask, argc, argv);
    if (code >= 0)
        return code;
    int r = open_model(&ask, "shardctl rewind", &s, &m, &e);
    json_t *before = r == SHD_OK ? read_settings(m) : NULL, *after = NULL;
    if (r == SHD_OK)
        r = shd_model_rewind(m, ask.to, &step, &e);
    if (r == SHD_OK && before != NULL)
        after = read_settings(m);
    if (r == SHD_OK)
        print_rewound(&ask, m, step, before, after);
    json_decref(before);
    json_decref(after);
    shd_close(s);
    return r == SHD_OK ? CTL_OK : ctl_fail("%s", e.text);
}
